"""Official ALFWorld games in a folder: which games a split has, where each is, and why some of them cannot be used.

A game is a file `json_2.1.*/<split>/<task>/<trial>/game.tw-pddl`, or a line {game: that path, task: goal sentence,
pddl_problem, solvable, walkthrough} of a `*.jsonl` or `*.jsonl.zst` file; the file wins. A line holds no text grammar: it is
played in the "old" text format, AgentBench's. A line that names no game, or one that an earlier line has, is listed among what
every split, or the game's, cannot use.
"""

from __future__ import annotations

import io
import os
import re
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envs.alfworld_env.game import (Game, kind_of_path, load_game, parse_problem, plain_sentence, plain_walkthrough,
                                    read_json)
from envs.base import EnvFault
from envs.instances import Instance

try:
    import zstandard
except ImportError:
    zstandard = None

# split -> (AgentBench's list of games, folder of ALFWorld to take when the list is not there)
SPLIT_FILES = {"train": ("train_valid.json", "train"), "dev": ("", "valid_seen"), "test": ("new_std.json", "valid_unseen")}
_GAME = "game.tw-pddl"
_NAME = re.compile(rf"json_2\.1\.[^/]+/(\w+)/[^/]+/[^/]+/{re.escape(_GAME)}\Z")
_PUT = re.compile(r"\Amove (.+) to ")
_UNREADABLE = (OSError, EOFError, ValueError, *((zstandard.ZstdError,) if zstandard else ()))
_libraries: dict[Path, "Library"] = {}
_lock = threading.Lock()


def data_folder(path: str | None) -> Path:
    """The `alfworld` folder below `path` or below the folder that EPPO_DATA names.

    Raises:
        EnvFault: there is none; the message says what belongs there.
    """
    base = path or os.environ.get("EPPO_DATA")
    folder = Path(base) / "alfworld" if base else None
    if folder is None or not folder.is_dir():
        where = "neither path nor EPPO_DATA is set" if base is None else f"{folder} is no folder"
        raise EnvFault(f"alfworld: no official games ({where}); expected "
                       "<path>/alfworld/json_2.1.1/{train,valid_seen,valid_unseen}/*/*/game.tw-pddl, and optionally "
                       "AgentBench's lists train_valid.json and new_std.json beside it; see python -m envs fetch alfworld")
    return folder


def library(path: str | None) -> "Library":
    """The library of the folder that `data_folder` finds, one per folder and process."""
    folder = data_folder(path).resolve()
    with _lock:
        if folder not in _libraries:
            _libraries[folder] = Library(folder)
        return _libraries[folder]


@dataclass(frozen=True, slots=True)
class Split:
    """The instances of a split in the list's order, and (game, reason) of those that cannot be used."""

    instances: list[Instance]
    skipped: list[tuple[str, str]]


