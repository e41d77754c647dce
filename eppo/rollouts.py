"""Rollouts: episodes (`eppo.episode`) played one by one, or many at once by a generator that continuously refills its batch.

Training and evaluation use the same code.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Callable, Sequence

from eppo.chat import ChatFormat
from eppo.episode import Episode, RolloutLimits
from eppo.generate.protocol import Completion, Generator, Request, stable_seed
from eppo.types import Group, Trajectory


def run_episode(env: Any, index: int, generator: Generator, tokenizer: Any, *, seed: int = 0, temperature: float = 1.0,
                max_turns: int | None = None, max_tokens: int | None = None, limits: RolloutLimits | None = None) -> Trajectory:
    """Play one episode and return its trajectory; `tokenizer` may be a ChatFormat."""
    chat = tokenizer if isinstance(tokenizer, ChatFormat) else ChatFormat(tokenizer)
    limits = limits or RolloutLimits(max_tokens=max_tokens or 8192, max_turns=max_turns, temperature=temperature)
    session = f"{env.task}:{index}:{seed}"
    episode = Episode(env, index, chat, limits, session=session, group_id=session, seed=seed)
    try:
        request = episode.open()
        while request is not None:
            try:
                completion, = generator.generate([request])
            except Exception as error:                      # noqa: BLE001  one failed generation is one failed episode
                episode.fail(error)
                break
            request = episode.receive(completion)
    finally:
        generator.end(session)
    return episode.trajectory()


def run_group(env: Any, index: int, generator: Generator, tokenizer: Any, size: int, *, seed: int = 0, **settings: Any) -> Group:
    """`size` rollouts of one prompt, one after the other in one environment."""
    group_id = f"{env.task}:{index}:{seed}"
    trajectories = [run_episode(env, index, generator, tokenizer, seed=stable_seed(seed, member), **settings) for member in range(size)]
    for trajectory in trajectories:
        trajectory.group_id = group_id
    return Group(group_id, env.task, env.instances[index].id, trajectories)


class EnvPool:
    """Environments by task, made on demand and reused; one episode holds one at a time.

    Args:
        make: `make(task) -> Env`.
    """

    def __init__(self, make: Callable[[str], Any]) -> None:
        self._make, self._idle, self._all, self._lock = make, {}, [], threading.Lock()

    def take(self, task: str) -> Any:
        with self._lock:
            idle = self._idle.setdefault(task, [])
            if idle:
                return idle.pop()
        env = self._make(task)
        with self._lock:
            self._all.append(env)
        return env

    def give_back(self, env: Any) -> None:
        with self._lock:
            self._idle.setdefault(env.task, []).append(env)

    def close(self) -> None:
        with self._lock:
            for env in self._all:
                env.close()
            self._all.clear()
            self._idle.clear()


@dataclass(frozen=True, slots=True)
class Job:
    """One episode to play."""

    task: str
    index: int
    group_id: str
    seed: int


def run_jobs(jobs: Sequence[Job], envs: EnvPool, generator: Any, chat: ChatFormat, limits: RolloutLimits, *, workers: int = 8,
             concurrency: int = 128, report: Callable[[int, Trajectory], None] = lambda number, trajectory: None) -> list[Trajectory]:
    """Play all jobs, at most `concurrency` at a time, and return their trajectories in the order of `jobs`.

    Environments step in `workers` threads. A generator that can `stream` gets every episode's next turn at a reproducible moment;
    others are called from `concurrency` threads and batch what arrives together. `report(number, trajectory)` is called, from any
    thread, as job `number` ends; an exception of it ends the run.
    """
    if hasattr(generator, "stream"):
        return _run_streaming(jobs, envs, generator, chat, limits, workers, concurrency, report)
    results: list[Trajectory | None] = [None] * len(jobs)

    def play(number: int) -> None:
        job = jobs[number]
        env = envs.take(job.task)
        try:
            results[number] = run_episode(env, job.index, generator, chat, seed=job.seed, limits=limits)
            results[number].group_id = job.group_id
        finally:
            envs.give_back(env)
        report(number, results[number])

    with ThreadPoolExecutor(concurrency) as threads:
        for future in [threads.submit(play, number) for number in range(len(jobs))]:
            future.result()
    return results


def _run_streaming(jobs: Sequence[Job], envs: EnvPool, generator: Any, chat: ChatFormat, limits: RolloutLimits, workers: int,
                   concurrency: int, report: Callable[[int, Trajectory], None]) -> list[Trajectory]:
    """Slot s plays jobs s, s + slots, s + 2 slots, …: which job a slot plays next never depends on which slot was faster."""
    results: list[Trajectory | None] = [None] * len(jobs)
    slots: list[tuple[int, Episode] | None] = [None] * min(concurrency, len(jobs))

    def begin(slot: int, number: int) -> Request | None:
        while number < len(jobs):
            job = jobs[number]
            env = envs.take(job.task)
            episode = Episode(env, job.index, chat, limits, session=f"{job.group_id}/{number}", group_id=job.group_id, seed=job.seed)
            slots[slot] = (number, episode)
            request = episode.open()
            if request is not None:
                return request
            number = finish(slot)
        return None

    def finish(slot: int) -> int:
        number, episode = slots[slot]
        results[number] = episode.trajectory()
        envs.give_back(episode.env)
        generator.end(episode.session)
        report(number, results[number])
        return number + len(slots)

    def proceed(slot: int, completion: Completion) -> Request | None:
        request = slots[slot][1].receive(completion)
        return request if request is not None else begin(slot, finish(slot))

    with ThreadPoolExecutor(workers) as threads:
        opened = list(threads.map(begin, range(len(slots)), range(len(slots))))
        live = [slot for slot, request in enumerate(opened) if request is not None]
        generator.stream([opened[slot] for slot in live],
                         lambda position, completion: threads.submit(proceed, live[position], completion), concurrency)
    return results


def to_groups(trajectories: Sequence[Trajectory]) -> list[Group]:
    """Trajectories by group id, in order of first appearance."""
    groups: dict[str, Group] = {}
    for trajectory in trajectories:
        group = groups.setdefault(trajectory.group_id, Group(trajectory.group_id, trajectory.task, trajectory.instance_id, []))
        group.trajectories.append(trajectory)
    return list(groups.values())
