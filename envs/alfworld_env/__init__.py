"""ALFWorld: do a chore in a household by text commands. Tool `take_action`; 20 turns (micro: 8); reward 1 when the goal holds.

Engines: our own (`engine.Engine`, the default) and TextWorld (`backend="textworld"`, optional), with the same texts and
admissible commands. Rules "agentbench": any text becomes the admissible command with the best BLEU, three identical actions in
a row end the episode, and a turn without a usable call marks it for good (THUDM/AgentBench, function-call form). Rules
"strict": only an admissible command acts; "put X in/on Y" and "move X to Y" both mean the game's own form; anything else is
answered with "Nothing happens." and counted.
"""

from __future__ import annotations

import functools
import random
import re
from typing import Any, Sequence

from envs.alfworld_env.bleu import nearest_command
from envs.alfworld_env.engine import Engine, Household
from envs.alfworld_env.expert import next_command, plan
from envs.alfworld_env.game import Game, to_pddl
from envs.alfworld_env.generate import draw_micro, draw_room, household
from envs.alfworld_env.official import library
from envs.alfworld_env.text import BANNER, Brief, Official
from envs.alfworld_env.textworld_engine import TextWorldEngine, borrow, give_back, missing
from envs.base import Env, EnvFault, Message, Status, assistant_call, check_name, function_tool
from envs.instances import Instance, generate
from envs.tool_calls import ParsedTurn, ToolCall

SYSTEM = """\
You are an agent in a household who has to bring about the goal that the user gives you. The first message describes the room
and the goal. After that, every turn goes like this: you see what your last action did and the list of actions that are
available now; you think about what helps, and then submit exactly one of them with the tool take_action.
Only actions from the list count. If the answer is "Nothing happens.", your action was not valid: choose one from the list.
Containers may be closed; open them to see what is inside. You can carry one thing at a time.
Always call the tool; a message without a tool call does nothing and uses up a turn. You have {turns} turns."""
MICRO_SYSTEM = "house: one action a turn."
BACKENDS = ("own", "textworld")
_ARRIVAL = re.compile(r"\AYou arrive at loc \d+\. ")
_PUT = re.compile(r"\A(?:put|move) (?P<thing>\S+(?: \d+)?) (?:in/on|in|on|into|onto|to) (?P<place>\S+(?: \d+)?)\Z")


