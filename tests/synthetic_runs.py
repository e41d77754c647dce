"""Records as a training run writes them, made up: entropies that decay like a - b ln t, with noise, on the paper's tasks."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd

TASKS = ("alfworld", "db", "kg", "os", "webshop")
START = {"alfworld": 0.62, "db": 0.95, "kg": 0.80, "os": 0.70, "webshop": 0.45}
SKILL = {"alfworld": 0.7, "db": 0.55, "kg": 0.3, "os": 0.45, "webshop": 0.6}


def synthetic_run(method="eppo", seed=0, steps=100, tasks=TASKS, noise=0.02, clip=0.03, evaluated=40, commit="0123abc"):
    """A stand-in for eppo.records.Run with the metrics that tables and figures read."""
    rng = np.random.default_rng([sum(map(ord, method)), seed])
    t = np.arange(1, steps + 1)
    columns = {"step": t}
    for number, task in enumerate(tasks):
        start, skill = START.get(task, 0.5), SKILL.get(task, 0.5)
        collapse = 0.16 if method == "eppo" else 0.10 + 0.05 * number
        spike = 0 if method == "eppo" else 0.15 * np.exp(-((t - steps * (0.75 + 0.04 * number)) / 3.0) ** 2)
        falling = start * (1 - collapse * np.log(t)) + spike + rng.normal(0, noise, steps)
        columns[f"task/{task}/entropy"] = np.maximum(0.03, falling)
        columns[f"task/{task}/entropy_se"] = np.full(steps, noise)
        columns[f"task/{task}/success"] = np.clip(skill * t / steps + rng.normal(0, 0.05, steps), 0, 1)
        columns[f"task/{task}/clip_frac"] = np.abs(rng.normal(clip, clip / 4, steps))
        z = np.cumsum(rng.normal(0, 0.25, steps)) * 0.3
        eps = np.clip(0.2 * (1 - 0.4 * z), 0.15, 0.30) if method.startswith("eppo") else np.full(steps, 0.2)
        columns |= {f"task/{task}/hi": 1 + eps, f"pacer/{task}/z": z, f"pacer/{task}/eps": eps}
        played = rng.binomial(16, np.clip(skill * (0.3 + 0.9 * t / steps), 0, 1)) / 16
        columns[f"val/{task}/success"] = np.where((t % 10 == 0) | (t == 1), played, np.nan)
    rows = [{"step": step, "split": "test", "task": task, "instance": f"{task}-{index}", "status": "completed", "seed": 0,
             "success": bool(rng.random() < SKILL.get(task, 0.5) * (0.5 if step == 0 else 1.0)), "reward": 0.0}
            for step in (0, steps) for task in tasks for index in range(evaluated)]
    config = {"method": method, "seed": seed, "steps": steps, "tasks": list(tasks), "recipe": "micro", "algorithm": {},
              "model": {"path": "micro"}, "env": {"rules": "strict"}, "validation": {"instances": 16}}
    info = {"config": config, "commit": commit, "dirty": False, "status": "finished"}
    return SimpleNamespace(path=Path(f"{method}-s{seed}-{commit}"), steps=pd.DataFrame(columns), episodes=pd.DataFrame(), gaps=[],
                           eval=pd.DataFrame(rows), info=info)
