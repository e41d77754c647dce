"""Rows and names in files that are read in place: processes that open the same files share their pages."""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np


def in_place(file: Path) -> np.ndarray:
    """The array that `np.save` wrote, mapped into memory and not read."""
    return np.load(file, mmap_mode="r").view(np.ndarray)


class Rows(Sequence[bytes]):
    """Byte strings by number: `<name>.rows` holds them end to end, `<name>.ends.npy` where each ends."""

    def __init__(self, folder: Path, name: str) -> None:
        self._ends = in_place(folder / f"{name}.ends.npy")
        self._bytes: mmap.mmap | bytes = b""
        if len(self._ends) and self._ends[-1]:               # an empty file cannot be mapped
            with (folder / f"{name}.rows").open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> bytes:
        if not 0 <= number < len(self._ends):
            raise IndexError(number)
        return self._bytes[int(self._ends[number - 1]) if number else 0:int(self._ends[number])]

    @staticmethod
    def write(folder: Path, name: str, rows: Iterable[bytes]) -> None:
        ends, end = [], 0
        with (folder / f"{name}.rows").open("wb") as file:
            for row in rows:
                end += file.write(row)
                ends.append(end)
        np.save(folder / f"{name}.ends.npy", np.array(ends, dtype=np.int64))


class Names(Mapping[str, int]):
    """A mapping from text to number: sorted rows, and the number of each in `<name>.numbers.npy`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._rows = Rows(folder, name)
        self._numbers = in_place(folder / f"{name}.numbers.npy")

    def __getitem__(self, text: str) -> int:
        key = text.encode("utf-8", "surrogatepass")
        place = bisect_left(self._rows, key)
        if place == len(self._rows) or self._rows[place] != key:
            raise KeyError(text)
        return int(self._numbers[place])

    def __iter__(self) -> Iterator[str]:
        return (row.decode("utf-8", "surrogatepass") for row in self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    @staticmethod
    def write(folder: Path, name: str, numbers: Mapping[str, int]) -> None:
        encoded = sorted((text.encode("utf-8", "surrogatepass"), number) for text, number in numbers.items())
        Rows.write(folder, name, (key for key, _ in encoded))
        np.save(folder / f"{name}.numbers.npy", np.array([number for _, number in encoded], dtype=np.int32))
