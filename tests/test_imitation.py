"""Imitation: parts of a batch, and a second process that changes no bit and may be lost."""

from __future__ import annotations

import random
import select
import time
from pathlib import Path

import pytest
import torch

from eppo.gradient_worker import GradientWorker, part_gradients, two_parts
from eppo.imitation import imitate
from eppo.policy import build_micro_model, token_scores
from eppo.warm_start import weights_digest


def example(rng: random.Random, length: int) -> tuple[list[int], list[int]]:
    return [rng.randrange(64) for _ in range(length)], [0] * 3 + [rng.randrange(2) for _ in range(length - 4)] + [1]


def batches(size: int = 5):
    rng = random.Random(7)
    while True:
        yield [example(rng, rng.randint(6, 30)) for _ in range(size)]


def model():
    return build_micro_model(64, hidden=16, layers=2, heads=2, kv_heads=1, mlp=32, seed=3)


def test_parts_are_balanced_with_their_padding():
    rows = [([0] * length, [1] * length) for length in (10, 40, 12, 20, 11)]
    longer, shorter = two_parts(rows)
    assert [len(ids) for ids, _ in longer] == [40] and [len(ids) for ids, _ in shorter] == [20, 12, 11, 10]
    assert two_parts(rows[:1]) == (rows[:1], [])


def test_parts_add_up_to_the_gradient_of_the_batch():
    batch, net = next(batches()), model().double()
    count = sum(sum(mask) for _, mask in batch)
    sums = [part_gradients(net, part, count) for part in two_parts(batch)]
    width = max(len(ids) for ids, _ in batch)
    ids_BT = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in batch])
    mask_BT = torch.tensor([mask + [0] * (width - len(mask)) for _, mask in batch]).bool()
    loss = -token_scores(net, ids_BT, mask_BT, entropy=False).logp_BT.sum() / count
    loss.backward()
    assert sums[0][0] + sums[1][0] == pytest.approx(loss.item(), rel=1e-6)              # log-probabilities are float32
    for parameter, one, other in zip(net.parameters(), sums[0][1], sums[1][1]):
        torch.testing.assert_close(one + other, parameter.grad, rtol=1e-5, atol=1e-8)


def imitated(processes: int, updates: int = 12, between=lambda update: None):
    net, seen = model(), []
    for update, loss, tokens in imitate(net, batches(), updates=updates, lr=1e-2, processes=processes):
        seen.append((update, loss, tokens))
        between(update)
    return seen, weights_digest(net), net


@pytest.fixture()
def worker(monkeypatch):
    """The worker of the next imitation, started before its first update."""
    found, enter = [], GradientWorker.__enter__

    def started(self):
        found.append(self)
        assert select.select([self._process.stdout], [], [], 120)[0]
        return enter(self)

    monkeypatch.setattr(GradientWorker, "__enter__", started)
    return found


def test_a_second_process_changes_no_bit(worker, tmp_path):
    left = []

    def look(update):
        if update == 6:
            left.append({path.name for path in Path(worker[0]._folder.name).iterdir()})

    seen, digest, net = imitated(2, between=look)
    assert (seen, digest) == imitated(1)[:2]
    assert worker[0]._ready and not worker[0]._lost and len(left) == 1 and left[0] <= {"config.json", "generation_config.json"}
    assert worker[0]._process.returncode is not None and not list(tmp_path.glob("*"))
    net.save_pretrained(tmp_path)                           # the weights are ordinary memory again
    assert (tmp_path / "model.safetensors").exists()


def test_a_worker_that_is_killed_is_done_without(worker):
    def kill(update):
        if update == 4:
            worker[0]._process.kill()
            time.sleep(0.2)

    with pytest.warns(UserWarning, match=r"ended \(exit code -9\); one process goes on"):
        seen, digest, _ = imitated(2, between=kill)
    assert (seen, digest) == imitated(1)[:2]


def test_a_worker_that_ends_over_its_part_is_done_without(worker, monkeypatch):
    read = GradientWorker._read

    def ended(self):
        if self._ready:
            self._process.kill()
            self._process.wait()
            self._process.stdout.read()
        return read(self)

    monkeypatch.setattr(GradientWorker, "_read", ended)
    with pytest.warns(UserWarning, match="one process goes on"):
        seen, digest, _ = imitated(2)
    assert (seen, digest) == imitated(1)[:2]


def test_a_loss_that_is_not_finite_is_refused():
    net = model()
    next(net.parameters()).data[3] = float("nan")
    with pytest.raises(FloatingPointError, match="loss is nan at update 0; lower warm_start.lr"):
        next(imitate(net, batches(), updates=3, lr=1e-2))


@pytest.mark.parametrize("fault", ["room", "process"])
def test_where_no_second_process_can_be_had_one_does_it(monkeypatch, fault, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if fault == "room":
        def full(*args):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.posix_fallocate", full)
    else:
        monkeypatch.setattr("sys.executable", "/nonexistent/python")
    with pytest.warns(UserWarning, match="the warm start goes on in one process: .*(No space left|No such file)"):
        seen, digest, _ = imitated(2)
    assert (seen, digest) == imitated(1)[:2] and not list(tmp_path.iterdir())
