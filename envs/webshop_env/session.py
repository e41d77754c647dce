"""One shopper's visit: which page is open, what can be clicked, what a search or a click leads to.

`rules="agentbench"` navigates as upstream does. `rules="strict"` closes what lets, or makes, an agent leave the shop's own
rules: search works only where there is a search bar; search words are words (upstream "<q> kind", "<c> category", "<r>" list
products without a search, and "<a>" crashes); "next >" is there only if a next page is; "search" is not offered as a click
that does nothing; a value that two options share goes to the first of them that is not chosen yet (upstream: always the last);
the item page shows what is chosen.
"""

from __future__ import annotations

import random

from envs.webshop_env.catalogue import Catalogue, Product
from envs.webshop_env.pages import BACK, BUY, NEXT, PREV, Full


class SiteError(Exception):
    """The site crashed, as upstream does on these keywords; it ends the episode with "task error"."""


class Session:
    """A visit to `catalogue` in one `layout`.

    Attributes:
        page: "search", "results", "item" or "sub_page"; `sub_page` names the last.
        hits: positions of the products found, best first; `number` is the page of results, from 1.
        product: position of the open product; None elsewhere.
        chosen: options chosen for it, name to value. Leaving for a page of results clears both.
        bought: position of the product bought; None before.
    """

    def __init__(self, catalogue: Catalogue, layout: Full, instruction: str, rules: str, seed: str = "") -> None:
        self.catalogue, self.layout, self.instruction, self.strict = catalogue, layout, instruction, rules == "strict"
        self._rng = random.Random(f"webshop/session/{seed}")
        self.bought: int | None = None
        self._home()

    # ---- what is shown -----------------------------------------------------------------------------------------------
    @property
    def item(self) -> Product:
        return self.catalogue.products[self.product]

    @property
    def has_search_bar(self) -> bool:
        return self.page == "search"

    @property
    def listed(self) -> list[int]:
        """Positions of the products on the open page of results."""
        size = self.layout.per_page
        return self.hits[(self.number - 1) * size:self.number * size]

    @property
    def clickables(self) -> list[str]:
        """What can be clicked, in page order: buttons, products, option values."""
        if self.page == "search":
            return [] if self.strict else ["search"]
        if self.page == "results":
            return [BACK, *self._turning, *(self.catalogue.products[position].asin.lower() for position in self.listed)]
        if self.page == "sub_page":
            return [BACK, PREV]
        values = [value for values in self.item.options.values() for value in values]
        return list(dict.fromkeys([BACK, PREV, *self.layout.sub_pages, BUY, *values]))

    @property
    def _turning(self) -> list[str]:
        more = not self.strict or self.number * self.layout.per_page < len(self.hits)
        return [PREV] * (self.number > 1) + [NEXT] * more

    def text(self) -> str:
        """The open page."""
        if self.page == "search":
            return self.layout.search(self.instruction)
        if self.page == "results":
            return self.layout.results(self.instruction, [self.catalogue.products[position] for position in self.listed],
                                       self.number, len(self.hits), self._turning)
        if self.page == "sub_page":
            return self.layout.sub_page(self.instruction, self.item, self.sub_page)
        return self.layout.item(self.instruction, self.item, self.chosen if self.strict else {})

    # ---- what can be done --------------------------------------------------------------------------------------------
    def search(self, keywords: str) -> bool:
        """Open the first page of results; False, and nothing changes, without keywords or, strict, without a search bar."""
        if self.strict and (not self.has_search_bar or not keywords.strip()) or not keywords:
            return False
        found = None if self.strict else self._command(keywords.split(" "))
        self.hits = self.catalogue.search(keywords, self.layout.max_hits) if found is None else found
        self._results(1)
        return True

    def click(self, value: str) -> bool:
        """Click a button, product or option value (lower case); False, and nothing changes, if it is not on the page."""
        if value not in self.clickables or value == "search":
            return False
        if value == BUY:
            self.bought = self.product
        elif value == BACK:
            self._home()
        elif value == NEXT and self.page == "results":
            self._results(self.number + 1)
        elif value == PREV and self.page == "results":
            self._results(self.number - 1)
        elif value == PREV and self.page == "item":
            self._results(self.number)
        elif value == PREV:
            self.page, self.sub_page = "item", ""
        elif self.page == "item" and value in self.layout.sub_pages:
            self.page, self.sub_page = "sub_page", value
        elif self.page == "item":
            self._choose(value)
        else:
            self.page, self.product = "item", self.catalogue.find(value)
        return True

    def _home(self) -> None:
        self.hits: list[int] = []
        self._results(0)
        self.page = "search"

    def _results(self, number: int) -> None:
        self.page, self.number, self.sub_page = "results", number, ""
        self.product: int | None = None
        self.chosen: dict[str, str] = {}

    def _choose(self, value: str) -> None:
        names = [name for name, values in self.item.options.items() if value in values]
        free = [name for name in names if name not in self.chosen] if self.strict else []
        self.chosen[free[0] if free else names[-1]] = value

    def _command(self, words: list[str]) -> list[int] | None:
        """What upstream's hidden search commands list; None for ordinary keywords."""
        if words[0] == "<r>":
            if len(self.catalogue.products) < self.layout.max_hits:
                raise SiteError("<r> needs as many products as results are listed")
            return self._rng.sample(range(len(self.catalogue.products)), self.layout.max_hits)
        if words[0] == "<a>" or words == ["<c>"]:
            raise SiteError(f"the site fails on {words[0]}")
        if words[0] == "<c>":
            return self.catalogue.labelled("category", words[1].strip())
        if words[0] == "<q>":
            return self.catalogue.labelled("query", " ".join(words[1:]).strip())
        return None
