"""Thirty steps of forty episodes with every method and control on the micro recipe; a markdown table of what came out.

    python tests/benchmarks/methods_30_steps.py                          # all of them, about a minute each on one core
    python tests/benchmarks/methods_30_steps.py gspo seal --out FOLDER   # some
    python tests/benchmarks/methods_30_steps.py --table                  # only the table, of the runs that there are

One prompt of each of the five tasks a step, eight episodes a prompt, 16 dev instances a task before and after, one seed. It looks
for what breaks, and says nothing about which method is better: with 16 x 5 validation episodes the standard error is 5 points.
What is finished is skipped, what was interrupted goes on. Arms that replay a schedule get the run of eppo with seed 1, which is
made first.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any, Iterable

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pandas as pd  # noqa: E402

from eppo.algorithms import ALGORITHMS  # noqa: E402
from eppo.checks import check_name  # noqa: E402
from eppo.config import ROOT, RunConfig, load_recipe  # noqa: E402
from eppo.records import Run, read_run  # noqa: E402
from eppo.trainer import train  # noqa: E402

STEPS, EDGE = 30, 5                                         # EDGE: steps at either end over which a column is averaged
SIZE = {"rollout.prompts_per_task": 1, "rollout.group_size": 8, "validation.instances": 16, "validate_every": STEPS,
        "checkpoint_every": 10}
SCHEDULED = ("c1_per_task", "c4_yoked")
ANSWERS = ("FloatingPointError",)                           # ends that say something about the method; any other run goes on
JUMP_NATS, FALL, BIG_NORM, BIG_RATIO = 0.1, 0.05, 20.0, 100.0


def config_of(method: str, folder: Path, seed: int = 0) -> RunConfig:
    """The run's configuration; its folder is `folder`/<method>-s<seed>."""
    source = {"algorithm.schedule_from": str(folder / "eppo-s1")} if method in SCHEDULED else {}
    limit = {"algorithm.max_tokens": load_recipe("micro").rollout.max_tokens} if method == "dr_grpo" else {}
    return load_recipe("micro", method=method, seed=seed, steps=STEPS, out=str(folder / f"{method}-s{seed}"),
                       **SIZE, **source, **limit)


def make(method: str, folder: Path, seed: int = 0) -> str:
    """Train unless that is done; how the run ended. A run that diverges is an answer too: its record says why."""
    config = config_of(method, folder, seed)
    path = config.run_dir()
    info = read_run(path).info if (path / "run.json").exists() else {"status": "none", "error": None}
    if info["status"] == "finished" or str(info["error"]).startswith(ANSWERS):
        return "there"
    started = time.perf_counter()
    try:
        for _ in train(config, resume=any((path / "checkpoints").glob("step-*.pt"))):
            pass
    except FloatingPointError as error:
        return f"FAILED: {error}"
    return f"{time.perf_counter() - started:.0f} s"


def mean_over_tasks(run: Run, key: str) -> pd.Series:
    """task/<id>/`key`, averaged over tasks, per training step."""
    rows = run.steps[run.steps["step"] > 0]
    return rows[[f"task/{task}/{key}" for task in run.info["config"]["tasks"]]].mean(axis=1)


def summary(run: Run) -> dict[str, Any]:
    """One row of the table."""
    rows = run.steps[run.steps["step"] > 0]
    success, entropy = mean_over_tasks(run, "success"), mean_over_tasks(run, "entropy")
    validation = run.steps["val/success"].dropna() if "val/success" in run.steps else pd.Series(dtype=float)
    ends = [validation.iloc[0], validation.iloc[-1]] if len(validation) > 1 else [float("nan")] * 2
    return {"method": run.info["config"]["method"], "success": pair(success, 100, 1),
            "val": "{:.1f} {:.1f}".format(*(100 * end for end in ends)), "entropy": pair(entropy, 1, 3),
            "clip %": f"{100 * rows['loss/clip_frac'].mean():.2f}",
            "grad norm": f"{rows['loss/grad_norm'].mean():.2f} ({rows['loss/grad_norm'].max():.1f})",
            "ratio max": f"{rows['loss/ratio_max'].max():.1f}", "s/step": f"{rows['perf/step_s'].median():.2f}",
            "what went wrong": "; ".join(findings(run, success, entropy, ends)) or "-"}


def pair(values: pd.Series, scale: float, digits: int) -> str:
    """Means of the first and the last EDGE steps."""
    return f"{scale * values.iloc[:EDGE].mean():.{digits}f} {scale * values.iloc[-EDGE:].mean():.{digits}f}"


def findings(run: Run, success: pd.Series, entropy: pd.Series, ends: list[float]) -> Iterable[str]:
    """What a reader should look at: how it ended, its warnings, and what moved the wrong way."""
    rows = run.steps[run.steps["step"] > 0]
    if run.info["status"] != "finished":
        yield f"{run.info['status']} after step {rows['step'].max()}: {run.info['error']}"
    if ends[1] < ends[0] - FALL:
        yield f"validation fell by {100 * (ends[0] - ends[1]):.1f} points"
    if entropy.iloc[-EDGE:].mean() > entropy.iloc[:EDGE].mean() + JUMP_NATS:
        yield f"entropy rose by {entropy.iloc[-EDGE:].mean() - entropy.iloc[:EDGE].mean():.2f} nats"
    if rows["loss/grad_norm"].max() > BIG_NORM:
        yield f"gradient norm up to {rows['loss/grad_norm'].max():.0f}"
    if rows["loss/ratio_max"].max() > BIG_RATIO:
        yield f"ratio up to {rows['loss/ratio_max'].max():.3g}"
    generated = [name for name in rows if name.startswith("sampling/") and name.endswith("/generated")]
    if generated:
        kept = [name.replace("/generated", "/kept") for name in generated]
        yield f"{rows[generated].sum(axis=1).mean():.1f} groups rolled out a step for {rows[kept].sum(axis=1).mean():.1f} kept"
    yield from run.info["warnings"]


def table(methods: Iterable[str], folder: Path) -> str:
    """The runs that there are, in the given order, as markdown; numbers in pairs are first and last."""
    runs = [read_run(path) for method in methods if ((path := folder / f"{method}-s0") / "run.json").exists()]
    rows = [summary(run) for run in runs if len(run.steps) > 1]
    return pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True) if rows else "no runs yet"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("methods", nargs="*", help="all where none is named")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "runs" / "methods_30_steps")
    parser.add_argument("--table", action="store_true", help="train nothing")
    options = parser.parse_args()
    methods = [check_name("method", name, tuple(ALGORITHMS)) for name in options.methods or ALGORITHMS]
    if not options.table:
        if set(methods) & set(SCHEDULED):
            print("eppo, seed 1:", make("eppo", options.out, seed=1), flush=True)
        for method in methods:
            print(f"{method}: {make(method, options.out)}", flush=True)
    print(table(methods, options.out))


if __name__ == "__main__":
    main()
