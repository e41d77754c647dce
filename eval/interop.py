"""An evaluation for other tools: lm-eval's results, Inspect's logs, metadata of a Hugging Face model card.

    write_all(read_evaluation(folder), folder)       # results_lm_eval.json, model_card.md, and inspect/<task>.eval where inspect_ai is
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pandas as pd

from eval.evaluations import Evaluation
from eval.runs import task_label, write_json
from eval.tables import FAULTS

METRICS = ("success", "score")


def write_all(evaluation: Evaluation, folder: str | Path) -> list[str]:
    """Write every form that is possible here; returns a line per form: its files, or why there is none."""
    folder = Path(folder)
    write_json(folder / "results_lm_eval.json", lm_eval_results(evaluation))
    model_card(evaluation).save(folder / "model_card.md")
    lines = [f"lm-eval: {folder / 'results_lm_eval.json'}", f"model card: {folder / 'model_card.md'}"]
    if importlib.util.find_spec("inspect_ai") is None:
        return [*lines, "Inspect: inspect_ai is not installed (pip install -e '.[inspect]')"]
    return [*lines, *(f"Inspect: {path}" for path in inspect_logs(evaluation, folder / "inspect"))]


def _counted(evaluation: Evaluation) -> pd.DataFrame:
    return evaluation.eval[~evaluation.eval["status"].isin(FAULTS)]


def _known(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The rows that have the metric, as floats: an episode that a turn limit of ours ended has no score."""
    return rows[rows[metric].notna()].astype({metric: float})


def _cluster_stderr(rows: pd.DataFrame, column: str) -> float | str:
    """Standard error of the mean with instances as clusters: seeds of one instance are no independent evidence. "N/A" below two."""
    means = rows.groupby("instance")[column].mean()
    return float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else "N/A"


# ---- lm-eval ----------------------------------------------------------------------------------------------------------
def lm_eval_results(evaluation: Evaluation) -> dict[str, Any]:
    """The dict that lm-eval's tools read (`make_table`, result viewers): fractions, a task agentbench_<id> each, and their group.

    It carries no lm_eval_version, because that harness did not play the episodes.
    """
    rows, policy, settings = _counted(evaluation), evaluation.policy, evaluation.settings
    results, samples, configs, hashes = {}, {}, {}, {}
    for task, part in rows.groupby("task", sort=True):
        name = f"agentbench_{task}"
        results[name] = {"alias": task_label(str(task))}
        for metric in METRICS:
            known = _known(part, metric)
            results[name] |= {f"{metric},none": float(known[metric].mean()) if len(known) else "N/A",
                              f"{metric}_stderr,none": _cluster_stderr(known, metric)}
        ids = sorted(part["instance"].unique())
        samples[name] = {"original": len(ids), "effective": len(part)}
        hashes[name] = hashlib.sha256("\n".join(ids).encode()).hexdigest()
        configs[name] = {"task": name, "output_type": "generate_until", "repeats": int(part["eval_seed"].nunique()), "num_fewshot": 0,
                         "generation_kwargs": {"temperature": settings["temperature"], "do_sample": settings["temperature"] > 0,
                                               "max_gen_toks": settings["max_turn_tokens"]},
                         "metadata": {"version": 1.0, "turn_limit": evaluation.info["turn_limits"][task],
                                      **{key: settings[key] for key in ("source", "size", "rules", "split")}}}
    group: dict[str, Any] = {"alias": "agentbench"}
    for metric in METRICS:
        means = [one[f"{metric},none"] for one in results.values()]
        group |= {f"{metric},none": "N/A" if "N/A" in means else sum(means) / len(means), f"{metric}_stderr,none": "N/A"}
    return {"results": results | {"agentbench": group}, "groups": {"agentbench": group}, "group_subtasks": {"agentbench": list(results)},
            "configs": configs, "versions": dict.fromkeys(results, 1.0), "n-shot": dict.fromkeys(results, 0),
            "higher_is_better": {name: {"success": True, "score": True} for name in results}, "n-samples": samples, "task_hashes": hashes,
            "config": {"model": policy.get("kind"), "model_args": {"pretrained": policy.get("model", policy["name"])}, "batch_size": None,
                       "random_seed": None, "eval_seeds": sorted(map(int, rows["eval_seed"].unique()))},
            "git_hash": evaluation.info.get("commit"), "date": _started(evaluation).timestamp(), "model_name": policy["name"],
            "model_source": policy.get("kind"), "chat_template": None, "infrastructure_faults": len(evaluation.eval) - len(rows)}


def _started(evaluation: Evaluation) -> datetime:
    return datetime.fromisoformat(evaluation.info["started"]).astimezone(timezone.utc)


# ---- Inspect ----------------------------------------------------------------------------------------------------------
def inspect_logs(evaluation: Evaluation, folder: str | Path) -> list[Path]:
    """Write <folder>/<task>.eval for `inspect view`: a sample per instance and an epoch per seed; faults are samples with an error.

    Raises:
        ImportError: inspect_ai is not installed; says how to install it.
    """
    try:
        from inspect_ai.log import write_eval_log
    except ImportError as error:
        raise ImportError(f"inspect_ai is not installed; pip install -e '.[inspect]' brings it ({error})") from error
    folder, written = Path(folder), []
    folder.mkdir(parents=True, exist_ok=True)
    for task, rows in evaluation.eval.groupby("task", sort=True):
        written.append(folder / f"{task}.eval")
        write_eval_log(_inspect_log(evaluation, str(task), rows), str(written[-1]), format="eval")
    return written


