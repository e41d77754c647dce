"""Official files: say what is there and what is missing, download what is missing, and say how many instances can be used.

Files are downloaded to a temporary name and renamed when complete. Without a connection the command says where each missing
file comes from. WebShop's search index is built here too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

import envs
from envs.base import SPLITS, EnvFault, check_name
from envs.commands.markdown import table
from envs.commands.sources import ITEMS, Item
from envs.webshop_env import official as webshop

TIMEOUT_S = 60


def main(arguments: list[str]) -> int:
    """0 if everything that the tasks need is there afterwards, else 1."""
    parser = argparse.ArgumentParser(prog="python -m envs fetch", description=__doc__)
    parser.add_argument("tasks", nargs="*", help=f"default: {', '.join(ITEMS)}")
    parser.add_argument("--path", default=os.environ.get("EPPO_DATA"), help="data folder; default: the variable EPPO_DATA")
    parser.add_argument("--dry-run", action="store_true", help="download and build nothing")
    options = parser.parse_args(arguments)
    if not options.path:
        parser.error("name the data folder: --path FOLDER, or set EPPO_DATA")
    folder = Path(options.path)
    tasks = [check_name("task", task, tuple(ITEMS)) for task in options.tasks] or list(ITEMS)
    items = [item for task in tasks for item in ITEMS[task]]
    if not options.dry_run:
        _download_all([item for item in items if not present(folder, item)], folder)
        if "webshop" in tasks:
            _build_index(folder / "webshop")
    rows = [{"file": item.path, "for": item.use, "there": found or ("no (optional)" if item.optional else "no"),
             "from": "" if found else _origin(item)} for item in items for found in [present(folder, item)]]
    print(f"\n{table(rows, ('file', 'for', 'there', 'from'))}\n")
    print(table([_usable(task, split, str(folder)) for task in tasks for split in SPLITS],
                ("task", "split", "instances", "cannot be used", "why not")))
    return int(any(not item.optional and not present(folder, item) for item in items))


def present(folder: Path, item: Item) -> str:
    """The item's path, or else the first pattern of files that serve as well and their number; "" if there is neither."""
    own = folder / item.path
    if own.is_file() and own.stat().st_size or own.is_dir() and any(own.iterdir()):
        return item.path
    counts = ((pattern, sum(1 for _ in folder.glob(pattern))) for pattern in item.also)
    return next((f"{pattern} ({count})" for pattern, count in counts if count), "")


def _origin(item: Item) -> str:
    return item.url + (f" : {item.member}" if item.member else "")


def _usable(task: str, split: str, path: str) -> dict[str, Any]:
    row: dict[str, Any] = {"task": task, "split": split}
    if "official" not in envs.env_class(task).sources:
        return row | {"why not": "the task reads no official files"}
    try:
        with envs.make(task, source="official", split=split, path=path) as env:
            return row | {"instances": len(env.instances), "cannot be used": len(getattr(env, "skipped", ()))}
    except (EnvFault, ValueError) as error:
        return row | {"instances": 0, "why not": str(error)}


def _build_index(folder: Path) -> None:
    """Save the search index of a large product file; one that fits stays."""
    try:
        if webshop.needs_index(folder):
            print(f"building the search index in {folder / webshop.INDEX}: about five minutes for 1.18 million products")
            webshop.build_index(folder)
    except (EnvFault, OSError) as fault:
        print(f"no index: {fault}", file=sys.stderr)


# ---- downloads ------------------------------------------------------------------------------------------------------------
def _download_all(missing: list[Item], folder: Path) -> None:
    """Download each URL once and put its items in place; what fails is said and left out."""
    for url in dict.fromkeys(item.url for item in missing):
        wanted = [item for item in missing if item.url == url]
        print(f"{url}: for {', '.join(item.path for item in wanted)}", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as work:
            try:
                file = _download(url, Path(work) / "file")
                for item in wanted:
                    _place(file, item, folder, Path(work))
            except (OSError, ValueError, tarfile.TarError, zipfile.BadZipFile) as error:
                print(f"  not fetched: {error}", file=sys.stderr)


def _download(url: str, target: Path) -> Path:
    """Raises OSError; ValueError where a web page came instead of a file."""
    request = urllib.request.Request(url, headers={"User-Agent": "python -m envs fetch"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer, target.open("wb") as file:
        if answer.headers.get_content_type() == "text/html":
            raise ValueError("the server answered with a web page; download the file with a browser")
        shutil.copyfileobj(answer, file, 2 ** 20)
        if answer.length:
            raise ValueError(f"the connection broke off {answer.length} bytes before the end")
    return target


def _place(file: Path, item: Item, folder: Path, work: Path) -> None:
    """Put the downloaded file, or what the item takes out of the archive, under the item's path."""
    ready = work / "ready"
    shutil.rmtree(ready, ignore_errors=True)
    ready.mkdir()
    if not item.member:
        shutil.copyfile(file, ready / "whole")
    for name, source in _members(file, item.member) if item.member else ():
        target = ready / (name.removeprefix(item.member) if item.path.endswith("/") else "whole")
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as out:
            shutil.copyfileobj(source, out)
    if not any(ready.iterdir()):
        raise ValueError(f"the archive holds no {item.member}")
    goal = folder / item.path
    goal.parent.mkdir(parents=True, exist_ok=True)
    (ready if item.path.endswith("/") else ready / "whole").rename(goal)


def _members(archive: Path, wanted: str) -> Iterator[tuple[str, IO[bytes]]]:
    """(name, content) of the files in a zip or tar archive that are `wanted` or lie in it. A tarball of a repository has one
    folder around everything, which is left out; names that lead out of the archive are refused."""
    def matches(name: str) -> bool:
        if ".." in PurePosixPath(name).parts or name.startswith("/"):
            raise ValueError(f"the archive holds {name!r}, which leads out of it")
        return name == wanted or wanted.endswith("/") and name.startswith(wanted) and not name.endswith("/")

    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as file:
            for name in filter(matches, file.namelist()):
                with file.open(name) as content:
                    yield name, content
        return
    with tarfile.open(archive) as file:
        for entry in file:
            name = entry.name.partition("/")[2]
            if entry.isfile() and matches(name):
                yield name, file.extractfile(entry)
