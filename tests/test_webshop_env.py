"""WebShop: search, pages, navigation, episodes, generated and official goals."""

from __future__ import annotations

import collections
import gzip
import json
import math
import os
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import envs
from envs.base import EnvFault, Status, assistant_call
from envs.check import check_env, garbage_turns
from envs.instances import fingerprint, load_instances, save_instances
from envs.webshop_env import catalogue as products
from envs.webshop_env.catalogue import Catalogue, Product
from envs.webshop_env.goals import KINDS
from envs.webshop_env.pages import Full
from envs.webshop_env.search import ProductIndex, analyse
from envs.webshop_env.session import Session, SiteError

DATA = Path(os.environ.get("EPPO_DATA", "../shared/data"))
ROOT = Path(__file__).parent.parent


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


def click(value: str) -> dict[str, object]:
    return assistant_call("click_action", value=value)


def search(keywords: str) -> dict[str, object]:
    return assistant_call("search_action", keywords=keywords)


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


# ---- episodes -----------------------------------------------------------------------------------------------------------
def test_check_env_passes() -> None:
    rows = check_env("webshop", sample=5)
    assert {row["kind"] for row in rows} == set(KINDS)
    micro = [row for row in rows if row["size"] == "micro"]
    assert max(row["max_turns"] for row in micro) <= 6 and max(row["max_chars"] for row in micro) <= 700
    check_env("webshop", sample=5, rules="agentbench", sizes=("micro",))


def test_micro_episode_text_by_text() -> None:
    env = envs.make("webshop", split="train")
    index = next(number for number, instance in enumerate(env.instances) if instance.kind == "second page"
                 and len(instance.data["goal"]["goal_options"]) == 1)
    goal = env.instances[index].data["goal"]
    system, user = env.reset(index)
    assert len(system["content"].split()) <= 12
    (value,) = goal["goal_options"].values()
    assert user["content"] == f"buy {goal['keywords']} {value} under {goal['price_upper']:.0f}"
    first = env.step(env.expert()).messages[0]["content"]
    lines = first.split(", ")
    assert lines[3:] == ["next >"] and all(f" {goal['keywords']} $" in line for line in lines[:3])
    assert all(int(line.split("$")[1]) > goal["price_upper"] for line in lines[:3])
    second = env.step(env.expert()).messages[0]["content"]
    assert f"{goal['asin']} {goal['keywords']} $" in second and "< prev" in second
    assert env.step(env.expert()).messages[0]["content"].endswith("buy now")
    assert value not in env.step(env.expert()).messages[0]["content"]
    result = env.step(env.expert())
    assert (result.reward, result.status, result.messages) == (1.0, Status.COMPLETED, [])
    assert result.info["asin"] == goal["asin"] and result.info["turns"] == 5 and result.info["cut_chars"] == 0


@pytest.mark.parametrize("size", ("micro", "small"))
def test_kinds_are_what_they_say(size: str) -> None:
    env = envs.make("webshop", size=size, split="dev")
    turns = collections.defaultdict(list)
    for index, instance in enumerate(env.instances):
        turns[instance.kind].append(len(env.oracle(index)))
        goal, hits = instance.data["goal"], env.catalogue.search(instance.data["goal"]["keywords"], env.layout.max_hits)
        page = hits.index(env.catalogue.find(goal["asin"])) // env.layout.per_page
        assert page == (instance.kind == "second page")
        if instance.kind == "cheaper":
            assert env.catalogue.products[hits[0]].price > goal["price_upper"]
    assert set(turns["no option"]) == {3} and set(turns["one option"]) == {4} and set(turns["two options"]) == {5}
    assert set(turns["second page"]) == {4, 5} and set(turns["cheaper"]) == {3, 4}