def _inspect_log(evaluation: Evaluation, task: str, rows: pd.DataFrame) -> Any:
    from inspect_ai.log import (EvalConfig, EvalDataset, EvalLog, EvalMetric, EvalResults, EvalSample, EvalScore, EvalSpec, EvalStats)
    from inspect_ai.model import GenerateConfig
    from inspect_ai.scorer import Score

    settings, info = evaluation.settings, evaluation.info
    seeds = {seed: epoch for epoch, seed in enumerate(sorted(rows["eval_seed"].unique()), start=1)}
    counted = rows[~rows["status"].isin(FAULTS)]
    started = _started(evaluation).isoformat()
    samples = [EvalSample(id=row["instance"], epoch=seeds[row["eval_seed"]], input=f"{task_label(task)}, {row['kind']}", target="",
                          scores=None if row["status"] in FAULTS else
                          {metric: Score(value=float(row[metric]), explanation=row["status"])
                           for metric in METRICS if pd.notna(row[metric])},
                          error=_inspect_error(row) if row["status"] in FAULTS else None, total_time=row["seconds"],
                          turn_count=int(row["turns"]), metadata=json.loads(pd.Series(row).to_json()))
               for row in rows.to_dict("records")]
    scores = []
    for metric in METRICS:
        known = _known(counted, metric)
        if known.empty:
            continue
        stderr = _cluster_stderr(known, metric)
        metrics = {"mean": EvalMetric(name="mean", value=float(known[metric].mean()))}
        metrics |= {} if stderr == "N/A" else {"stderr": EvalMetric(name="stderr", value=stderr)}
        scores.append(EvalScore(name=metric, scorer=metric, scored_samples=len(known), unscored_samples=len(rows) - len(known),
                                metrics=metrics))
    ids = sorted(rows["instance"].unique())
    spec = EvalSpec(created=started, task=f"agentbench_{task}",
                    task_args={key: settings[key] for key in ("source", "size", "rules", "split")},
                    dataset=EvalDataset(name=f"{settings['source']}-{task}-{settings['split']}", samples=len(ids), sample_ids=ids),
                    model=evaluation.policy["name"], config=EvalConfig(epochs=len(seeds), turn_limit=info["turn_limits"][task]),
                    model_generate_config=GenerateConfig(temperature=settings["temperature"], max_tokens=settings["max_turn_tokens"]),
                    metadata={"policy": evaluation.policy, "eval_seeds": [int(seed) for seed in seeds], "commit": info.get("commit")})
    return EvalLog(status="success" if info["status"] == "finished" else "started", eval=spec, samples=samples,
                   results=EvalResults(total_samples=len(rows), completed_samples=len(counted), scores=scores),
                   stats=EvalStats(started_at=started, completed_at=started))


def _inspect_error(row: dict[str, Any]) -> Any:
    from inspect_ai.log import EvalError

    text = f"{row['status']}: {row['error']}"
    return EvalError(message=text, traceback=text, traceback_ansi=text)


# ---- Hugging Face -----------------------------------------------------------------------------------------------------
def model_card_data(evaluation: Evaluation) -> Any:
    """`ModelCardData` whose model-index has, per task, the success rate over all seeds and the mean score, in percent."""
    from huggingface_hub import EvalResult, ModelCardData

    rows, settings, policy = _counted(evaluation), evaluation.settings, evaluation.policy
    found = []
    for task, part in rows.groupby("task", sort=True):
        for metric, name in zip(METRICS, ("Success rate", "Score")):
            known = _known(part, metric)
            if known.empty:
                continue
            found.append(EvalResult(
                task_type="text-generation", task_name="Multi-turn agent", dataset_type=f"agentbench-{task}-{settings['source']}",
                dataset_name=f"AgentBench {task_label(str(task))} ({settings['source']}"
                             + (f", {settings['size']})" if settings["source"] == "generated" else ")"),
                dataset_split=settings["split"],
                dataset_args={"rules": settings["rules"], "turn_limit": evaluation.info["turn_limits"][task],
                              "temperature": settings["temperature"], "seeds": sorted(map(int, part["eval_seed"].unique()))},
                metric_type=metric, metric_name=name, metric_value=round(100 * float(known[metric].mean()), 4)))
    base = policy.get("model") if policy.get("model") not in (None, "micro") and policy.get("method") else None
    return ModelCardData(model_name=policy["name"], eval_results=found, library_name="transformers", base_model=base,
                         tags=["agent", "tool-use", *(["reinforcement-learning"] if policy.get("method") not in (None, "start") else [])])


def model_card(evaluation: Evaluation) -> Any:
    """A `ModelCard` that holds this metadata and says under which settings the numbers were found."""
    from huggingface_hub import ModelCard

    settings = "\n".join(f"- {name}: {value}" for name, value in sorted(evaluation.settings.items()) if name != "path")
    front = model_card_data(evaluation).to_yaml()
    return ModelCard(f"---\n{front}\n---\n\n# {evaluation.policy['name']}\n\nEvaluated under:\n\n{settings}\n")
