"""What to buy: goals drawn over a generated catalogue, and the official goals in their order and splits.

A goal is plain JSON in upstream's words: asin, category, query, name, product_category, instruction_text, attributes,
price_upper, goal_options (dict name to value; a list of values in the human goals); generated goals add `keywords`, the
expert's search.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

from envs.base import EnvFault
from envs.instances import Instance
from envs.webshop_env.catalogue import Catalogue, Product
from envs.webshop_env.official import instruction_files
from envs.webshop_env.pages import Full
from envs.webshop_env.reward import NO_LIMIT, plain_nouns, purchase_reward
from envs.webshop_env.schema import bad_fields, parse_json

KINDS = ("no option", "one option", "two options", "cheaper", "second page")
SHARES = {"micro": KINDS + ("no option", "one option", "cheaper")} | dict.fromkeys(
    ("small", "full"), KINDS + ("one option", "two options", "two options"))            # kinds of eight goals in a row
SHUFFLE_SEED = 233
OFFICIAL_SPLITS = {"test": (0, 200), "dev": (200, 280), "train": (1000, 12000)}     # AgentBench; upstream tests on 0-499
MAX_DRAWS = 2000
MISLEADING = 0.25
SYNTHETIC_FIELDS = {"instruction": str, "instruction_attributes": [str]}
HUMAN_FIELDS = SYNTHETIC_FIELDS | {"instruction_options": [str]}

Goal = dict[str, Any]


# ---- generated ----------------------------------------------------------------------------------------------------------
def draw_goal(rng: random.Random, kind: str, catalogue: Catalogue, layout: Full, size: str) -> Goal:
    """A goal of `kind` that some product meets in full; `asin` is the first such product in the list that `keywords` give.

    "no option", "one option", "two options": it is on the first page; "cheaper": so it is, but the first hit meets everything
    but the price; "second page": none on the first page meets everything. Of the goals of larger sizes, a share `MISLEADING` is
    such that also who searches for the whole instruction finds something else first.
    """
    misleading = size != "micro" and rng.random() < MISLEADING
    for _ in range(MAX_DRAWS):
        options = KINDS.index(kind) if kind in KINDS[:3] else rng.randrange(2 if size == "micro" else 3)
        product = rng.choice(catalogue.products)
        if size == "full" and kind in KINDS[3:]:             # a cheap one, so that the bound rules out many that come first
            product = min([product, *rng.choices(catalogue.products, k=15)], key=lambda other: other.pricing[0])
        goal = _propose(rng, product, options, size)
        if goal and _classify(goal, catalogue, layout) == kind and not (misleading and _first_hit_meets(goal, catalogue, layout)):
            return goal
    raise RuntimeError(f"webshop: no goal of kind {kind!r} in {MAX_DRAWS} draws")


def _propose(rng: random.Random, product: Product, options: int, size: str) -> Goal | None:
    if len(product.options) < options or len(product.pricing) != 1:
        return None
    micro = size == "micro"
    attributes = list(product.attributes) if micro else \
        rng.sample(product.attributes, min(len(product.attributes), rng.choice(ATTRIBUTES[size])))
    names = sorted(rng.sample(list(product.options), options), key=list(product.options).index)
    chosen = {name: rng.choice(product.options[name]) for name in names}
    limit = rng.choice([float(bound) for bound in range(15, 100, 5) if bound > product.price]) if micro else \
        price_bound(product.price, rng)
    goal = _goal(product, "", attributes, chosen, limit) | {"keywords": " ".join([*attributes, product.query])}
    return goal | {"instruction_text": _TEXTS[size](goal, rng)}


def _micro_text(goal: Goal, rng: random.Random) -> str:
    return " ".join(["buy", goal["keywords"], *goal["goal_options"].values(), "under", f"{goal['price_upper']:.0f}"])


def _small_text(goal: Goal, rng: random.Random) -> str:
    first, *others = goal["attributes"]
    query, rest = goal["query"], _listed(others)
    lead = rng.choice((f"i am looking for a {first}, {', '.join(others)} {query}", f"i need a {query} that is {first} and {rest}",
                       f"find me a {first} {query}, it should be {rest}",
                       f"i want to buy a {query} with these features: {', '.join(goal['attributes'])}"))
    return lead + _options_text(goal) + _bound_text(goal["price_upper"])


def _full_text(goal: Goal, rng: random.Random) -> str:
    first, *others = goal["attributes"]
    query, rest = goal["query"], _listed(others)
    lead = rng.choice((f"im looking for a {query} for my sister. it has to be {first}, and {rest} would matter to her as well",
                       f"my old {query} broke and i need another one: {', '.join(goal['attributes'])}",
                       f"can you find something {first}? i mean a {query}, {rest} if possible",
                       f"i would like a {query} which is {first}. make sure that it is {rest} too"))
    return lead + _options_text(goal) + _bound_text(goal["price_upper"])


def _listed(words: list[str]) -> str:
    return ", ".join(words[:-1]) + " and " * (len(words) > 1) + words[-1]


def _options_text(goal: Goal) -> str:
    options = " and ".join(f"{name} {value}" for name, value in goal["goal_options"].items())
    return f", with {options}" if options else ""


ATTRIBUTES = {"small": (2, 3, 4), "full": (2, 3, 4, 5, 6)}  # wanted by a goal
_TEXTS = {"micro": _micro_text, "small": _small_text, "full": _full_text}


def _classify(goal: Goal, catalogue: Catalogue, layout: Full) -> str | None:
    """The kind of the goal; points `asin` (and `name`) at the first product that meets it."""
    hits = catalogue.search(goal["keywords"], layout.max_hits)
    rank = next((rank for rank, position in enumerate(hits) if meets(catalogue.products[position], goal)), None)
    if rank is None:
        return None
    goal |= {"asin": catalogue.products[hits[rank]].asin, "name": catalogue.products[hits[rank]].title}
    page = rank // layout.per_page
    if page:
        return "second page" if page == 1 else None
    if rank and meets(catalogue.products[hits[0]], goal | {"price_upper": None}):
        return "cheaper"
    return KINDS[len(goal["goal_options"])]


def _first_hit_meets(goal: Goal, catalogue: Catalogue, layout: Full) -> bool:
    """Whether the first product within the budget that a search for the whole instruction lists meets the goal."""
    hits = (catalogue.products[position] for position in catalogue.search(goal["instruction_text"].lower(), layout.max_hits))
    first = next((product for product in hits if product.price <= goal["price_upper"]), None)
    return first is not None and meets(first, goal)


def meets(product: Product, goal: Goal) -> bool:
    """Whether buying `product` with the wanted options gives reward 1 under strict rules."""
    chosen = {name: value for name, value in goal["goal_options"].items() if value in product.options.get(name, ())}
    limit = goal["price_upper"]
    if len(chosen) < len(goal["goal_options"]) or product.query != goal["query"] or limit is not None and product.price > limit:
        return False                                         # most products: no need for the whole formula
    return purchase_reward(product, chosen, goal, "strict", plain_nouns).value == 1.0


def price_bound(price: float, rng: random.Random) -> float:
    """Upstream's bound in dollars: the larger of two of the multiples of 10 that `_bounds` gives; no limit above them."""
    above = _bounds(price)
    return max(rng.sample(above, 2)) if len(above) > 1 else NO_LIMIT