def test_unknown_button_is_answered_with_the_clickables_and_never_buying_gives_nothing() -> None:
    env = envs.make("webshop", size="small", split="dev")
    env.reset(0)
    env.step(env.expert())
    env.step(env.expert())
    before = env.session.text()
    result = env.step(click("Add to Cart"))
    text = result.messages[0]["content"]
    assert text == f"Invalid action: 'add to cart' cannot be clicked here. Clickables: {', '.join(env.session.clickables)}"
    assert result.info["invalid_calls"] == 1 and env.session.text() == before
    assert "no search bar here" in env.step(search("mug")).messages[0]["content"]
    while not result.done:
        result = env.step(click("Add to Cart"))
    assert (result.reward, result.status, result.truncated) == (0.0, Status.TASK_LIMIT, True)


def test_buttons_are_read_in_any_case_and_spacing() -> None:
    env = envs.make("webshop", split="dev")
    env.reset(0)
    env.step(env.expert())
    assert env.step(click("  NEXT   > ")).info["invalid_calls"] == 0 and env.session.number == 2


def test_wrong_purchases_pay_less_than_one() -> None:
    env = envs.make("webshop", split="dev")
    for index, instance in enumerate(env.instances):
        if instance.kind not in ("cheaper", "second page"):
            continue
        env.reset(index)
        env.step(env.expert())
        env.step(click(env.catalogue.products[env.session.listed[0]].asin))
        result = env.step(click("buy now"))
        assert result.status == Status.COMPLETED and 0.0 < result.reward < 1.0 and result.info["price_met"] is False


def test_agentbench_messages_are_literal() -> None:
    env = envs.make("webshop", size="small", split="dev", rules="agentbench")
    start = env.reset(0)[1]["content"]
    instruction = env.goal["instruction_text"]
    actions = "\n\nAvailable Actions:\n{'has_search_bar': True, 'clickables': ['search']}"
    assert start == f"The initial observation:\nWebShop [SEP] Instruction: [SEP] {instruction} [SEP] Search{actions}"
    silent = f"Observation:\nNo executable tool calls found! You should call a tool instead.{actions}"
    assert env.step("hm").messages == [{"role": "user", "content": silent}]
    unknown = env.step(assistant_call("buy", what="x")).messages[0]
    assert unknown == {"role": "user", "content": silent}
    broken = env.step('<tool_call>{"name": "click_action", "arguments": "x"}</tool_call>').messages[0]
    assert broken["role"] == "user" and broken["content"].startswith("No valid tool call found from agent.\nObservation:\n")
    same = env.step(click("nowhere")).messages[0]
    home = f"WebShop [SEP] Instruction: [SEP] {instruction} [SEP] Search{actions}"
    assert same["role"] == "tool" and same["content"] == f"Action: click[nowhere]\n\nObservation:\n{home}"
    wrong_key = env.step(assistant_call("search_action", query=env.goal["query"])).messages[0]
    assert wrong_key["content"].startswith(f"Action: search[{env.goal['query']}]\n\nObservation:\nInstruction:")
    page = env.session.text()
    for keywords in ("a [b]", "a\nb", ""):
        env.step(search(keywords))
        assert env.session.text() == page
    while (result := env.step(click("nowhere"))).messages[0]["content"] != "Task limit reached.":
        assert not result.done
    assert result.status == Status.TASK_LIMIT and result.info["turns"] == 20 and result.messages[0]["role"] == "tool"


def test_site_crash_is_a_task_error_under_agentbench() -> None:
    env = envs.make("webshop", split="dev", rules="agentbench")
    env.reset(0)
    result = env.step(search("<a> cotton"))
    assert (result.status, result.reward, result.done) == (Status.TASK_ERROR, 0.0, True)


@pytest.mark.parametrize("rules", ("strict", "agentbench"))
def test_random_play_never_raises_and_rarely_wins(rules: str) -> None:
    rng, env = random.Random(0), envs.make("webshop", split="dev", rules=rules)
    junk, wins, episodes = garbage_turns(env.tools), 0, 0
    for number in range(150):
        env.reset(number % len(env.instances))
        episodes, result = episodes + 1, None
        while result is None or not result.done:
            move = rng.random()
            if move < 0.3:
                turn = rng.choice(junk)
            elif move < 0.5:
                turn = search(rng.choice(["red shirt", "]]", "<q> shirt", "cup " * 3]))
            else:
                turn = click(rng.choice(env.session.clickables or ["search"]))
            result = env.step(turn)
            assert 0.0 <= result.reward <= 1.0 and all(len(message["content"]) <= 101_000 for message in result.messages)
        wins += result.reward == 1.0
    assert wins < episodes / 4


