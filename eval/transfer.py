"""Transfer to reasoning benchmarks: lm-eval's stock tasks, unmodified, on a checkpoint, a hub id or an endpoint (the paper's Table 3).

    rows = evaluate_transfer("results/runs/micro/eppo-s0-.../model", items=50, max_new_tokens=32)
    rows = evaluate_transfer("Qwen/Qwen2.5-3B-Instruct", backend="vllm", seeds=(0, 1, 2, 3), temperature=0.7, aime_samples=8)

A pass is one benchmark under one seed and repeat. It is one call of `lm_eval.simple_evaluate`, whose whole result is kept
(eval/transfer_records.py); a pass that is there already is not repeated. Before the model is asked anything, a canary that answers
perfectly must score 1.0 on every task, and one that answers nothing 0.
"""

from __future__ import annotations

import io
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import datasets
import pandas as pd
import torch
from torch.utils import collect_env

from eppo.policy import load_tokenizer
from eval.runs import ROOT
from eval.transfer_records import Pass, describe, read_transfer, write_index
from eval.transfer_tasks import DEFAULT, GATED, Stock, few_shot_split_absent, find_stock, local_tasks, source_digest, stock_folder

HARNESS_SEEDS = {"random_seed": 0, "numpy_random_seed": 1234, "torch_random_seed": 1234, "fewshot_random_seed": 1234}     # its own defaults


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a pass depends on besides model, benchmark, seed and repeat; all of it is in the record."""

    items: int | None = None
    few_shot: int | Mapping[str, int] | None = None
    chat_template: bool = True
    system: str | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sampled(self) -> bool:
        return bool(self.generation.get("temperature"))

    def shots(self, stock: Stock) -> int | None:
        """Few-shot examples asked of lm-eval; None: the stock task's own number."""
        return self.few_shot.get(stock.name) if isinstance(self.few_shot, Mapping) else self.few_shot


@dataclass(frozen=True)
class Found:
    """Stock tasks as lm-eval finds them: those that can be read, with the digest of their local files (None: hub), and why others not.

    `zero_shot`: tasks whose few-shot examples are in a split that the local files lack, so that none can be given.
    """

    manager: Any
    ready: dict[str, str | None]
    skipped: dict[str, str]
    zero_shot: frozenset[str]


def evaluate_transfer(model: Any, tasks: Sequence[str] = tuple(DEFAULT), *, seeds: Sequence[int] = (0,), backend: str = "hf",
                      model_args: Mapping[str, Any] | None = None, batch_size: int | str = 8, data: str | Path | None = None,
                      items: int | None = None, max_new_tokens: int | None = None, few_shot: int | Mapping[str, int] | None = None,
                      chat_template: bool = True, system: str | None = None, temperature: float = 0.0,
                      generation: Mapping[str, Any] | None = None, aime_samples: int = 1, label: str | None = None,
                      out: str | Path | None = None, report: Callable[[str], Any] = lambda text: None) -> pd.DataFrame:
    """Score `model` on transfer benchmarks.

    Args:
        model: a checkpoint folder, a hub id, the name that an API knows, or an LM object of lm-eval.
        tasks: names of transfer_tasks.DEFAULT, or stock tasks of transfer_tasks.STOCK.
        seeds: evaluation seeds. Prompts, few-shot examples and the order of options are the same for all; sampling differs. At
            temperature 0 it cannot: then the first seed alone is played, once, and the record says so.
        backend: lm-eval's name of the model type ("hf", "vllm", "local-chat-completions", ...), made with `model_args`.
        data: folder of local JSON lines files (names as in eval/tasks); a benchmark that is not there is read from the hub.
        items: only about the first so many items of each benchmark, spread over MMLU-Pro's subjects; None: all.
        max_new_tokens: limit of a generation; None: the task's own (32,768 for AIME).
        few_shot: examples for all tasks, or by stock name; None: as the stock task says. A stock task that fixes 0 keeps it.
        chat_template: whether the model's chat template lays out the prompts.
        generation: further generation keywords of lm-eval, such as top_p.
        aime_samples: samples of each AIME problem (avg@k); more than one needs a temperature.
        label: the model's name in tables; by default its run's, or its own.
        out: folder of the records; by default results/transfer/<label>.
        report: called with a line of text after each pass.

    Returns:
        One row per item, seed and repeat: see `transfer_records.read_transfer`.

    Raises:
        ValueError: an unknown task or backend; a Path without a model; no task that can be read here; a canary that did not score 1.0
            and 0; a context too short for the new tokens. ModuleNotFoundError: lm-eval is not installed.
    """
    about = describe(model, backend, model_args, label)
    folder = Path(out) if out else ROOT / "results" / "transfer" / about["label"]
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {}
    setting = Setting(items=items, few_shot=few_shot, chat_template=chat_template, system=system,
                      generation=({"max_gen_toks": max_new_tokens} if max_new_tokens else {}) | dict(generation or {}) | sampling)
    notes = []
    if not setting.sampled and (len(seeds) > 1 or aime_samples > 1):
        notes.append("Temperature 0: seeds and repeats cannot differ, so one was played.")
        seeds, aime_samples = seeds[:1], 1
    found = find_tasks(tasks, data, folder / "tasks")
    model_type(backend)
    versions = {name: version(name) for name in ("lm-eval", "transformers", "datasets")}
    canary = {name: check_canary(found, find_stock(name), setting) for name in found.ready}
    report(f"canary: 1.0 and 0 on {', '.join(canary)}")
    passes, lm = [], None
    for seed in dict.fromkeys(seeds):
        for stock in map(find_stock, found.ready):
            for repeat in range(aime_samples if stock.column.startswith("AIME") else 1):
                key = {"model": about, "setting": asdict(setting), "stock": stock.name, "data": found.ready[stock.name],
                       "zero_shot": stock.name in found.zero_shot, "seed": seed, "repeat": repeat, "versions": versions}
                this = Pass(folder, key)
                if not this.done():
                    lm = lm or make_lm(model, backend, model_args, batch_size)
                    this.write(*one_pass(found, stock, setting, lm, seed, repeat))
                passes.append(this)
                report(f"{stock.name}, seed {seed}, repeat {repeat}: {this.headline()}")
    write_index(folder, passes, skipped=found.skipped, notes=notes, canary=canary)
    return read_transfer(folder)


