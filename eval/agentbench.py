"""Agent evaluation: every held-out instance once per seed, through the rollout code of training.

    rows = evaluate(generator, ["db", "os"], seeds=(0, 1, 2, 3), tokenizer=tokenizer, size="micro")
    rows = evaluate_run("results/runs/micro/eppo-s0-...")      # a finished run's model; rows are appended to its eval.jsonl

A row is one episode: run, task, seed, instance, success, score, reward, turns, tokens, status, seconds. Success and reward are the
environment's, before any training penalty; infrastructure faults have reward NaN and are counted beside the score.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

import envs
from eppo.chat import ChatFormat
from eppo.config import RunConfig
from eppo.generate import Generator, TransformersGenerator
from eppo.measure import episode_row
from eppo.policy import load_policy
from eppo.records import RunWriter, read_run
from eppo.rollouts import EnvPool, Job, RolloutLimits, run_jobs

MAX_FAULT_FRAC = 0.02                                       # more infrastructure faults than this fail an evaluation
TEMPERATURE = 0.8                                           # AgentRL's evaluation


def evaluate(generator: Generator, tasks: Sequence[str], seeds: Sequence[int] = (0, 1, 2, 3), *, tokenizer: Any,
             source: str = "generated", size: str = "small", rules: str | None = None, split: str = "test", path: str | None = None,
             instances: int | None = None, temperature: float = TEMPERATURE, max_tokens: int = 8192, max_turn_tokens: int = 1024,
             max_turns: int | None = None, workers: int = 8, concurrency: int = 64) -> pd.DataFrame:
    """Play every instance of `split` once per seed.

    Args:
        tokenizer: the policy's tokenizer, or its ChatFormat.
        rules: "agentbench" or "strict"; None: agentbench for official instances, strict for generated ones.
        instances: only the first so many of each task; None plays all.
        temperature: at 0 all seeds play the same episodes.

    Returns:
        One row per episode, seeds outermost; each request's noise depends on (seed, task, instance, turn) alone.

    Raises:
        ValueError: an unknown task. envs.EnvFault: more than 2 % of the episodes failed by infrastructure; names statuses and texts.
    """
    chat = tokenizer if isinstance(tokenizer, ChatFormat) else ChatFormat(tokenizer)
    rules = rules or ("agentbench" if source == "official" else "strict")
    pool = EnvPool(lambda task: envs.make(task, source=source, size=size, split=split, rules=rules, path=path))
    limits = RolloutLimits(max_tokens, max_turn_tokens, max_turns, temperature, abnormal_reward=None)
    try:
        jobs = []
        for seed in seeds:
            for task in tasks:
                env = pool.take(task)
                pool.give_back(env)
                number = len(env.instances) if instances is None else min(instances, len(env.instances))
                jobs += [Job(task, index, f"{task}/{index}/{seed}", seed) for index in range(number)]
        episodes = run_jobs(jobs, pool, generator, chat, limits, workers=workers, concurrency=concurrency)
    finally:
        pool.close()
    faults = [episode for episode in episodes if episode.reward != episode.reward]
    if len(faults) > MAX_FAULT_FRAC * len(episodes):
        texts = sorted({f"{episode.task}: {episode.status}: {episode.info.get('error')}" for episode in faults})
        raise envs.EnvFault(f"{len(faults)} of {len(episodes)} episodes failed by infrastructure, not by the policy: "
                            + "; ".join(texts[:3]))
    rows = [{**episode_row(episode, 0, split), "rules": rules, "temperature": temperature} for episode in episodes]
    return pd.DataFrame(rows).drop(columns="step")


def evaluate_run(run_dir: str | Path, seeds: Sequence[int] = (0, 1, 2, 3), *, start: bool = False, **settings: Any) -> pd.DataFrame:
    """Evaluate a finished run's model (or, with `start`, the model it began from) and append the rows to its eval.jsonl.

    Environment and rollout settings are the run's own unless given. What the run's records already hold is not played again.
    """
    run = read_run(run_dir)
    config, step = run.config, 0 if start else int(run.steps["step"].max())
    done = run.eval[(run.eval["split"] == settings.get("split", "test")) & (run.eval["step"] == step)] if len(run.eval) else run.eval
    left = [seed for seed in seeds if not len(done) or seed not in set(done["seed"])]
    if left:
        folder = Path(run_dir) / ("start" if start else "model")
        model, tokenizer = load_policy(str(folder), config.model.dtype)
        generator = TransformersGenerator(model, step, max_active=config.rollout.concurrency)
        rows = evaluate(generator, config.tasks, left, tokenizer=tokenizer, **(_settings(config) | settings))
        generator.close()
        with RunWriter(run_dir, config, resume=True) as writer:
            writer.write_eval(step, rows.to_dict("records"))
    rows = read_run(run_dir).eval
    return rows[(rows["split"] == settings.get("split", "test")) & (rows["step"] == step)].reset_index(drop=True)


def _settings(config: RunConfig) -> dict[str, Any]:
    rollout, env = config.rollout, config.env
    return {"source": env.source, "size": env.size, "rules": env.rules, "path": env.path, "temperature": config.validation.temperature,
            "max_tokens": rollout.max_tokens, "max_turn_tokens": rollout.max_turn_tokens, "max_turns": rollout.max_turns,
            "workers": rollout.workers, "concurrency": rollout.concurrency}
