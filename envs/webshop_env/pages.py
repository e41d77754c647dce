"""The texts of the pages: what WebShop's templates show in text mode, visible strings joined by " [SEP] ".

`Compact` is the layout of the micro catalogue, made to be short: the same order, joined by commas, one part per product and
per option, without the instruction, the names of options, what the results page said already, and the buttons that every page
of a kind has ("back to search", "< prev" and "features" on an item page can be clicked all the same).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from envs.webshop_env.catalogue import Product

SEP = " [SEP] "
BACK, PREV, NEXT, BUY = "back to search", "< prev", "next >", "buy now"


class Full:
    """WebShop's own layout. `chosen` is what the item page shows as selected: nothing upstream, options under strict rules."""

    per_page, max_hits = 10, 50
    sub_pages: tuple[str, ...] = ("description", "features", "reviews")

    def search(self, instruction: str) -> str:
        return SEP.join(["WebShop", "Instruction:", instruction, "Search"])

    def results(self, instruction: str, products: Sequence[Product], page: int, total: int, buttons: Sequence[str]) -> str:
        return SEP.join(["Instruction:", instruction, "Back to Search", f"Page {page} (Total results: {total})",
                         *(button.capitalize() if button == NEXT else "< Prev" for button in buttons),
                         *(part for product in products for part in (product.asin, product.title.strip(), product.price_tag))])

    def item(self, instruction: str, product: Product, chosen: Mapping[str, str]) -> str:
        options = [part for name, values in product.options.items() for part in (name, *values)]
        selected = ["Selected: " + ", ".join(f"{name}: {value}" for name, value in chosen.items())] if chosen else []
        return SEP.join(["Instruction:", instruction, "Back to Search", "< Prev", *options, *selected, product.title.strip(),
                         f"Price: {product.price_tag}", f"Rating: {product.rating}",
                         *(name.capitalize() for name in self.sub_pages), "Buy Now"])

    def sub_page(self, instruction: str, product: Product, name: str) -> str:
        content = {"description": (product.description,), "features": product.bullets,
                   "reviews": product.reviews or ("No reviews found",)}[name]
        return SEP.join(["Instruction:", instruction, "Back to Search", "< Prev", *(part.strip() for part in content)])


class Compact(Full):
    """The micro layout. An option that is chosen (and shown as such) leaves the page."""

    per_page, max_hits = 3, 9
    sub_pages = ("features",)

    def search(self, instruction: str) -> str:
        return instruction

    def results(self, instruction: str, products: Sequence[Product], page: int, total: int, buttons: Sequence[str]) -> str:
        lines = [f"{product.asin} {product.title} {product.price_tag}" for product in products]
        return ", ".join([*lines, *buttons]) or "no results"

    def item(self, instruction: str, product: Product, chosen: Mapping[str, str]) -> str:
        return ", ".join([*(" ".join(values) for name, values in product.options.items() if name not in chosen), BUY])

    def sub_page(self, instruction: str, product: Product, name: str) -> str:
        return ", ".join([*product.bullets, PREV])
