"""Checkpoints that are whole or not there: save, find the newest intact one, load; and the state of the random generators.

    save_checkpoint(run / "checkpoints", step, state)     # step-000020-<hash>.pt; the last two are kept
    state = load_checkpoint(run / "checkpoints")          # the newest intact one; a damaged one is skipped with a warning

The file name ends in the first 16 digits of the SHA-256 of the content, so one rename publishes content and checksum together.
A state holds tensors and plain Python values only: it loads with `weights_only=True`, which runs no code from the file.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eppo.files import atomic_replacement, full_disk_explained, sync_folder

KEEP = 2
NAME = re.compile(r"step-(\d{6,})-([0-9a-f]{16})\.pt")
PLAIN = (type(None), bool, int, float, str, bytes, Tensor)


def save_checkpoint(folder: str | os.PathLike[str], step: int, state: Mapping[str, Any]) -> Path:
    """Write `state` after `step` atomically and return its file; all but the last two steps up to this one are removed.

    Raises:
        ValueError: `state` holds something that would not load again (its place is named).
        OSError: the disk is full; the earlier checkpoints are intact.
    """
    _check_plain(state, "state")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"step-{step:06d}.part"
    with full_disk_explained(part, "the previous checkpoint"), atomic_replacement(part) as file:
        torch.save(dict(state), file)
    path = folder / f"step-{step:06d}-{_digest(part)}.pt"
    os.replace(part, path)
    sync_folder(folder)
    _remove_old(folder, path, step)
    return path


def latest_checkpoint(folder: str | os.PathLike[str], at_most: int | None = None) -> Path:
    """The newest checkpoint in `folder` whose content has its checksum; each damaged one that is skipped is a warning.

    Args:
        at_most: the last step that still has its records; later checkpoints are passed over (None: none is).

    Raises:
        ValueError: none is there, or none is intact (the files that were tried are named).
    """
    candidates = [(step, path) for step, path in list_checkpoints(folder) if at_most is None or step <= at_most]
    for step, path in reversed(candidates):
        if _intact(path):
            return path
        warnings.warn(f"checkpoint {path} of step {step} is damaged or half-written; an earlier one is tried", stacklevel=2)
    tried = ", ".join(path.name for _, path in reversed(candidates))
    raise ValueError(f"no usable checkpoint in {folder}: " + (f"all are damaged (tried {tried})" if tried else "it holds none")
                     + "; there is nothing to resume: start without resume in another folder")


def load_checkpoint(path: str | os.PathLike[str], at_most: int | None = None) -> dict[str, Any]:
    """The state in a checkpoint file, or in the newest intact one of a folder (of no later step than `at_most`); tensors on the CPU.

    Raises:
        ValueError: the file is damaged or was not written by `save_checkpoint`; for a folder see `latest_checkpoint`.
    """
    path = Path(path)
    if path.is_dir():
        path = latest_checkpoint(path, at_most)
    elif not path.is_file() or not _intact(path):
        raise ValueError(f"checkpoint {path} " + ("is damaged, half-written or renamed" if path.exists() else "does not exist")
                         + "; give the folder to use the newest intact one")
    return torch.load(path, map_location="cpu", weights_only=True)


def list_checkpoints(folder: str | os.PathLike[str]) -> list[tuple[int, Path]]:
    """(step, file) of every checkpoint in `folder`, damaged ones included, in the order of steps."""
    found = [(match, path) for path in Path(folder).glob("step-*.pt") if (match := NAME.fullmatch(path.name))]
    return sorted((int(match[1]), path) for match, path in found)


def _remove_old(folder: Path, newest: Path, step: int) -> None:
    """Keep `newest` and the last of earlier steps; later ones belong to a course that was left by resuming."""
    earlier = sorted({number for number, _ in list_checkpoints(folder) if number < step})[-(KEEP - 1):]
    for number, path in list_checkpoints(folder):
        if path != newest and number not in earlier:
            path.unlink()
    for leftover in folder.glob("step-*.part*"):
        leftover.unlink()


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _intact(path: Path) -> bool:
    match = NAME.fullmatch(path.name)
    return match is not None and match[2] == _digest(path)


def _check_plain(value: Any, place: str) -> None:
    if isinstance(value, Mapping):
        for name, item in value.items():
            _check_plain(name, f"a key of {place}")
            _check_plain(item, f"{place}[{name!r}]")
    elif isinstance(value, (list, tuple, set)):
        for index, item in enumerate(value):
            _check_plain(item, f"{place}[{index}]")
    elif type(value) not in PLAIN and not isinstance(value, Tensor):
        raise ValueError(f"{place} is a {type(value).__module__}.{type(value).__name__}; a checkpoint holds tensors, numbers, "
                         "text, lists and mappings only: convert it first")


# ---- random generators ----------------------------------------------------------------------------------------------
def capture_rng() -> dict[str, Any]:
    """The state of the global generators of python, numpy and torch (every GPU too), as a part of a checkpoint."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {"python": random.getstate(), "numpy": (name, keys.tolist(), position, has_gauss, gauss),
            "torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []}


def restore_rng(state: Mapping[str, Any]) -> None:
    """Put the global generators where `capture_rng` found them.

    Raises:
        ValueError: the state holds more GPUs than there are here.
    """
    if len(state["cuda"]) > torch.cuda.device_count():
        raise ValueError(f"the checkpoint has random states of {len(state['cuda'])} GPUs, here are "
                         f"{torch.cuda.device_count()}; resume on as many")
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
