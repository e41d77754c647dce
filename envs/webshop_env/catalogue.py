"""Products, the catalogue that holds them, and the generated catalogues.

A catalogue is shared: one per size (or per folder of official files) and process, built when first needed, by whichever
thread comes first. A generated catalogue depends on its size alone.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from envs.webshop_env import lexicon
from envs.webshop_env.search import ProductIndex

PRODUCTS = {"small": 4000, "full": 20_000}
FAMILY = (1, 1, 2, 3, 4, 6)                                 # sizes of families, equally likely
SEARCHES_KEPT = 8192
NO_PRICE = 100.0                                            # WebShop's price of a product that has none


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
    """Products and their search index; a product is known by its position.

    Args:
        positions: id in lower case to position; index: over the products' texts. Both are made where they are not given.
        left_out: official records (file and place) that could not be used, and why.
    """

    def __init__(self, products: Sequence[Product], positions: Mapping[str, int] | None = None,
                 index: ProductIndex | None = None, left_out: Mapping[str, str] | None = None) -> None:
        self.products, self.left_out = products, dict(left_out or {})
        self.positions = positions if positions is not None else \
            {product.asin.lower(): position for position, product in enumerate(products)}
        self.index = index or ProductIndex(product.index_text for product in products)
        self._searched = lru_cache(SEARCHES_KEPT)(self.index.search)

    def search(self, keywords: str, limit: int) -> list[int]:
        """Positions of the `limit` best matches, best first. Recent short searches are kept: agents repeat each other's."""
        return list((self._searched if len(keywords) <= 200 else self.index.search)(keywords, limit))

    def find(self, asin: str) -> int:
        """Position of the product with this id, in whatever case. KeyError: no such product."""
        return self.positions[asin.lower()]

    def labelled(self, label: str, value: str) -> list[int]:
        """Positions of all products whose `label` ("category", "query") is `value`."""
        return [position for position, product in enumerate(self.products) if getattr(product, label) == value]


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
                  lambda: Catalogue(micro_products() if size == "micro" else large_products(size, PRODUCTS[size])))


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


def large_products(size: str, count: int) -> list[Product]:
    """`count` products with brand, attributes (some in the title, some only among the features), options and price tags, in
    families of up to six that share brand, kind and title but differ in features, option values and price: as in a real shop,
    the first hit often is not quite what is wanted. Each `size` has a catalogue of its own."""
    rng = random.Random(f"webshop/{size}/catalogue")
    ids: set[str] = set()
    products: list[Product] = []
    while len(products) < count:
        products += _family(rng, ids)
    return products[:count]


def _family(rng: random.Random, ids: set[str]) -> list[Product]:
    department = rng.choice(list(lexicon.DEPARTMENTS))
    shelf = lexicon.DEPARTMENTS[department]
    noun, shelf_name = rng.choice(list(shelf["nouns"].items()))
    brand = rng.choice(lexicon.BRAND_STARTS) + rng.choice(lexicon.BRAND_ENDS)
    audience = rng.choice(lexicon.AUDIENCES[department])
    leads = rng.sample(shelf["attributes"], 2)
    first, second = (lead.title() for lead in leads)
    groups = rng.sample(list(shelf["options"]), rng.choice((0, 1, 2, 2)))
    around = rng.randint(*shelf["price"])
    path = f"{shelf['path']} \u203a {shelf_name} \u203a {noun.title()}"
    family = []
    for _ in range(rng.choice(FAMILY)):
        while (asin := "B0" + "".join(rng.choices("0123456789BCDFGHJKLMNPQRSTVWXYZ", k=8))) in ids:
            pass
        ids.add(asin)
        others = [attribute for attribute in shelf["attributes"] if attribute not in leads]
        attributes = leads + rng.sample(others, rng.randint(2, 6))
        title = f"{brand} {first} {noun.title()} for {audience}, {second}, Model {rng.randrange(100, 1000)}"
        low = round(max(3, around + rng.randint(-around // 4, around // 4)) + rng.choice((0.99, 0.5, 0.0, 0.49)), 2)
        pricing = (low, round(low + rng.randint(2, 15), 2)) if rng.random() < 0.15 else (low,)
        options = {name: _subset(rng, shelf["options"][name]) for name in shelf["options"] if name in groups}
        bullets = tuple(f"{attribute.capitalize()}: {rng.choice(('made', 'chosen', 'tested'))} for {audience.lower()}"
                        for attribute in rng.sample(attributes, len(attributes)))
        description = f"This {noun} by {brand} suits {audience.lower()} and is {attributes[2]}."
        family.append(Product(asin, title, noun, department, path, tuple(attributes), options, pricing,
                              " to ".join(f"${price}" for price in pricing), description, bullets))
    return family


def _subset(rng: random.Random, values: Sequence[str]) -> tuple[str, ...]:
    """Three or more of `values`, in their order."""
    chosen = set(rng.sample(range(len(values)), rng.randint(3, len(values))))
    return tuple(value for position, value in enumerate(values) if position in chosen)
