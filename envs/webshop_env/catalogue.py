"""Products: the generated catalogues and the loading of WebShop's product JSON.

A catalogue is shared: one per size (or per folder of official files) and process, built when first needed, by whichever
thread comes first. A generated catalogue depends on its size alone.
"""

from __future__ import annotations

import gzip
import json
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from envs.base import EnvFault
from envs.webshop_env import lexicon
from envs.webshop_env.search import ProductIndex

SMALL_PRODUCTS = 4000
SEARCHES_KEPT = 8192
NO_PRICE = 100.0                                            # WebShop's price of a product that has none
PRODUCT_FIELDS = {"asin": str, "Title": str, "Description": str, "BulletPoints": list, "options": dict, "Attributes": list,
                  "Price": str, "pricing": list, "category": str, "query": str, "product_category": str,
                  "Rating": (str, float, int)}


@dataclass(frozen=True, slots=True)
class Product:
    """What the shop sells. `options`: name to values, in page order; `pricing`: no, one or two prices in dollars."""

    asin: str
    title: str
    query: str
    category: str
    product_category: str
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]]
    pricing: tuple[float, ...]
    price_tag: str
    description: str
    bullets: tuple[str, ...]
    rating: str = "N.A."
    reviews: tuple[str, ...] = ()

    @property
    def index_text(self) -> str:
        """The text under which the product is found: title, description, first bullet point, options."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        return " ".join([self.title, self.description, self.bullets[0] if self.bullets else "", options]).lower()

    @property
    def price(self) -> float:
        """Dollars. A price range counts by a draw within it, fixed by the product's id (upstream: another in each process)."""
        if len(self.pricing) < 2:
            return self.pricing[0] if self.pricing else NO_PRICE
        return random.Random(f"webshop/price/{self.asin}").uniform(*self.pricing[:2])


class Catalogue:
    """Products and their search index; a product is known by its position."""

    def __init__(self, products: Sequence[Product]) -> None:
        self.products = products
        self.positions = {product.asin.lower(): position for position, product in enumerate(products)}
        self.index = ProductIndex(product.index_text for product in products)
        self._searched = lru_cache(SEARCHES_KEPT)(self.index.search)

    def search(self, keywords: str, limit: int) -> list[int]:
        """Positions of the `limit` best matches, best first. Recent short searches are kept: agents repeat each other's."""
        return list((self._searched if len(keywords) <= 200 else self.index.search)(keywords, limit))

    def find(self, asin: str) -> int:
        """Position of the product with this id, in whatever case. KeyError: no such product."""
        return self.positions[asin.lower()]


_shared: dict[Any, Any] = {}
_lock = threading.RLock()


def shared(key: Any, build: Callable[[], Any]) -> Any:
    """The value of `build()`, made once per process and `key`, whichever thread asks first."""
    with _lock:
        if key not in _shared:
            _shared[key] = build()
        return _shared[key]


def generated(size: str) -> Catalogue:
    """The generated catalogue of `size`."""
    return shared(("catalogue", size),
                  lambda: Catalogue(micro_products() if size == "micro" else small_products(SMALL_PRODUCTS)))


# ---- generated products -------------------------------------------------------------------------------------------------
def micro_products() -> list[Product]:
    """198 products with titles of two words, a colour and a noun, in families of one title each.

    50 families have one product; 26 have two, the dearer first; 24 have four, the three dearer first. Search lists a
    family in this order, so a low price bound rules out the first hit, or all three hits of the first page.
    """
    rng = random.Random("webshop/micro/catalogue")
    titles = [(kind, color, noun) for kind, nouns in lexicon.MICRO_NOUNS.items() for noun in nouns
              for color in lexicon.MICRO_COLORS]
    members = [1] * 50 + [2] * 26 + [4] * 24
    ids = [letter + digit for letter in "abcdefghijklmnopqrstuvwxyz" for digit in "0123456789"]
    rng.shuffle(ids)
    rng.shuffle(members)
    products = []
    for (kind, color, noun), count in zip(rng.sample(titles, len(members)), members, strict=True):
        groups = lexicon.MICRO_GROUPS[kind][:rng.choice((1, 1, 2)) if count > 1 else rng.choice((0, 1, 2, 2))]
        cheap, dear = (11, 39) if count > 1 else (12, 88), (62, 88)
        for member in range(count):
            price = _uneven(rng, *(dear if member < count - 1 else cheap))
            products.append(Product(
                ids[len(products)], f"{color} {noun}", noun, kind, f"{kind} \u203a {noun}", (color,),
                {name: lexicon.MICRO_OPTIONS[name] for name in groups}, (float(price),), f"${price}",
                f"a {color} {noun}", (f"well made {noun}",)))
    return products


