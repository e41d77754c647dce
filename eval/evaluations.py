"""What an evaluation leaves behind, and how it is read back. One folder per policy and setting:

    evaluation.json      the policy, every setting, turn limits, code and machine, status
    episodes.jsonl       one line per episode, written as it ends

A folder takes more seeds, tasks or instances later; it refuses other settings. `Evaluation` can stand where tables want an
`eppo.records.Run`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pandas as pd

from eppo.completeness import missing_evaluated
from eppo.episode import FAULTS
from eppo.files import LineFile, encode, read_lines, write_atomically
from eppo.machine import environment
from eval.runs import ROOT

SCHEMA = 1
EVALUATIONS = ROOT / "results" / "evaluations"
# A row says the same as these settings, or nothing: rows that differ belong to another evaluation.
ROW_SETTINGS = ("split", "rules", "temperature", "source", "size")
UNTRAINED = "start"                                         # the method of a policy that no run of ours has trained


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation as it was recorded: `info` is evaluation.json, `eval` has a row per episode. `steps` is empty."""

    path: Path
    info: dict[str, Any]
    eval: pd.DataFrame
    steps: pd.DataFrame = field(default_factory=pd.DataFrame)

    @property
    def settings(self) -> dict[str, Any]:
        return self.info["settings"]

    @property
    def gaps(self) -> list[str]:
        """Sentences about rows that are missing: of an evaluation that was cut short, or deleted since."""
        return missing_evaluated(self.eval, self.info.get("episodes"))

    @property
    def policy(self) -> dict[str, Any]:
        return self.info["policy"]


