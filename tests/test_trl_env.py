"""The environments as TRL sees them: typed tools, a prompt, a reward; and a few of its training steps on the micro model."""

import json

import pytest

import envs
from envs.base import EnvFault
from envs.trl import ENDED, environment, prompts
from tests.models import tiny_model, tiny_tokenizer

HERE = [task for task in envs.TASKS if envs.available(task)[0]]


def play(env, turns):
    """The oracle's turns as TRL would carry them out: by method."""
    text = None
    for turn in turns:
        for call in turn.get("tool_calls") or []:
            text = getattr(env, call["function"]["name"])(**call["function"]["arguments"])
        if not turn.get("tool_calls"):
            text = env.final_answer(answer=turn["content"])
    return text


@pytest.mark.parametrize("task", HERE)
def test_the_oracle_earns_one_through_the_methods(task):
    cls = environment(task, size="micro", split="test")
    rows = prompts(task, size="micro", split="test", count=3)
    env = cls()
    with envs.make(task, size="micro", split="test") as plain:
        for row in rows:
            opening = plain.reset(row["index"])
            assert env.reset(**row) == opening[-1]["content"] and row["prompt"][0] == opening[0]
            assert env.get_reward() == 0.0
            turns = plain.oracle(row["index"])
            play(env, turns[:-1])
            assert env.get_reward() == 0.0
            assert play(env, turns[-1:])
            assert env.get_reward() == 1.0
            assert play(env, turns[-1:]) == ENDED and env.get_reward() == 1.0
    assert len(rows) == 3 and all(row["environment"] == task for row in rows)


@pytest.mark.parametrize("task", HERE)
def test_transformers_builds_the_same_schema_from_the_methods(task):
    from transformers.utils import get_json_schema

    cls = environment(task, size="micro")
    with envs.make(task, size="micro") as plain:
        for tool in plain.tools:
            function = tool["function"]
            found = get_json_schema(getattr(cls(), function["name"]))["function"]
            assert (found["name"], found["description"]) == (function["name"], function["description"])
            assert found["parameters"]["required"] == function["parameters"]["required"]
            for name, schema in function["parameters"]["properties"].items():
                assert found["parameters"]["properties"][name]["type"] == schema["type"]
                assert found["parameters"]["properties"][name]["description"] == schema["description"]


def test_a_fault_has_no_reward_and_every_public_method_is_a_tool(monkeypatch):
    cls = environment("webshop", size="micro")
    env = cls()
    env.reset(0)

    def broken(call):
        raise EnvFault("the shop burnt down")

    monkeypatch.setattr(env._env, "_call", broken)
    name = env._env.tool_names[0]
    getattr(env, name)(**{next(iter(env._env.tools[0]["function"]["parameters"]["properties"])): "x"})
    assert env.get_reward() is None
    env.reset(0)
    assert env.get_reward() == 0.0
    public = {name for name in vars(cls) if not name.startswith("_")} - {"reset", "get_reward"}
    assert public == set(env._env.tool_names)


@pytest.mark.extended
def test_a_few_steps_of_grpo_train_on_two_environments_at_once(tmp_path, monkeypatch):
    pytest.importorskip("trl", reason="trl is not installed")
    import datasets
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    tasks = ["db", "webshop"]
    settings = {"size": "micro", "split": "train"}
    rows = [row for pair in zip(*(prompts(task, count=4, **settings) for task in tasks)) for row in pair]
    tokenizer, seen = tiny_tokenizer(), []
    monkeypatch.setattr(tokenizer, "response_template", qwen3_template, raising=False)   # the same tags
    factories = {task: environment(task, **settings) for task in tasks}

    def watch(environments, completions, **columns):
        seen.extend((type(env).__name__, env.get_reward()) for env in environments)
        return [0.0] * len(completions)

    trainer = GRPOTrainer(
        model=tiny_model(), reward_funcs=[watch], environment_factory=factories, train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer, args=GRPOConfig(
            output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=4, num_generations=2, max_completion_length=48,
            use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, seed=0, bf16=False))
    trainer.train()
    assert trainer.state.global_step == 2
    assert {name for name, _ in seen} == {"DbEnvironment", "WebshopEnvironment"} and len(seen) == 8
    assert all(reward in (0.0, 1.0) for _, reward in seen)
    logged = [entry for entry in trainer.state.log_history if "rewards/DbEnvironment/mean" in entry]
    assert len(logged) == 2, json.dumps(trainer.state.log_history)[:2000]

