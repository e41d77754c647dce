"""Training on toy tasks: repeatable to the bit, resumable to the bit, killable at any moment; equivalent ways to batch."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import toy_env
from models import tiny_model, tiny_tokenizer

from eppo.algorithms import get_algorithm
from eppo.batching import TaskSampler, microbatches, minibatches, to_batch
from eppo.config import load_recipe
from eppo.learner import Learner, mean_metrics
from eppo.measure import entropy_standard_error, task_stats
from eppo.records import compare_steps, read_run
from eppo.rollouts import to_groups
from eppo.trainer import train
from eppo.types import Trajectory, Turn

ROOT = Path(__file__).resolve().parent.parent
TINY = {"rollout.prompts_per_task": 2, "rollout.group_size": 4, "rollout.max_tokens": 160, "rollout.max_turn_tokens": 24,
        "rollout.lag": 1, "rollout.stale_refresh": 2, "validation.instances": 3, "checkpoint_every": 2, "validate_every": 2,
        "trajectories": "all", "threads": 1}


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    """A model folder that the tests train from."""
    folder = tmp_path_factory.mktemp("start")
    tiny_model(scale=1.5).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def config(start, out, **changes):
    fixed = {"tasks": list(toy_env.GAMBLES), "steps": 4, "out": str(out), "model.path": str(start)}
    return load_recipe("micro", **(fixed | TINY | changes))


def steps_without_timings(folder):
    return [{key: value for key, value in json.loads(line).items() if not key.startswith("perf/")}
            for line in (Path(folder) / "steps.jsonl").read_text().splitlines()]


def final_weights(folder):
    from eppo.checkpoint import load_checkpoint

    return load_checkpoint(Path(folder) / "checkpoints")["learner"]["model"]


def assert_same_run(a, b):
    assert compare_steps(a, b) == []
    assert steps_without_timings(a) == steps_without_timings(b)
    first, second = final_weights(a), final_weights(b)
    assert all(torch.equal(first[name], second[name]) for name in first)
    for name in ("episodes", "trajectories", "eval"):
        rows = [[{k: v for k, v in json.loads(line).items() if not k.startswith("perf/")} for line in
                 (Path(folder) / f"{name}.jsonl").read_text().splitlines()] for folder in (a, b)]
        assert rows[0] == rows[1], name


@pytest.fixture(scope="session")
def whole(start, tmp_path_factory):
    """An uninterrupted run of four steps."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    records = list(train(config(start, out)))
    assert [record.step for record in records] == [0, 1, 2, 3, 4]
    return out


def test_a_run_records_what_it_did(whole):
    run = read_run(whole)
    assert run.info["status"] == "finished" and len(run.episodes) == 4 * 16 and len(run.eval) == 3 * 6
    last = run.steps.iloc[-1]
    for task in toy_env.GAMBLES:
        assert last[f"task/{task}/episodes"] == 8 and 0 < last[f"task/{task}/entropy"] < 6.0
        assert last[f"pacer/{task}/entropy"] == last[f"task/{task}/entropy"]
        assert 0.15 <= last[f"pacer/{task}/eps"] <= 0.3
        assert last[f"task/{task}/hi"] == pytest.approx(1 + last[f"pacer/{task}/eps"], abs=1e-6)
        shares = [last[c] for c in run.steps.columns if c.startswith(f"task/{task}/status/") and last[c] == last[c]]
        assert sum(shares) == pytest.approx(1.0)
        assert 0 < last[f"task/{task}/success"] < 1
    assert (run.steps["loss/grad_norm"].dropna() > 0.01).all()
    first = run.steps[run.steps["step"] == 1].iloc[0]
    assert first["loss/ratio_max"] == pytest.approx(1.0, abs=1e-4) and first["loss/clip_frac"] == 0
    assert (whole / "model" / "config.json").exists()


def test_versions_follow_the_lag_and_the_stale_pool(whole):
    episodes = read_run(whole).episodes
    seen = {step: set().union(*map(set, rows["versions"])) for step, rows in episodes.groupby("step")}
    # lag 1: step t samples with the weights after t - 2 steps; the stale pool took them at steps 1 and 3.
    assert seen[1] == {0} and seen[2] <= {0} and seen[3] <= {1} and seen[4] <= {1, 2} and 2 in seen[4]


def test_two_equal_runs_write_equal_bytes(start, whole, tmp_path):
    list(train(config(start, tmp_path / "again")))
    assert_same_run(whole, tmp_path / "again")


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_closed_run_resumes_to_the_same_bits(start, whole, tmp_path, after):
    out = tmp_path / "run"
    running = train(config(start, out))
    for record in running:
        if record.step == after:
            break
    running.close()
    assert read_run(out).info["status"] == "stopped"
    list(train(config(start, out), resume=True))
    assert_same_run(whole, out)


