"""Evaluations: rows, seeds, resuming after a kill, time limits, faults."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import toy_env
from models import tiny_model, tiny_tokenizer

import envs
from envs.base import EnvFault, assistant_call
from eppo.chat import ChatFormat
from eppo.config import load_recipe
from eppo.generate import ScriptedGenerator, TransformersGenerator, stable_seed
from eppo.episode import FAULTS, Episode
from eval import tables
from eval.agentbench import MAX_TURNS, TEMPERATURE, evaluate, recipe_settings
from eval.evaluations import evaluation_dir, identity, read_evaluation
from eval.policies import OracleAgent, ScriptedAgent

ROOT = Path(__file__).resolve().parent.parent
CHAT = ChatFormat(tiny_tokenizer())
TASKS = list(toy_env.TOY_TASKS)
CLOCK = ["seconds", "perf/env_s"]


def play(agent=None, tasks=TASKS, seeds=(0, 1), instances=4, **settings):
    return evaluate(agent or OracleAgent(), tasks, seeds, size="micro", instances=instances, **settings)


def lines(folder):
    return [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]


class Counting(ScriptedAgent):
    """Plays the oracle and remembers which episodes it began; raises or waits where told."""

    def __init__(self, after=None, error=KeyboardInterrupt):
        self.begun, self.lock = [], threading.Lock()

        def script(env, index, messages, rng):
            with self.lock:
                if len(messages) == 2:
                    self.begun.append((env.task, index))
                    if after is not None and len(self.begun) > after:
                        raise error
            return OracleAgent().act(env, index, messages, rng)

        super().__init__(script)


# ---- rows -----------------------------------------------------------------------------------------------------------
def test_a_row_is_an_episode():
    rows = play(policy={"name": "me", "method": "eppo", "train_seed": 7, "step": 12})
    assert [tuple(row) for row in rows[["seed", "task", "index"]].to_numpy()] == [
        (seed, task, index) for seed in (0, 1) for task in TASKS for index in range(4)]
    assert {"run", "task", "seed", "eval_seed", "train_seed", "instance", "kind", "success", "score", "reward", "turns", "tokens", "status",
            "seconds", "rules", "temperature", "turn_limit", "source", "size", "split", "step", "attempt", "error"} <= set(rows)
    first = rows.iloc[0]
    assert (first["run"], first["train_seed"], first["step"], first["kind"], first["status"]) == ("me", 7, 12, "lookup", "completed")
    assert (first["rules"], first["temperature"], first["turn_limit"]) == ("strict", 0.8, 4) and (rows["seed"] == rows["eval_seed"]).all()
    assert (rows["success"] & (rows["reward"] == 1) & (rows["score"] == 1)).all() and rows["seconds"].between(0, 5).all()
    assert rows.set_index("task").loc[TASKS[0], "turns"].eq(2).all() and rows.set_index("task").loc[TASKS[1], "turns"].eq(1).all()


def test_the_papers_settings_are_the_defaults():
    assert (TEMPERATURE, MAX_TURNS) == (0.8, 20)
    agent = ScriptedAgent([assistant_call("look", word="x")])
    for settings, turns in (({}, 4), ({"max_turns": 3}, 3)):                           # 4 is the environment's own limit
        row = play(agent, TASKS[:1], (0,), 1, **settings).iloc[0]
        assert (row["turns"], row["turn_limit"], row["status"]) == (turns, turns, "task limit reached")
        assert row["reward"] == 0.0                         # no penalty of training
    assert recipe_settings(load_recipe("micro"), size="small") == {
        "source": "generated", "size": "small", "rules": "strict", "path": None, "split": "test", "temperature": 0.8, "max_tokens": 512,
        "max_turn_tokens": 40, "max_turns": 20}


@pytest.mark.parametrize("settings, words", [({"seeds": ()}, "needs seeds and tasks"),
                                             ({"tasks": ["toy_lokup"]}, "did you mean 'toy_lookup'"),
                                             ({"agent": ScriptedGenerator([])}, "ScriptedGenerator takes tokens; pass tokenizer=")])
def test_bad_input(settings, words):
    with pytest.raises(ValueError, match=words):
        play(**settings)


# ---- seeds ----------------------------------------------------------------------------------------------------------
def test_each_request_has_its_own_seed_of_run_seed_task_instance_and_turn():
    made = ScriptedGenerator(lambda request, history: CHAT.turn_ids("a"))
    rows = play(made, seeds=(3, 4), tokenizer=CHAT)
    wanted = [stable_seed(row.seed, row.task, row.instance, turn) for row in rows.itertuples() for turn in range(row.turns)]
    assert len(set(wanted)) == len(wanted) == 2 * 2 * 4 * 4
    assert sorted(request.seed for request in made.requests) == sorted(wanted)


def test_seeds_differ_repeat_and_cannot_differ_at_temperature_zero():
    model, seen = tiny_model(), {}

    def sampled(temperature, seeds, **settings):
        rows = evaluate(TransformersGenerator(model), TASKS, seeds, size="micro", instances=4, tokenizer=CHAT, temperature=temperature,
                        max_tokens=300, max_turn_tokens=12, **settings)
        return {seed: part[["task", "instance", "tokens", "sampled_tokens", "status"]].to_numpy().tolist()
                for seed, part in rows.groupby("seed")}

    seen = sampled(0.8, (0, 1, 2, 3))
    assert len({json.dumps(value) for value in seen.values()}) == 4
    assert sampled(0.8, (2,), concurrency=3) == {2: seen[2]}                            # in other batches too
    with pytest.warns(UserWarning, match="temperature 0: seeds cannot differ"):
        greedy = sampled(0.0, (0, 1))
    assert greedy[0] == greedy[1]


# ---- resuming -------------------------------------------------------------------------------------------------------
def test_only_the_gaps_are_played(tmp_path):
    first = Counting(after=5)
    with pytest.raises(KeyboardInterrupt):
        play(first, out=tmp_path, concurrency=1)
    assert len(lines(tmp_path)) == 5 and json.loads((tmp_path / "evaluation.json").read_text())["status"] == "stopped"
    with open(tmp_path / "episodes.jsonl", "a") as file:
        file.write('{"eval_seed":0,"half')
    second = Counting()
    with pytest.warns(UserWarning, match="half-written"):
        rows = play(second, out=tmp_path, concurrency=3)
    assert len(second.begun) == 11 and len(rows) == len(lines(tmp_path)) == 16
    whole = play(policy={"name": "Counting"})
    pd.testing.assert_frame_equal(rows.drop(columns=[*CLOCK, "run"]), whole.drop(columns=[*CLOCK, "run"]))
    third = Counting()
    pd.testing.assert_frame_equal(play(third, out=tmp_path), rows)
    assert third.begun == [] and json.loads((tmp_path / "evaluation.json").read_text())["status"] == "finished"


def test_more_seeds_tasks_and_instances_are_added(tmp_path):
    play(Counting(), TASKS[:1], (0,), 2, out=tmp_path)
    more = Counting()
    assert len(play(more, TASKS, (0, 1), 3, out=tmp_path)) == 12 and len(more.begun) == 10
    assert len(play(Counting(), TASKS[:1], (1,), 3, out=tmp_path)) == 3                 # what was asked for, not what there is
    assert len(lines(tmp_path)) == 12


def test_a_folder_takes_one_policy_and_setting(tmp_path):
    play(out=tmp_path, policy={"name": "a"})
    with pytest.raises(ValueError, match="another evaluation .temperature: 0.8 -> 0.5.; give another out"):
        play(out=tmp_path, policy={"name": "a"}, temperature=0.5)
    with pytest.raises(ValueError, match="name: 'a' -> 'b'"):
        play(out=tmp_path, policy={"name": "b"})
    settings = read_evaluation(tmp_path).settings
    assert identity({"name": "a"}, settings) == identity({"name": "a", "prices": {"input": 1}}, settings | {"path": "/elsewhere"})
    assert evaluation_dir({"name": "org/model:7b"}, settings, "some/micro.yaml").parts[-3:-1] == ("evaluations", "micro")
    assert evaluation_dir({"name": "org/model:7b"}, settings).name.startswith("org_model_7b-")


def test_one_writer_at_a_time(tmp_path):
    seen = []

    def script(env, index, messages, rng):
        with pytest.raises(BlockingIOError, match="another process writes"):
            play(out=tmp_path, policy={"name": "x"})
        seen.append(json.loads((tmp_path / "evaluation.json").read_text())["status"])
        return assistant_call("answer", value="0")

    play(ScriptedAgent(script), TASKS[:1], (0,), 1, out=tmp_path, policy={"name": "x"})
    assert seen == ["running"]


KILLED = """
import sys, time
sys.path[:0] = [{root!r}, {tests!r}]
import toy_env
from eval.agentbench import evaluate
from eval.policies import OracleAgent, ScriptedAgent
def slowly(env, index, messages, rng):
    time.sleep(0.05)
    return OracleAgent().act(env, index, messages, rng)
