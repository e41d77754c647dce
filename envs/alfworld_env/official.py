"""Official ALFWorld games in a folder: which games a split has, and why some of them cannot be used."""

from __future__ import annotations

import json
import os
from pathlib import Path

from envs.alfworld_env.game import kind_of_path, load_game
from envs.base import EnvFault
from envs.instances import Instance

# split -> (AgentBench's list of games, folder of ALFWorld to take when the list is not there)
SPLIT_FILES = {"train": ("train_valid.json", "train"), "dev": ("", "valid_seen"), "test": ("new_std.json", "valid_unseen")}
_GAME = "game.tw-pddl"


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
                       "AgentBench's lists train_valid.json and new_std.json beside it")
    return folder


def games_root(folder: Path) -> Path:
    """The folder that holds `json_2.1.1` (or a later release), which the lists' paths start from."""
    roots = [root for root in (folder, folder / "games") if any(root.glob("json_2.1.*"))]
    if not roots:
        raise EnvFault(f"alfworld: no json_2.1.* folder in {folder} or {folder / 'games'}")
    return roots[0]


def load_split(path: str | None, split: str) -> tuple[list[Instance], list[tuple[str, str]], Path]:
    """(instances in the list's order, skipped games with the reason, folder the instances' paths start from).

    Raises:
        EnvFault: no usable game.
    """
    folder = data_folder(path)
    root = games_root(folder)
    list_name, sub = SPLIT_FILES[split]
    listing = folder / list_name if list_name else None
    if listing is not None and listing.is_file():
        names = [name for group in json.loads(listing.read_text(encoding="utf-8")).values() for name in group]
        source = str(listing)
    else:
        names = sorted(game.relative_to(root).as_posix() for game in root.glob(f"json_2.1.*/{sub}/*/*/{_GAME}"))
        source = f"{root}/json_2.1.*/{sub}"
    instances, skipped = [], []
    for name in names:
        try:
            kind, game = kind_of_path(name), load_game(root / name)
        except (OSError, ValueError) as error:
            reason = "file is missing" if isinstance(error, FileNotFoundError) else str(error)
            skipped.append((name, reason))
            continue
        if game.problem.goal.kind != kind:
            skipped.append((name, f"the goal is of type {game.problem.goal.kind}, the folder says {kind}"))
            continue
        instances.append(Instance("/".join(Path(name).parts[-3:-1]), "alfworld", kind, {"game": name}))
    if not instances:
        first = f"; the first, {skipped[0][0]}: {skipped[0][1]}" if skipped else ""
        raise EnvFault(f"alfworld: no usable game of split {split!r} in {source} ({len(skipped)} skipped{first})")
    return instances, skipped, root
