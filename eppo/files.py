"""Files that survive a killed process and a full disk: atomic replacement, and JSON lines that only grow."""

from __future__ import annotations

import errno
import json
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def full_disk_explained(path: Path, intact: str) -> Iterator[None]:
    """Turns a full disk or quota inside the block into an OSError that names the file, what is `intact` and what to do."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__      # torch.save hides the OSError behind its own
        if not isinstance(cause, OSError) or cause.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(cause.errno, f"the disk is full: {path} could not be written; {intact} is intact; "
                                   "free some space and resume") from error


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` by `data` on the disk: after a crash it holds the old bytes or the new ones, never a mixture."""
    with full_disk_explained(path, "the old file"), atomic_replacement(path) as file:
        file.write(data)


@contextmanager
def atomic_replacement(path: Path) -> Iterator[BinaryIO]:
    """An open temporary file that becomes `path`, flushed to the disk, when the block ends; an exception removes it instead."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush the folder's list of names to the disk, so that a rename or a new file survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- JSON lines -----------------------------------------------------------------------------------------------------
def encode(row: Mapping[str, Any], what: str = "row") -> bytes:
    """`row` as one line of ASCII JSON with sorted keys; NaN becomes null, numpy and torch scalars become numbers.

    Raises:
        ValueError: infinity, or a value that JSON does not have, with its place in the row.
    """
    return json.dumps(_plain(row, what), sort_keys=True, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _plain(value: Any, place: str) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isinf(value):
            raise ValueError(f"{place} is {value}; infinity is not recorded (a value that does not exist is NaN)")
        return None if math.isnan(value) else float(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(item, f"{place}: {name}") for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{place}[{index}]") for index, item in enumerate(value)]
    if hasattr(value, "tolist"):                           # numpy and torch, scalars included
        return _plain(value.tolist(), place)
    raise ValueError(f"{place} = {value!r} ({type(value).__name__}) cannot be recorded; give numbers, text, lists or mappings")


def scan_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each whole line of a JSON-lines file, as bytes with its newline and as a row.

    A last line without its end, left by a killed process, is dropped with a warning; every other line must be an object with a
    whole number "step".

    Raises:
        ValueError: a corrupt line, naming file and line.
    """
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    for number, line in enumerate(lines, start=1):
        last = number == len(lines)
        if last and not line:
            return
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or type(row.get("step")) is not int:
                raise ValueError('not an object with a whole number "step"')
        except ValueError as error:
            if last:
                warnings.warn(f"{path}, line {number}: half-written by a process that was killed; dropped", stacklevel=3)
                return
            raise ValueError(f"{path}, line {number} is corrupt ({error}): restore the file, or move the run's folder away and "
                             "start again") from None
        yield line + b"\n", row


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file (see `scan_lines`); none where the file is absent."""
    return [row for _, row in scan_lines(path)]


class LineFile:
    """A JSON-lines file open for appending. Opening it repairs a half-written last line; `last_step` is the largest in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines, self.last_step = self._select(None)
        if b"".join(lines) != (path.read_bytes() if path.exists() else b""):
            write_atomically(path, b"".join(lines))
        self._open()

    def _open(self) -> None:
        self._file = open(self.path, "ab", buffering=0)
        sync_folder(self.path.parent)

    def _select(self, step: int | None) -> tuple[list[bytes], int | None]:
        """The lines up to `step` (None: all) and the largest step among them."""
        kept = [(line, row["step"]) for line, row in scan_lines(self.path) if step is None or row["step"] <= step]
        return [line for line, _ in kept], max((number for _, number in kept), default=None)

    def append(self, lines: Iterable[bytes], step: int) -> None:
        """Write encoded `lines` of `step` and flush them to the disk; after an error the file is as it was before.

        Raises:
            OSError: the disk is full, with what to do.
        """
        data, before = memoryview(b"".join(lines)), os.fstat(self._file.fileno()).st_size
        if not data:
            return
        with full_disk_explained(self.path, "everything up to the previous step"):
            try:
                while data:
                    data = data[self._file.write(data):]
                os.fsync(self._file.fileno())
            except BaseException:
                os.ftruncate(self._file.fileno(), before)
                raise
        self.last_step = step

    def rewind(self, step: int) -> None:
        """Drop the lines of later steps, atomically."""
        if self.last_step is None or self.last_step <= step:
            return
        lines, self.last_step = self._select(step)
        self._file.close()
        write_atomically(self.path, b"".join(lines))
        self._open()

    def close(self) -> None:
        self._file.close()
