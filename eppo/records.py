"""What a run leaves behind, and how it is read back. One folder per run:

    run.json             the whole resolved configuration, identity, commit, versions, hardware, times, status, error
    steps.jsonl          one line per training step: {"step": 1, "loss/total": ..., "task/db/entropy": ..., "perf/step_s": ...}
    episodes.jsonl       one line per training episode         trajectories.jsonl    a sample of them, token by token
    eval.jsonl           one line per evaluated episode        checkpoints/          see eppo.checkpoint

run.json is replaced atomically. The others only grow, one JSON object per line with the key "step", sorted keys, flushed to the
disk before a write returns. NaN (a metric that a step does not have) is written as null; infinity is refused. Timings
stand under perf/ and nowhere else in these files, so two equal runs write equal steps.jsonl but for perf/ (`compare_steps`).
The schema, column by column: results/README.md.
"""

from __future__ import annotations

import fcntl
import json
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pandas as pd

from eppo.checkpoint import list_checkpoints
from eppo.completeness import missing_rows
from eppo.config import ROOT, RunConfig
from eppo.files import LineFile, encode, read_lines, write_atomically
from eppo.machine import environment
from eppo.plugins import plugin_digests
from eppo.types import StepRecord

SCHEMA = 1
RUN_COLUMNS = ("path", "recipe", "method", "seed", "status", "steps", "started", "ended", "commit", "dirty", "identity")
FILES = ("steps", "episodes", "trajectories", "eval")


@dataclass(frozen=True, slots=True)
class Run:
    """A run as it was recorded. `steps`, `episodes`, `eval`: one row per line, null as NaN; empty where nothing was written."""

    path: Path
    info: dict[str, Any]
    steps: pd.DataFrame
    episodes: pd.DataFrame
    eval: pd.DataFrame

    @property
    def config(self) -> RunConfig:
        return RunConfig.from_dict(self.info["config"])

    @property
    def gaps(self) -> list[str]:
        """Sentences about rows that were recorded once and are not there; see `eppo.completeness`."""
        return missing_rows(self.steps, self.episodes, self.eval)


