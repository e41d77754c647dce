"""The operating-system task: answer a question about, or change, a small Linux world by shell commands in a real sandbox.

Tools, turn limit, statuses and grading: AgentBench's function-call form (THUDM/AgentBench, AgentRL). Commands run in one
bubblewrap sandbox per episode (`envs.os_env.sandbox`); where none is possible the environment refuses, with the reason.
`backend` is "bubblewrap", "bubblewrap-root", "docker[:image]", or None for the first of the former two that works; the
attribute `backend` and `info["sandbox"]` of every result then name it.
`rules="strict"` grades answers outside the sandbox, and states by a clean shell over a copy of the files that were left; a
reference command of an official record runs before the agent's first turn, over a copy too; an answer counts only from
`answer_action`. `rules="agentbench"` grades what either ending tool says, reads a call's first value
whatever its key, and ends the episode on a command that exceeds its time.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Sequence
from typing import Any

from envs.base import Env, EnvFault, Message, Status, assistant_call, function_tool
from envs.instances import Instance, generate
from envs.os_env import checkers, official
from envs.os_env.docker import DockerSandbox, probe_docker
from envs.os_env.sandbox import CopyFailed, Limits, Output, Sandbox, probe
from envs.os_env.server import MODES
from envs.os_env.system_tasks import draw_full, draw_small
from envs.os_env.tasks import NAMES, WORDS, draw_micro
from envs.tool_calls import ParsedTurn, ToolCall

MICRO_SYSTEM = "You use a Linux shell. Call one tool each turn."
SYSTEM = """You act like a person at the keyboard of an Ubuntu machine; the user's side plays the machine. You get one \
problem: either carry out an operation on it or answer a question about it.
Each turn, think briefly, then call exactly one tool:
- bash_action runs a bash script in your shell and shows you its output. Output that is too long is cut, so keep it short \
yourself. Scripts must not wait for input.
- finish_action ends the problem when the operation is done, or when you lack information; none will be given to you later.
- answer_action ends the problem with your answer. An answer is exact and short: a single number or name, no sentence around it.
Always call a tool; an answer written as plain text does not count."""
LEAD_IN = "Here is a new problem, in a fresh operating system.\n\n"
CUTS = {"micro": (120, 100, " [cut]"), None: (800, 780, "\n[truncated because the output is too long]")}
STOPPED = {"timeout": "[stopped: out of time]", "output": "[stopped: too much output]", "memory": "[stopped: out of memory]"}
LIMITS = {"micro": Limits(wall_s=3.0, cpu_s=3, processes=32, address_bytes=256 << 20, memory_bytes=128 << 20,
                          file_bytes=4 << 20,
                          disk_bytes=4 << 20, output_bytes=1 << 18),
          None: Limits(),
          "official": Limits(wall_s=30.0, cpu_s=30, processes=256, address_bytes=1 << 30, memory_bytes=1 << 30,
                             disk_bytes=64 << 20, whole_root=True,
                             capabilities=1 << 1 | 1 << 2 | 1 << 3)}   # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])|[\x00-\x08\x0b-\x1f\x7f]")


class OSEnv(Env):
    """The shell task. See the module's docstring and `envs.base.Env`.

    Raises:
        EnvFault: no sandbox can be started on this machine; the message says why.
    """

    task = "os"
    turn_limits = {"micro": 6, "small": 8, "full": 8, "official": 8}
    sizes = ("micro", "small", "full")
    sources = ("generated", "official")
    tools = [function_tool("bash_action", "Run a bash script in the shell.", script="The script."),
             function_tool("finish_action", "End the problem: the operation is done.", thought="Why it is done."),
             function_tool("answer_action", "End the problem with an answer.", answer="The answer, exact and short.")]

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        ok, reason = self.available(self.backend)
        if not ok:
            raise EnvFault(f"os: {reason}")
        if self.backend is None:
            self.backend = probe()[0]
        self._style = "official" if self.source == "official" else self.size
        self._sandbox: Sandbox | DockerSandbox | None = None

    @classmethod
    def available(cls, backend: str | None = None) -> tuple[bool, str]:
        """Whether a sandbox starts here; tried once per process."""
        if backend is not None and backend.partition(":")[0] == "docker":
            return probe_docker(backend.partition(":")[2])
        if backend not in (None, *MODES):
            return False, f"unknown backend {backend!r}; known: {', '.join(MODES)}, docker, docker:IMAGE"
        mode, reason = probe() if backend is None else probe(backend)
        return mode is not None, reason

    @property
    def skipped(self) -> tuple[tuple[str, str], ...]:
        """(id, reason) of the official records of this split that cannot be used."""
        return official.load(self.path, self.split)[1] if self.source == "official" else ()

    def _load(self) -> Sequence[Instance]:
        if self.source == "official":
            return official.load(self.path, self.split)[0]
        draw = {"micro": draw_micro, "small": draw_small, "full": draw_full}[self.size]
        return generate("os", self.size, self.split, draw, key=lambda data: [data["question"], data.get("answer")])

    def _open(self, data: dict[str, Any]) -> tuple[Sandbox | DockerSandbox, str]:
        """The world of an instance, and what its reference command says in it ("" where there is none)."""
        limits, own = LIMITS.get(self._style, LIMITS[None]), data["init"] if self.source == "generated" else ""
        box = DockerSandbox(own, limits, self.backend.partition(":")[2]) if self.backend.startswith("docker") else \
            Sandbox(own, limits, self.backend)
        try:
            gold = ""
            if self.source == "official":
                official.open_world(data, box)
                if any(link["do"] == "reference" for link in data.get("chain", ())):
                    with box.copy() as twin:
                        gold = official.run_reference(twin, data).text
            return box, gold
        except CopyFailed as failure:                        # no agent has been here yet
            box.close()
            raise EnvFault(f"os: {failure}") from failure
        except BaseException:
            box.close()
            raise

    def _start(self, instance: Instance, rng: random.Random) -> list[Message]:
        self.close()
        self._scripts: list[str] = []
        self._sandbox, self._gold = self._open(instance.data)
        if instance.data.get("start"):
            self._sandbox.run(instance.data["start"])
        micro = self._style == "micro"
        return [{"role": "system", "content": MICRO_SYSTEM if micro else SYSTEM},
                {"role": "user", "content": ("" if micro else LEAD_IN) + instance.data["question"]}]

    def _call(self, call: ToolCall) -> str | None:
        value = next(iter(call.arguments.values()))
        if call.name == "bash_action":
            self._scripts.append(value)
            return self._observe(self._sandbox.run(value))
        answered = call.name == "answer_action" or self.rules == "agentbench"
        info = {}
        try:
            reward = float(self._grade(value if answered else None))
        except CopyFailed as failure:                        # by what the agent left behind: its own loss
            reward, info["error"] = 0.0, str(failure)
        self._finish(Status.COMPLETED, reward, info=info)
        self.close()
        return None

    def _observe(self, output: Output) -> str | None:
        if output.why == "timeout" and self.rules == "agentbench":
            self._finish(Status.TASK_ERROR, 0.0, info={"error": "the command ran out of time"})
            self.close()
            return None
        micro = self._style == "micro"
        if self.rules == "agentbench" and _undecodable(output.data):
            return "The output of the OS cannot be read as UTF-8 text."
        text = _ESCAPES.sub("", output.text.replace("\r\n", "\n")).rstrip("\n")
        limit, keep, note = CUTS.get(self._style, CUTS[None])
        if len(text) > limit:
            self.cut_chars += len(text) - keep
            text = text[:keep] + note
        if output.why != "exit":
            text = f"{text}\n{STOPPED[output.why]}".lstrip("\n")
        if micro:
            return text or "(no output)"
        return f"The output of the OS:\n\n{text}" if text else "The output of the OS is empty."

    def _grade(self, answer: str | None) -> bool:
        data, strict = self.instance.data, self.rules == "strict"
        if "match" in data:
            return answer is not None and official.right_by_match(data["match"], answer)
        if "answer" in data:
            return answer is not None and checkers.matches(data["answer"]["kind"], answer, data["answer"]["value"], self.rules)
        scripts = "check" in data or any(link["do"] == "script" for link in data["chain"])
        if any(link["do"] == "compare" for link in data.get("chain", ())) and answer is None:
            return False
        with contextlib.ExitStack() as stack:
            box = stack.enter_context(self._sandbox.copy()) if strict and scripts else self._sandbox
            if "check" in data:
                return box.check(data["check"]).code == 0
            return official.right_by_chain(data, answer or "", self.rules, self._gold, box)

    def _no_call(self, parsed: ParsedTurn) -> Message:
        if self.rules == "agentbench":
            return {"role": "user", "content": "No tool was called. Please call a tool."}
        return super()._no_call(parsed)

    def _bad_call(self, call: ToolCall) -> str | None:
        if self.rules == "strict":
            return super()._bad_call(call)
        if call.name not in self.tool_names:
            return "Invalid function call. Please call a tool instead"
        if isinstance(call.raw, dict) and call.raw:          # the first value counts, whatever it is called
            self.invalid_calls -= 1
            return self._call(ToolCall(call.name, {"value": str(next(iter(call.raw.values())))}, id=call.id))
        return str(call.error)

    def _out_of_turns(self) -> None:
        super()._out_of_turns()
        self.close()

    def _counts(self) -> dict[str, Any]:
        return super()._counts() | {"sandbox": self.backend}

    def expert(self) -> Message:
        data, done = self.instance.data, 0
        for script in self._scripts:
            done += done < len(data["steps"]) and script == data["steps"][done]
        if done < len(data["steps"]):
            return assistant_call("bash_action", script=data["steps"][done])
        return _ending(data, self._gold)

    def oracle(self, index: int) -> list[Message]:
        data, gold = self.instances[index].data, ""
        if self.source == "official":
            box, gold = self._open(data)
            box.close()
        return [assistant_call("bash_action", script=script) for script in data["steps"]] + [_ending(data, gold)]

    def mistake(self, rng: random.Random) -> Message:
        """A look at something useless, a repeated or wrongly spelt step, or (one in twenty) a wrong answer."""
        data = self.instance.data
        if rng.random() < 0.05:
            return assistant_call("answer_action", answer=rng.choice(NAMES + WORDS))
        looks = [script for script in data["steps"] if not script.startswith(("rm", "mv", "chmod", "echo", "mkdir", "sed"))]
        path = next(iter(re.findall(r"/[\w/.-]+", data["question"])), "/root")
        choices = [f"ls {path}", f"cat {path}/{rng.choice(NAMES)}", f"grep -l {rng.choice(WORDS)} {path}/*",
                   *self._scripts[-1:], *looks[:1]]
        safe = [script for script in choices if script in looks or script not in data["steps"]]
        return assistant_call("bash_action", script=rng.choice(safe))

    def close(self) -> None:
        sandbox = getattr(self, "_sandbox", None)
        if sandbox is not None:
            sandbox.close()
            self._sandbox = None


def _ending(data: dict[str, Any], gold: str) -> Message:
    if "match" in data and "answer" not in data["match"]:
        return assistant_call("answer_action", answer=data["match"]["regex"])
    if "answer" in data or "match" in data:
        return assistant_call("answer_action", answer=data["answer"]["value"] if "answer" in data else data["match"]["answer"])
    if any(link["do"] == "compare" for link in data.get("chain", ())):
        return assistant_call("answer_action", answer=gold.strip())
    return assistant_call("finish_action", thought="done")


def _undecodable(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return True
    return False
