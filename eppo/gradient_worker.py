"""Gradients of imitation on two cores.

A batch is cut into two parts. `GradientWorker` is a second process that computes one part's gradient while the first process
computes the other's; it shares weights and gradients through files that both map into memory, and hears of its work in lines of
JSON. Until it has started, and where there is none, one process computes both parts. The sums are the same in the same order, so
the number of processes changes no bit.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from eppo.policy import token_scores

Example = tuple[list[int], list[int]]                       # token ids; mask, 1 where a token is imitated


def two_parts(batch: Sequence[Example]) -> tuple[list[Example], list[Example]]:
    """The longer and the shorter examples, cut where the larger part, padded, is smallest."""
    rows = sorted(batch, key=lambda example: len(example[0]), reverse=True)
    lengths = [len(ids) for ids, _ in rows] + [0]
    cut = min(range(1, len(rows) + 1), key=lambda cut: max(cut * lengths[0], (len(rows) - cut) * lengths[cut]))
    return rows[:cut], rows[cut:]


def part_gradients(model: nn.Module, part: Sequence[Example], count: int) -> tuple[float, list[Tensor]]:
    """The part's share of a batch's loss, nats per token of the batch's `count` imitated ones, and its gradient by parameter."""
    parameters = list(model.parameters())
    if not part:
        return 0.0, [torch.zeros_like(p) for p in parameters]
    length = max(len(ids) for ids, _ in part)
    ids_BT = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in part])
    mask_BT = torch.tensor([mask + [0] * (length - len(mask)) for _, mask in part], dtype=torch.bool)
    loss = -token_scores(model, ids_BT, mask_BT, entropy=False).logp_BT.sum() / count
    return loss.item(), list(torch.autograd.grad(loss, parameters))


class GradientWorker:
    """See the module's docstring. Use as a context; afterwards the model's weights are ordinary memory again.

    Args:
        model: float32, on a CPU, all of its parameters trained; the worker builds the like from its configuration.

    Raises:
        OSError, RuntimeError: there is no room for the files, or no process to be had; the model is as it was.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._folder = tempfile.TemporaryDirectory(prefix="eppo-gradients-")
        try:
            folder = Path(self._folder.name)
            model.config.save_pretrained(folder)
            weights, self._gradients = (_mapped(folder / name, self._parameters, new=True) for name in ("weights", "gradients"))
            for parameter, shared in zip(self._parameters, weights):
                shared.copy_(parameter.data)
            self._process = subprocess.Popen([sys.executable, "-m", "eppo.gradient_worker", folder, str(torch.get_num_threads())],
                                             cwd=Path(__file__).resolve().parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                             start_new_session=True)               # Ctrl-C reaches the first process, which ends it
        except (OSError, RuntimeError):
            self._folder.cleanup()
            raise
        for parameter, shared in zip(self._parameters, weights):
            parameter.data = shared
        self._ready = self._lost = False
        self._told = select.poll()
        self._told.register(self._process.stdout, select.POLLIN)

    def start(self, part: Sequence[Example], count: int) -> bool:
        """Hand `part` over and return True, or False where the worker has not started yet, or has ended."""
        if self._lost or not self._ready and not self._told.poll(0):
            return False
        if not self._ready:
            self._ready = self._read() is not None
            for name in ("weights", "gradients"):           # both sides have them mapped: not even kill -9 leaves them behind
                Path(self._folder.name, name).unlink()
        if self._lost:
            return False
        try:
            self._process.stdin.write(json.dumps([part, count]).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._lose()
        return not self._lost

    def result(self) -> tuple[float, list[Tensor]] | None:
        """What `part_gradients` gives for the part handed over; None where the worker ended over it."""
        loss = self._read()
        return None if loss is None else (loss, self._gradients)

    def _read(self) -> float | None:
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            self._lose()
            return None
        return json.loads(line)

    def _lose(self) -> None:
        self._lost = True
        warnings.warn(f"the second process of the warm start ended (exit code {self._process.wait()}); one process goes on", stacklevel=2)

    def __enter__(self) -> "GradientWorker":
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.communicate()
        for parameter in self._parameters:
            parameter.data = parameter.data.clone()
        self._folder.cleanup()


def _mapped(path: Path, like: Sequence[Tensor], new: bool = False) -> list[Tensor]:
    """float32 tensors of these shapes, one after another in a file that is mapped into memory."""
    size = sum(p.numel() for p in like)
    if new:
        with open(path, "wb") as file:                      # all of it now: writing a mapped page that finds no room kills the process
            os.posix_fallocate(file.fileno(), 0, 4 * size)
    flat = torch.from_file(str(path), shared=True, size=size, dtype=torch.float32)
    return [piece.view_as(p) for piece, p in zip(flat.split([p.numel() for p in like]), like)]


def main(folder: str, threads: str) -> None:
    """The worker: a line when it is ready, then one line out for every line in, until the other side closes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    parameters = list(model.parameters())
    for parameter, shared in zip(parameters, _mapped(Path(folder) / "weights", parameters)):
        parameter.data = shared
    gradients = _mapped(Path(folder) / "gradients", parameters)
    print(0.0, flush=True)
    for line in sys.stdin:
        loss, found = part_gradients(model, *json.loads(line))
        for shared, gradient in zip(gradients, found):
            shared.copy_(gradient)
        print(json.dumps(loss), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
