"""Multi-task agentic RL, one step per pass of the loop in `train`, numbered as in the suite's flow:

    1 sample a task-balanced batch of prompts          5 take the optimiser steps of this batch
    2 roll out G episodes per prompt                   6 sync weights to the generators that are due
    3 turn rewards into advantages                     7 write the step record
    4 measure per-task entropy, set each task's clip

A method is a set of hooks (`eppo.algorithms`); the loop has no branch on its name. Under a launcher every process runs the loop on
the same batch (`eppo.distributed`); the first one writes.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from eppo import distributed
from eppo.algorithms import Algorithm, get_algorithm
from eppo.batching import TaskSampler, minibatches, to_batch
from eppo.chat import ChatFormat
from eppo.checkpoint import capture_rng, load_checkpoint, restore_rng, save_checkpoint
from eppo.config import RunConfig
from eppo.generate import TransformersGenerator, stable_seed
from eppo.learner import Learner, mean_metrics
from eppo.measure import batch_metrics, episode_row, task_stats, trajectory_row, validation_metrics
from eppo.pools import WeightPools
from eppo.rollouts import EnvPool, Job, RolloutLimits, run_jobs, to_groups
from eppo.selection import MAX_ROUNDS
from eppo.types import Batch, Group, StepRecord, Trajectory
from eppo.warm_start import make_env, start_policy


def train(config: RunConfig, resume: bool = False) -> Iterator[StepRecord]:
    """Train, yielding each step's record as it is written. Step 0 is the validation before training.

    Closing the generator, Ctrl-C and the end of the run checkpoint what has been done.

    Args:
        resume: go on from the last good checkpoint of `config.run_dir()`; the bits are those of an uninterrupted run (CPU).

    Raises:
        ValueError: the folder holds a run and `resume` is False, or there is nothing to resume.
        FloatingPointError: a non-finite loss or gradient; names step, task and tensor. The last checkpoint is intact.
    """
    torch.set_num_threads(config.threads or torch.get_num_threads())
    with distributed.joined(config.device), distributed.open_writer(config, resume) as writer, _Run(config, writer) as run:
        step = run.restore() if resume else 0
        if not resume:
            run.save(0)
        try:
            if writer.last_step is None:
                yield run.write(0, run.validate(0), [])
            while step < config.steps:
                step += 1
                with run.timed("step"):
                    with run.timed("rollout"):
                        groups = run.roll_out(step)                                            # 1, 2
                    batch = to_batch([t for group in groups for t in group.trajectories], config.tasks)
                    with run.timed("score"):
                        run.learner.score(batch)
                    batch.advantages_BT = run.algorithm.advantages(batch)                      # 3
                    eps = run.algorithm.pace(task_stats(batch, run.clipped))                   # 4
                    with run.timed("update"):
                        metrics = run.optimise(step, batch, eps)                               # 5
                    run.pools.record(run.learner.model, step)                                  # 6
                    if _due(step, config.validate_every, config.steps):
                        metrics |= run.validate(step)
                    run.pools.push(step + 1)
                record = run.write(step, metrics | batch_metrics(batch), batch.trajectories)   # 7
                if _due(step, config.checkpoint_every, config.steps):
                    run.save(step)
                yield record
            run.export()
        except (GeneratorExit, KeyboardInterrupt):
            run.save_if_whole(step)
            raise


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


class _Run:
    """Everything one run holds: policy, generator, environments, data position, records."""

    def __init__(self, config: RunConfig, writer: distributed.RunWriter | distributed.SilentWriter) -> None:
        self.config, self.writer = config, writer
        self.algorithm: Algorithm = get_algorithm(config.method, **config.algorithm)
        with distributed.first_alone():
            model, tokenizer, self.start = start_policy(config)
        distributed.require_same("the digest of the start weights", self.start)
        self.chat = ChatFormat(tokenizer)
        rollout = config.rollout
        self.limits = RolloutLimits(rollout.max_tokens, rollout.max_turn_tokens, rollout.max_turns, rollout.temperature,
                                    rollout.abnormal_reward, rollout.stale_share)
        self.envs = EnvPool(lambda task: make_env(config, task, "train", extra=True))
        self.dev_envs = EnvPool(lambda task: make_env(config, task, "dev"))
        sizes = {}
        for task in config.tasks:
            env = self.envs.take(task)
            sizes[task] = len(env.instances)
            self.envs.give_back(env)
        self.sampler = TaskSampler(sizes, config.seed)
        self.learner = Learner(model, self.algorithm, config)
        self.generator = TransformersGenerator(model, max_active=rollout.concurrency)
        self.pools = WeightPools(self.generator, model, lag=rollout.lag,
                                 stale_refresh=rollout.stale_refresh if rollout.stale_share > 0 else None)
        self.clipped: dict[str, tuple[float, float]] = {}
        self.seconds: dict[str, float] = {}
        self.written = 0

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - started

    # steps 1 and 2 -------------------------------------------------------------------------------------------------
    def roll_out(self, step: int) -> list[Group]:
        """G episodes for each prompt; a method that filters groups gets the missing ones refilled per task, up to a cap."""
        rollout = self.config.rollout
        quota = dict.fromkeys(self.config.tasks, rollout.prompts_per_task)
        groups: list[Group] = []
        for _ in range(MAX_ROUNDS):
            jobs = self.sampler.jobs(step, quota, rollout.group_size)
            groups = [*groups, *to_groups(self._play(jobs, self.envs, self.limits))]
            groups, quota = self.algorithm.select(groups)
            if not quota:
                break
        return list(groups)

    def _play(self, jobs: list[Job], pool: EnvPool, limits: RolloutLimits) -> list[Trajectory]:
        rollout = self.config.rollout
        return distributed.spread(jobs, lambda own: run_jobs(own, pool, self.generator, self.chat, limits, workers=rollout.workers,
                                                             concurrency=rollout.concurrency))

    # step 5 --------------------------------------------------------------------------------------------------------
    def optimise(self, step: int, batch: Batch, eps: dict[str, float]) -> dict[str, float]:
        """All optimiser steps of a rollout batch; the clip ranges stay the same."""
        optim, updates = self.config.optim, []
        for epoch in range(optim.epochs):
            for minibatch in minibatches(batch, optim.minibatches, random.Random(f"{self.config.seed}/{step}/{epoch}")):
                try:
                    updates.append(self.learner.update(minibatch, eps))
                except FloatingPointError as error:
                    raise FloatingPointError(f"step {step}: {error}; the last checkpoint in {self.writer.folder} is intact. "
                                             "Lower optim.lr or optim.grad_clip and resume") from error
        metrics = mean_metrics(updates) | self.algorithm.metrics()
        self.clipped = {task: (metrics.get(f"task/{task}/clip_high_frac", 0.0), metrics.get(f"task/{task}/clip_low_frac", 0.0))
                        for task in self.config.tasks}
        return metrics

    # validation ----------------------------------------------------------------------------------------------------
    def validate(self, step: int) -> dict[str, float]:
        """Play the fixed dev instances with the newest weights; every validation of a run draws the same noise."""
        settings = self.config.validation
        if settings.instances == 0 or self.config.validate_every == 0:
            return {}
        with self.timed("validation"):
            self.pools.push_current()
            jobs = []
            for task in self.config.tasks:
                env = self.dev_envs.take(task)
                self.dev_envs.give_back(env)
                jobs += [Job(task, index, f"val/{task}/{index}", stable_seed("validation", self.config.seed, task, index))
                         for index in range(min(settings.instances, len(env.instances)))]
            limits = RolloutLimits(self.limits.max_tokens, self.limits.max_turn_tokens, self.limits.max_turns, settings.temperature,
                                   abnormal_reward=None)
            trajectories = self._play(jobs, self.dev_envs, limits)
        self.writer.write_eval(step, [episode_row(trajectory, step, "dev") for trajectory in trajectories])
        return validation_metrics(trajectories)

    # step 7 --------------------------------------------------------------------------------------------------------
    def write(self, step: int, metrics: dict[str, float], trajectories: list[Trajectory]) -> StepRecord:
        """Append the step's record, its episodes and the chosen trajectories."""
        tokens = sum(t.num_sampled_tokens for t in trajectories)
        metrics = metrics | {f"perf/{part}_s": value for part, value in self.seconds.items()}
        metrics["perf/env_s"] = sum(t.info["env_s"] for t in trajectories)
        if tokens:
            metrics |= {"rollout/sampled_tokens": tokens, "rollout/tokens": sum(len(t.ids_T) for t in trajectories),
                        "rollout/version_mean": sum(v for t in trajectories for v in t.version_T if v >= 0) / tokens,
                        "perf/sampled_tokens_per_s": tokens / self.seconds["rollout"]}
        self.seconds = {}
        record = StepRecord(step, metrics)
        self.writer.write_step(record, [episode_row(t, step, "train") for t in trajectories],
                               [trajectory_row(t, step) for t in self._chosen(trajectories)])
        self.writer.write_warnings(self.algorithm.warnings)
        self.written = step
        return record

    def _chosen(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """All, none, or the best and the worst of each group ("sample")."""
        if self.config.trajectories != "sample":
            return trajectories if self.config.trajectories == "all" else []
        chosen = []
        for group in to_groups(trajectories):
            ranked = sorted(group.trajectories, key=lambda t: -math.inf if math.isnan(t.reward) else t.reward)
            chosen += [ranked[0], ranked[-1]] if len(ranked) > 1 else ranked
        return chosen

    def export(self) -> None:
        """The trained model as an ordinary model folder, `model` in the run's folder, and what it began from as `start`."""
        for name, module in (("model", self.learner.model), ("start", self.learner.reference)):
            if module is not None and distributed.rank() == 0:
                module.generation_config.eos_token_id = list(self.chat.stop_ids)          # servers stop there
                module.save_pretrained(self.writer.folder / name)
                self.chat.tokenizer.save_pretrained(self.writer.folder / name)

    # checkpoints ---------------------------------------------------------------------------------------------------
    def save(self, step: int) -> None:
        if distributed.rank() > 0:
            return
        save_checkpoint(self.writer.folder / "checkpoints", step, {
            "step": step, "learner": self.learner.state_dict(), "pools": self.pools.state_dict(), "sampler": self.sampler.state_dict(),
            "algorithm": self.algorithm.state_dict(), "clipped": self.clipped, "rng": capture_rng(), "start": self.start})

    def save_if_whole(self, step: int) -> None:
        """Checkpoint on the way out, unless a step is half done: then the last checkpoint stands and resume repeats the rest."""
        if self.written == step and step > 0:
            self.save(step)

    def restore(self) -> int:
        """Load the last good checkpoint, drop what was recorded after it, and return its step."""
        # A step's line is on the disk before its checkpoint: one that is later than the records has lost some, and is repeated.
        state = load_checkpoint(self.writer.folder / "checkpoints", at_most=self.writer.last_step or 0)
        step = state["step"]
        distributed.require_same("the step of the last checkpoint", step)
        if state["start"] != self.start:
            raise ValueError(f"{self.writer.folder} began from other weights ({state['start']}) than there are now ({self.start}); "
                             "restore that model or start a new run")
        for part in ("learner", "pools", "sampler", "algorithm"):
            getattr(self, part).load_state_dict(state[part])
        self.clipped = {task: tuple(pair) for task, pair in state["clipped"].items()}
        restore_rng(state["rng"])
        self.writer.rewind(step)
        self.written = step
        return step

    def __enter__(self) -> "_Run":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.envs.close()
        self.dev_envs.close()
        self.generator.close()
