"""The transfer benchmarks: which stock tasks of lm-eval they are, local files in place of the hub, and a perfect answer to each item.

A stock task is never changed. `local_tasks` writes YAMLs that include it and override its data source, for
`lm-eval run --include_path FOLDER --tasks NAME` just as for `eval.transfer`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

import yaml

from eppo.checks import check_name

LOCAL = Path(__file__).resolve().parent / "tasks"
SUBJECTS = ("biology", "business", "chemistry", "computer_science", "economics", "engineering", "health", "history", "law", "math",
            "other", "philosophy", "physics", "psychology")


@dataclass(frozen=True, slots=True)
class Stock:
    """A task of lm-eval that counts as one benchmark.

    `strict` and `flexible` are its two extractions as "metric,filter" (equal where it has one). `size` is the number of items of the
    whole benchmark. `answer` gives a text that every extraction must score 1 for. Items come from `split`; `shots_from` is another
    split that the task opens for its few-shot examples.
    """

    name: str
    column: str
    yaml: str
    local: str
    strict: str
    flexible: str
    size: int
    split: str
    answer: Callable[[Mapping[str, Any]], str]
    shots_from: str = ""
    subtasks: tuple[str, ...] = ()

    def limit(self, items: int | None) -> int | None:
        """Items of each subtask, for about `items` items in all; None: all."""
        return None if items is None else math.ceil(items / max(1, len(self.subtasks)))


def _aime(doc: Mapping[str, Any]) -> str:
    return rf"\boxed{{{next(doc[key] for key in doc if key.lower() == 'answer')}}}"


def _math(doc: Mapping[str, Any]) -> str:
    from lm_eval.tasks.hendrycks_math.utils import last_boxed_only_string, remove_boxed

    return f"Final Answer: The final answer is ${remove_boxed(last_boxed_only_string(doc['solution']))}$. I hope it is correct."


def _gsm8k(doc: Mapping[str, Any]) -> str:
    number = doc["answer"].rpartition("#### ")[2].strip()
    return f"The final answer is {number}. The answer is {number}.\n#### {number}"


def _choice(doc: Mapping[str, Any]) -> str:
    return f"The answer is ({doc['answer'].strip('()')})."


def _gsm8k_task(name: str, file: str) -> Stock:
    return Stock(name, "GSM8K", f"gsm8k/{file}.yaml", "gsm8k", "exact_match,strict-match", "exact_match,flexible-extract", 1319, "test",
                 _gsm8k, "train" if name in ("gsm8k", "gsm8k_cot_zeroshot") else "")


def _gpqa_task(kind: str, folder: str) -> Stock:
    return Stock(f"gpqa_main_{kind}", "GPQA", f"gpqa/{folder}/gpqa_main_{kind}.yaml", "gpqa", "exact_match,strict-match",
                 "exact_match,flexible-extract", 448, "train", _choice)


STOCK = {stock.name: stock for stock in (
    Stock("aime24", "AIME24", "aime/aime24.yaml", "aime24", "exact_match,none", "exact_match,none", 30, "train", _aime),
    Stock("aime25", "AIME25", "aime/aime25.yaml", "aime25", "exact_match,none", "exact_match,none", 30, "test", _aime),
    Stock("minerva_math500", "MATH500", "minerva_math/minerva_math500.yaml", "math500", "exact_match,none", "math_verify,none", 500,
          "test", _math),
    Stock("hendrycks_math500", "MATH500", "hendrycks_math/hendrycks_math500.yaml", "math500", "exact_match,none", "exact_match,none",
          500, "test", lambda doc: f"${doc['answer']}$"),
    _gsm8k_task("gsm8k", "gsm8k"), _gsm8k_task("gsm8k_cot", "gsm8k-cot"), _gsm8k_task("gsm8k_cot_zeroshot", "gsm8k-cot-zeroshot"),
    _gsm8k_task("gsm8k_cot_llama", "gsm8k-cot-llama"),
    Stock("mmlu_pro", "MMLU-Pro", "mmlu_pro/_mmlu_pro.yaml", "mmlu_pro", "exact_match,custom-extract", "exact_match,custom-extract",
          12032, "test", _choice, "validation", tuple(f"mmlu_pro_{subject}" for subject in SUBJECTS)),
    _gpqa_task("cot_zeroshot", "cot_zeroshot"), _gpqa_task("cot_n_shot", "cot_n_shot"),
    _gpqa_task("generative_n_shot", "generative"),
)}
# What a benchmark's own name stands for. The paper does not say which variants it used; see PAPER.md.
DEFAULT = {"aime24": "aime24", "aime25": "aime25", "math500": "minerva_math500", "gsm8k": "gsm8k", "mmlu_pro": "mmlu_pro",
           "gpqa": "gpqa_main_cot_zeroshot"}
# Stock tasks ask for columns under the names of their hub data set; a local file may spell them otherwise.
RENAME = {"aime24": {"problem": "Problem", "answer": "Answer"}}
GATED = "GPQA's data set is gated and no token is set: accept its terms on the hub and set HF_TOKEN"


def find_stock(name: str) -> Stock:
    """The stock task that a benchmark's name or a stock task's own name means.

    Raises:
        ValueError: neither; names the nearest.
    """
    return STOCK[DEFAULT.get(name) or check_name("transfer task", name, (*DEFAULT, *STOCK))]


def stock_folder() -> Path:
    """The folder of lm-eval's tasks.

    Raises:
        ModuleNotFoundError: lm-eval is not installed.
    """
    spec = find_spec("lm_eval")
    if spec is None:
        raise ModuleNotFoundError("the transfer benchmarks need lm-eval: pip install -e '.[eval]'")
    return Path(spec.submodule_search_locations[0]) / "tasks"


def source_files(stock: Stock, data: Path) -> dict[str, Path]:
    """Split -> local file of `stock` below `data`, those that are there."""
    found = {split: sorted(data.glob(pattern)) for split, pattern in _patterns(stock).items()}
    return {split: files[0].resolve() for split, files in found.items() if files}


def _patterns(stock: Stock) -> dict[str, str]:
    config = yaml.safe_load((LOCAL / f"{stock.local}.yaml").read_text(encoding="utf-8"))
    return {split: name.removeprefix("$data/") for split, name in config["dataset_kwargs"]["data_files"].items()}


def local_tasks(names: Sequence[str], data: str | Path, out: str | Path) -> dict[str, str]:
    """Write to `out` the YAMLs that make lm-eval read the tasks `names` from JSON lines files in the folder `data`.

    File names are those in eval/tasks (gsm8k_test*.jsonl and so on). A split that only few-shot examples need may be absent.

    Returns:
        Stock name -> why it cannot be read from `data`; nothing is written for these.
    """
    data, out = Path(data), Path(out)
    out.mkdir(parents=True, exist_ok=True)
    absent = {}
    for stock in map(find_stock, names):
        files = source_files(stock, data)
        if stock.split not in files:
            absent[stock.name] = f"no local file {_patterns(stock)[stock.split]}"
            for task in stock.subtasks or (stock.name,):
                (out / f"{task}.yaml").unlink(missing_ok=True)          # of an earlier call
            continue
        files = {split: _renamed(stock, file, out) for split, file in files.items()}
        if stock.shots_from:                                # opened even for 0 shots
            files.setdefault(stock.shots_from, files[stock.split])
        for task in stock.subtasks or (stock.name,):
            path = stock_folder() / stock.yaml
            text = Template((LOCAL / f"{stock.local}.yaml").read_text(encoding="utf-8")).safe_substitute(
                stock=path.with_name(f"{task}.yaml") if stock.subtasks else path, task=task)
            config = yaml.safe_load(text)
            config["dataset_kwargs"]["data_files"] = {split: str(file) for split, file in files.items()}
            (out / f"{task}.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return absent


def _renamed(stock: Stock, file: Path, out: Path) -> Path:
    """`file`, or a copy of it in `out` whose columns have the names that the stock task asks for."""
    names = RENAME.get(stock.name, {})
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()] if names else []
    if not any(set(names) & set(row) for row in rows):
        return file
    path = out / f"{stock.name}-renamed.jsonl"
    path.write_text("".join(json.dumps({names.get(key, key): value for key, value in row.items()}) + "\n" for row in rows),
                    encoding="utf-8")
    return path.resolve()


def few_shot_split_absent(stock: Stock, data: Path) -> bool:
    """Whether the split of the few-shot examples is missing from the local files, so that none can be given."""
    return bool(stock.shots_from) and stock.shots_from not in source_files(stock, data)


def source_digest(stock: Stock, data: Path) -> str:
    """SHA-256 over the local files of `stock`."""
    digest = hashlib.sha256()
    for _, file in sorted(source_files(stock, data).items()):
        digest.update(file.read_bytes())
    return digest.hexdigest()