def test_a_killed_run_resumes_to_the_same_bits(start, whole, tmp_path):
    out, rng = tmp_path / "run", random.Random(7)
    code = ("import sys; sys.path[:0] = ['.', 'tests']; import test_trainer as t; from eppo.trainer import train; "
            f"[None for _ in train(t.config({str(start)!r}, {str(out)!r}), resume={{}})]")
    for number in range(3):
        resume = any((out / "checkpoints").glob("*.pt")) if out.exists() else False
        process = subprocess.Popen([sys.executable, "-c", code.format(resume)], cwd=ROOT, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        goal = number + 1
        while time.monotonic() < deadline and process.poll() is None:
            if (out / "steps.jsonl").exists() and len((out / "steps.jsonl").read_text().splitlines()) >= goal:
                break
            time.sleep(0.01)
        time.sleep(rng.random() * 0.3)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")                     # a half-written line or checkpoint is reported as a warning
        list(train(config(start, out), resume=True))
    assert_same_run(whole, out)


@pytest.mark.parametrize("lost", [1, 2])
def test_steps_whose_records_are_lost_are_repeated(start, whole, tmp_path, lost):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    lines = (run / "steps.jsonl").read_bytes().splitlines(keepends=True)
    (run / "steps.jsonl").write_bytes(b"".join(lines[:-lost]) + lines[-lost][:40])
    with pytest.warns(UserWarning, match="half-written"):
        list(train(config(start, run), resume=True))
    assert_same_run(whole, run)


@pytest.mark.parametrize("damage", ["deleted", "garbage", "gap", "short"])
def test_lost_records_are_refused_and_nothing_is_cut(start, whole, tmp_path, damage):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    lines = (run / "steps.jsonl").read_bytes().splitlines(keepends=True)
    (run / "steps.jsonl").unlink()
    if damage != "deleted":
        left = {"garbage": [b"\xff" * 300], "gap": lines[:1] + lines[2:], "short": lines[:2]}[damage]       # checkpoints: 2 and 4
        (run / "steps.jsonl").write_bytes(b"".join(left))
    before = {path: path.read_bytes() for path in run.glob("*.json*")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="lines are lost"):
            next(train(config(start, run), resume=True))
    assert before == {path: path.read_bytes() for path in run.glob("*.json*")}


def test_resume_needs_a_run_and_a_run_is_not_overwritten(start, whole, tmp_path):
    with pytest.raises(ValueError, match="nothing to resume"):
        next(train(config(start, tmp_path / "none"), resume=True))
    with pytest.raises(ValueError, match="already holds a run"):
        next(train(config(start, whole)))
    with pytest.raises(ValueError, match="lag"):
        next(train(config(start, whole, **{"rollout.lag": 3}), resume=True))


def test_resume_from_other_start_weights_is_refused(start, tmp_path):
    other = tmp_path / "other"
    tiny_model(scale=1.5).save_pretrained(other)
    tiny_tokenizer().save_pretrained(other)
    running = train(config(other, tmp_path / "run"))
    next(running)
    running.close()
    tiny_model(seed=5).save_pretrained(other)
    with pytest.raises(ValueError, match="began from other weights"):
        next(train(config(other, tmp_path / "run"), resume=True))


def test_a_non_finite_loss_stops_the_run_and_names_step_and_task(start, tmp_path, monkeypatch):
    from eppo.algorithms import EPPO

    def broken(self, policy_logp_BT, minibatch, lo_BT, hi_BT):
        loss_BT = policy_logp_BT * 1.0
        row = (minibatch.task_ids_B == 1).nonzero()[:, 0]
        loss_BT[row] = float("nan") if self.pacer.steps == 3 else 0.0
        return loss_BT

    monkeypatch.setattr(EPPO, "token_loss", broken)
    with pytest.raises(FloatingPointError, match="step 3: loss/policy is not finite in an episode of task 'toy_dice'"):
        list(train(config(start, tmp_path / "run")))
    run = read_run(tmp_path / "run")
    assert run.info["status"] == "failed" and "toy_dice" in run.info["error"]
    monkeypatch.undo()
    list(train(config(start, tmp_path / "run"), resume=True))
    assert read_run(tmp_path / "run").info["status"] == "finished"


@pytest.mark.parametrize("method", ["grpo", "agentrl", "eppo_no_task_clip", "eppo_no_trend"])
def test_every_method_trains_and_observes_the_pacer(start, tmp_path, method):
    list(train(config(start, tmp_path / "run", method=method, steps=2)))
    last = read_run(tmp_path / "run").steps.iloc[-1]
    assert all(f"pacer/{task}/eps" in last for task in toy_env.GAMBLES) and last["loss/grad_norm"] > 0


def test_methods_see_the_same_first_batch(start, tmp_path):
    ids = []
    for method in ("agentrl", "eppo"):
        list(train(config(start, tmp_path / method, method=method, steps=1)))
        lines = (tmp_path / method / "trajectories.jsonl").read_text().splitlines()
        ids.append([json.loads(line)["ids"] for line in lines])
    assert ids[0] == ids[1] and len(ids[0]) == 16


# ---- parts ----------------------------------------------------------------------------------------------------------
def trajectories(count=12, tasks=toy_env.GAMBLES, seed=0):
    rng, made = random.Random(seed), []
    for n in range(count):
        length, start = rng.randrange(12, 40), rng.randrange(3, 8)
        mask = [0] * start + [1] * (length - start)
        made.append(Trajectory([rng.randrange(300) for _ in range(length)], mask, [-rng.random() * 8 * bit for bit in mask],
                               [0 if bit else -1 for bit in mask], [Turn(start, length)], reward=float(rng.random() < 0.5),
                               env_reward=0.0, score=None, success=False, status="completed", task=tasks[n % len(tasks)],
                               instance_id=f"i{n // 4}", group_id=f"{tasks[n % len(tasks)]}/{n // 4}", seed=n))
    return made


def gradient_of(rows, micro_batch_tokens, order=None, padding=0, method="eppo"):
    cfg = load_recipe("micro", method=method, tasks=list(toy_env.GAMBLES), **{"optim.micro_batch_tokens": micro_batch_tokens})
    rows = [rows[i] for i in order] if order else rows
    batch = to_batch(rows, toy_env.GAMBLES)
    if padding:
        for name in ("ids_BT", "mask_BT", "sampler_logp_BT"):
            value = getattr(batch, name)
            setattr(batch, name, torch.cat([value, torch.zeros(len(value), padding, dtype=value.dtype)], 1))
    model = tiny_model()
    learner = Learner(model, get_algorithm(method), cfg)
    learner.score(batch)
    batch.advantages_BT = learner.algorithm.advantages(batch)
    eps = learner.algorithm.pace(task_stats(batch, {}))
    captured = {}
    learner._step = lambda: captured.setdefault("g", torch.cat([p.grad.flatten() for p in model.parameters()])).norm().item()
    metrics = learner.update(batch, eps)
    return captured["g"], metrics, eps


@pytest.mark.parametrize("variant", [{"micro_batch_tokens": 1}, {"micro_batch_tokens": 90}, {"padding": 64},
                                     {"order": [5, 0, 3, 1, 2, 4, 11, 9, 6, 8, 7, 10]}])
def test_micro_batches_row_order_and_padding_leave_the_gradient_alone(variant):
    rows = trajectories()
    reference, metrics, eps = gradient_of(rows, 10**6)
    other, other_metrics, other_eps = gradient_of(rows, **{"micro_batch_tokens": 10**6, **variant})
    assert (reference - other).abs().max() < 2e-5 * reference.abs().max()
    assert other_eps == pytest.approx(eps, rel=1e-6)
    for key, value in metrics.items():
        assert other_metrics[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


def test_an_episode_without_reward_changes_nothing():
    rows = trajectories()
    lost = trajectories(1, seed=99)[0]
    lost.reward, lost.group_id = float("nan"), rows[0].group_id
    reference, metrics, _ = gradient_of(rows, 10**6)
    other, other_metrics, _ = gradient_of([*rows, lost], 10**6)
    assert (reference - other).abs().max() < 2e-5 * reference.abs().max()
    assert other_metrics["loss/clip_frac"] == pytest.approx(metrics["loss/clip_frac"])


def test_per_task_gradients_add_up_to_the_joint_one(monkeypatch):
    from eppo.algorithms import EPPO

    rows = trajectories()
    joint, _, _ = gradient_of(rows, 10**6)
    monkeypatch.setattr(EPPO, "needs", property(lambda self: frozenset({"ref_logp", "per_task_grad"})))
    split, _, _ = gradient_of(rows, 10**6)
    assert (joint - split).abs().max() < 2e-5 * joint.abs().max()


def test_sampler_visits_every_instance_once_an_epoch_and_continues_in_the_middle():
    sampler = TaskSampler({"a": 5, "b": 3}, seed=1)
    drawn = [i for _ in range(5) for i in sampler.draw("a", 2)]
    assert sorted(drawn[:5]) == sorted(drawn[5:]) == [0, 1, 2, 3, 4] and drawn[:5] != drawn[5:]
    whole = TaskSampler({"a": 5, "b": 3}, seed=1)
    assert whole.draw("a", 10) == drawn
    half = TaskSampler({"a": 5, "b": 3}, seed=1)
    half.draw("a", 7)
    again = TaskSampler({"a": 5, "b": 3}, seed=1)
    again.load_state_dict(half.state_dict())
    assert again.draw("a", 3) == drawn[7:]
    assert TaskSampler({"a": 5}, seed=2).draw("a", 5) != drawn[:5]


def test_jobs_interleave_tasks_and_share_prompts_within_a_group():
    jobs = TaskSampler({"a": 5, "b": 3}, seed=1).jobs(1, {"a": 2, "b": 2}, 3)
    assert [job.task for job in jobs] == ["a"] * 3 + ["b"] * 3 + ["a"] * 3 + ["b"] * 3
    assert len({job.seed for job in jobs}) == 12 and len({job.group_id for job in jobs}) == 4
    assert len({job.index for job in jobs[:3]}) == 1


def test_minibatches_hold_whole_groups_and_all_rows_once():
    batch = to_batch(trajectories(16), toy_env.GAMBLES)
    parts = list(minibatches(batch, 3, random.Random(0)))
    seeds = sorted(t.seed for part in parts for t in part.trajectories)
    assert seeds == list(range(16)) and len(parts) == 3
    groups = [set(t.group_id for t in part.trajectories) for part in parts]
    assert not groups[0] & groups[1] and not groups[1] & groups[2]


def test_microbatches_respect_the_token_budget():
    batch = to_batch(trajectories(16), toy_env.GAMBLES)
    parts = list(microbatches(batch, 100))
    assert sorted(row for rows in parts for row in rows) == list(range(16))
    for rows in parts:
        assert len(rows) == 1 or len(rows) * max(len(batch.trajectories[row].ids_T) for row in rows) <= 100


def test_entropy_standard_error_clusters_by_episode():
    entropy = torch.tensor([[0.5, 0.5, 0.0], [1.5, 1.5, 1.5], [1.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]], dtype=torch.bool)
    # H = 6.5 / 6; residuals s_e - H n_e: 1 - 2H, 4.5 - 3H, 1 - H
    H = 6.5 / 6
    expected = ((((1 - 2 * H) ** 2 + (4.5 - 3 * H) ** 2 + (1 - H) ** 2) * 3 / 2) ** 0.5) / 6
    assert entropy_standard_error(entropy, mask) == pytest.approx(expected, rel=1e-9)
    assert entropy_standard_error(entropy[:1], mask[:1]) != entropy_standard_error(entropy[:1], mask[:1])


def test_mean_metrics_keeps_maxima():
    assert mean_metrics([{"a": 1.0, "r_max": 3.0}, {"a": 3.0, "r_max": 2.0}, {"b": 5.0}]) == {"a": 2.0, "r_max": 3.0, "b": 5.0}


def test_groups_of_a_step_are_complete():
    groups = to_groups(trajectories(16))
    assert sum(len(group.trajectories) for group in groups) == 16


os.environ.setdefault("OMP_NUM_THREADS", "1")


def test_smaller_sets_come_round_more_often_and_tasks_share_equally():
    sampler = TaskSampler({"a": 1000, "b": 3}, seed=1)
    jobs = [job for step in range(9) for job in sampler.jobs(step, {"a": 2, "b": 2}, 1)]
    drawn = {task: [job.index for job in jobs if job.task == task] for task in "ab"}
    assert len(drawn["a"]) == len(drawn["b"]) == 18 and len(set(drawn["a"])) == 18
    assert sorted(drawn["b"]) == [0] * 6 + [1] * 6 + [2] * 6


def test_a_fault_in_an_experts_episode_names_task_and_place(monkeypatch):
    from envs.base import EnvFault
    from eppo.warm_start import collect

    monkeypatch.setattr(toy_env.LookupEnv, "expert", lambda *_, **__: int("x4"))
    cfg = load_recipe("micro", tasks=["toy_lookup"])
    with pytest.raises(EnvFault, match=r"expert's episode of toy_lookup failed at .*test_trainer.py:\d+: ValueError: invalid literal"):
        collect(cfg)


def test_the_command_says_a_runs_warnings_and_refuses_in_one_line(start, tmp_path, capsys):
    from eppo.__main__ import main

    cfg = config(start, tmp_path / "run")
    arguments = ["--recipe", "micro", "-p", "model.path", cfg.model.path, "-p", "tasks", *cfg.tasks, "-p", "out", str(tmp_path / "run"),
                 "-p", "steps", "1", "-p", "rollout.prompts_per_task", "1", "-p", "rollout.group_size", "2", "-p", "validate_every", "0",
                 "-p", "rollout.max_tokens", "160", "-p", "rollout.max_turn_tokens", "24", "-p", "validation.instances", "1",
                 "-p", "optim.lr", "0"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].startswith("step 1, ") and "warning: optim.lr = 0: the weights stay those of the start" in err
    assert main(["-p", "tasks", "db"]) == 2
    assert capsys.readouterr().err == "error: override of recipe 'micro': tasks = 'db' is text, must be a list; write [\"db\"]\n"
