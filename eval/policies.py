"""What an evaluation can evaluate: a run or model folder, a hub id, an endpoint's model, or an agent that needs no model.

    with open_policy("results/runs/micro/eppo-s0-...") as policy:                       # a run: its trained model
        rows = evaluate(policy.generator, tasks, tokenizer=policy.chat, policy=policy.about)
    open_policy("Qwen/Qwen2.5-3B-Instruct", backend="vllm")                             # a hub id, on a GPU
    open_policy("gpt-5", endpoint="https://api.openai.com/v1", label="GPT-5")            # a row of the paper's Table 1
    open_policy("oracle")                                                               # also: expert, random
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eppo.chat import ChatFormat, Message
from eppo.checks import check_name
from eppo.generate import OpenAIGenerator, TransformersGenerator, VLLMGenerator
from eppo.policy import load_policy, load_tokenizer
from eppo.records import read_run

BACKENDS = ("transformers", "vllm")


# ---- agents ---------------------------------------------------------------------------------------------------------
class OracleAgent:
    """The environment's own solution, turn by turn: what is not 100 % under it is a fault of the instance or of the stack."""

    name = "oracle"

    def act(self, env: Any, index: int, messages: Sequence[Message], rng: random.Random) -> str | Message:
        played = sum(message["role"] == "assistant" for message in messages)
        turns = env.oracle(index)
        return turns[played] if played < len(turns) else {"content": ""}


class ExpertAgent:
    """The expert's next turn, which recovers from mistakes."""

    name = "expert"

    def act(self, env: Any, index: int, messages: Sequence[Message], rng: random.Random) -> str | Message:
        return env.expert()


class RandomAgent:
    """A tool at random, with words of the dialogue as its arguments: the floor."""

    name = "random"

    def act(self, env: Any, index: int, messages: Sequence[Message], rng: random.Random) -> str | Message:
        words = [word for message in messages[1:] for word in str(message.get("content", "")).split()] or ["none"]
        function = rng.choice(env.tools)["function"]
        arguments = {name: _any(schema, words, rng) for name, schema in function["parameters"].get("properties", {}).items()}
        return {"content": "", "tool_calls": [{"type": "function", "function": {"name": function["name"], "arguments": arguments}}]}


def _any(schema: Mapping[str, Any], words: Sequence[str], rng: random.Random) -> Any:
    """A value that fits a JSON schema of the kinds that tools use."""
    if "enum" in schema:
        return rng.choice(schema["enum"])
    return {"integer": lambda: rng.randrange(10), "number": lambda: rng.random(), "boolean": lambda: rng.random() < 0.5,
            "array": lambda: [_any(schema.get("items", {}), words, rng)], "object": dict}.get(
                schema.get("type"), lambda: rng.choice(words))()


class ScriptedAgent:
    """Answers from a script: turns in order, the last one repeated, or `script(env, index, messages, rng) -> turn`."""

    name = "scripted"

    def __init__(self, script: Sequence[str | Message] | Callable[..., str | Message]) -> None:
        self._script = script

    def act(self, env: Any, index: int, messages: Sequence[Message], rng: random.Random) -> str | Message:
        if callable(self._script):
            return self._script(env, index, messages, rng)
        played = sum(message["role"] == "assistant" for message in messages)
        return self._script[min(played, len(self._script) - 1)]


AGENTS = {agent.name: agent for agent in (OracleAgent, ExpertAgent, RandomAgent)}


# ---- any policy by name ---------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Policy:
    """What `evaluate` needs: a generator, its chat format (None for endpoints and agents), and `about`, for the records."""

    generator: Any
    chat: ChatFormat | None
    about: dict[str, Any]

    def close(self) -> None:
        if hasattr(self.generator, "close"):
            self.generator.close()

    def __enter__(self) -> "Policy":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_policy(policy: str | Path, *, backend: str = "transformers", dtype: str | None = None, device: str = "auto",
                start: bool = False, label: str | None = None, endpoint: str | None = None, concurrency: int = 64,
                **settings: Any) -> Policy:
    """Load `policy`.

    Args:
        policy: a run's folder, a model's folder, a hub id, the name of a model at `endpoint`, or one of AGENTS.
        backend: "transformers" or "vllm", for models that are loaded here.
        dtype: of the weights; None: the run's own, else float32 on a CPU and bfloat16 elsewhere.
        device: of a model that transformers loads; "auto": a GPU where there is one.
        start: of a run, the model it began from instead of the one it ended with.
        label: the name it has in the paper's tables, if it is a model of them.
        endpoint: address of an OpenAI-compatible endpoint.
        settings: of OpenAIGenerator, or of VLLMGenerator.

    Raises:
        ValueError: an unknown backend; nothing that can be loaded; a run without a model. ImportError: vLLM is asked for and missing.
    """
    check_name("backend", backend, BACKENDS)
    name = str(policy)
    if endpoint is not None:
        generator = OpenAIGenerator(name, endpoint, **settings)
        return Policy(generator, None, {"name": name, "label": label or name} | generator.describe())
    if name in AGENTS:
        return Policy(AGENTS[name](), None, {"name": name, "label": label or name, "kind": "agent"})
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(policy, Path) and not policy.exists():
        raise ValueError(f"{policy} does not exist; make reproduce, or notebooks/run.py train with this recipe, makes such a run; or name "
                         "another policy")
    about: dict[str, Any] = {"name": Path(name).name, "label": label or Path(name).name, "kind": backend, "model": name}
    step = 0
    if (Path(name) / "run.json").exists():
        run = read_run(name)
        config, step = run.config, 0 if start or run.steps.empty else int(run.steps["step"].max())
        folder = Path(name) / ("start" if start else "model")
        if not folder.is_dir():
            raise ValueError(f"run {name} (status {run.info['status']}) has no folder {folder.name}/; finish it first")
        about |= {"name": run.path.name + ("-start" if start else ""), "run": run.path.name, "recipe": config.recipe,
                  "method": "start" if start else config.method, "train_seed": config.seed, "step": step, "model": config.model.path,
                  "run_status": run.info["status"], "run_commit": run.info.get("commit")}
        name, dtype = str(folder), dtype or config.model.dtype
    dtype = dtype or ("float32" if device == "cpu" and backend == "transformers" else "bfloat16")
    if backend == "vllm":
        generator = VLLMGenerator(name, dtype=dtype, version=step, **settings)
        chat = ChatFormat(load_tokenizer(name))
    else:
        model, tokenizer = load_policy(name, dtype, device)
        generator, chat = TransformersGenerator(model, step, max_active=concurrency, **settings), ChatFormat(tokenizer)
    template = hashlib.sha256(str(chat.tokenizer.chat_template).encode()).hexdigest()[:16]
    return Policy(generator, chat, about | {"dtype": dtype, "weights": generator.fingerprint(), "chat_template": template})