def _bounds(price: float) -> list[float]:
    """The next four multiples of 10 above `price`, at most 990."""
    return [10.0 * step for step in range(1, 100) if 10.0 * step > price][:4]


def _bound_text(limit: float) -> str:
    return f", and price lower than {limit:.2f} dollars" if limit < NO_LIMIT else ""


# ---- official -----------------------------------------------------------------------------------------------------------
def official_goals(folder: Path, catalogue: Catalogue) -> tuple[list[Goal], dict[str, str]]:
    """All goals of `folder` in the official order (shuffled by seed 233), and the records that give none, with the reason.

    Human goals if `items_human_ins.json` is there, else the synthetic ones of `items_ins_v2*.json`. The price bounds come from
    a generator of their own, seeded by product (upstream draws them before it seeds, so that they differ in every process).
    """
    human = folder / "items_human_ins.json"
    if human.exists():
        goals, skipped = _human_goals(_read_json(human, dict), catalogue)
    else:
        files = instruction_files(folder)
        if not files:
            raise EnvFault(f"webshop: neither items_human_ins.json nor items_ins_v2*.json in {folder}")
        goals, skipped = _synthetic_goals(_read_json(files[0], dict), catalogue)
    random.Random(SHUFFLE_SEED).shuffle(goals)
    for path in sorted(folder.glob("human_goals*.json")):
        texts = _read_json(path, list)
        skipped[path.name] = f"{len(texts)} texts without products, attributes and options; those are in items_human_ins.json"
    return goals, skipped


