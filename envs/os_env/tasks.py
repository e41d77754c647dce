"""Generated shell problems of size micro, and what all sizes share.

`data` of an instance is plain JSON: `question`; `init` (POSIX shell, runs before the first command); `steps` (the expert's
scripts in order); and either `answer` {kind, value}, matched outside the sandbox, or `check`, a script over the final state.
Nothing of the gold is inside the sandbox, and nothing depends on clock, host files or directory order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

TOPS = ("root", "home", "opt", "var", "tmp")
DIRS = ("bag", "barn", "base", "box", "camp", "case", "cave", "crate", "den", "desk", "dock", "farm", "hall", "hut", "lab",
        "loft", "mill", "nest",
        "park", "port", "shed", "shop", "tent", "vault", "yard")
NAMES = ("apple", "basil", "bean", "beet", "berry", "cherry", "clove", "corn", "date", "fig", "garlic", "ginger", "grape",
         "guava", "kale", "kiwi",
         "leek", "lemon", "lime", "mango", "melon", "mint", "nut", "oat", "olive", "onion", "orange", "papaya", "pea", "peach",
         "pear", "pepper",
         "plum", "potato", "radish", "rice", "rye", "sage", "thyme", "tomato", "wheat", "yam")
WORDS = ("ant", "bear", "bee", "bird", "boat", "book", "bull", "cat", "chair", "clock", "coat", "cow", "crab", "crow", "cup",
         "deer", "dog", "door",
         "duck", "eagle", "fish", "fox", "frog", "goat", "goose", "hat", "hawk", "hen", "horse", "lamp", "lion", "map", "mole",
         "moon", "mouse",
         "owl", "pen", "pig", "pipe", "rat", "ring", "rope", "seal", "sheep", "ship", "shoe", "snail", "snake", "star", "stone",
         "swan",
         "tiger", "toad", "train", "tree", "wasp", "whale", "wolf", "worm")
FILES_PER_FOLDER = (3, 5)


def pick(rng: random.Random, words: Sequence[str], count: int) -> list[str]:
    """`count` different words."""
    return rng.sample(list(words), count)


def problem(question: str, init: list[str], steps: list[str], *, answer: tuple[str, Any] | None = None,
            check: str | None = None) -> dict[str, Any]:
    """The `data` of an instance; give `answer` (checker, value) or `check`."""
    data: dict[str, Any] = {"question": question, "init": "\n".join(init), "steps": steps}
    return data | ({"answer": {"kind": answer[0], "value": str(answer[1])}} if answer else {"check": check})


class Folder:
    """A micro folder: a few files with one word each."""

    def __init__(self, rng: random.Random) -> None:
        self.path = f"/{rng.choice(TOPS)}/{rng.choice(DIRS)}"
        count = rng.randint(*FILES_PER_FOLDER)
        self.files = dict(zip(pick(rng, NAMES, count), pick(rng, WORDS, count), strict=True))
        self.name, self.word = next(iter(self.files.items()))  # the file that matters; samples are in random order
        self.file = f"{self.path}/{self.name}"

    def init(self) -> list[str]:
        return [f"mkdir {self.path}; cd {self.path}"] + [f"echo {word} > {name}" for name, word in sorted(self.files.items())]


def read(rng: random.Random) -> dict[str, Any]:
    folder = Folder(rng)
    return problem(f"What word is in {folder.file}?", folder.init(), [f"cat {folder.file}"], answer=("string", folder.word))


def lines(rng: random.Random) -> dict[str, Any]:
    folder, count = Folder(rng), rng.randint(10, 299)
    return problem(f"How many lines has {folder.file}?", [*folder.init(), f"seq {count} > {folder.name}"],
                   [f"wc -l < {folder.file}"], answer=("integer", count))


def which(rng: random.Random) -> dict[str, Any]:
    folder = Folder(rng)
    return problem(f"Which file in {folder.path} has the word {folder.word}?", folder.init(),
                   [f"grep -l {folder.word} {folder.path}/*"], answer=("string", folder.name))


def largest(rng: random.Random) -> dict[str, Any]:
    folder = Folder(rng)
    sizes = rng.sample(range(10, 99), len(folder.files))
    sizes[0] += 100                                          # the file that matters is the first, whatever the seed
    init = folder.init() + [f"seq {size} > {name}" for name, size in zip(folder.files, sizes, strict=True)]
    return problem(f"Which file in {folder.path} is largest?", init, [f"ls -S {folder.path}"], answer=("string", folder.name))


def locate(rng: random.Random) -> dict[str, Any]:
    folder = Folder(rng)
    top, middle = folder.path.rsplit("/", 1)[0], rng.choice(DIRS)
    below = f"{folder.path}/{middle}"
    init = [f"mkdir -p {below}; cd {below}"] + folder.init()[1:]
    return problem(f"Find the file {folder.name} below {top}. What word is in it?", init,
                   [f"find {top} -name {folder.name}", f"cat {below}/{folder.name}"], answer=("string", folder.word))


def chain(rng: random.Random) -> dict[str, Any]:
    """A file names a file that (half of the time) names a file that has the word."""
    folder, hops = Folder(rng), rng.choice((1, 2))
    route = list(folder.files)[:hops + 1]
    init = folder.init() + [f"echo {after} > {before}" for before, after in pairwise(route)]
    return problem(f"Start at {folder.file}. Each file names the next in {folder.path}. What is the last word?", init,
                   [f"cat {folder.path}/{name}" for name in route], answer=("string", folder.files[route[-1]]))


def remove(rng: random.Random) -> dict[str, Any]:
    folder = Folder(rng)
    left = " ".join(sorted(set(folder.files) - {folder.name}))
    return problem(f"Remove the file in {folder.path} that has the word {folder.word}.", folder.init(),
                   [f"grep -l {folder.word} {folder.path}/*", f"rm {folder.file}"], check=only(folder.path, left))


def move(rng: random.Random) -> dict[str, Any]:
    folder, target = Folder(rng), f"/{rng.choice(TOPS)}/{rng.choice(NAMES)}"
    left = " ".join(sorted(set(folder.files) - {folder.name}))
    return problem(f"Move the file in {folder.path} that has the word {folder.word} to {target}.", folder.init(),
                   [f"grep -l {folder.word} {folder.path}/*", f"mv {folder.file} {target}"],
                   check=f'{only(folder.path, left)} && [ -f {target} ] && [ "$(cat {target})" = {folder.word} ]')


def only(path: str, names: str) -> str:
    """A check that a folder holds exactly these names (sorted, joined by blanks)."""
    return f'[ "$(cd {path} && ls -A | LC_ALL=C sort | tr "\\n" " ")" = "{names} " ]'


MICRO: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "read": read, "lines": lines, "which": which, "largest": largest, "locate": locate, "chain": chain, "remove": remove,
    "move": move}


def draw_micro(rng: random.Random, index: int) -> tuple[str, dict[str, Any]]:
    """One micro problem; kinds in turn."""
    kind = list(MICRO)[index % len(MICRO)]
    return kind, MICRO[kind](rng)