def local_data() -> Path | None:
    """The folder transfer/ below the one that the environment variable EPPO_DATA names, if it is there."""
    folder = Path(os.environ["EPPO_DATA"], "transfer").resolve() if os.environ.get("EPPO_DATA") else None
    return folder if folder and folder.is_dir() else None


def find_tasks(tasks: Sequence[str], data: str | Path | None, out: Path) -> Found:
    """Which of `tasks` can be read, from files in `data` or from the hub.

    Raises:
        ValueError: an unknown task, two that are the same, or none that can be read.
    """
    folder = stock_folder()
    from lm_eval.tasks import TaskManager

    stocks = {find_stock(name).name: find_stock(name) for name in tasks}
    if len(stocks) < len(tasks):
        raise ValueError(f"transfer tasks {list(tasks)} name the same stock task twice")
    absent = local_tasks(list(stocks), data, out) if data else {name: "no local files" for name in stocks}
    paths = dict.fromkeys((folder / stock.yaml).parent for stock in stocks.values())
    with _steady():                                         # it warns of every stock task that a local file overrides
        manager = TaskManager(include_defaults=False, include_path=[*paths, *([out] if data else [])])
    ready, skipped = {}, {}
    for name, stock in stocks.items():
        if name not in absent:
            ready[name] = source_digest(stock, Path(data))
        elif (reason := _why_not_on_hub(manager, stock)):
            skipped[name] = f"{absent[name]}; {reason}"
        else:
            ready[name] = None
    if not ready:
        raise ValueError("no transfer task can be read here: " + "; ".join(f"{name}: {reason}" for name, reason in skipped.items()))
    short = {name for name, digest in ready.items() if digest and few_shot_split_absent(stocks[name], Path(data))}
    return Found(manager, ready, skipped, frozenset(short))


def _why_not_on_hub(manager: Any, stock: Stock) -> str:
    """"" if the hub (or its cache) has the data set, else the reason."""
    from huggingface_hub import get_token

    if stock.column == "GPQA" and not get_token():
        return GATED
    try:
        with _steady():
            manager.load([stock.subtasks[0] if stock.subtasks else stock.name])
    except OSError as error:                                # no connection, offline mode, no access: all are OSErrors of the hub's client
        return f"the hub: {error}"
    return ""


def make_lm(model: Any, backend: str, model_args: Mapping[str, Any] | None, batch_size: int | str) -> Any:
    """The LM object of lm-eval for `model`."""
    from lm_eval.api.model import LM

    if isinstance(model, LM):
        return model
    args = {"model" if "completions" in backend else "pretrained": str(model)} | dict(model_args or {})
    tokenizer = None
    if os.path.isdir(str(model)) and not {"tokenizer", "gguf_file"} & set(args):
        tokenizer = load_tokenizer(str(model))              # as it was trained with: lm-eval's way may read a saved one differently
    if backend == "hf":
        args.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")           # lm-eval takes cuda for granted
        args |= {"tokenizer": tokenizer} if tokenizer else {}
    lm = model_type(backend).create_from_arg_obj(args, {"batch_size": batch_size})
    if backend == "vllm" and tokenizer:
        lm.tokenizer = tokenizer                            # it takes none as an argument, and gets token ids from here
    return lm


