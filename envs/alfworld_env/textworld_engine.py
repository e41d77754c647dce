"""TextWorld as the other engine of the household (optional: `pip install alfworld`, which compiles a GPL-3 planner).

Domain and text grammar come from the installed alfworld package, never from a game file, because TextWorld evaluates
expressions in a grammar. TextWorld translates a problem four times per episode and parses every template again at every
step; the caches below remove that and change no text. Not for threads: its parsers and `sys.stdout` are global.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
from importlib import resources
from typing import Any

from envs.base import EnvFault


def missing() -> str:
    """Why TextWorld cannot be used here; "" if it can."""
    try:
        import alfworld.agents.environment.alfred_tw_env  # noqa: F401
        import fast_downward  # noqa: F401
    except ImportError as error:
        return f"TextWorld is not installed ({error}); pip install alfworld, or use the built-in engine (backend=None)"
    return ""


@functools.cache
def logic_texts(wording: str) -> tuple[str, str]:
    """(domain, grammar) of the installed alfworld in the "new" or the "old" text format.

    The old format of release 0.2.2 differs in the put command, in the arrival text, and has no help.
    """
    data = resources.files("alfworld") / "data"
    domain, grammar = (data / "alfred.pddl").read_text(), (data / "alfred.twl2").read_text()
    if wording == "old":
        grammar = grammar[:grammar.index("action help")]
        for new, old in (("You arrive at {r.name}.", "You arrive at {lend.name}."),
                         ("You move the {o.name} to the {r.name}.", "You put the {o.name} in/on the {r.name}."),
                         ("move {o} to {r}", "put {o} in/on {r}")):
            if new not in grammar:
                raise EnvFault(f"this version of alfworld has another grammar: {new!r} is not in it")
            grammar = grammar.replace(new, old)
        start = domain.index("(:action help")
        domain = domain[:start] + domain[domain.index("\n)\n", start) + 3:]
    return domain, grammar


@functools.cache
def _speed_up() -> None:
    """Cache what TextWorld computes again and again; results are shared only where nothing writes to them."""
    import fast_downward
    from textworld.envs.pddl import textgen
    from textworld.logic import Rule

    translate, parse, rule = fast_downward.pddl2sas, textgen._parse_and_convert, Rule.parse_conjunctive_query

    @functools.lru_cache(maxsize=4)
    def translated(domain: str, problem: str) -> tuple[Any, str]:
        argv = sys.argv
        try:
            return translate(domain, problem)
        finally:
            sys.argv = argv

    parsed = functools.lru_cache(maxsize=4096)(lambda text, rule_name: parse(text, rule_name=rule_name))
    fast_downward.pddl2sas = lambda domain, problem, verbose=False, optimize=False: translated(domain, problem)
    textgen._parse_and_convert = lambda text, rule_name, **_: copy.deepcopy(parsed(text, rule_name))
    Rule.parse_conjunctive_query = functools.lru_cache(maxsize=4096)(rule)
    textgen.copy_context = lambda context: {**context, "variables": dict(context["variables"]),
                                            "mapping": dict(context["mapping"])}


def _forget() -> None:
    """Empty the store in which TextWorld keeps every proposition of every game for ever; it only saves making them again."""
    from mementos import core

    vars(core).get("_memento_cache", {}).clear()


_idle: list["TextWorldEngine"] = []
_lock = threading.Lock()


def borrow() -> "TextWorldEngine":
    """An engine that nobody uses, or a new one; `give_back` keeps it for the next, because its memory is never freed."""
    with _lock:
        return _idle.pop() if _idle else TextWorldEngine()


def give_back(engine: "TextWorldEngine") -> None:
    """Keep `engine` for the next `borrow`."""
    with _lock:
        _idle.append(engine)


class TextWorldEngine:
    """`engine.Household` played by TextWorld under alfworld's naming. One object plays any number of games, one after the
    other; it holds a copy of the planner's library, which the process never gives back (see `borrow`).

    Args:
        fast: use the caches (same texts); they stay for the life of the process.

    Raises:
        EnvFault: TextWorld is not installed. ValueError: `fast=False` after the caches came into place.
    """

    def __init__(self, fast: bool = True) -> None:
        if reason := missing():
            raise EnvFault(reason)
        import textworld
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
        from textworld.envs.pddl.pddl import PddlEnv

        if fast:
            _speed_up()
        elif _speed_up.cache_info().currsize:
            raise ValueError("TextWorld runs with caches in this process already; use a fresh process for fast=False")
        self._env = AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)))
        self.commands: list[str] = []
        self.won = False

    def load(self, pddl: str, task: str, wording: str) -> "TextWorldEngine":
        """Take up another game: a PDDL problem, its goal sentence and the text format ("old" or "new"); returns itself."""
        domain, grammar = logic_texts(wording)
        _forget()
        self._env.load({"pddl_domain": domain, "grammar": grammar.replace("UNKNOWN GOAL.", task), "pddl_problem": pddl})
        return self

    def reset(self) -> str:
        """Start again; returns the opening text."""
        return self._take(self._env.reset())

    def step(self, command: str) -> str:
        """Play a command; returns TextWorld's feedback."""
        return self._take(self._env.step(command)[0])

    def _take(self, state: Any) -> str:
        self.commands, self.won = state["admissible_commands"], bool(state["won"])
        return state["feedback"]
