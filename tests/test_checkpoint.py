"""Checkpoints: whole or not there, the newest intact one wins, random generators go on where they were."""

import errno
import random
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from eppo.checkpoint import capture_rng, latest_checkpoint, list_checkpoints, load_checkpoint, restore_rng, save_checkpoint


def state_of(step):
    return {"step": step, "weights": {"w": torch.full((3, 2), float(step))}, "pacer": {"db": (0.1, None, [1])}, "big": 2**100}


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_round_trip_and_the_last_two_are_kept(tmp_path):
    for step in (0, 20, 40):
        path = save_checkpoint(tmp_path, step, state_of(step))
    assert re.fullmatch(r"step-000040-[0-9a-f]{16}\.pt", path.name)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [20, 40] and len(list(tmp_path.iterdir())) == 2
    state = load_checkpoint(tmp_path)
    assert latest_checkpoint(tmp_path) == path and state["step"] == 40 and state["pacer"] == {"db": (0.1, None, [1])}
    assert state["weights"]["w"].tolist() == [[40.0] * 2] * 3 and state["big"] == 2**100


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("harm", [damage, cut, lambda path: path.write_bytes(b"")], ids=["flipped bit", "cut short", "empty"])
def test_a_damaged_newest_gives_way_to_the_one_before(tmp_path, harm):
    save_checkpoint(tmp_path, 20, state_of(20))
    harm(newest := save_checkpoint(tmp_path, 40, state_of(40)))
    with pytest.warns(UserWarning, match=f"{newest.name} of step 40 is damaged"):
        assert load_checkpoint(tmp_path)["step"] == 20
    with pytest.raises(ValueError, match="is damaged"):
        load_checkpoint(newest)


def test_none_usable_names_what_was_tried(tmp_path):
    with pytest.raises(ValueError, match="it holds none; there is nothing to resume"):
        load_checkpoint(tmp_path)
    paths = [save_checkpoint(tmp_path, step, state_of(step)) for step in (20, 40)]
    for path in paths:
        damage(path)
    with pytest.warns(UserWarning), pytest.raises(ValueError, match=f"tried {paths[1].name}, {paths[0].name}"):
        latest_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        load_checkpoint(tmp_path / "none.pt")


def test_saving_again_after_a_resume_leaves_no_abandoned_future(tmp_path):
    for step in (20, 40):
        save_checkpoint(tmp_path, step, state_of(step))
    save_checkpoint(tmp_path, 30, state_of(30))
    assert [step for step, _ in list_checkpoints(tmp_path)] == [20, 30]
    save_checkpoint(tmp_path, 30, {"step": 30, "other": 1})
    assert [step for step, _ in list_checkpoints(tmp_path)] == [20, 30] and load_checkpoint(tmp_path)["other"] == 1


def test_what_would_not_load_is_refused_before_writing(tmp_path):
    with pytest.raises(ValueError, match=r"state\['a'\]\[1\] is a numpy.float64"):
        save_checkpoint(tmp_path, 1, {"a": [1, np.float64(2)]})
    assert list(tmp_path.iterdir()) == []


def test_full_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    good = save_checkpoint(tmp_path, 20, state_of(20))
    save = torch.save

    def full(state, file):
        save(state, open("/dev/full", "wb"))

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="disk is full.*previous checkpoint is intact; free some space and resume") as caught:
        save_checkpoint(tmp_path, 40, {"w": torch.zeros(1_000_000)})
    assert caught.value.errno == errno.ENOSPC and list(tmp_path.iterdir()) == [good] and load_checkpoint(tmp_path)["step"] == 20


def test_killed_while_saving(tmp_path):
    """A process killed in the middle of torch.save leaves the earlier checkpoint and a remainder that the next save removes."""
    save_checkpoint(tmp_path, 20, state_of(20))
    code = f"""
import os, signal, torch
from eppo.checkpoint import save_checkpoint
def half(state, file):
    file.write(b"PK half"); file.flush(); os.kill(os.getpid(), signal.SIGKILL)
torch.save = half
save_checkpoint({str(tmp_path)!r}, 40, {{"a": 1}})
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert len(list(tmp_path.iterdir())) == 2 and load_checkpoint(tmp_path)["step"] == 20
    save_checkpoint(tmp_path, 40, state_of(40))
    assert len(list(tmp_path.iterdir())) == 2 and load_checkpoint(tmp_path)["step"] == 40


def draw():
    return random.random(), random.gauss(0, 1), np.random.standard_normal(), np.random.rand(), torch.rand(3).tolist()


def test_random_generators_go_on_where_they_were(tmp_path):
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    draw()
    save_checkpoint(tmp_path, 1, {"rng": capture_rng()})
    expected = [draw(), draw()]
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    restore_rng(load_checkpoint(tmp_path)["rng"])
    assert [draw(), draw()] == expected


def test_states_of_more_gpus_than_here_are_refused():
    state = capture_rng() | {"cuda": [torch.zeros(8)] * (torch.cuda.device_count() + 1)}
    with pytest.raises(ValueError, match="resume on as many"):
        restore_rng(state)