def _uneven(rng: random.Random, low: int, high: int) -> int:
    """A price that is no multiple of five, so that no price equals a bound."""
    return rng.choice([price for price in range(low, high + 1) if price % 5])


def small_products(count: int) -> list[Product]:
    """`count` products with brand, attributes (some in the title, some only among the features), options and price tags."""
    rng = random.Random("webshop/small/catalogue")
    ids: set[str] = set()
    return [_small_product(rng, ids) for _ in range(count)]


def _small_product(rng: random.Random, ids: set[str]) -> Product:
    department = rng.choice(list(lexicon.DEPARTMENTS))
    shelf = lexicon.DEPARTMENTS[department]
    noun, shelf_name = rng.choice(list(shelf["nouns"].items()))
    attributes = rng.sample(shelf["attributes"], rng.choice((4, 5, 6)))
    brand = rng.choice(lexicon.BRAND_STARTS) + rng.choice(lexicon.BRAND_ENDS)
    audience = rng.choice(lexicon.AUDIENCES[department])
    while (asin := "B0" + "".join(rng.choices("0123456789BCDFGHJKLMNPQRSTVWXYZ", k=8))) in ids:
        pass
    ids.add(asin)
    first, second = (attribute.title() for attribute in attributes[:2])
    title = f"{brand} {first} {noun.title()} for {audience}, {second}, Model {rng.randrange(100, 1000)}"
    low = round(rng.randint(*shelf["price"]) + rng.choice((0.99, 0.5, 0.0, 0.49)), 2)
    pricing = (low, round(low + rng.randint(2, 15), 2)) if rng.random() < 0.15 else (low,)
    groups = rng.sample(list(shelf["options"]), rng.choice((0, 1, 1, 2, 2)))
    options = {name: _subset(rng, shelf["options"][name]) for name in shelf["options"] if name in groups}
    bullets = tuple(f"{attribute.capitalize()}: {rng.choice(('made', 'chosen', 'tested'))} for {audience.lower()}"
                    for attribute in rng.sample(attributes, len(attributes)))
    description = f"This {noun} by {brand} suits {audience.lower()} and is {attributes[2]}."
    path = f"{shelf['path']} \u203a {shelf_name} \u203a {noun.title()}"
    return Product(asin, title, noun, department, path, tuple(attributes), options, pricing,
                   " to ".join(f"${price}" for price in pricing), description, bullets)


def _subset(rng: random.Random, values: Sequence[str]) -> tuple[str, ...]:
    """Three or more of `values`, in their order."""
    chosen = set(rng.sample(range(len(values)), rng.randint(3, min(len(values), 8))))
    return tuple(value for position, value in enumerate(values) if position in chosen)


# ---- official files -----------------------------------------------------------------------------------------------------
def official(folder: Path) -> Catalogue:
    """The products of WebShop's documents file (`documents*.jsonl.gz`: id, contents, product per line) in `folder`.

    Raises:
        EnvFault: no such file, or a record without the fields of a product.
    """
    def build() -> Catalogue:
        files = sorted(folder.glob("documents*.jsonl.gz"))
        if not files:
            raise EnvFault(f"webshop: no documents*.jsonl.gz in {folder}; put WebShop's product documents there "
                           "(see https://github.com/princeton-nlp/WebShop) or use source='generated'")
        return Catalogue(read_documents(files[0]))
    return shared(("catalogue", str(folder.resolve())), build)


def read_documents(path: Path) -> list[Product]:
    """Products in file order, without repeated ids, as upstream. EnvFault names file and line of a bad record."""
    products: dict[str, Product] = {}
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                product = _read_product(json.loads(line), f"{path}, line {number}")
                products.setdefault(product.asin, product)
    except (OSError, EOFError, ValueError) as error:
        raise EnvFault(f"webshop: {path} cannot be read: {error}") from error
    return list(products.values())


def _read_product(record: Any, where: str) -> Product:
    item = record.get("product") if isinstance(record, dict) else None
    bad = sorted(PRODUCT_FIELDS) if not isinstance(item, dict) else \
        [name for name, kind in PRODUCT_FIELDS.items() if not isinstance(item.get(name), kind)]
    if bad:
        raise EnvFault(f"webshop: {where}: missing or of another type: {', '.join(bad)}")
    reviews = tuple(part for review in item.get("Reviews") or []
                    for part in (f'"{review.get("title", "")}"', str(review.get("score", "")), str(review.get("body", ""))))
    return Product(item["asin"], item["Title"], item["query"].lower().strip(), item["category"], item["product_category"],
                   tuple(item["Attributes"]), {name: tuple(values) for name, values in item["options"].items()},
                   tuple(map(float, item["pricing"])), item["Price"], item["Description"], tuple(item["BulletPoints"]),
                   str(item["Rating"]), reviews)