@dataclass
class Library:
    """The games below one folder. A line of a `.jsonl` file is kept compressed and parsed at each use, as a file is."""

    folder: Path
    _lines: dict[str, bytes] | None = None
    _bad_lines: list[tuple[str, str, str]] = field(default_factory=list)      # split folder or "", file and line, reason
    _splits: dict[str, Split] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        """The folder that the games' paths start from: `folder`, or `games` in it."""
        return next((root for root in (self.folder, self.folder / "games") if any(root.glob("json_2.1.*"))), self.folder)

    def split(self, name: str) -> Split:
        """The games of split "train", "dev" or "test". EnvFault: none that can be used."""
        with _lock:
            if name not in self._splits:
                self._splits[name] = self._load(name)
            return self._splits[name]

    def game(self, name: str) -> Game:
        """The game under a path such as "json_2.1.1/train/<task>/<trial>/game.tw-pddl".

        Raises:
            OSError: neither a file nor a line. ValueError: it cannot be used; the message says why.
        """
        if self._lines and name in self._lines and not (self.root / name).is_file():
            return _game_of(read_json(zlib.decompress(self._lines[name]).decode()))
        return load_game(self.root / name)

    def _files(self) -> list[Path]:
        return sorted([*self.folder.glob("*.jsonl"), *self.folder.glob("*.jsonl.zst")])

    def _read_files(self) -> dict[str, bytes]:
        """Path of the game -> its line, compressed; what cannot be used goes to `_bad_lines`."""
        found: dict[str, bytes] = {}
        self._bad_lines.clear()
        for file in self._files():
            for place, line in _read_lines(file):
                try:
                    name = _name_of(line)
                except ValueError as error:
                    self._bad_lines.append(("", place, str(error)))
                    continue
                if name in found:
                    self._bad_lines.append((_NAME.match(name).group(1), place, f"an earlier line has {name}"))
                else:
                    found[name] = zlib.compress(line.encode(), 1)
        return found

    def _load(self, split: str) -> Split:
        listing, sub = SPLIT_FILES[split]
        if self._lines is None:
            self._lines = self._read_files()
        if listing and (self.folder / listing).is_file():
            names, source = _listed(self.folder / listing), str(self.folder / listing)
        else:
            files = (game.relative_to(self.root).as_posix() for game in self.root.glob(f"json_2.1.*/{sub}/*/*/{_GAME}"))
            names = sorted({*files, *(name for name in self._lines if _NAME.match(name).group(1) == sub)})
            source = f"{self.root}/json_2.1.*/{sub}"
        instances, seen = [], set()
        skipped = [(place, reason) for folder, place, reason in self._bad_lines if folder in ("", sub)]
        for name in names:
            try:
                if name in seen:
                    raise ValueError("listed twice")
                seen.add(name)
                kind, game = kind_of_path(name), self.game(name)
                if game.problem.goal.kind != kind:
                    raise ValueError(f"the goal is of type {game.problem.goal.kind}, the folder says {kind}")
                instances.append(Instance("/".join(Path(name).parts[-3:-1]), "alfworld", kind, {"game": name}))
            except (OSError, ValueError) as error:
                skipped.append((name, "file is missing" if isinstance(error, FileNotFoundError) else str(error)))
        if not instances:
            first = f"; the first, {skipped[0][0]}: {skipped[0][1]}" if skipped else ""
            raise EnvFault(f"alfworld: no usable game of split {split!r} in {source} ({len(skipped)} skipped{first})")
        return Split(instances, skipped)


def _listed(listing: Path) -> list[str]:
    """The paths in one of AgentBench's lists {type: [path, ...]}, in order."""
    try:
        groups = read_json(listing.read_text(encoding="utf-8"))
        names = [name for group in groups.values() for name in group]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise EnvFault(f"alfworld: {listing} is not a list of games {{type: [path, ...]}}: {error}") from error
    if not all(isinstance(name, str) for name in names):
        raise EnvFault(f"alfworld: {listing} lists something that is not a path")
    return names


def _read_lines(file: Path) -> Iterator[tuple[str, str]]:
    """(file and line number, line) of a `.jsonl` or `.jsonl.zst` file. EnvFault: it cannot be read to its end."""
    number = 0
    with _open(file) as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{file.name}, line {number}", line
        except _UNREADABLE as error:
            raise EnvFault(f"alfworld: {file}, line {number + 1}: {error}") from error


def _name_of(line: str) -> str:
    """The path of the game that a line holds. ValueError: it holds none."""
    record = read_json(line)
    name = record.get("game") if isinstance(record, dict) else None
    if not isinstance(name, str) or not _NAME.match(name):
        raise ValueError(f"no record of a game: {ascii(name)[:80]} is no path of one")
    return name


def _open(file: Path) -> io.TextIOBase:
    if file.suffix != ".zst":
        return file.open(encoding="utf-8")
    if zstandard is None:
        raise EnvFault(f"alfworld: {file} needs zstandard (pip install zstandard); or unpack it: zstd -d --long=27 {file}")
    unpacked = zstandard.ZstdDecompressor(max_window_size=2 ** 27).stream_reader(file.open("rb"), closefd=True)
    return io.TextIOWrapper(unpacked, "utf-8")


def _game_of(record: dict[str, Any]) -> Game:
    for key in ("pddl_problem", "task"):
        if not isinstance(record.get(key), str):
            raise ValueError(f"the record has no text under {key!r}")
    if not record.get("solvable", False):
        raise ValueError("marked as not solvable")
    walkthrough = [_PUT.sub(r"put \1 in/on ", command) for command in plain_walkthrough(record)]
    return Game(parse_problem(record["pddl_problem"]), plain_sentence(record["task"]), "old", walkthrough)
