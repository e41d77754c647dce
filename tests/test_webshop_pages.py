"""WebShop's search, page texts, clickables and navigation."""

from __future__ import annotations

import math
import random

import pytest

from envs.webshop_env.catalogue import Catalogue, Product
from envs.webshop_env.pages import Full
from envs.webshop_env.search import ProductIndex, analyse
from envs.webshop_env.session import Session, SiteError


def item(number: int, **changes: object) -> Product:
    fields = {"asin": f"B00{number}", "title": f"Blue Mug {number}", "query": "mug", "category": "home",
              "product_category": "Home \u203a Mugs", "attributes": ("dishwasher safe",), "options": {}, "pricing": (9.5,),
              "price_tag": "$9.5", "description": "A mug.", "bullets": (" Holds tea ", "Blue")}
    return Product(**(fields | changes))


@pytest.fixture
def shop() -> Catalogue:
    optioned = item(99, title="Red Cup", options={"size": ("small", "10"), "color": ("red", "blue"), "width": ("10", "20")},
                    pricing=(5.0, 8.0), price_tag="$5.0 to $8.0")
    return Catalogue([item(number) for number in range(12)] + [optioned])


# ---- search -------------------------------------------------------------------------------------------------------------
def test_analysis_is_english() -> None:
    assert analyse("The Men's Running-Shoes, size 5.5 & 1,000 U.S.A. o'clock") == \
        ["men", "run", "shoe", "size", "5.5", "1,000", "u.s.a", "o'clock"]
    assert analyse("it is of the") == []


def test_search_equals_the_bm25_formula() -> None:
    rng = random.Random(0)
    words = [f"w{chr(97 + number)}" for number in range(20)]
    texts = [" ".join(rng.choices(words, k=rng.randint(3, 15))) for _ in range(60)]
    index, documents = ProductIndex(texts), [text.split() for text in texts]
    mean = sum(map(len, documents)) / len(documents)
    for _ in range(30):
        query = rng.sample(words, 3)
        scores = []
        for document in documents:
            score = 0.0
            for term in query:
                frequency, containing = document.count(term), sum(term in other for other in documents)
                idf = math.log(1 + (len(documents) - containing + 0.5) / (containing + 0.5))
                score += idf * frequency / (frequency + 0.9 * (1 - 0.4 + 0.4 * len(document) / mean))
            scores.append(round(score, 4))
        found = index.search(" ".join(query), 10)
        best = sorted((score for score in scores if score > 0), reverse=True)[:10]
        assert [scores[position] for position in found] == pytest.approx(best, abs=2e-4)


def test_ties_come_in_catalogue_order_and_strangers_not_at_all() -> None:
    index = ProductIndex(["red cup"] * 7 + ["blue cup"] * 7 + ["green hat"])
    assert index.search("red cup", 9) == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert index.search("cup", 50) == list(range(14))
    assert index.search("nothing known", 5) == index.search("", 5) == index.search("the", 5) == []
    assert index.search("hat " * 50_000, 5) == [14]
    assert ProductIndex([]).search("cup", 5) == ProductIndex(["", "the"]).search("cup", 5) == []


# ---- pages and navigation: agentbench -----------------------------------------------------------------------------------
def test_page_texts_and_clickables_are_literal(shop: Catalogue) -> None:
    visit = Session(shop, Full(), "buy a mug", "agentbench")
    assert visit.text() == "WebShop [SEP] Instruction: [SEP] buy a mug [SEP] Search"
    assert visit.clickables == ["search"] and visit.has_search_bar
    assert not visit.click("search") and visit.page == "search"
    assert visit.search("mug")
    first = " [SEP] ".join(f"B00{number} [SEP] Blue Mug {number} [SEP] $9.5" for number in range(10))
    lead = "Instruction: [SEP] buy a mug [SEP] Back to Search [SEP] "
    assert visit.text() == f"{lead}Page 1 (Total results: 13) [SEP] Next > [SEP] {first}"
    assert visit.clickables == ["back to search", "next >"] + [f"b00{number}" for number in range(10)]
    assert visit.click("next >")
    assert visit.text().startswith(f"{lead}Page 2 (Total results: 13) [SEP] < Prev [SEP] Next > [SEP] B0010 [SEP] ")
    assert visit.click("b0099")
    options = "size [SEP] small [SEP] 10 [SEP] color [SEP] red [SEP] blue [SEP] width [SEP] 10 [SEP] 20"
    assert visit.text() == (f"{lead}< Prev [SEP] {options} [SEP] Red Cup [SEP] Price: $5.0 to $8.0 [SEP] Rating: N.A. [SEP] "
                            "Description [SEP] Features [SEP] Reviews [SEP] Buy Now")
    assert visit.clickables == ["back to search", "< prev", "description", "features", "reviews", "buy now",
                                "small", "10", "red", "blue", "20"]
    assert visit.click("features")
    assert visit.text() == f"{lead}< Prev [SEP] Holds tea [SEP] Blue"
    assert visit.clickables == ["back to search", "< prev"] and not visit.click("buy now")


def test_options_survive_sub_pages_and_are_cleared_by_results(shop: Catalogue) -> None:
    visit = Session(shop, Full(), "x", "agentbench")
    visit.search("mug"), visit.click("next >"), visit.click("b0099")
    visit.click("red"), visit.click("small"), visit.click("blue")
    assert visit.chosen == {"color": "blue", "size": "small"}
    visit.click("reviews")
    assert visit.text().endswith("No reviews found")
    visit.click("< prev")
    assert visit.page == "item" and visit.chosen == {"color": "blue", "size": "small"}
    visit.click("< prev")
    assert (visit.page, visit.number, visit.product, visit.chosen) == ("results", 2, None, {})
    visit.click("b0099"), visit.click("red"), visit.search("cup")
    assert (visit.page, visit.number, visit.product, visit.chosen) == ("results", 1, None, {})
    visit.click("b0099"), visit.click("back to search")
    assert visit.page == "search" and visit.hits == []


def test_strict_navigation_closes_the_holes(shop: Catalogue) -> None:
    literal, strict = (Session(shop, Full(), "x", rules) for rules in ("agentbench", "strict"))
    assert literal.clickables == ["search"] and strict.clickables == []
    for visit in (literal, strict):
        assert visit.search("mug")
    assert literal.search("cup") and not strict.search("cup")                       # search bar on the start page only
    literal.search("mug")
    for _ in range(5):
        assert literal.click("next >")                                              # past the end for ever
    assert literal.listed == [] and literal.number == 6
    assert strict.click("next >") and not strict.click("next >") and strict.number == 2
    strict.click("b0099"), strict.click("10"), strict.click("10")
    assert strict.chosen == {"size": "10", "width": "10"}
    assert "Selected: size: 10, width: 10" in strict.text()
    literal.search("cup"), literal.click("b0099"), literal.click("10")
    assert literal.chosen == {"width": "10"} and "Selected" not in literal.text()


def test_hidden_search_commands_are_agentbench_only(shop: Catalogue) -> None:
    literal, strict = (Session(shop, Full(), "x", rules) for rules in ("agentbench", "strict"))
    assert literal.search("<q> mug") and len(literal.hits) == 13
    assert literal.search("<c> home") and len(literal.hits) == 13
    for keywords in ("<a> dishwasher", "<c>", "<r>"):
        with pytest.raises(SiteError):
            literal.search(keywords)
    assert strict.search("<q> cup") and strict.hits == [12]
