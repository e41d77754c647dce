"""Records of a transfer evaluation: a folder with lm-eval's whole results, and the rows that tables are made from.

    <folder>/transfer.json               which passes were asked for, what was skipped and why, the canary's scores
    <folder>/passes/<pass>.json          lm-eval's result without samples, and under "eppo" what it does not record itself
    <folder>/passes/<pass>.samples.jsonl lm-eval's samples, one per item and extraction, each with what was cut
    <folder>/tasks/                      the YAMLs that put local files in place of the hub
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from eval.runs import write_json
from eval.transfer_tasks import STOCK, find_stock

SCHEMA = 1
MARKS = ("truncated", "prompt_cut", "prompt_tokens", "seed")


def describe(model: Any, backend: str, model_args: Mapping[str, Any] | None, label: str | None = None) -> dict[str, Any]:
    """Who is evaluated: label, backend and arguments, fingerprint of a local folder; run, method and training seed of a run's model.

    Raises:
        ValueError: `model` is a Path, and no folder is there.
    """
    if isinstance(model, Path) and not model.is_dir():
        raise ValueError(f"{model} does not exist; make reproduce, or notebooks/run.py train with this recipe, makes such a model; or name "
                         "another one")
    name = model if isinstance(model, (str, Path)) else type(model).__name__
    folder = Path(name)
    plain = {key: value if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__
             for key, value in (model_args or {}).items()}
    about = {"label": label or folder.name, "model": str(name), "backend": backend, "model_args": plain}
    about |= dict.fromkeys(("fingerprint", "run", "method", "train_seed", "backbone"))
    if not isinstance(model, (str, Path)):
        about["fingerprint"] = uuid.uuid4().hex             # nobody knows what an object answers: never taken for one met before
    if folder.is_dir():
        files = sorted(path for path in folder.iterdir() if path.is_file())
        state = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        about["fingerprint"] = _digest(state)
        if (folder.parent / "run.json").is_file():
            config = json.loads((folder.parent / "run.json").read_text(encoding="utf-8"))["config"]
            about |= {"run": folder.parent.name, "method": "start" if folder.name == "start" else config["method"],
                      "train_seed": config["seed"], "backbone": config["model"]["path"]}
            about["label"] = label or (folder.parent.name + ("-start" if folder.name == "start" else ""))
    return about


@dataclass(frozen=True)
class Pass:
    """One benchmark under one seed and repeat, named by everything that it depends on: another setting is another file."""

    folder: Path
    key: dict[str, Any]

    @property
    def path(self) -> Path:
        return self.folder / "passes" / f"{self.key['stock']}-s{self.key['seed']}-r{self.key['repeat']}-{_digest(self.key)[:8]}.json"

    def done(self) -> bool:
        return self.path.exists()

    def write(self, results: dict[str, Any], more: dict[str, Any]) -> None:
        """Samples first, the result last and in one go: what is there is whole."""
        from lm_eval.utils import handle_non_serializable

        self.path.parent.mkdir(parents=True, exist_ok=True)
        template = more["chat_template"]
        with self.path.with_suffix(".samples.jsonl").open("w", encoding="utf-8") as file:
            for task, samples in results["samples"].items():
                for sample in samples:
                    row = {"task": task} | sample | {"eppo": more["marks"].get((task, sample["doc_id"]), {})}
                    file.write(json.dumps(row, default=handle_non_serializable) + "\n")
        whole = {name: value for name, value in results.items() if name != "samples"}
        whole["eppo"] = {"schema": SCHEMA, "key": self.key, "chat_template": template,
                         "chat_template_sha256": template and hashlib.sha256(template.encode()).hexdigest()}
        partial = self.path.with_suffix(".part")
        partial.write_text(json.dumps(whole, indent=1, default=handle_non_serializable), encoding="utf-8")
        partial.replace(self.path)

    def headline(self) -> str:
        """Both extractions' scores, such as "strict 0.310, flexible 0.340"."""
        stock = find_stock(self.key["stock"])
        scores = json.loads(self.path.read_text(encoding="utf-8"))["results"][stock.name]
        return ", ".join(f"{name} {scores[key]:.3f}" for name, key in (("strict", stock.strict), ("flexible", stock.flexible)))