evaluate(ScriptedAgent(slowly), {tasks!r}, (0, 1), size="micro", out={out!r}, concurrency=2, policy={{"name": "k"}}, report=print)
"""


def test_a_killed_evaluation_goes_on_without_loss_or_duplicates(tmp_path):
    code = KILLED.format(root=str(ROOT), tests=str(ROOT / "tests"), tasks=TASKS, out=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    deadline = time.monotonic() + 60
    while not (tmp_path / "episodes.jsonl").exists() or len((tmp_path / "episodes.jsonl").read_bytes().splitlines()) < 5:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    kept = len((tmp_path / "episodes.jsonl").read_bytes().splitlines())
    assert 5 <= kept < 32 and json.loads((tmp_path / "evaluation.json").read_text())["status"] == "running"
    agent = Counting()
    rows = evaluate(agent, TASKS, (0, 1), size="micro", out=tmp_path, policy={"name": "k"})
    assert len(agent.begun) == 32 - kept and len(rows) == len(lines(tmp_path)) == 32
    assert not rows.duplicated(["seed", "task", "instance"]).any() and rows["success"].all()


def test_episodes_are_played_at_once_up_to_the_limit():
    running, most, lock = set(), [0], threading.Lock()

    def script(env, index, messages, rng):
        with lock:
            running.add(threading.get_ident())
            most[0] = max(most[0], len(running))
        time.sleep(0.03)
        with lock:
            running.discard(threading.get_ident())
        return OracleAgent().act(env, index, messages, rng)

    play(ScriptedAgent(script), concurrency=5)
    assert 2 <= most[0] <= 5


def test_progress_says_how_far_when_done_and_how_well(monkeypatch):
    told = []
    monkeypatch.setattr("eval.agentbench.REPORT_S", -1.0)
    play(ScriptedAgent(lambda env, index, messages, rng: assistant_call("answer", value="odd")), concurrency=1, report=told.append)
    assert len(told) == 17 and told[3].startswith("4/16 episodes, about 0.0 min left; success %: toy_lookup 0.0, toy_parity ")
    wins = play(ScriptedAgent(lambda env, index, messages, rng: assistant_call("answer", value="odd")))
    share = 100 * wins.loc[wins["task"] == "toy_parity", "success"].mean()
    assert told[-1].endswith(f"success %: toy_lookup 0.0, toy_parity {share:.1f}") and told[-1].startswith("16/16 episodes, ")


# ---- time and faults ------------------------------------------------------------------------------------------------
def hanging(task, index, seconds=30.0):
    """An environment class whose step hangs in one instance, once; and how many were made."""
    made = []

    class Hanging(toy_env.LookupEnv):
        def __init__(self, **settings):
            made.append(self)
            super().__init__(**settings)

        def step(self, turn, finish_reason="stop"):
            if self.instance is self.instances[index] and not any(getattr(env, "hung", False) for env in made):
                self.hung = True
                time.sleep(seconds)
            return super().step(turn, finish_reason)

    Hanging.task = task
    envs.register(task, Hanging)
    return made


def test_an_environment_that_hangs_ends_one_episode_and_is_replaced():
    made = hanging("toy_hanging", 1)
    started = time.monotonic()
    with pytest.raises(EnvFault, match="1 of 6 episodes failed.*episode time limit: OutOfTime: toy_hanging: step did not answer") as caught:
        play(tasks=["toy_hanging"], seeds=(0,), instances=6, concurrency=1, episode_s=2.0)
    assert time.monotonic() - started < 15 and len(made) == 3                            # to look at, lost, its replacement
    rows = caught.value.rows.set_index("index")
    assert rows.loc[1, "status"] == "episode time limit" and np.isnan(rows.loc[1, "reward"]) and rows.drop(index=1)["success"].all()


def test_an_environment_that_hangs_does_not_stop_a_streaming_generator():
    hanging("toy_hanging_too", 1)
    with pytest.raises(EnvFault) as caught:
        evaluate(TransformersGenerator(tiny_model()), ["toy_hanging_too"], (0,), size="micro", instances=4, tokenizer=CHAT,
                 max_tokens=300, max_turn_tokens=8, step_s=1.0)
    statuses = caught.value.rows.set_index("index")["status"].to_dict()
    assert statuses.pop(1) == "environment error" and set(statuses.values()) == {"task limit reached"} and len(statuses) == 3


def test_a_policy_that_hangs_ends_one_episode():
    def script(env, index, messages, rng):
        if index == 2:
            time.sleep(30)
        return OracleAgent().act(env, index, messages, rng)

    started = time.monotonic()
    with pytest.raises(EnvFault, match="model call time limit") as caught:
        play(ScriptedAgent(script), TASKS[:1], (0,), 4, call_s=1.0)
    assert time.monotonic() - started < 15 and caught.value.rows["success"].tolist() == [True, True, False, True]


def test_a_late_answer_of_a_streaming_generator_is_a_fault_too(monkeypatch):
    asked = Episode._request

    def long_ago(self, ids):
        request = asked(self, ids)
        if self.index == 0:
            self._asked -= 100
        return request

    monkeypatch.setattr(Episode, "_request", long_ago)
    with pytest.raises(EnvFault, match="an answer took 100.. s; the limit is 50 s") as caught:
        evaluate(TransformersGenerator(tiny_model()), TASKS[:1], (0,), size="micro", instances=3, tokenizer=CHAT, max_tokens=300,
                 max_turn_tokens=8, call_s=50.0)
    assert caught.value.rows["status"].tolist().count("model call time limit") == 1


def broken(task, bad, where="_start"):
    class Broken(toy_env.LookupEnv):
        def _start(self, instance, rng):
            if where == "_start" and int(instance.id.rsplit("-", 1)[1]) in bad:
                raise EnvFault("no sandbox")
            return super()._start(instance, rng)

    Broken.task = task
    envs.register(task, Broken)


def test_faults_beside_the_score_and_played_again(tmp_path):
    bad = {3}
    broken("toy_broken", bad)
    with pytest.raises(EnvFault, match=r"2 of 16 episodes failed by infra.*\(more than 2%\): toy_broken: environment error: .*no sandbox"):
        play(tasks=["toy_broken"], seeds=(0, 1), instances=8, out=tmp_path, policy={"name": "f"})
    assert len(lines(tmp_path)) == 16 and json.loads((tmp_path / "evaluation.json").read_text())["status"] == "failed"
    bad.clear()
    agent = Counting()
    rows = play(agent, ["toy_broken"], (0, 1), 8, out=tmp_path, policy={"name": "f"})
    assert agent.begun == [("toy_broken", 3)] * 2 and len(rows) == len(lines(tmp_path)) == 16 and rows["success"].all()
    assert rows.set_index("index")["attempt"].to_dict() == dict.fromkeys(range(8), 1) | {3: 2}


def test_few_faults_pass_and_many_stop_the_evaluation_early():
    failures = []

    def once(env, index, messages, rng):
        if not failures:
            failures.append(index)
            raise RuntimeError("out of memory")
        return OracleAgent().act(env, index, messages, rng)

    rows = play(ScriptedAgent(once), TASKS[1:], range(8), 8)
    assert rows["status"].value_counts().to_dict() == {"completed": 63, "model error": 1} and rows["reward"].isna().sum() == 1
    assert "out of memory" in rows.loc[rows["status"] == "model error", "error"].item()
    broken("toy_never", set(range(8)))
    agent = Counting()
    with pytest.raises(EnvFault, match="11 of 64 episodes"):
        play(agent, ["toy_never"], range(8), 8, concurrency=1)


def test_an_environment_that_cannot_be_made_says_so_before_anything_is_played(tmp_path):
    class Missing(toy_env.LookupEnv):
        task = "toy_missing"

        def __init__(self, **settings):
            raise EnvFault("bubblewrap is not installed")

    envs.register("toy_missing", Missing)
    agent = Counting()
    with pytest.raises(EnvFault, match="bubblewrap is not installed"):
        play(agent, [*TASKS, "toy_missing"], out=tmp_path)
    assert agent.begun == []


def test_the_tables_know_every_fault():
    assert set(tables.FAULTS) == set(FAULTS)