def identity(policy: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """16 hexadecimal digits, the same exactly where policy and settings are (prices and places of files apart)."""
    told = {name: value for name, value in policy.items() if name not in ("prices", "label")}
    kept = {name: value for name, value in settings.items() if name != "path"}
    return hashlib.sha256(json.dumps([told, kept], sort_keys=True, default=str).encode()).hexdigest()[:16]


def evaluation_dir(policy: Mapping[str, Any], settings: Mapping[str, Any], recipe: str = "") -> Path:
    """The default folder: results/evaluations/<recipe>/<policy>-<identity>."""
    name = "".join(char if char.isalnum() or char in "._-" else "_" for char in str(policy["name"]))
    return EVALUATIONS / (Path(recipe).stem or "unnamed") / f"{name}-{identity(policy, settings)[:8]}"


def begin(folder: Path, policy: Mapping[str, Any], settings: Mapping[str, Any], turn_limits: Mapping[str, int]) -> dict[str, Any]:
    """What evaluation.json is to say of a new or continued evaluation.

    Raises:
        ValueError: the folder holds an evaluation of another policy or with other settings; the differences are named.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, now = folder / "evaluation.json", datetime.now(timezone.utc).isoformat(timespec="seconds")
    info = {"schema": SCHEMA, "identity": identity(policy, settings), "policy": dict(policy), "settings": dict(settings),
            "turn_limits": dict(turn_limits), "started": now, "continued": [], "status": "running", "error": None} | environment()
    if path.exists():
        before = read_info(folder)
        if before["identity"] != info["identity"]:
            changed = [f"{name}: {old.get(name)!r} -> {new.get(name)!r}"
                       for old, new in ((before["policy"], policy), (before["settings"], settings))
                       for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
            raise ValueError(f"{folder} holds another evaluation ({'; '.join(changed)}); give another out")
        info |= {"started": before["started"], "continued": [*before["continued"], now],
                 "turn_limits": before["turn_limits"] | dict(turn_limits)}
    return info


def save_info(folder: Path, info: Mapping[str, Any]) -> None:
    write_atomically(folder / "evaluation.json", (json.dumps(info, indent=1, sort_keys=True, allow_nan=False) + "\n").encode())


def read_info(folder: Path) -> dict[str, Any]:
    try:
        info = json.loads((folder / "evaluation.json").read_bytes())
    except FileNotFoundError:
        raise ValueError(f"no evaluation in {folder}: it holds no evaluation.json") from None
    except ValueError as error:
        raise ValueError(f"{folder}/evaluation.json is corrupt ({error})") from None
    if not isinstance(info, dict) or info.get("schema") != SCHEMA:
        raise ValueError(f"{folder}/evaluation.json is not of schema {SCHEMA}; use the version of the project that wrote it")
    return info


def read_evaluation(folder: str | os.PathLike[str]) -> Evaluation:
    """The evaluation recorded in `folder`.

    Raises:
        ValueError: none there, another schema, or a corrupt line. A half-written last line is only a warning, as are rows that are
            missing.
    """
    folder = Path(folder)
    info = read_info(folder)
    policy, settings = info["policy"], info["settings"]
    rows = frame(read_lines(folder / "episodes.jsonl"))
    tasks = list(dict.fromkeys(rows["task"])) if len(rows) else []
    config = {"method": policy.get("method") or UNTRAINED, "seed": policy.get("train_seed") or 0, "tasks": tasks,
              "recipe": policy.get("recipe"), "model": {"path": policy.get("model") or policy["name"]}, "algorithm": {},
              "env": {name: settings[name] for name in ("source", "size", "rules")}}
    evaluation = Evaluation(folder, info | {"config": config}, rows)
    for text in evaluation.gaps:
        warnings.warn(f"{folder}/{text}; the command that made it plays what is missing", stacklevel=2)
    return evaluation


def frame(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """One row per episode: seed by seed, task by task, instance by instance."""
    rows = sorted(rows, key=lambda row: (row["seed"], row["task"], row.get("index", 0), row["instance"]))
    made = pd.DataFrame(rows)
    empty = [name for name in made if made[name].isna().all()]
    return made.astype(dict.fromkeys(empty, "float64"))


class EpisodeLog:
    """The one writer of a file of episode rows; threads may share it. `rows` are those that count: `mine`, and no faults.

    Opening it drops a half-written last line, and the rows of `mine` that ended by an infrastructure fault: these episodes are
    played again. A row is on the disk when `append` returns.

    Args:
        path: the file; None keeps rows in memory only.
        mine: which rows of the file belong to this evaluation.

    Raises:
        BlockingIOError: another process writes there. ValueError: a corrupt line.
    """

    def __init__(self, path: Path | None, mine: Callable[[Mapping[str, Any]], bool] = lambda row: True) -> None:
        self.rows: list[dict[str, Any]] = []
        self.tries: dict[tuple, int] = {}                   # of episodes that ended by faults before
        self._guard, self._file, self._lock = threading.Lock(), None, None
        if path is None:
            return
        self._lock = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            rows = read_lines(path)
            again = [row for row in rows if mine(row) and row["status"] in FAULTS]
            self.tries = {key(row): row.get("attempt", 1) for row in again}
            self.rows = [row for row in rows if mine(row) and row["status"] not in FAULTS]
            if again:
                write_atomically(path, b"".join(encode(row) for row in rows if not (mine(row) and row["status"] in FAULTS)))
            self._file = LineFile(path)
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, BlockingIOError):
                raise BlockingIOError(f"another process writes in {path.parent}; wait for it or end it") from None
            raise

    def append(self, row: dict[str, Any]) -> dict[str, Any]:
        """Write `row` with its number of attempts, and return it as it will be read back (NaN is null)."""
        row["attempt"] = self.tries.get(key(row), 0) + 1
        line = encode(row, "episode")
        written = json.loads(line)
        with self._guard:
            if self._file is not None:
                self._file.append([line], row["step"])
            self.rows.append(written)
        return written

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            os.close(self._lock)

    def __enter__(self) -> "EpisodeLog":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def key(row: Mapping[str, Any]) -> tuple[int, str, str]:
    """What makes an episode of an evaluation the same episode."""
    return row["seed"], row["task"], row["instance"]
