"""The rules that `envs.check.check_env` holds an environment to, one method each."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from statistics import mean
from typing import Any

from envs.base import Env, EnvFault, Message, Status, StepResult, assistant_call
from envs.instances import Instance, fingerprint
from envs.tool_calls import parse_turn, render_turn

TALK = "I am not sure what to do."                           # a turn without a call: costs a turn, gives nothing


class Contract:
    """The rules, applied to one size and split; `findings` collects what is broken."""

    def __init__(self, cls: type[Env], settings: dict[str, Any], where: str, noise: float) -> None:
        self.cls, self.where, self.noise, self.what = cls, where, noise, ""
        self.env, self.other = cls(**settings), cls(**settings)
        self.findings: list[str] = []
        self.played: list[tuple[str, int, int]] = []          # kind, characters, turns of a solved expert episode
        self.noisy: list[tuple[str, bool]] = []

    def run(self, sample: int, marks: dict[str, str], hostile: bool) -> None:
        self.guard("tools", self.tools)
        self.guard("instances", self.instances, marks)
        for index in self.indices(sample):
            for rule in (self.reset, self.oracle, self.expert, self.recovery):
                self.guard(f"{rule.__name__}, {self.env.instances[index].id}", rule, index)
        useless = (self.garbage, self.error_texts, self.turn_limit, self.endless_call, self.out_of_range)
        for rule in (self.text_form, self.side_by_side, self.short_threads, *(useless if hostile else ())):
            self.guard(rule.__name__, rule)
        for env in (self.env, self.other):
            self.guard("close twice", lambda env=env: (env.close(), env.close()))

    def guard(self, what: str, rule: Callable[..., Any], *args: Any) -> None:
        """Run one rule; an exception in it is a finding. EnvFault passes through: the machine failed, not the contract."""
        self.what = what
        try:
            rule(*args)
        except EnvFault:
            raise
        except Exception as error:
            self.expect(False, f"raised {type(error).__name__}: {error}")

    def expect(self, holds: bool, complaint: str) -> bool:
        if not holds:
            self.findings.append(f"{self.where}, {self.what}: {complaint}")
        return holds

    # ---- static rules ---------------------------------------------------------------------------------------------
    def tools(self) -> None:
        self.expect(bool(self.env.tools) and len(set(self.env.tool_names)) == len(self.env.tools),
                    "no tools, or one name twice")
        self.expect(_plain(self.env.tools), "tools are not plain JSON")
        for tool in self.env.tools:
            function = tool["function"]
            schema = function["parameters"]
            self.expect(tool.get("type") == "function" and bool(function.get("description")),
                        f"{function['name']}: no type or description")
            self.expect(set(schema.get("required", [])) <= set(schema.get("properties", {})),
                        f"{function['name']}: requires a parameter that is not among its properties")

    def instances(self, marks: dict[str, str]) -> None:
        items = self.env.instances
        self.expect(len(items) > 0, "no instances")
        self.expect(len({item.id for item in items}) == len(items), "instance ids are not unique")
        self.expect(list(self.other._load()) == list(items), "loading a second time gives other instances or another order")
        strange = [item for item in items
                   if not isinstance(item, Instance) or item.task != self.cls.task or not _plain(item.data)]
        self.expect(not strange, f"{len(strange)} are not an Instance of this task with plain JSON data: {strange[:1]}")
        for item in items:
            twin = marks.setdefault(fingerprint(item.data), f"{self.where} {item.id}")
            if not self.expect(twin == f"{self.where} {item.id}", f"{item.id} is the same as {twin}; splits must be disjoint"):
                break

    def indices(self, sample: int) -> list[int]:
        """The first instance of each kind, then instances spread evenly up to `sample`."""
        items = self.env.instances
        chosen = list({items[index].kind: index for index in reversed(range(len(items)))}.values())
        spread = [index for index in range(0, len(items), max(1, len(items) // max(1, sample))) if index not in chosen]
        return sorted(chosen + spread[:max(0, sample - len(chosen))])

    # ---- rules on single episodes ---------------------------------------------------------------------------------
    def reset(self, index: int) -> None:
        first = self.env.reset(index, seed=1)
        spoken = [message for message in first if message["role"] in ("system", "user") and message["content"]]
        self.expect(bool(first) and _plain(first) and spoken == first, "opening messages need role and text, as plain JSON")
        before = fingerprint(self.env.instance.data)
        moved = self.answer(self.env, self.env.expert())
        self.expect(self.env.reset(index, seed=1) == first, "the same index and seed give other opening messages")
        self.expect(self.answer(self.env, self.env.expert()) == moved,
                    "the first expert turn is answered differently in a second episode")
        self.expect(self.other.reset(index, seed=1) == first, "a second environment opens differently")
        self.expect(fingerprint(self.env.instance.data) == before, "an episode changed the instance's data")

    def oracle(self, index: int) -> None:
        turns = self.env.oracle(index)
        self.expect(turns == self.env.oracle(index), "oracle() answers differently the second time")
        self.expect(len(turns) <= self.env.max_turns, f"oracle() needs {len(turns)} turns, the limit is {self.env.max_turns}")
        self.env.reset(index)
        self.won(self.play(turns), "oracle()")

    def expert(self, index: int) -> None:
        length = sum(len(message["content"]) for message in self.env.reset(index))
        result, turns = None, 0
        while result is None or not result.done:
            turn = self.env.expert()
            self.expect(turn == self.env.expert(), "expert() answers differently when asked twice in one state")
            self.expect(turn.get("role") == "assistant" and _plain(turn), "expert() is not a plain assistant message")
            result = self.step(self.env, turn)
            turns += 1
            length += len(render_turn(turn)) + sum(len(message["content"]) for message in result.messages)
        if self.won(result, "expert play"):
            self.played.append((self.env.instance.kind, length, turns))
        self.expect(self.env.step(turn) == result, "a step after the end does not repeat the last result")

    def recovery(self, index: int) -> None:
        rng, result = random.Random(index), None
        self.env.reset(index)
        while result is None or not result.done:
            slip = rng.random() < self.noise
            turn = self.env.mistake(rng) if slip else self.env.expert()
            error = parse_turn(turn, self.env.tools).error
            self.expect(not slip or error is None, f"mistake() is an invalid call: {error}")
            result = self.step(self.env, turn)
        self.noisy.append((self.env.instance.kind, result.reward == 1.0))

    def play(self, turns: Iterable[Message]) -> StepResult | None:
        result = None
        for turn in turns:
            result = self.env.step(turn)
            if result.done:
                break
        return result

    def won(self, result: StepResult | None, who: str) -> bool:
        """Whether a solving episode ended as it must."""
        if not self.expect(result is not None and result.done, f"{who} does not end the episode"):
            return False
        good = result.reward == 1.0 and result.terminated and not result.truncated and result.status == Status.COMPLETED
        ending = f"reward {result.reward}, status '{result.status}'{', truncated' * result.truncated}"
        return self.expect(good, f"{who} ends with {ending}; expected reward 1, '{Status.COMPLETED}'; info {result.info}")

    def step(self, env: Env, turn: str | Message) -> StepResult:
        """`env.step` with the rules that hold for every step."""
        used = env.turns_used
        result = env.step(turn)
        self.expect(env.turns_used == used + 1, "a step did not use exactly one turn")
        self.expect(0.0 <= result.reward <= 1.0, f"reward {result.reward} is outside [0, 1]")
        self.expect(result.score is None or 0.0 <= result.score <= 1.0, f"score {result.score} is outside [0, 1]")
        self.expect(result.done or (result.reward == 0.0 and result.status == Status.RUNNING),
                    "a running episode has reward 0 and 'running'")
        self.expect(not (result.terminated and result.truncated), "terminated and truncated at once")
        self.expect(result.status != Status.ENVIRONMENT_ERROR, f"infrastructure fault: {result.info.get('error')}")
        self.expect(result.done or bool(result.messages), "the episode goes on, but no observation came")
        self.expect(_plain([result.messages, result.info]), "messages or info are not plain JSON")
        for message in result.messages:
            self.expect(message["role"] in ("tool", "user"), f"an observation has role {message['role']!r}, not tool or user")
            message["content"].encode()                      # a lone surrogate would break every tokenizer: it raises here
        return result

    def answer(self, env: Env, turn: str | Message) -> tuple[Any, ...]:
        result = self.step(env, turn)
        texts = [message["content"] for message in result.messages]
        return texts, result.reward, result.terminated, result.truncated, result.status

    # ---- rules on hostile and useless turns -----------------------------------------------------------------------
    def garbage(self) -> None:
        self.env.reset(0)
        for turn in garbage_turns(self.env.tools):
            self.guard(f"garbage turn {str(turn)[:100]!r}", self.unrewarded, turn)

    def unrewarded(self, turn: str | Message) -> None:
        result = self.step(self.env, turn)
        self.expect(result.reward == 0.0, f"rewarded with {result.reward}")
        if result.done:
            self.env.reset(0)

    def error_texts(self) -> None:
        """Unknown tools and missing arguments are answered, counted, and under strict rules explained."""
        functions = [tool["function"] for tool in self.env.tools]
        cases = [("no_such_tool", self.env.tool_names[0])]
        cases += [(function["name"], key) for function in functions for key in function["parameters"].get("required", [])[:1]]
        for name, named in cases:
            self.env.reset(0)
            result = self.step(self.env, f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>')
            text = " ".join(message["content"] for message in result.messages)
            self.expect(result.info.get("invalid_calls") == 1, f"{name} without arguments does not count as an invalid call")
            self.expect(bool(text), f"{name} without arguments is not answered")
            self.expect(self.env.rules != "strict" or named in text,
                        f"{name} without arguments: {text!r} does not name {named!r}")

    def turn_limit(self) -> None:
        self.env.reset(0)
        for turn in range(1, self.env.max_turns + 1):
            result = self.step(self.env, TALK)
            state = "over" if result.done else "not over"
            if not self.expect(result.done == (turn == self.env.max_turns),
                               f"after {turn} of {self.env.max_turns} turns of talk the episode is {state}"):
                return
        self.limit_reached(result)
        self.expect(self.env.step(TALK) == result, "a step after the limit does not repeat the last result")

    def endless_call(self) -> None:
        """A policy that repeats the first expert turn for ever meets the limit (or has solved the instance by it)."""
        self.env.reset(0)
        turn, result = self.env.expert(), None
        while result is None or not result.done:
            result = self.step(self.env, turn)
        if not result.terminated:
            self.limit_reached(result)

    def limit_reached(self, result: StepResult) -> None:
        self.expect(result.truncated and result.status == Status.TASK_LIMIT and result.reward == 0.0,
                    f"at the turn limit: truncated {result.truncated}, status '{result.status}', reward {result.reward}; "
                    f"expected truncated, '{Status.TASK_LIMIT}', 0")
        self.expect(result.info.get("turns") == self.env.max_turns,
                    f"info['turns'] is {result.info.get('turns')}, not {self.env.max_turns}")

    def out_of_range(self) -> None:
        for index in (len(self.env.instances), -1):
            try:
                self.env.reset(index)
            except IndexError:
                continue
            self.expect(False, f"reset({index}) must raise IndexError")

    # ---- rules on forms and on several environments -----------------------------------------------------------------
    def text_form(self) -> None:
        """The Hermes text of a turn does what the message does."""
        turns = self.env.oracle(0)
        self.env.reset(0), self.other.reset(0)
        for turn in turns:
            by_message, by_text = self.answer(self.env, turn), self.answer(self.other, render_turn(turn))
            if not self.expect(by_message == by_text,
                               f"{render_turn(turn)!r} as text gives {by_text}, as message {by_message}"):
                break

    def side_by_side(self) -> None:
        """Two environments played in turns do not disturb each other."""
        last = len(self.env.instances) - 1
        plans = [(self.env, self.env.oracle(0)), (self.other, self.other.oracle(last))]
        self.env.reset(0), self.other.reset(last)
        results = {}
        for position in range(max(len(turns) for _, turns in plans)):
            results |= {env: env.step(turns[position]) for env, turns in plans if position < len(turns)}
        for result in results.values():
            self.won(result, "an episode played beside another")

    def short_threads(self) -> None:
        """An environment may be used from one thread after another: here each thread ends before the next begins."""
        jobs: list[tuple[Any, ...]] = [(self.env.step, turn) for turn in self.env.oracle(0)]
        for job in [(self.env.reset, 0), *jobs]:
            with ThreadPoolExecutor(1) as pool:
                result = pool.submit(*job).result()
        self.won(result, "an episode with each turn from another thread")

    def rows(self) -> list[dict[str, Any]]:
        rows = []
        for kind in sorted({item.kind for item in self.env.instances}):
            chars, turns = [[entry[column] for entry in self.played if entry[0] == kind] for column in (1, 2)]
            noisy = [won for other, won in self.noisy if other == kind]
            rows.append({"kind": kind, "instances": sum(item.kind == kind for item in self.env.instances),
                         "episodes": len(chars),
                         "mean_chars": mean(chars) if chars else None, "max_chars": max(chars, default=None),
                         "mean_turns": mean(turns) if turns else None, "max_turns": max(turns, default=None),
                         "noisy_solved": mean(noisy) if noisy else None})
        return rows


def garbage_turns(tools: list[dict[str, Any]]) -> list[str | Message]:
    """Turns that no environment may reward or choke on: empty, broken, hostile, huge, and with values of the wrong type."""
    turns: list[Any] = ["", " \n", TALK, "<tool_call>", "<tool_call></tool_call>", "<tool_call>[]</tool_call>",
                        "<tool_call>{}</tool_call>", '<tool_call>{"name": null}</tool_call>',
                        "<tool_call>" + "{" * 5000 + "</tool_call>",
                        "\x00\ud800\uffff", "x" * 200_000, {"role": "assistant", "content": None},
                        {"role": "assistant", "content": ["text"], "tool_calls": None},
                        {"role": "assistant", "tool_calls": [None, 3, {}, {"function": None}]}]
    values = ["", " ", "\x00", "../" * 50, "'\";--", "x" * 100_000, "\ud800", None, 987654, -1.5, True, [], {}, [[1]],
              {"a": {"b": 1}}]
    for function in (tool["function"] for tool in tools):
        name, keys = function["name"], list(function["parameters"].get("properties", {}))
        turns += [assistant_call(name, **{key: value for key in keys}) for value in values]
        turns += [f'<tool_call>{{"name": "{name}", "arguments": {text}}}</tool_call>'
                  for text in ('"{}"', "[1]", '{"no_such_argument": 1}')]
    return turns


def _plain(value: Any) -> bool:
    """Whether `value` survives JSON unchanged (no tuples, no integer keys, no objects)."""
    return json.loads(json.dumps(value)) == value
