"""Agent evaluation: every held-out instance once per seed, through the rollout code of training.

    rows = evaluate(generator, ["db", "os"], seeds=(0, 1, 2, 3), tokenizer=tokenizer, size="micro", out="results/evaluations/mine")
    rows = evaluate_run("results/runs/micro/eppo-s0-...")      # a finished run's model; rows are appended to its eval.jsonl

A row is one episode: run, task, seed (also as eval_seed), train_seed, instance, kind, success, score, reward, turns, tokens, status,
seconds, and what it was played under: rules, temperature, turn_limit, source, size. Success and reward are the environment's,
before any training penalty. Infrastructure faults have reward NaN, are counted beside the score, and are played again by the next
call. With a folder (`out`) each row is on the disk as its episode ends: after a kill the same call plays what is missing.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas as pd

import envs
from eppo.chat import ChatFormat
from eppo.config import RunConfig
from eppo.generate import Generator, TransformersGenerator
from eppo.measure import episode_row
from eppo.policy import load_policy
from eppo.records import read_run
from eppo.episode import FAULTS, RolloutLimits
from eppo.rollouts import EnvPool, Job
from eppo.types import Trajectory
from eval.episodes import TimedEnv, play
from eval.evaluations import ROW_SETTINGS, EpisodeLog, begin, frame, key, save_info

MAX_FAULT_FRAC = 0.02                                       # more infrastructure faults than this fail an evaluation
FEW_FAULTS = 10                                             # that many are waited for before an evaluation stops half-way
TEMPERATURE = 0.8                                           # AgentRL's evaluation, as are 20 turns and four seeds
MAX_TURNS = 20
EPISODE_S, CALL_S, STEP_S = 1800.0, 600.0, 120.0
REPORT_S = 10.0                                             # between two lines of progress


def evaluate(generator: Generator | Any, tasks: Sequence[str], seeds: Sequence[int] = (0, 1, 2, 3), *, tokenizer: Any = None,
             source: str = "generated", size: str = "small", rules: str | None = None, split: str = "test", path: str | None = None,
             instances: int | None = None, temperature: float = TEMPERATURE, max_tokens: int = 8192, max_turn_tokens: int = 1024,
             max_turns: int | None = MAX_TURNS, workers: int = 8, concurrency: int = 64, episode_s: float | None = EPISODE_S,
             call_s: float | None = CALL_S, step_s: float | None = STEP_S, out: str | Path | None = None,
             policy: Mapping[str, Any] | None = None, report: Callable[[str], Any] | None = None) -> pd.DataFrame:
    """Play every instance of `split` once per seed.

    Args:
        generator: takes tokens (`generate`), messages (`chat`: an endpoint) or looks at the environment (`act`: eval.policies).
        tokenizer: of a generator that takes tokens, or its ChatFormat.
        rules: "agentbench" or "strict"; None: agentbench for official instances, strict for generated ones.
        instances: only the first so many of each task; None plays all.
        temperature: at 0 all seeds play the same episodes.
        max_turns: turns of an episode; the environment's own limit holds where it is lower. The rows say which held (turn_limit).
        episode_s, call_s, step_s: bounds in seconds of an episode, one answer of the policy and one step of an environment; None: none.
            Past it the episode ends as an infrastructure fault: "episode time limit", "model call time limit", "environment error".
        out: folder for evaluation.json and episodes.jsonl; what it holds of this evaluation is not played again.
        policy: what the records say of it: name, and of a trained one run, method, train_seed, step (see eval.policies).
        report: gets a line of progress now and then, such as `print`.

    Returns:
        One row per episode, seeds outermost; each request's noise depends on (seed, task, instance, turn) alone.

    Raises:
        ValueError: an unknown task, no seeds, or a folder with another evaluation. envs.EnvFault: an environment cannot be made, or more
            than 2 % of the episodes failed by infrastructure; it names statuses and texts, and has the rows so far as `rows`.
    """
    settings = {"source": source, "size": size, "rules": rules or ("agentbench" if source == "official" else "strict"), "split": split,
                "path": path, "temperature": temperature, "max_tokens": max_tokens, "max_turn_tokens": max_turn_tokens,
                "max_turns": max_turns}
    if hasattr(generator, "generate") and tokenizer is None:
        raise ValueError(f"{type(generator).__name__} takes tokens; pass tokenizer=")
    policy = {"name": getattr(generator, "name", type(generator).__name__)} | dict(policy or {})
    bounds_s = (episode_s, call_s, step_s)
    with closing(_Plan(settings, tasks, seeds, instances)) as plan:
        if out is None:
            with EpisodeLog(None) as log:
                return _play_gaps(plan, log, generator, tokenizer, policy, workers, concurrency, bounds_s, report)
        folder = Path(out)
        info = begin(folder, policy, settings, plan.turn_limits)
        with EpisodeLog(folder / "episodes.jsonl") as log:  # evaluation.json too belongs to whoever holds the log
            save_info(folder, info)
            try:
                rows = _play_gaps(plan, log, generator, tokenizer, policy, workers, concurrency, bounds_s, report)
            except BaseException as error:
                stopped = isinstance(error, KeyboardInterrupt)
                save_info(folder, info | {"status": "stopped" if stopped else "failed", "error": f"{type(error).__name__}: {error}"})
                raise
            save_info(folder, info | {"status": "finished", "episodes": len(log.rows)})
    return rows


def evaluate_run(run_dir: str | Path, seeds: Sequence[int] = (0, 1, 2, 3), *, start: bool = False, instances: int | None = None,
                 workers: int | None = None, concurrency: int | None = None, episode_s: float | None = EPISODE_S,
                 call_s: float | None = CALL_S, step_s: float | None = STEP_S, report: Callable[[str], Any] | None = None,
                 **settings: Any) -> pd.DataFrame:
    """Evaluate a finished run's model (or, with `start`, the model it began from); each row goes to its eval.jsonl as it is played.

    Environment and rollout settings are the run's own unless given. What the run's records already hold under these settings is not
    played again. run.json, which says how the training went, stays as it is.
    """
    run = read_run(run_dir)
    config, step = run.config, 0 if start else int(run.steps["step"].max())
    own = {"temperature": config.validation.temperature, "max_turns": config.rollout.max_turns}
    settings = recipe_settings(config) | own | settings
    policy = {"name": run.path.name, "run": run.path.name, "method": config.method, "train_seed": config.seed, "step": step}

    def mine(row: Mapping[str, Any]) -> bool:
        return row["step"] == step and all(row.get(name) in (None, settings[name]) for name in ROW_SETTINGS)

    with closing(_Plan(settings, config.tasks, seeds, instances)) as plan, EpisodeLog(run.path / "eval.jsonl", mine) as log:
        if not plan.gaps(log):
            return plan.select(log.rows)
        model, tokenizer = load_policy(str(run.path / ("start" if start else "model")), config.model.dtype)
        concurrency = concurrency or config.rollout.concurrency
        generator = TransformersGenerator(model, step, max_active=concurrency)
        try:
            return _play_gaps(plan, log, generator, tokenizer, policy, workers or config.rollout.workers, concurrency,
                              (episode_s, call_s, step_s), report)
        finally:
            generator.close()


def recipe_settings(config: RunConfig, **changes: Any) -> dict[str, Any]:
    """A recipe's instances, rules and token limits, with the temperature and turns of an evaluation; `changes` that are None change
    nothing."""
    rollout, env = config.rollout, config.env
    own = {"source": env.source, "size": env.size, "rules": env.rules, "path": env.path, "split": "test", "temperature": TEMPERATURE,
           "max_tokens": rollout.max_tokens, "max_turn_tokens": rollout.max_turn_tokens, "max_turns": rollout.max_turns or MAX_TURNS}
    return own | {name: value for name, value in changes.items() if value is not None}


class _Plan:
    """Which episodes an evaluation has: every seed, task and instance, with an environment of each task to ask."""

    def __init__(self, settings: Mapping[str, Any], tasks: Sequence[str], seeds: Sequence[int], instances: int | None) -> None:
        tasks, seeds = list(dict.fromkeys(tasks)), list(dict.fromkeys(seeds))
        if not seeds or not tasks:
            raise ValueError(f"an evaluation needs seeds and tasks; got seeds {seeds}, tasks {tasks}")
        if instances is not None and instances < 1:
            raise ValueError(f"instances = {instances} would play nothing; give at least 1, or None for all")
        if settings["temperature"] == 0 and len(seeds) > 1:
            warnings.warn("temperature 0: seeds cannot differ by sampling; one seed says as much", stacklevel=3)
        self.settings, self.tasks = dict(settings), tasks
        self.envs: dict[str, Any] = {}
        try:
            for task in tasks:
                self.envs[task] = self.make(task)
        except BaseException:
            self.close()
            raise
        number = {task: len(env.instances) if instances is None else min(instances, len(env.instances)) for task, env in self.envs.items()}
        # Interleaved: long tasks beside short ones keep the batch full, and the progress speaks for all tasks.
        self.jobs = [Job(task, index, f"{task}/{index}/{seed}", seed) for seed in seeds
                     for index in range(max(number.values())) for task in tasks if index < number[task]]
        own = self.settings["max_turns"]
        self.turn_limits = {task: env.max_turns if own is None else min(own, env.max_turns) for task, env in self.envs.items()}

    def make(self, task: str) -> Any:
        names = ("source", "size", "split", "rules", "path")
        return envs.make(task, **{name: self.settings[name] for name in names})

    def key(self, job: Job) -> tuple[int, str, str]:
        return job.seed, job.task, self.envs[job.task].instances[job.index].id

    def gaps(self, log: EpisodeLog) -> list[Job]:
        done = set(map(key, log.rows))
        return [job for job in self.jobs if self.key(job) not in done]

    def select(self, rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
        """The rows that belong to this plan."""
        wanted = set(map(self.key, self.jobs))
        return frame(row for row in rows if key(row) in wanted)

    def close(self) -> None:
        for env in self.envs.values():
            env.close()


def _play_gaps(plan: _Plan, log: EpisodeLog, generator: Any, tokenizer: Any, policy: Mapping[str, Any], workers: int, concurrency: int,
               bounds_s: tuple[float | None, float | None, float | None], report: Callable[[str], Any] | None) -> pd.DataFrame:
    """Play what `log` lacks of `plan` and return all rows of it."""
    episode_s, call_s, step_s = bounds_s
    jobs, stop = plan.gaps(log), threading.Event()
    settings, chat = plan.settings, tokenizer
    if hasattr(generator, "generate") and not isinstance(tokenizer, ChatFormat):
        chat = ChatFormat(tokenizer)
    limits = RolloutLimits(settings["max_tokens"], settings["max_turn_tokens"], settings["max_turns"], settings["temperature"],
                           abnormal_reward=None, episode_s=episode_s, call_s=call_s)
    pool = EnvPool(lambda task: TimedEnv(lambda: plan.make(task), plan.envs[task], episode_s, step_s, stop))
    known = {"run": policy["name"], "train_seed": policy.get("train_seed")} | {name: settings[name] for name in ROW_SETTINGS}
    progress = _Progress(plan, log, len(jobs), report)

    def write(number: int, trajectory: Trajectory) -> None:
        if stop.is_set():
            return
        job = jobs[number]
        row = _row(trajectory, policy.get("step") or 0, settings["split"]) | known
        progress.count(log.append(row | {"eval_seed": job.seed, "index": job.index, "turn_limit": plan.turn_limits[job.task]}))

    try:
        if jobs:
            play(jobs, pool, generator, chat, limits, workers=workers, concurrency=concurrency, report=write, stop=stop)
        progress.tell()
        progress.judge(0)
    except envs.EnvFault as fault:
        fault.rows = plan.select(log.rows)
        raise
    finally:
        pool.close()
    return plan.select(log.rows)


def _row(trajectory: Trajectory, step: int, split: str) -> dict[str, Any]:
    """One line of episodes.jsonl. Of an endpoint's episode the token counts are the endpoint's; null where it reports none."""
    info = trajectory.info
    row = episode_row(trajectory, step, split) | {"seconds": round(info["seconds"], 3)}
    if "usage" in info:
        row |= {"tokens": info["tokens"], "served": info["served"]} | info["usage"]
    return row


class _Progress:
    """Counts rows by task, tells how far it is, and stops an evaluation that has too many faults to pass."""

    def __init__(self, plan: _Plan, log: EpisodeLog, waiting: int, report: Callable[[str], Any] | None) -> None:
        self.total, self.waiting, self.report = len(plan.jobs), waiting, report
        self.done, self.won, self.scored = 0, Counter(), Counter(dict.fromkeys(plan.tasks, 0))
        self.faults: list[dict[str, Any]] = []
        self.started = self.told = time.monotonic()
        self._lock = threading.Lock()
        wanted = set(map(plan.key, plan.jobs))
        for row in log.rows:
            if key(row) in wanted:
                self._add(row)

    def _add(self, row: Mapping[str, Any]) -> None:
        if row["status"] in FAULTS:
            self.faults.append(dict(row))
        else:
            self.scored[row["task"]] += 1
            self.won[row["task"]] += bool(row["success"])

    def count(self, row: Mapping[str, Any]) -> None:
        with self._lock:
            self.done += 1
            self._add(row)
            self.judge(FEW_FAULTS)
            if time.monotonic() - self.told > REPORT_S:
                self.tell()

    def judge(self, spared: int) -> None:
        """Raises envs.EnvFault where more than `spared` faults, and too many for the whole evaluation, have been met."""
        if len(self.faults) > max(spared, MAX_FAULT_FRAC * self.total):
            texts = sorted({f"{fault['task']}: {fault['status']}: {fault['error']}" for fault in self.faults})
            raise envs.EnvFault(f"{len(self.faults)} of {self.total} episodes failed by infrastructure, not by the policy "
                                f"(more than {MAX_FAULT_FRAC:.0%}): " + "; ".join(texts[:3]))

    def tell(self) -> None:
        if self.report is None:
            return
        self.told = time.monotonic()
        left = (self.told - self.started) / self.done * (self.waiting - self.done) if self.done else 0.0
        parts = [f"{task} {100 * self.won[task] / number:.1f}" if number else f"{task} n/a" for task, number in self.scored.items()]
        ending = f", {len(self.faults)} infrastructure faults" if self.faults else ""
        when = f"about {left / 60:.1f} min left" if self.done < self.waiting else f"{self.told - self.started:.0f} s"
        self.report(f"{self.total - self.waiting + self.done}/{self.total} episodes, {when}; success %: {', '.join(parts)}{ending}")