class ALFWorldEnv(Env):
    """The household task; `backend` is the engine."""

    task = "alfworld"
    turn_limits = {"micro": 8, "small": 20, "full": 20, "official": 20}
    sizes = ("micro", "small", "full")
    sources = ("generated", "official")
    tools = [function_tool("take_action", "Carry out one action in the household.", action="the action, as text")]

    def __init__(self, **settings: Any) -> None:
        self._textworld: TextWorldEngine | None = None
        check_name("alfworld: backend", settings.get("backend") or "own", BACKENDS)
        super().__init__(**settings)
        self._micro = self.source == "generated" and self.size == "micro"
        ok, reason = self.available(self.backend)
        if not ok:
            raise EnvFault(f"alfworld: {reason}")
        if self.backend == "textworld" and self._micro:
            raise ValueError("alfworld: size 'micro' has texts of its own; with backend 'textworld' use size 'small' or 'full'")

    @classmethod
    def available(cls, backend: str | None = None) -> tuple[bool, str]:
        if backend not in (None, *BACKENDS):
            return False, f"unknown alfworld backend {backend!r}; known: {', '.join(BACKENDS)}"
        reason = missing() if backend == "textworld" else ""
        return not reason, reason

    def _load(self) -> Sequence[Instance]:
        if self.source == "official":
            return library(self.path).split(self.split).instances
        draw = draw_micro if self.size == "micro" else functools.partial(draw_room, size=self.size)
        return generate("alfworld", self.size, self.split, draw)

    @property
    def skipped(self) -> list[tuple[str, str]]:
        """Official games of this split that cannot be used, each with the reason."""
        return library(self.path).split(self.split).skipped if self.source == "official" else []

    # ---- episode --------------------------------------------------------------------------------------------------
    def _game(self, instance: Instance) -> Game:
        if self.source == "official":
            try:
                return library(self.path).game(instance.data["game"])
            except (OSError, ValueError) as error:           # gone or changed since it was listed
                raise EnvFault(f"alfworld: {instance.data['game']}: {error}") from error
        return Game(household(instance.data), instance.data["task"], "new")

    def _world(self, instance: Instance) -> Engine:
        """A fresh household of our own engine."""
        game = self._game(instance)
        return Engine(game.problem, game.task, Brief() if self._micro else Official(game.wording))

    def _start(self, instance: Instance, rng: random.Random) -> list[Message]:
        self.world = self._world(instance)
        self._played: Household = self.world
        if self.backend == "textworld":
            self._textworld = self._textworld or borrow()
            self._played = self._textworld.load(to_pddl(self.world.problem), self.world.task, self.world.texts.wording)
        opening = self._played.reset()
        self._agree(opening, opening if self._played is self.world else self.world.reset())
        self._sticky: Status | None = None
        self._submitted: list[str] = []
        if self._micro:
            return [{"role": "system", "content": MICRO_SYSTEM}, {"role": "user", "content": opening}]
        opening = opening.removeprefix(BANNER)
        return [{"role": "system", "content": SYSTEM.format(turns=self.max_turns)},
                {"role": "user", "content": f"Here is your task. {opening}{self._listing()}"}]

    def _listing(self) -> str:
        return "" if self._micro else " AVAILABLE ACTIONS: " + "\n".join(self._played.commands) + "\n"

    def _agree(self, theirs: str, ours: str) -> None:
        if theirs != ours or self._played.commands != self.world.commands or self._played.won != self.world.won:
            raise EnvFault(f"alfworld: TextWorld and the built-in engine disagree: {theirs!r} and {ours!r}")

    def _call(self, call: ToolCall) -> Message | str | None:
        return self._act(call.arguments["action"])

    def _act(self, action: str) -> str:
        """Play one submitted action under the rules; the observation."""
        if self.rules == "agentbench":
            action = action.lower().split("\n")[0]
            command = nearest_command(action, self._played.commands)
        else:
            command = self._translate(" ".join(action.lower().split()))
            if command not in self._played.commands:
                self.invalid_calls += 1
        told = self._played.step(command)
        self._agree(told, told if self._played is self.world else self.world.step(command))
        self._submitted.append(action)
        repeated = len(self._submitted) > 3 and len(set(self._submitted[-3:])) == 1
        if self.rules == "agentbench" and repeated:
            self._finish(Status.INVALID_ACTION, 0.0, info={"error": "the same action three times in a row"})
        elif self._played.won:
            self._finish(self._sticky or Status.COMPLETED, 1.0)
        return _ARRIVAL.sub("", told) + self._listing()

    def _translate(self, command: str) -> str:
        """The game's own form of a put command; other text unchanged."""
        match = _PUT.match(command)
        return self.world.texts.put_template.format(match["thing"], match["place"]) if match else command

    def _no_call(self, parsed: ParsedTurn) -> Message:
        if self.rules == "agentbench":
            self._sticky = Status.VALIDATION_FAILED
        return super()._no_call(parsed)

    def _bad_call(self, call: ToolCall) -> Message | str:
        """agentbench reads the first argument by position and ignores the tool's name; only a call without text is bad."""
        if self.rules == "strict":
            return super()._bad_call(call)
        first = next(iter(call.raw.values()), None) if isinstance(call.raw, dict) else None
        if isinstance(first, str):
            return self._act(first)
        self._sticky = Status.INVALID_ACTION
        return {"role": "user", "content": "The tool call had no action. Call take_action with the action as text."}

    def _finish(self, status: Status, reward: float, score: float | None = None, *, truncated: bool = False,
                info: dict[str, Any] | None = None) -> None:
        """The text format goes into the record: success differs much between "put X in/on Y" and "move X to Y"."""
        super()._finish(status, reward, score, truncated=truncated, info={"wording": self.world.texts.wording, **(info or {})})

    def close(self) -> None:
        if self._textworld is not None:
            give_back(self._textworld)
        self._textworld, self.instance = None, None          # a step without a new reset is an error
        self.world = self._played = None

    # ---- experts --------------------------------------------------------------------------------------------------
    def expert(self) -> Message:
        return assistant_call("take_action", action=next_command(self.world) or "look")

    def oracle(self, index: int) -> list[Message]:
        return [assistant_call("take_action", action=command) for command in plan(self._world(self.instances[index]))]

    def mistake(self, rng: random.Random) -> Message:
        best = next_command(self.world) or "look"
        wrong = [command for command in self.world.commands if command != best]
        digits = [position for position, char in enumerate(best) if char.isdigit()]
        if digits and rng.random() < 0.3:
            position = rng.choice(digits)
            other = rng.choice([digit for digit in "123456789" if digit != best[position]])
            return assistant_call("take_action", action=best[:position] + other + best[position + 1:])
        return assistant_call("take_action", action=rng.choice(wrong))