# ---- what the catalogues and instances depend on ------------------------------------------------------------------------
def test_catalogues_do_not_depend_on_the_hash_seed() -> None:
    program = ("import envs; from envs.instances import fingerprint; env = envs.make('webshop', split='dev');"
               "hits = [env.catalogue.search(i.data['goal']['keywords'], 9) for i in env.instances];"
               "print(fingerprint([[i.data for i in env.instances], hits, [repr(p) for p in env.catalogue.products]]))")
    prints = {subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": seed}, check=True,
                             capture_output=True, text=True).stdout for seed in ("1", "2")}
    assert len(prints) == 1


def test_one_catalogue_serves_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_shared", {})
    with ThreadPoolExecutor(8) as pool:
        catalogues = list(pool.map(lambda _: products.generated("micro"), range(16)))
    assert len({id(catalogue) for catalogue in catalogues}) == 1
    env = envs.make("webshop", split="dev")
    expected = [env.catalogue.search(instance.data["goal"]["keywords"], 9) for instance in env.instances]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda instance: env.catalogue.search(instance.data["goal"]["keywords"], 9), env.instances))
    assert found == expected


def test_micro_words_have_one_role_and_numbers_are_short() -> None:
    catalogue = products.generated("micro")
    assert 120 <= len(catalogue.products) <= 200 and len(catalogue.positions) == len(catalogue.products)
    colors = {product.title.split()[0] for product in catalogue.products}
    nouns = {product.query for product in catalogue.products}
    values = {value for product in catalogue.products for group in product.options.values() for value in group}
    assert not colors & nouns and not colors & values and not nouns & values
    assert all(10 < product.price < 100 and product.price % 5 for product in catalogue.products)
    assert all(re.fullmatch("[a-z][0-9]", product.asin) for product in catalogue.products)


def test_instances_travel_through_datasets_and_splits_share_no_instruction(tmp_path: Path) -> None:
    splits = {split: list(envs.make("webshop", split=split).instances) for split in ("train", "dev", "test")}
    save_instances(splits["dev"], tmp_path / "dev")
    assert load_instances(tmp_path / "dev") == splits["dev"]
    texts = [{instance.data["goal"]["instruction_text"] for instance in instances} for instances in splits.values()]
    assert [len(instances) for instances in splits.values()] == list(map(len, texts)) == [1000, 64, 128]
    assert not texts[0] & texts[1] and not texts[0] & texts[2] and not texts[1] & texts[2]
    assert fingerprint(splits["dev"][0].data) == fingerprint(envs.make("webshop", split="dev").instances[0].data)


# ---- official files -----------------------------------------------------------------------------------------------------
def document(asin: str, **changes: object) -> str:
    fields = {"asin": asin, "Title": f"Tea Mug {asin}", "Description": "A mug.", "BulletPoints": ["Big"],
              "options": {"color": ["red", "blue"]}, "Attributes": ["big handle"], "Price": "$12.0", "pricing": [12.0],
              "category": "home", "query": " Tea Mug ", "product_category": "Home \u203a Mugs", "Rating": "N.A.", "Reviews": []}
    return json.dumps({"id": asin, "contents": "", "product": fields | changes})