def model_type(backend: str) -> Any:
    """lm-eval's class of that name.

    Raises:
        ValueError: no such class; names all.
    """
    import lm_eval.models  # noqa: F401  registers them
    from lm_eval.api.registry import get_model

    return get_model(backend)


def one_pass(found: Found, stock: Stock, setting: Setting, lm: Any, seed: int, repeat: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """One call of lm-eval: its whole result, and what it does not record itself (chat template, seed, what was cut)."""
    from lm_eval import simple_evaluate

    from eval.transfer_models import Watched

    watched = Watched(lm, seed, repeat, progress=Sparse(sys.stderr))
    with _steady(), redirect_stderr(io.StringIO()):         # no bars but the model's
        results = simple_evaluate(watched, tasks=[stock.name], task_manager=found.manager, limit=stock.limit(setting.items),
                                  num_fewshot=0 if stock.name in found.zero_shot else setting.shots(stock),
                                  apply_chat_template=setting.chat_template, fewshot_as_multiturn=setting.chat_template,
                                  system_instruction=setting.system, gen_kwargs=dict(setting.generation) or None, **HARNESS_SEEDS)
    template = lm.chat_template(True) if setting.chat_template else None
    return results, {"chat_template": template, "marks": watched.marks}


@contextmanager
def _steady() -> Iterator[None]:
    """What surrounds a call of lm-eval: options in one order, one look at the machine, no lines and bars about what the record says.

    GPQA shuffles its options with Python's generator while it maps the data set, and maps it anew for prompts, for scores and for
    few-shot examples. Left alone, only the cache of `datasets` makes these agree, with whatever order was met first on this machine.
    So nothing is taken from that cache, and every mapping starts from the same state of the generator.
    """
    logger, plain_map, look = logging.getLogger("lm_eval"), datasets.Dataset.map, collect_env.get_pretty_env_info
    level, cached, bars = logger.level, datasets.is_caching_enabled(), datasets.utils.are_progress_bars_disabled()

    def seeded_map(*args: Any, **kwargs: Any) -> Any:
        random.seed(HARNESS_SEEDS["random_seed"])
        return plain_map(*args, **kwargs)

    datasets.disable_caching()
    datasets.disable_progress_bars()                        # hundreds of them, of which a notebook keeps every one
    datasets.Dataset.map, collect_env.get_pretty_env_info = seeded_map, _machine
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        datasets.Dataset.map, collect_env.get_pretty_env_info = plain_map, look
        if cached:
            datasets.enable_caching()
        if not bars:
            datasets.enable_progress_bars()


class Sparse(io.TextIOBase):
    """What a progress bar writes, passed on to `out` as a line at most every `every_s` seconds: a notebook keeps all that it prints."""

    def __init__(self, out: TextIO, every_s: float = 10.0) -> None:
        self.out, self.every_s, self.told = out, every_s, time.monotonic()

    def write(self, text: str) -> int:
        if text.strip() and time.monotonic() - self.told >= self.every_s:
            self.told = time.monotonic()
            self.out.write(text.strip() + "\n")
        return len(text)


@cache
def _machine(look: Callable[[], str] = collect_env.get_pretty_env_info) -> str:
    return look()                                           # seconds; lm-eval asks at every call


def check_canary(found: Found, stock: Stock, setting: Setting) -> dict[str, float]:
    """Score of perfect answers and of none, on the items, prompts and extractions that the model will meet.

    Raises:
        ValueError: perfect answers do not score 1.0 in every extraction, or empty ones not 0: no number of this task can be trusted.
    """
    from eval.transfer_models import Canary

    scores = {}
    for perfect in (True, False):
        results, _ = one_pass(found, stock, setting, Canary(perfect), 0, 0)
        for extraction in (stock.strict, stock.flexible):
            score = results["results"][stock.name][extraction]
            if score != float(perfect):
                metric, name = extraction.split(",")
                wrong = [f"{task} {sample['doc_id']}" for task, samples in results["samples"].items() for sample in samples
                         if sample["filter"] == name and sample[metric] != perfect]
                raise ValueError(f"canary: {'perfect answers' if perfect else 'empty answers'} score {score} on {stock.name} "
                                 f"({extraction}); wrong: {', '.join(wrong[:5])}")
        scores["perfect" if perfect else "silent"] = float(perfect)
    return scores
