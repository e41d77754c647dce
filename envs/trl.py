"""Our environments for TRL's GRPOTrainer: `environment_factory` classes with typed tools and their own reward.

    factory, dataset = environment("db", size="micro"), prompts("db", size="micro", count=64)
    GRPOTrainer(model=..., environment_factory=factory, train_dataset=dataset, args=...)
    GRPOTrainer(..., environment_factory={task: environment(task) for task in tasks}, train_dataset=mixed_prompts)

TRL calls every tool of a turn itself, one after the other, so an environment that honours only the first call of a turn runs
them as turns of their own. A call that does not fit the schema is a normal observation here; TRL's own parser meets it first.
"""

from __future__ import annotations

import inspect
from typing import Any

import envs
from envs.base import EnvFault, assistant_call

TYPES = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict}
ENDED = "The episode has ended."


def environment(task: str, **settings: Any) -> type:
    """A class for `environment_factory`: its public methods are the tools of `task`; `reset(index=, seed=)` opens an instance
    and returns the user's message; `get_reward()` is the reward in [0, 1] of the episode as it stands.

    Args:
        settings: those of `envs.make`.
    """
    with envs.make(task, **settings) as probe:
        tools, answers_in_text = probe.tools, task == "kg"

    class Environment:
        """One episode at a time."""

        def __init__(self) -> None:
            self._env = envs.make(task, **settings)
            self._last, self._fault = None, None

        def reset(self, index: int = 0, seed: int = 0, **row: Any) -> str:
            """Open instance `index`; other columns of the row are ignored."""
            self._last, self._fault = None, None
            return self._env.reset(index, seed)[-1]["content"]

        def get_reward(self) -> float | None:
            """The reward; 0 for an episode that has not ended, None (which TRL leaves out) after an infrastructure fault."""
            if self._fault is not None:
                return None
            return self._last.reward if self._last is not None and self._last.done else 0.0

        def _play(self, name: str, arguments: dict[str, Any]) -> str:
            if self._last is not None and self._last.done:
                return ENDED
            turn = {"role": "assistant", "content": arguments["answer"]} if name == "final_answer" and answers_in_text else \
                assistant_call(name, **arguments)
            self._last = self._env.step(turn)
            if self._last.status == envs.Status.ENVIRONMENT_ERROR:
                self._fault = EnvFault(str(self._last.info.get("error")))
            return "\n".join(message["content"] for message in self._last.messages) or ENDED

        def __del__(self) -> None:
            if hasattr(self, "_env"):
                self._env.close()

    functions = [tool["function"] for tool in tools]
    if answers_in_text:                                      # plain text ends an episode in KG; TRL hands over calls only
        functions.append({"name": "final_answer", "description": "End the problem with an answer.", "parameters": {
            "properties": {"answer": {"type": "string", "description": "Final Answer: #k, where #k is the variable."}}}})
    for function in functions:
        setattr(Environment, function["name"], _method(function))
    Environment.__name__ = Environment.__qualname__ = f"{task.capitalize()}Environment"
    return Environment


def _method(function: dict[str, Any]) -> Any:
    """A method with the signature and the docstring from which transformers builds the schema of a tool."""
    properties = function["parameters"]["properties"]

    def method(self: Any, *given: Any, **named: Any) -> str:
        arguments = method.__signature__.bind(self, *given, **named).arguments
        return self._play(function["name"], {name: arguments[name] for name in properties})

    kinds = {name: list[str] if schema.get("type") == "array" else TYPES[schema.get("type", "string")]
             for name, schema in properties.items()}
    method.__name__ = method.__qualname__ = function["name"]
    method.__signature__ = inspect.Signature(
        [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)] +
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind) for name, kind in kinds.items()],
        return_annotation=str)
    method.__annotations__ = kinds | {"return": str}
    described = "\n".join(f"    {name}: {schema.get('description', name)}" for name, schema in properties.items())
    method.__doc__ = f"{function['description']}\n\nArgs:\n{described}\n\nReturns:\n    What the environment answers."
    return method


def prompts(task: str, count: int | None = None, **settings: Any) -> list[dict[str, Any]]:
    """Rows for a TRL dataset (`datasets.Dataset.from_list`): prompt (the system message, and a user message that `reset`
    fills), index, seed, environment (the task, which chooses among several)."""
    with envs.make(task, **settings) as env:
        system = env.reset(0)[0]
        number = len(env.instances) if count is None else min(count, len(env.instances))
    if system["role"] != "system":
        raise ValueError(f"{task}: its opening has no system message")
    return [{"prompt": [system, {"role": "user", "content": ""}], "index": index, "seed": 0, "environment": task}
            for index in range(number)]
