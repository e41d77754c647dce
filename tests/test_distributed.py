"""Two processes take the steps of one: real processes, started by torchrun, that sum over gloo on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from method_batches import NAMES, learner_of, start_folder, take_steps
from safetensors.torch import load_file
from two_processes import BATCHES, run_config

from eppo import distributed
from eppo.checkpoint import load_checkpoint
from eppo.records import compare_steps, read_run
from eppo.trainer import train

ROOT = Path(__file__).resolve().parent.parent
FEW = ("grpo", "eppo", "pcgrad", "seal", "kl_cov", "entropy_bonus")
PER_BATCH = ("seal/auc", "seal/cosine_gap")                 # of a micro-batch, averaged: diagnostics, not part of the step


def launch(*arguments):
    """The documented launcher with two processes on one machine."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)


def two(folder, start, names):
    """What each of the two processes found."""
    done = launch("tests/two_processes.py", folder, start, *names)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"{number}.pt") for number in (0, 1)]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return start_folder(tmp_path_factory)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def found(folder, start):
    return two(folder, start, FEW)


def assert_same_steps(name, found, rounding):
    records, weights = take_steps(learner_of(name), BATCHES)
    moved = (weights - torch.cat([value.detach().flatten() for value in learner_of(name).parameters])).norm()
    assert moved > 1e-2
    (others, ends), (_, twins) = (one["steps"][name] for one in found)
    assert torch.equal(ends, twins)
    assert (ends - weights).norm() < rounding * moved
    for one, other in zip(records, others, strict=True):
        assert set(one) == set(other)
        for key in set(one) - set(PER_BATCH):
            assert other[key] == pytest.approx(one[key], rel=1e-6, abs=1e-8, nan_ok=True), key


@pytest.mark.parametrize("name", FEW)
def test_two_processes_take_the_steps_of_one(name, found):
    assert_same_steps(name, found, rounding=1e-10)


@pytest.mark.extended
def test_so_they_do_for_every_method(tmp_path):
    """Sums of a sequence's log-probabilities, as GSPO's, are in float32 and round by the width of the micro-batch, in one process too."""
    found = two(tmp_path, "-", NAMES)
    for name in NAMES:
        assert_same_steps(name, found, rounding=1e-6)


def test_a_loss_that_is_not_finite_in_one_process_ends_both(found):
    texts = [one["not finite"] for one in found]
    assert texts[0] == texts[1] and texts[0].startswith("FloatingPointError: loss/policy is not finite in an episode of task")


def test_processes_that_disagree_stop(found):
    for one in found:
        assert one["not same"] == ["", "ValueError: x is not the same in every process: 0, 1; give all of them the same files"]


def rows(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_a_run_of_two_processes_records_what_one_does(found, folder, start, tmp_path):
    """Rollouts are batched otherwise, so that logits and with them everything later differ in the last bits of float32."""
    list(train(run_config(start, tmp_path / "one")))
    one, both = read_run(tmp_path / "one"), read_run(folder / "whole")
    assert both.info["status"] == "finished" and len(both.steps) == 3 and len(both.eval) == len(one.eval) > 0
    assert list(one.steps) == list(both.steps)
    for key in one.steps:
        if not key.startswith("perf/"):
            assert both.steps[key].tolist() == pytest.approx(one.steps[key].tolist(), rel=1e-4, abs=1e-5, nan_ok=True), key
    for name in ("episodes", "trajectories"):
        for mine, its in zip(rows(tmp_path / "one", name), rows(folder / "whole", name), strict=True):
            skip = ("sampler_logp", "perf/env_s")
            assert {k: v for k, v in mine.items() if k not in skip} == {k: v for k, v in its.items() if k not in skip}
    before = load_file(start / "model.safetensors")
    states = [load_checkpoint(place / "checkpoints")["learner"]["model"] for place in (tmp_path / "one", folder / "whole")]
    start_W, mine_W, its_W = (torch.cat([state[key].flatten() for key in before]) for state in (before, *states))
    assert (mine_W - its_W).norm() < 1e-4 * (mine_W - start_W).norm()       # Adam enlarges the rounding of gradients near 0


def test_a_stopped_run_of_two_processes_resumes_to_the_same_bits(found, folder):
    assert compare_steps(folder / "whole", folder / "cut") == []
    mine, its = (load_checkpoint(folder / name / "checkpoints")["learner"]["model"] for name in ("whole", "cut"))
    assert all(torch.equal(mine[key], its[key]) for key in mine)


def test_a_folder_that_cannot_be_written_stops_every_process(found):
    texts = [one["run"] for one in found]
    assert texts[0].startswith("ValueError: ") and "already holds a run" in texts[0] and texts[1] == f"FirstFailed: process 0: {texts[0]}"


@pytest.mark.extended
def test_the_documented_command(start, tmp_path):
    arguments = ["-m", "eppo", "-p", "tasks", "db", "alfworld", "-p", "model.path", start, "-p", "out", tmp_path / "run",
                 "-p", "steps", 1, "-p", "rollout.prompts_per_task", 1, "-p", "rollout.group_size", 2, "-p", "validation.instances", 1]
    done = launch(*arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("step 1") == 1 and read_run(tmp_path / "run").info["status"] == "finished"
    again = launch(*arguments)
    assert again.returncode != 0 and again.stderr.count("already holds a run") == 1 and "Error: [" not in again.stderr


def test_shares_are_whole_and_even(monkeypatch):
    weights = [9, 8, 7, 7, 5, 5, 4, 3, 1, 1]
    for number in (1, 2, 3, 4):
        monkeypatch.setattr(distributed, "size", lambda number=number: number)
        parts = []
        for own in range(number):
            monkeypatch.setattr(distributed, "rank", lambda own=own: own)
            parts.append(distributed.share(list(enumerate(weights)), weights))
        assert [item for part in parts for item in part] == list(enumerate(weights))
        assert all(abs(sum(weight for _, weight in part) - sum(weights) / number) <= max(weights) for part in parts)
    monkeypatch.setattr(distributed, "rank", lambda: 3)
    assert distributed.share(["only"], [5]) == []


def test_without_a_launcher_there_is_one_process():
    assert distributed.size() == 1 and distributed.rank() == 0 and distributed.gather("x") == ["x"]
    assert distributed.spread([1, 2, 3], lambda own: [10 * one for one in own]) == [10, 20, 30]
    with distributed.joined(), distributed.first_alone():
        assert not torch.distributed.is_initialized()
