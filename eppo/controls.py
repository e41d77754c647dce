"""Signals of the control arms: what moves a clip range when entropy does not; and what methods read from recorded runs. Random
parts are functions of (seed, step, task), so they leave every other random stream alone and need no state of their own."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence


def shuffled(values: Mapping[str, float], seed: int, step: int) -> dict[str, float]:
    """The values dealt out anew over the tasks, uniformly at random in each step."""
    dealt = [values[task] for task in sorted(values)]
    random.Random(f"shuffled/{seed}/{step}").shuffle(dealt)
    return dict(zip(sorted(values), dealt))


def derangement(tasks: Sequence[str], number: int) -> dict[str, str]:
    """task -> the other task whose value it gets: the `number`-th permutation without a fixed point, counted round.

    Raises:
        ValueError: fewer than two tasks have none.
    """
    names = sorted(tasks)
    if len(names) < 2:
        raise ValueError(f"a derangement needs at least two tasks, got {names}")
    found = [order for order in itertools.permutations(names) if all(a != b for a, b in zip(names, order))]
    return dict(zip(names, found[number % len(found)]))


def autoregressive(before: Mapping[str, float], tasks: Sequence[str], beta: float, seed: int, step: int) -> dict[str, float]:
    """u = beta u + sqrt(1 - beta^2) N(0, 1) per task, from N(0, 1): noise as slow as an EMA of decay beta, of variance 1."""
    noise = {task: random.Random(f"autoregressive/{seed}/{step}/{task}").gauss(0, 1) for task in tasks}
    return {task: beta * before[task] + math.sqrt(1 - beta**2) * noise[task] if task in before else noise[task]
            for task in tasks}


@dataclass(eq=False)
class TaskEMA:
    """An exponential moving average per task, from the first value on without bias correction, and that first value."""

    beta: float
    values: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)

    def update(self, fresh: Mapping[str, float]) -> dict[str, float]:
        """The averages of all tasks seen so far; a task without a fresh value keeps its own."""
        for task, value in fresh.items():
            self.first.setdefault(task, value)
            self.values[task] = self.beta * self.values.get(task, value) + (1 - self.beta) * value
        return dict(self.values)

    def state_dict(self) -> dict[str, Any]:
        return {"values": dict(sorted(self.values.items())), "first": dict(sorted(self.first.items()))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values, self.first = dict(state["values"]), dict(state["first"])


@dataclass(frozen=True, slots=True)
class Schedule:
    """The clip ranges of a recorded run: one mapping task -> eps for each of its steps, from step 1."""

    path: str
    seed: int
    eps: tuple[Mapping[str, float], ...]


def read_schedule(folder: str, tasks: Sequence[str], steps: int, seed: int) -> Schedule:
    """The clip ranges that a recorded run of eppo, or of a method built on it, used.

    Args:
        folder: the run's folder.
        tasks, steps, seed: of the run that is to use them.

    Raises:
        ValueError: no run there, a method that EPPO's pacer does not move (a baseline or a control arm), other tasks, another
            number of steps, an unfinished run, or the same seed.
    """
    from eppo.algorithms import ALGORITHMS, EPPO
    from eppo.algorithms.arms import Arm

    run, where = _run_of_tasks("schedule_from", folder, tasks)
    config = run.info["config"]
    cls = ALGORITHMS.get(config["method"])
    if cls is None or not issubclass(cls, EPPO) or issubclass(cls, Arm):
        raise ValueError(f"{where} is a run of {config['method']!r}, in which EPPO's pacer set nothing; give a run of eppo")
    if config["seed"] == seed:
        raise ValueError(f"{where} has this run's seed, {seed}; a control needs the clip ranges of another seed")
    rows = run.steps[run.steps["step"] > 0]
    if config["steps"] != steps or len(rows) != steps:
        raise ValueError(f"{where} has {len(rows)} of {config['steps']} steps, this run has {steps}; they must be the same")
    eps = [{task: float(row[name]) for task in tasks if (name := f"pacer/{task}/eps") in row and row[name] == row[name]}
           for row in rows.sort_values("step").to_dict("records")]
    return Schedule(str(folder), config["seed"], tuple(eps))


def read_references(folder: str, tasks: Sequence[str], batches: int) -> dict[str, float]:
    """Per task, the token-weighted mean entropy in nats of the first `batches` batches of a recorded run.

    Raises:
        ValueError: no run there, other tasks, fewer batches than that, or weights that moved between them (optim.lr above 0).
    """
    run, where = _run_of_tasks("reference_from", folder, tasks)
    rows = run.steps[run.steps["step"] > 0].sort_values("step").head(batches)
    if len(rows) < batches:
        raise ValueError(f"{where} has {len(rows)} batches, ref_batches asks for {batches}")
    if batches > 1 and run.info["config"]["optim"]["lr"] > 0:
        raise ValueError(f"{where} trained (optim.lr {run.info['config']['optim']['lr']:g}), so only its first batch is of the untouched "
                         f"policy; make it again with optim.lr 0, or use ref_batches 1")
    found = {}
    for task in tasks:
        tokens = rows[f"task/{task}/episodes"] * rows[f"task/{task}/sampled_tokens"]
        known = rows[f"task/{task}/entropy"].notna()
        if known.any():
            found[task] = float((rows[f"task/{task}/entropy"] * tokens)[known].sum() / tokens[known].sum())
    return found


def _run_of_tasks(setting: str, folder: str, tasks: Sequence[str]) -> tuple[Any, str]:
    """The run in `folder`, and how to speak of it; ValueError if its tasks are others."""
    from eppo.records import read_run

    run, where = read_run(folder), f"{setting} {str(folder)!r}"
    if set(run.info["config"]["tasks"]) != set(tasks):
        raise ValueError(f"{where} has the tasks {sorted(run.info['config']['tasks'])}, this run has {sorted(tasks)}; they must be the "
                         "same")
    return run, where


def time_average(schedules: Sequence[Schedule]) -> dict[str, float]:
    """Per task, the mean clip range over the steps and runs in which it had one."""
    found: dict[str, list[float]] = {}
    for schedule in schedules:
        for eps in schedule.eps:
            for task, value in eps.items():
                found.setdefault(task, []).append(value)
    return {task: math.fsum(values) / len(values) for task, values in sorted(found.items())}
