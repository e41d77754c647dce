"""WebShop: find a product by search, choose its options, buy it.

Tools, pages, navigation, turn limit and reward follow princeton-nlp/WebShop as THUDM/AgentBench plays it (function-call
form). Beyond the strict rules listed in `session` and `reward`, `rules="strict"` answers an invalid action with the reason
and the clickable list, and takes arguments by name; "agentbench" repeats the page, and takes the first argument whatever
its name. Both count invalid actions in `info["invalid_calls"]`.

Not literal under either rules: the price that a price range counts by and the bounds of the official goals come from seeded
generators (upstream draws both anew in each process), and the default noun tagger is a word list (`backend="spacy:<model>"`
is upstream's way; see `reward.noun_tagger`).
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from envs.base import Env, EnvFault, Message, Status, assistant_call, function_tool
from envs.instances import Instance, generate
from envs.tool_calls import ParsedTurn, ToolCall
from envs.webshop_env import catalogue as products
from envs.webshop_env import goals, lexicon
from envs.webshop_env.official import official_catalogue, official_folder
from envs.webshop_env.pages import BACK, BUY, NEXT, PREV, Compact, Full
from envs.webshop_env.reward import best_options, noun_tagger, obstacle, purchase_reward
from envs.webshop_env.session import Session, SiteError

MICRO_SYSTEM = "search, click, buy"
SYSTEM = """You are shopping on a website for the product that the instruction describes.
Every turn you get an observation of the open page and the actions available on it; answer with exactly one tool call.
Use the search tool where the page has a search bar, and the click tool on one of the clickables: other values do nothing.
Choose the keywords with care, think before you act, open a product, choose the options that are asked for, and buy it.
Always call a tool, also when you are unsure: nobody will answer questions, and you need no permission for any tool."""
MICRO_CHARS = 120                                           # a micro observation is cut at this length
ECHO_CHARS = 1000                                           # of the action that an observation repeats, strict rules
NO_CALL = "No executable tool calls found! You should call a tool instead."
BROKEN_CALL = "No valid tool call found from agent."
LIMIT = "Task limit reached."


class WebShopEnv(Env):
    """The shop. `data["goal"]` is the goal (see `goals`), over the catalogue of the size or of the official folder.

    `backend` names the noun tagger. Official files are read from `path`/webshop. `skipped` says which official records give no
    instance, and why.
    """

    task = "webshop"
    turn_limits = {"micro": 8, "small": 20, "full": 20, "official": 20}
    sizes = ("micro", "small", "full")
    sources = ("generated", "official")
    tools = [function_tool("search_action", "Search for products; only on a page with a search bar.", keywords="search words"),
             function_tool("click_action", "Click a button, a product or an option.", value="one of the clickables")]

    @classmethod
    def available(cls, backend: str | None = None) -> tuple[bool, str]:
        try:
            noun_tagger(backend)
        except (EnvFault, ValueError) as fault:
            return False, str(fault)
        return True, ""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.nouns = noun_tagger(self.backend)
        self.layout, self.catalogue = self._shop()
        self.skipped: dict[str, str] = self.catalogue.left_out | (self._official_goals()[1] if self.source == "official" else {})
        self.session: Session | None = None

    @property
    def micro(self) -> bool:
        return self.source == "generated" and self.size == "micro"

    def _shop(self) -> tuple[Full, products.Catalogue]:
        generated = self.source == "generated"
        return Compact() if self.micro else Full(), \
            products.generated(self.size) if generated else official_catalogue(official_folder(self.path))

    def _official_goals(self) -> tuple[list[goals.Goal], dict[str, str]]:
        folder = official_folder(self.path)
        return products.shared(("goals", str(folder.resolve())),
                               lambda: goals.official_goals(folder, official_catalogue(folder)))

    def _load(self) -> Sequence[Instance]:
        if self.source == "official":
            return goals.official_instances(self._official_goals()[0], self.split)
        layout, catalogue = self._shop()

        def draw(rng: random.Random, index: int) -> tuple[str, dict[str, Any]]:
            kind = goals.SHARES[self.size][index % 8]
            return kind, {"catalogue": self.size, "goal": goals.draw_goal(rng, kind, catalogue, layout, self.size)}
        return generate(self.task, self.size, self.split, draw, key=lambda data: data["goal"]["instruction_text"])

    # ---- the episode -------------------------------------------------------------------------------------------------
    def _start(self, instance: Instance, rng: random.Random) -> list[Message]:
        self.goal = instance.data["goal"]
        self.session = self._visit(instance, str(rng.random()))
        self.shown = self.session.text()
        if self.micro:
            return [{"role": "system", "content": MICRO_SYSTEM}, {"role": "user", "content": self.shown}]
        return [{"role": "system", "content": SYSTEM},
                {"role": "user", "content": f"The initial observation:\n{self._page()}"}]

    def _visit(self, instance: Instance, seed: str = "") -> Session:
        return Session(self.catalogue, self.layout, instance.data["goal"]["instruction_text"], self.rules, seed)

    def _call(self, call: ToolCall) -> Message | str | None:
        if self.rules == "agentbench":
            return self._literal(call.name, next(iter(call.raw.values())))
        value = _fold(call.arguments["keywords" if call.name == "search_action" else "value"])
        if call.name == "search_action":
            done = self.session.search(value)
        else:
            done = self.session.click({_fold(clickable): clickable for clickable in self.session.clickables}.get(value, value))
        if not done:
            self.invalid_calls += 1
            return self._cut(self._refusal(call.name, value))
        if len(value) > ECHO_CHARS:
            self.cut_chars += len(value) - ECHO_CHARS
            value = value[:ECHO_CHARS] + "..."
        return self._after(f"{_verb(call.name)}[{value}]")

    def _after(self, action: str) -> str | None:
        """The observation after a valid `action`; a purchase ends the episode without one."""
        if self.session.bought is not None:
            product = self.catalogue.products[self.session.bought]
            reward = purchase_reward(product, self.session.chosen, self.goal, self.rules, self.nouns)
            self._finish(Status.COMPLETED, reward.value, info={"asin": product.asin, "attributes_met": reward.attributes,
                                                               "options_met": reward.options, "price_met": reward.price,
                                                               "type_factor": reward.type})
            return None
        self.shown = self.session.text()
        return self._cut(self.shown) if self.micro else f"Action: {_clean(action)}\n\nObservation:\n{self._page()}"

    def _refusal(self, name: str, value: str) -> str:
        shown = _clean(value[:40])
        if name == "click_action":
            reason = f"'{shown}' cannot be clicked here"
        else:
            reason = "no keywords" if self.session.has_search_bar else f"there is no search bar here; click '{BACK}' first"
        can = ", ".join(self.session.clickables) or "nothing, use search_action"
        return f"Invalid action: {reason}. Clickables: {can}" if not self.micro else f"invalid action, can click: {can}"

    def _cut(self, text: str) -> str:
        if not self.micro or len(text) <= MICRO_CHARS:
            return text
        self.cut_chars += len(text) - MICRO_CHARS
        return text[:MICRO_CHARS]

    def _page(self) -> str:
        actions = {"has_search_bar": self.session.has_search_bar, "clickables": self.session.clickables}
        return f"{self.shown}\n\nAvailable Actions:\n{actions}"

    def close(self) -> None:
        self.session, self.instance = None, None             # a step without a new reset is an error

    # ---- agentbench's answers ----------------------------------------------------------------------------------------
    def _literal(self, name: str, value: Any) -> Message | str | None:
        """Upstream reads "verb[value]" back by a pattern: brackets and line breaks in `value` make the action invalid."""
        action = f"{_verb(name)}[{value}]"
        verb, bracket, argument = action[:-1].rpartition("[")
        valid = "\n" not in action and verb in ("search", "click") and argument != ""
        try:
            valid = valid and (self.session.search if verb == "search" else self.session.click)(argument.lower())
        except SiteError as error:
            self._finish(Status.TASK_ERROR, 0.0, info={"error": str(error)})
            return None
        self.invalid_calls += not valid
        answer = self._after(action)
        return LIMIT if self._final is None and self._last_turn else answer

    def _no_call(self, parsed: ParsedTurn) -> Message:
        if self.rules == "strict":
            return super()._no_call(parsed)
        self.shown = NO_CALL                                 # upstream shows it in place of the page until the next action
        return self._unanswered()

    def _bad_call(self, call: ToolCall) -> Message | str | None:
        if self.rules == "strict":
            return self._cut(super()._bad_call(call))
        known, arguments = call.name in self.tool_names, call.raw
        if known and isinstance(arguments, dict) and arguments:
            self.invalid_calls -= 1                          # the argument's name and type do not matter upstream
            return self._literal(call.name, next(iter(arguments.values())))
        return self._unanswered(f"{BROKEN_CALL}\n" if known or not isinstance(arguments, dict) else "")

    @property
    def _last_turn(self) -> bool:
        return self.turns_used >= self.max_turns

    def _unanswered(self, lead: str = "") -> Message:
        """What follows a turn without a usable call: a user message, without the action."""
        if self._last_turn:
            return {"role": "tool", "content": LIMIT}
        return {"role": "user", "content": f"{lead}Observation:\n{self._page()}"}

    # ---- those who play ----------------------------------------------------------------------------------------------
    def expert(self) -> Message:
        return self._advise(self.session, self.goal)

    def oracle(self, index: int) -> list[Message]:
        instance = self.instances[index]
        session, turns = self._visit(instance), []
        while session.bought is None and len(turns) < self.max_turns:
            turns.append(self._advise(session, instance.data["goal"]))
            call = turns[-1]["tool_calls"][0]["function"]
            (value,) = call["arguments"].values()
            if not (session.search if call["name"] == "search_action" else session.click)(value.lower()):
                raise RuntimeError(f"webshop: the expert's {call} is invalid in {instance.id}")
        return turns

    def _advise(self, session: Session, goal: goals.Goal) -> Message:
        target = self.catalogue.find(goal["asin"])
        if session.page == "search":
            return assistant_call("search_action", keywords=self._keywords(goal))
        if session.page == "results":
            return _click(self._towards(session, target))
        if session.page == "sub_page" or session.product != target:
            return _click(PREV)
        return _click(next(iter(self._missing(session, goal)), BUY))

    def _keywords(self, goal: goals.Goal) -> str:
        """The expert's search: the goal's own keywords; else the product's title, or its whole text where the title is shared
        by more products than a search lists; without what agentbench's action pattern and commands trip over."""
        if "keywords" in goal:
            return goal["keywords"]
        product = self.catalogue.products[self.catalogue.find(goal["asin"])]
        texts = [" ".join(re.sub(r"[\[\]<>]", " ", text).split()) for text in (product.title, product.index_text)]
        return next((text for text in texts if self._finds(text, goal)), texts[0])

    def _finds(self, keywords: str, goal: goals.Goal) -> bool:
        return self.catalogue.find(goal["asin"]) in self.catalogue.search(keywords.lower(), self.layout.max_hits)

    def _towards(self, session: Session, target: int) -> str:
        """The click on a page of results that leads to `target`."""
        if target not in session.hits:
            return BACK
        page = session.hits.index(target) // self.layout.per_page + 1
        if page == session.number:
            return self.catalogue.products[target].asin.lower()
        return NEXT if page > session.number else PREV

    def _missing(self, session: Session, goal: goals.Goal) -> list[str]:
        """Values to choose on the open item page, of those that make the purchase worth most."""
        wanted = goal["goal_options"] if self.source == "generated" else \
            best_options(session.item, goal["goal_options"], self.rules)
        left = Counter(wanted.values()) - Counter(session.chosen.values())
        return [value for value in wanted.values() if left[value]]

    def unwinnable(self) -> dict[str, str]:
        """Instances whose own product cannot give reward 1 under these rules, by id, with the cause."""
        causes = {instance.id: self._obstacle(instance.data["goal"]) for instance in self.instances}
        return {name: cause for name, cause in causes.items() if cause}

    def _obstacle(self, goal: goals.Goal) -> str:
        product = self.catalogue.products[self.catalogue.find(goal["asin"])]
        if not self._finds(self._keywords(goal), goal):
            return f"a search for all its text does not list {product.asin}"
        chosen = best_options(product, goal["goal_options"], self.rules)
        return obstacle(product, chosen, goal, self.rules, self.nouns)

    def mistake(self, rng: random.Random) -> Message:
        session, goal = self.session, self.goal
        target = self.catalogue.find(goal["asin"])
        if session.page == "search":
            words = self._keywords(goal).split()
            colors = lexicon.MICRO_COLORS if self.micro else lexicon.COLORS
            spot = rng.randrange(len(words))
            words[spot:spot + 1] = [rng.choice([color for color in colors if color not in words])] * rng.randrange(2)
            return assistant_call("search_action", keywords=" ".join(words))
        if session.page == "results":
            wrong = [self.catalogue.products[position].asin.lower() for position in session.listed if position != target]
            return _click(rng.choice(wrong + [button for button in session.clickables if button in (BACK, PREV, NEXT)]))
        if session.page == "sub_page":
            return _click(rng.choice((PREV, BACK)))
        if rng.random() < 0.05:
            return _click(BUY)
        wanted = self._missing(session, goal)
        values = [value for values in session.item.options.values() for value in values if value not in wanted]
        return _click(rng.choice(values if values and rng.random() < 0.5 else [*self.layout.sub_pages, PREV]))


def _click(value: str) -> Message:
    return assistant_call("click_action", value=value)


def _fold(text: str) -> str:
    return " ".join(text.lower().split())


def _verb(name: str) -> str:
    return "search" if name == "search_action" else "click"


def _clean(text: str) -> str:
    """`text` without lone surrogates, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")