def write_index(folder: Path, passes: Sequence[Pass], *, skipped: Mapping[str, str], notes: Sequence[str],
                canary: Mapping[str, Any]) -> None:
    """Write transfer.json: what was asked for last."""
    write_json(folder / "transfer.json", {
        "schema": SCHEMA, "model": passes[0].key["model"], "setting": passes[0].key["setting"], "versions": passes[0].key["versions"],
        "seeds": sorted({one.key["seed"] for one in passes}), "skipped": dict(skipped), "notes": list(notes), "canary": dict(canary),
        "passes": [str(one.path.relative_to(folder)) for one in passes]})


def read_transfer(folder: str | Path) -> pd.DataFrame:
    """The rows of the evaluation that the records in `folder` describe.

    Returns:
        One row per item, seed and repeat: label, run, method, backbone, train_seed; benchmark (column of the table), stock, task, item;
        eval_seed, repeat; strict, flexible (bool: right under that extraction; equal where the task has one); truncated (the text ended
        at the limit of new tokens), prompt_cut (the prompt lost its beginning), None where the model does not tell; few_shot.
        `.attrs["transfer"]` is the index with one entry of "passes" per pass: few-shot counts, generation settings, task versions.

    Raises:
        ValueError: no record there, or one of another schema.
    """
    folder = Path(folder)
    if not (folder / "transfer.json").is_file():
        raise ValueError(f"no transfer.json in {folder}; evaluate_transfer writes it")
    index = json.loads((folder / "transfer.json").read_text(encoding="utf-8"))
    if index["schema"] != SCHEMA:
        raise ValueError(f"{folder}: records of schema {index['schema']}, this reads {SCHEMA}")
    rows, passes = [], []
    for name in index["passes"]:
        whole = json.loads((folder / name).read_text(encoding="utf-8"))
        key, stock = whole["eppo"]["key"], STOCK[whole["eppo"]["key"]["stock"]]
        first = (stock.subtasks or (stock.name,))[0]
        config = whole["configs"][first]
        passes.append({"file": name, "stock": stock.name, "few_shot": whole["n-shot"][first], "version": whole["versions"][first],
                       "generation": config["generation_kwargs"], "dataset": config["dataset_path"], "data": key["data"],
                       "zero_shot": key["zero_shot"], "chat_template_sha256": whole["eppo"]["chat_template_sha256"],
                       "n": sum(whole["n-samples"][task]["effective"] for task in stock.subtasks or (stock.name,))})
        rows += _rows((folder / name).with_suffix(".samples.jsonl"), key, whole["n-shot"][first])
    frame = pd.DataFrame(rows)
    frame.attrs["transfer"] = index | {"passes": passes}
    return frame


def _rows(path: Path, key: Mapping[str, Any], few_shot: int) -> list[dict[str, Any]]:
    stock, items = STOCK[key["stock"]], {}
    who = {name: key["model"][name] for name in ("label", "run", "method", "backbone", "train_seed")}
    for line in path.read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        row = items.setdefault((sample["task"], sample["doc_id"]), who | {
            "benchmark": stock.column, "stock": stock.name, "task": sample["task"], "item": sample["doc_id"], "eval_seed": key["seed"],
            "repeat": key["repeat"], **{mark: sample["eppo"].get(mark) for mark in MARKS}, "few_shot": few_shot})
        for extraction in ("strict", "flexible"):
            metric, name = getattr(stock, extraction).split(",")
            if sample["filter"] == name:
                row[extraction] = bool(sample[metric])
    return list(items.values())


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