def write_shop(folder: Path, lines: list[str]) -> Path:
    (folder / "webshop").mkdir()
    with gzip.open(folder / "webshop" / "documents_2.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(lines))
    return folder / "webshop"


def test_human_goals_are_read_in_order_with_reasons_for_those_left_out(tmp_path: Path) -> None:
    folder = write_shop(tmp_path, [document("B1"), document("B2"), document("B1", Title="again")])
    human = {"attributes": [], "options": [], "instruction_options": ["red"], "worker_id": "w", "assignment_id": "a"}
    (folder / "items_human_ins.json").write_text(json.dumps({
        "B2": [human | {"asin": "B2", "instruction": "i want a mug.", "instruction_attributes": ["big handle"]}],
        "B1": [human | {"asin": "B1", "instruction": "no attributes", "instruction_attributes": []},
               human | {"asin": "B1", "instruction": "a red mug", "instruction_attributes": ["big"]}], "B9": []}))
    env = envs.make("webshop", source="official", split="test", path=str(tmp_path))
    goals = [{"first": "B1"}, {"first": "B2"}]
    random.Random(233).shuffle(goals)
    assert [instance.data["goal"]["asin"] for instance in env.instances] == [goal["first"] for goal in goals]
    assert env.skipped == {"B9": "the product is not in the catalogue", "B1/0": "no attributes"}
    assert all("worker_id" not in json.dumps(instance.data) for instance in env.instances)
    texts = [instance.data["goal"]["instruction_text"] for instance in env.instances]
    assert all(text.endswith(f", and price lower than {instance.data['goal']['price_upper']:.2f} dollars")
               for text, instance in zip(texts, env.instances, strict=True))
    for index in range(2):
        env.reset(index)
        for turn in env.oracle(index):
            result = env.step(turn)
        assert result.reward == 1.0


def test_missing_and_broken_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EPPO_DATA", raising=False)
    with pytest.raises(EnvFault, match="EPPO_DATA"):
        envs.make("webshop", source="official")
    with pytest.raises(EnvFault, match="is not a folder"):
        envs.make("webshop", source="official", path=str(tmp_path))
    folder = write_shop(tmp_path, [document("B1"), document("B2", options=None, Price=3)])
    with pytest.raises(EnvFault, match="line 2: missing or of another type: options, Price"):
        envs.make("webshop", source="official", path=str(tmp_path))
    (folder / "documents_2.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(EnvFault, match="cannot be read"):
        envs.make("webshop", source="official", path=str(tmp_path))
    (folder / "documents_2.jsonl.gz").unlink()
    with pytest.raises(EnvFault, match="documents"):
        envs.make("webshop", source="official", path=str(tmp_path))


def official(**settings: object) -> envs.Env:
    if not (DATA / "webshop" / "documents_1k.jsonl.gz").exists():
        pytest.skip("EPPO_DATA: webshop/documents_1k.jsonl.gz not found")
    return envs.make("webshop", source="official", path=str(DATA), **settings)


def test_real_products_and_their_goals() -> None:
    sizes = {split: len(official(split=split).instances) for split in ("train", "dev", "test")}
    assert sizes == {"train": 5910, "dev": 80, "test": 200}             # of 6,910 synthetic goals
    env = official(split="test")
    assert len(env.catalogue.products) == 1000 and collections.Counter(env.skipped.values())["no instruction"] == 585
    with gzip.open(DATA / "webshop" / "documents_1k.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line, product in zip(lines, env.catalogue.products, strict=True):
            assert analyse(json.loads(line)["contents"]) == analyse(product.index_text)


def test_the_oracle_solves_real_goals() -> None:
    env = official(split="test")
    for index in range(len(env.instances)):
        env.reset(index)
        for turn in env.oracle(index):
            result = env.step(turn)
        assert result.reward == 1.0, env.instances[index].id


def test_agentbench_falls_short_of_one_only_by_its_colour_rule() -> None:
    env, short = official(split="test", rules="agentbench"), []
    for index, instance in enumerate(env.instances):
        env.reset(index)
        for turn in env.oracle(index):
            result = env.step(turn)
        if result.reward < 1.0:
            short.append(instance.id)
            options = len(instance.data["goal"]["goal_options"])
            assert result.info["attributes_met"] == len(instance.data["goal"]["attributes"]) and result.info["price_met"]
            assert result.info["options_met"] < options and result.info["type_factor"] == 1.0
    assert len(short) == 6