def official_instances(goals: list[Goal], split: str) -> list[Instance]:
    """The goals of one AgentBench split; the id is the position in the official order."""
    start, stop = OFFICIAL_SPLITS[split]
    return [Instance(f"webshop-official-{number}", "webshop", f"{len(goal['goal_options'])} options",
                     {"goal": goal, "number": number}) for number, goal in enumerate(goals[start:stop], start)]


def _read_json(path: Path, kind: type) -> Any:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(content, kind):
            raise ValueError(f"it holds no {kind.__name__}")
        return content
    except (OSError, ValueError) as error:
        raise EnvFault(f"webshop: {path} cannot be read: {error}") from error


def _goal(product: Product, text: str, attributes: list[str], options: Any, limit: float) -> Goal:
    return {"asin": product.asin, "category": product.category, "query": product.query, "name": product.title,
            "product_category": product.product_category, "instruction_text": text + _bound_text(limit),
            "attributes": attributes, "price_upper": limit, "goal_options": options}


def _synthetic_goals(records: Any, catalogue: Catalogue) -> tuple[list[Goal], dict[str, str]]:
    """One goal per combination of a product's option values, in catalogue order."""
    goals, skipped = [], {}
    for product in catalogue.products:
        record = records.get(product.asin)
        if why := _no_instruction(product, record):
            skipped[product.asin] = why
            continue
        limit = price_bound(product.price, random.Random(f"webshop/bound/{product.asin}"))
        names = sorted(product.options)
        for values in itertools.product(*(product.options[name] for name in names)):
            options = dict(zip(names, values, strict=True))
            chosen = ", and ".join(f"{name}: {value}" for name, value in options.items())
            goals.append(_goal(product, record["instruction"] + (f" with {chosen}" if chosen else ""),
                               record["instruction_attributes"], options, limit))
    return goals, skipped


def _no_instruction(product: Product, record: Any) -> str:
    """Why the product has no synthetic goal; "" if it has."""
    if record is None:
        return "not among the instructions"
    if isinstance(record, dict) and (record.get("instruction") is None or not record.get("instruction_attributes")):
        return "no instruction"
    return bad_fields(record, SYNTHETIC_FIELDS) or ("" if all(product.options.values()) else "an option without values")


def _human_goals(records: Any, catalogue: Catalogue) -> tuple[list[Goal], dict[str, str]]:
    """One goal per human instruction, in catalogue order; the crowd worker's fields are not read."""
    goals = []
    skipped = {asin: "the product is not in the catalogue" for asin in records if asin.lower() not in catalogue.positions}
    for asin in sorted(records.keys() - skipped.keys(), key=catalogue.find):
        product = catalogue.products[catalogue.find(asin)]
        for number, record in enumerate(records[asin] if isinstance(records[asin], list) else [records[asin]]):
            bad = bad_fields(record, HUMAN_FIELDS)
            if bad or not record["instruction_attributes"]:
                skipped[f"{asin}/{number}"] = bad or "no attributes"
                continue
            limit = price_bound(product.price, random.Random(f"webshop/bound/{asin}/{number}"))
            goals.append(_goal(product, record["instruction"].strip("."), record["instruction_attributes"],
                               record["instruction_options"], limit))
    return goals, skipped
