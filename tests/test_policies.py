"""Runs' folders evaluated into their records, and policies by name: runs, model folders, endpoints, agents."""

import random
import sys

import pandas as pd
import pytest
import toy_env
from models import tiny_model, tiny_tokenizer

import envs
from eppo.config import load_recipe
from eppo.records import RunWriter, StepRecord, read_run
from eval import tables
from eval.agentbench import evaluate, evaluate_run
from eval.policies import AGENTS, ExpertAgent, OracleAgent, RandomAgent, open_policy

TASKS = list(toy_env.TOY_TASKS)
CLOCK = ["seconds", "perf/env_s"]


def play(agent, tasks=TASKS, seeds=(0, 1), instances=4, **settings):
    return evaluate(agent, tasks, seeds, size="micro", instances=instances, **settings)


# ---- a run's folder -------------------------------------------------------------------------------------------------
@pytest.fixture
def run(tmp_path):
    limits = {"rollout.max_tokens": 300, "rollout.max_turn_tokens": 12}
    config = load_recipe("smoke", tasks=TASKS, out=str(tmp_path / "run"), steps=3, **limits)
    with RunWriter(config.run_dir(), config) as writer:
        writer.write_step(StepRecord(3, {"loss/total": 0.0}))
        writer.write_eval(3, [{"task": TASKS[0], "split": "dev", "seed": 5, "instance": "x", "status": "completed", "success": True}])
        writer.write_warnings(["the clip never bound"])
    for name, seed in (("model", 0), ("start", 1)):
        tiny_model(seed).save_pretrained(tmp_path / "run" / name)
        tiny_tokenizer().save_pretrained(tmp_path / "run" / name)
    return tmp_path / "run"


def test_a_runs_model_is_evaluated_into_its_records(run):
    before = (run / "run.json").read_bytes()
    rows = evaluate_run(run, (0,), instances=2)
    assert len(rows) == 4 and set(rows["step"]) == {3} and set(rows["run"]) == {"run"} and set(rows["temperature"]) == {
        read_run(run).config.validation.temperature}
    assert len(read_run(run).eval) == 5 and (run / "run.json").read_bytes() == before    # what training recorded stays as it is
    start = evaluate_run(run, (0,), instances=2, start=True)
    assert set(start["step"]) == {0} and start["sampled_tokens"].tolist() != rows["sampled_tokens"].tolist()
    more = evaluate_run(run, (0, 1), instances=3)
    assert len(more) == 12 and len(read_run(run).eval) == 1 + 12 + 4
    pd.testing.assert_frame_equal(evaluate_run(run, (0, 1), instances=3), more)
    assert len(read_run(run).eval) == 17


def test_settings_do_not_mix_in_a_runs_records_nor_in_tables(run):
    evaluate_run(run, (0, 1), instances=2)
    cold = evaluate_run(run, (0,), instances=2, temperature=0.3)
    assert len(cold) == 4 and len(read_run(run).eval) == 13
    kept = tables.scored(tables.rows_of([read_run(run)]))
    assert len(kept) == 8 and set(kept["temperature"]) == {read_run(run).config.validation.temperature}
    assert any("4 episodes played under another setting" in note for note in tables.notes(
        tables.render("quickstart", [read_run(run)], None), [read_run(run)]))


def test_an_open_run_folder_is_not_written(run):
    with RunWriter(run, read_run(run).config, resume=True):
        with pytest.raises(BlockingIOError):
            evaluate_run(run, (0,), instances=1)


# ---- policies -------------------------------------------------------------------------------------------------------
def test_policies_by_name(run, monkeypatch):
    with open_policy(run) as trained, open_policy(run, start=True) as started, open_policy(run / "model") as folder:
        assert len(trained.about["chat_template"]) == 16
        assert trained.about | {"weights": None, "run_commit": None, "chat_template": None} == {
            "name": "run", "label": "run", "kind": "transformers", "model": "micro", "run": "run", "recipe": "smoke", "method": "eppo",
            "train_seed": 0, "step": 3, "run_status": "finished", "run_commit": None, "dtype": "float32", "weights": None,
            "chat_template": None}
        assert trained.about["weights"] == folder.about["weights"] != started.about["weights"]
        assert (started.about["name"], started.about["method"], started.about["step"]) == ("run-start", "start", 0)
        rows = evaluate(trained.generator, TASKS, (0,), tokenizer=trained.chat, policy=trained.about, size="micro", instances=2,
                        **{"temperature": 1.0, "max_turns": None, "max_tokens": 300, "max_turn_tokens": 12})
    same = evaluate_run(run, (0,), instances=2, temperature=1.0)
    assert rows["sampled_tokens"].tolist() == same["sampled_tokens"].tolist()
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    api = open_policy("gpt-5", endpoint="https://api.example.com/v1", label="GPT-5", prices={"input": 1, "output": 2})
    assert api.about == {"name": "gpt-5", "label": "GPT-5", "kind": "endpoint", "model": "gpt-5", "calls": "message", "body": {},
                         "endpoint": "https://api.example.com/v1/chat/completions", "prices": {"input": 1, "output": 2}}
    assert all(open_policy(name).about == {"name": name, "label": name, "kind": "agent"} for name in AGENTS)


def test_what_cannot_be_opened_says_why(run, tmp_path):
    with pytest.raises(ValueError, match="unknown backend 'vlm'; did you mean 'vllm'"):
        open_policy(run, backend="vlm")
    with pytest.raises(ValueError, match="no such folder here, and as a hub id"):
        open_policy("no/such-model")
    with pytest.raises(ValueError, match="nothing does not exist; make reproduce"):
        open_policy(tmp_path / "nothing")
    (run / "model").rename(run / "elsewhere")
    with pytest.raises(ValueError, match="has no folder model/; finish it first"):
        open_policy(run)


def test_vllm_says_how_to_install_it(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"vLLM is not installed; pip install -e '.\[gpu\]'"):
        open_policy(run / "model", backend="vllm")


def test_oracle_and_expert_win_everything_and_chance_does_not():
    for agent in (OracleAgent(), ExpertAgent()):
        assert play(agent)["success"].all()
    rows = play(RandomAgent(), instances=8)
    assert 0 < rows["success"].mean() < 0.6
    pd.testing.assert_frame_equal(rows.drop(columns=CLOCK), play(RandomAgent(), instances=8, concurrency=1).drop(columns=CLOCK))
    fits = RandomAgent().act(envs.make("db"), 0, [{"role": "system"}, {"role": "user", "content": "some words"}], random.Random(1))
    assert fits["tool_calls"][0]["function"]["name"] in envs.make("db").tool_names
