"""Several processes, one run: each plays its share of the episodes and back-propagates its share of every mini-batch.

    torchrun --nproc-per-node 2 -m eppo --recipe micro        # with GPUs also: accelerate launch --multi_gpu --num_processes 2 -m eppo

A launcher starts the same program several times; `joined` makes them one group. Everything else of a step (advantages, pacing,
bounds, denominators, metrics) every process computes from the whole batch, and gradients are summed before the optimiser's step,
so that all hold the same weights and a step is that of one process but for the order of sums. Process 0 alone writes. Started
without a launcher there is one process, and nothing here does anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from eppo.config import RunConfig
from eppo.records import RunWriter

T = TypeVar("T")
TIMEOUT = timedelta(hours=4)                                # others wait while process 0 trains a warm start or writes a model


# ---- the group ------------------------------------------------------------------------------------------------------
@contextmanager
def joined(device: str = "auto") -> Iterator[None]:
    """Join the processes that a launcher started with this one, as its environment variables say; leave them at the end.

    Args:
        device: "cpu", or "cuda" and "auto" for the GPU of this process's number on its machine where there are GPUs.

    Raises:
        ValueError: this machine has fewer GPUs than processes.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or dist.is_initialized():
        yield
        return
    backend = "gloo"
    if device != "cpu" and torch.cuda.is_available():
        number, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if number >= gpus:
            raise ValueError(f"process {number} of this machine has no GPU of its own, there are {gpus}; start as many processes as "
                             "GPUs, or set device to cpu")
        torch.cuda.set_device(number)
        backend = "cpu:gloo,cuda:nccl"                      # gradients by nccl, scores and trajectories by gloo
    dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def size() -> int:
    """Number of processes of this run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


class FirstFailed(ValueError):
    """Process 0 ended with the error in the text, and so does this one."""


@contextmanager
def first_alone() -> Iterator[None]:
    """Process 0 runs the block before the others do: what it leaves in a cache they find.

    Raises:
        FirstFailed: in the others, where the block failed in process 0.
    """
    if rank() > 0:
        if error := gather(None)[0]:
            raise FirstFailed(f"process 0: {error}")
        yield
        return
    try:
        yield
    except Exception as error:
        gather(f"{type(error).__name__}: {error}")
        raise
    gather(None)


def require_same(name: str, value: str | int) -> None:
    """ValueError unless every process has the same `value`."""
    if len(set(values := gather(value))) > 1:
        raise ValueError(f"{name} is not the same in every process: {', '.join(map(str, values))}; give all of them the same files")


@contextmanager
def failing_together() -> Iterator[None]:
    """A FloatingPointError in one process is raised in all, so that none waits for one that has stopped."""
    if size() == 1:
        yield
        return
    error = None
    try:
        yield
    except FloatingPointError as found:
        error = str(found)
    if errors := [text for text in gather(error) if text]:
        raise FloatingPointError(errors[0])


# ---- shares -----------------------------------------------------------------------------------------------------------
def share(items: Sequence[T], weights: Sequence[float]) -> list[T]:
    """This process's run of consecutive `items`, of about the same weight (> 0) as the others'; possibly empty."""
    whole, before, own = sum(weights), 0.0, []
    for item, weight in zip(items, weights):
        if int((before + weight / 2) * size() / whole) == rank():
            own.append(item)
        before += weight
    return own


def spread(items: Sequence[Any], work: Callable[[Sequence[Any]], Sequence[T]]) -> list[T]:
    """`work(items)`, one result per item in their order, each process working on every `size()`-th item. Results are pickled."""
    if size() == 1:
        return list(work(items))
    own = items[rank()::size()]
    results: list[T] = [None] * len(items)
    for number, part in enumerate(gather(list(work(own)) if own else [])):
        results[number::size()] = part
    return results


# ---- sums -------------------------------------------------------------------------------------------------------------
def gather(value: T) -> list[T]:
    """The `value` of every process, by their number; it is pickled."""
    if size() == 1:
        return [value]
    values = [None] * size()
    dist.all_gather_object(values, value)
    return values


def total(tensor: Tensor) -> Tensor:
    """`tensor` summed over processes, in place, the same bits in each."""
    if size() > 1:
        dist.all_reduce(tensor)
    return tensor


def total_values(values: Mapping[str, float]) -> dict[str, float]:
    """Sums by name over processes; a name that one does not have counts as 0 there."""
    if size() == 1:
        return dict(values)
    parts = gather(dict(values))
    return {name: sum(part[name] for part in parts if name in part) for name in dict.fromkeys(name for part in parts for name in part)}


def total_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Sum the gradients over processes; a parameter that has none anywhere keeps none, so that its optimiser skips it."""
    if size() == 1:
        return
    present = total(torch.tensor([float(p.grad is not None) for p in parameters]))
    for p, found in zip(parameters, present.tolist()):
        if found:
            p.grad = total(torch.zeros_like(p) if p.grad is None else p.grad)


@contextmanager
def total_notes(notes: dict[str, tuple[float, float]]) -> Iterator[None]:
    """What the block adds to an algorithm's notes, (weighted sum, weight) by name, is summed over processes."""
    if size() == 1:
        yield
        return
    before = dict(notes)
    notes.clear()
    yield
    parts = [before, *gather(dict(notes))]
    notes.clear()
    for part in parts:
        for name, (value, weight) in part.items():
            old_value, old_weight = notes.get(name, (0.0, 0.0))
            notes[name] = (old_value + value, old_weight + weight)


# ---- records ----------------------------------------------------------------------------------------------------------
class SilentWriter:
    """In the place of `RunWriter` in every process but the first: knows the folder and its last step, writes nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.last_step: int | None = None

    def _nothing(self, *args: Any) -> None:
        pass

    write_step = write_eval = write_warnings = rewind = _nothing

    def __enter__(self) -> "SilentWriter":
        return self

    __exit__ = _nothing


def open_writer(config: RunConfig, resume: bool) -> RunWriter | SilentWriter:
    """The run's writer in process 0, a silent one elsewhere.

    Raises:
        ValueError, OSError: as `RunWriter`; FirstFailed in the others.
    """
    with first_alone():
        writer = SilentWriter(config.run_dir()) if rank() > 0 else RunWriter(config.run_dir(), config, resume=resume)
    last_step = gather(writer.last_step)[0]
    if rank() > 0:
        writer.last_step = last_step
    return writer