class RunWriter:
    """The one writer of a run's folder; a context manager that records how the run ended.

        with RunWriter(config.run_dir(), config) as writer:
            writer.write_step(StepRecord(1, metrics), episodes=rows, trajectories=rows)

    Leaving it without an exception gives status "finished", by Ctrl-C or a closed generator "stopped", else "failed" with the
    error's text. A killed process leaves "running".

    Args:
        folder: made if absent.
        config: the run's configuration.
        resume: go on with the run in `folder`; call `rewind` with the checkpoint's step next.

    Raises:
        ValueError: the folder holds a run and `resume` is False; or `resume` is True and it holds none, or another one; or a
            file of it is corrupt. A run without a single step is simply started again.
        BlockingIOError: another process writes there.
    """

    def __init__(self, folder: str | os.PathLike[str], config: RunConfig, *, resume: bool = False) -> None:
        self.folder, self.config = Path(folder), config
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            before = self._check_folder(resume)
            if resume:
                self._check_course()
            self._files = {name: LineFile(self.folder / f"{name}.jsonl") for name in FILES}
            self.rewind(-1 if self.last_step is None else self.last_step)       # rows of a step that was never finished
            digests = plugin_digests(config.plugins)
            changed = [name for name, digest in before.get("plugins", {}).items() if digests.get(name, digest) != digest]
            self._notes = [*config.warnings,
                           *(f"{name} has changed since the run began; what follows a resume is of its new text." for name in changed)]
            self.info = {"schema": SCHEMA, "identity": config.identity(), "config": config.to_dict(), "seed": config.seed,
                         "started": before.get("started", _now()), "ended": None, "status": "running", "error": None,
                         "warnings": self._notes, "plugins": before.get("plugins", digests),
                         "resumed": [*before.get("resumed", []), _now()] if resume else [], **environment()}
            self._save_info()
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, BlockingIOError):
                raise BlockingIOError(f"another process writes the run in {self.folder}; wait for it or end it") from None
            raise

    def _check_folder(self, resume: bool) -> dict[str, Any]:
        """What run.json says so far, or {}."""
        exists = (self.folder / "run.json").exists()
        info = _read_info(self.folder) if exists and (resume or self._num_steps()) else {}
        if resume:
            if not exists:
                raise ValueError(f"nothing to resume: {self.folder} holds no run.json; start without resume")
            if changes := RunConfig.from_dict(info["config"]).differences(self.config):
                raise ValueError(f"{self.folder} holds a run of another configuration ({'; '.join(changes)}); "
                                 "resume with the old one, or give another out")
        elif info:
            raise ValueError(f"{self.folder} already holds a run (status {info['status']}, {self._num_steps()} steps); "
                             "resume it, give another out, or move the folder away")
        return info

    def _check_course(self) -> None:
        """Before anything is cut: the steps follow each other, and some checkpoint is no later than the last of them."""
        path = self.folder / "steps.jsonl"
        last = max([0, *(row["step"] for row in _course(path))])
        saved = [step for step, _ in list_checkpoints(self.folder / "checkpoints")]
        if saved and min(saved) > last:
            raise ValueError(f"{path} ends at step {last}, but the checkpoints beside it are of steps {', '.join(map(str, saved))}: lines "
                             "are lost. Restore the file, or move the run's folder away and start again; nothing has been changed")

    def _num_steps(self) -> int:
        return _count_lines(self.folder / "steps.jsonl")

    @property
    def last_step(self) -> int | None:
        """The last step in steps.jsonl, None before the first."""
        return self._files["steps"].last_step

    def write_step(self, record: StepRecord, episodes: Iterable[Mapping[str, Any]] = (),
                   trajectories: Iterable[Mapping[str, Any]] = ()) -> None:
        """Append one step, its line in steps.jsonl last; either everything is valid or nothing is written.

        Raises:
            ValueError: an infinite metric, a value that is not JSON, or a step that is not after the last one.
            OSError: the disk is full (ENOSPC); what was written before is intact.
        """
        if self.last_step is not None and record.step <= self.last_step:
            raise ValueError(f"step {record.step} comes after step {self.last_step} in {self.folder}/steps.jsonl; rewind first")
        rows = {"episodes": episodes, "trajectories": trajectories, "steps": [record.metrics]}
        lines = {name: [encode({**row, "step": record.step}, name) for row in rows[name]] for name in rows}
        for name in rows:
            self._files[name].append(lines[name], record.step)

    def write_eval(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append evaluated episodes of the weights after `step` (0: before training)."""
        self._files["eval"].append([encode({**row, "step": step}, "eval") for row in rows], step)

    def write_warnings(self, texts: Iterable[str]) -> None:
        """What a reader of the run must know, into run.json, after what configuration and plugins themselves give rise to; it replaces
        what was there."""
        if (texts := [*self._notes, *texts]) != self.info["warnings"]:
            self.info["warnings"] = texts
            self._save_info()

    def rewind(self, step: int) -> None:
        """Drop every line of a later step, atomically file by file: the state to which a checkpoint of `step` belongs."""
        for file in self._files.values():
            file.rewind(step)

    def close(self, status: str, error: str | None = None) -> None:
        """Record how the run ended ("finished", "stopped" or "failed") and free the folder."""
        self.info |= {"status": status, "error": error, "ended": _now()}
        try:
            self._save_info()
        finally:
            for file in self._files.values():
                file.close()
            os.close(self._lock)

    def _save_info(self) -> None:
        text = json.dumps(self.info, indent=1, sort_keys=True, allow_nan=False) + "\n"
        write_atomically(self.folder / "run.json", text.encode())

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.close("finished")
        elif issubclass(kind, (GeneratorExit, KeyboardInterrupt)):
            self.close("stopped")
        else:
            self.close("failed", f"{kind.__name__}: {error}")


# ---- reading --------------------------------------------------------------------------------------------------------
def read_run(folder: str | os.PathLike[str]) -> Run:
    """The run recorded in `folder`.

    Raises:
        ValueError: no run there, a newer schema, or a corrupt line (file and line are named). A half-written last line, left by
            a killed process, is only a warning, and so are rows that are missing.
    """
    folder = Path(folder)
    info = _read_info(folder)
    frames = {"steps": _frame(_course(folder / "steps.jsonl"))}
    frames |= {name: _frame(read_lines(folder / f"{name}.jsonl")) for name in ("episodes", "eval")}
    run = Run(folder, info, **frames)
    for text in run.gaps:
        warnings.warn(f"{folder}/{text}", stacklevel=2)
    return run


def list_runs(root: str | os.PathLike[str] = ROOT / "results" / "runs") -> pd.DataFrame:
    """The runs below `root`, one row each with the columns of RUN_COLUMNS, sorted by path.

    An unreadable run.json is a row with status "unreadable" and a warning.
    """
    rows = []
    for path in sorted(Path(root).rglob("run.json")):
        row = {"path": str(path.parent), "status": "unreadable", "steps": _count_lines(path.parent / "steps.jsonl")}
        try:
            info = _read_info(path.parent)
        except ValueError as error:
            warnings.warn(str(error), stacklevel=2)
        else:
            row |= {name: info["config"][name] for name in ("recipe", "method", "seed")}
            row |= {name: info[name] for name in ("status", "started", "ended", "commit", "dirty", "identity")}
        rows.append(row)
    return pd.DataFrame(rows, columns=list(RUN_COLUMNS))


def compare_steps(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> list[str]:
    """Where steps.jsonl of two run folders differ, perf/ apart, as "step 3: loss/total: 0.1 is not 0.2"; empty when equal."""
    left, right = ({row["step"]: row for row in read_lines(Path(folder) / "steps.jsonl")} for folder in (a, b))
    found = []
    for step in sorted(left | right):
        mine, other = left.get(step, {}), right.get(step, {})
        for name in sorted(mine | other):
            values = [row[name] if name in row else "absent" for row in (mine, other)]
            if not name.startswith("perf/") and repr(values[0]) != repr(values[1]):
                found.append(f"step {step}: {name}: {values[0]!r} is not {values[1]!r}")
    return found


def _course(path: Path) -> list[dict[str, Any]]:
    """The rows of steps.jsonl.

    Raises:
        ValueError: a corrupt line, or a step that does not follow the one before it.
    """
    rows = read_lines(path)
    for number, (before, row) in enumerate(zip(rows, rows[1:]), start=2):
        if row["step"] != before["step"] + 1:
            raise ValueError(f"{path}, line {number}: step {row['step']} comes after step {before['step']}; lines are lost or changed: "
                             "restore the file, or move the run's folder away and start again")
    return rows


def _frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """One row each, "step" first and the other columns sorted; columns of numbers and nulls are floats."""
    columns = sorted({name for row in rows for name in row} - {"step"})
    frame = pd.DataFrame(rows, columns=["step", *columns])
    empty = [name for name in columns if frame[name].isna().all()]
    return frame.astype({"step": "int64"} | {name: "float64" for name in empty})


def _read_info(folder: Path) -> dict[str, Any]:
    path = folder / "run.json"
    try:
        info = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"no run in {folder}: it holds no run.json; list_runs() shows the runs there are") from None
    except ValueError as error:
        raise ValueError(f"{path} is corrupt ({error}); restore it, or move the folder away and start again") from None
    if not isinstance(info, dict) or info.get("schema") != SCHEMA:
        schema = info.get("schema") if isinstance(info, dict) else None
        raise ValueError(f"{path} has record schema {schema!r}; this version reads schema {SCHEMA}: use the version of the "
                         "project that wrote it")
    return info


def _count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
