"""Generated shell problems of sizes small and full: full sentences, folder trees of 15 to 60 files, logs of 40 to 160 lines; in
full four times as many. More kinds of both sizes are in `system_tasks`."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from envs.os_env.tasks import DIRS, NAMES, WORDS, only, pick, problem

USERS = ("alice", "bruno", "carla", "dmitri", "elena", "farid", "greta", "hiro", "ines", "jonas", "karin", "luis", "mei",
         "nadia", "oscar", "petra")
PLACES = ("/root/{}", "/home/{}", "/opt/{}", "/var/{}", "/tmp/{}", "/var/lib/{}", "/home/public/{}", "/opt/data/{}")
ENDINGS = ("txt", "csv", "log", "md", "conf", "json")
LEVELS = ("DEBUG", "INFO", "WARN", "ERROR")
KEYS = ("timeout", "port", "retries", "threads", "cache_mb", "batch", "depth", "window", "limit", "workers")


class Tree:
    """A folder with sub-folders and files; `files` maps paths to contents."""

    def __init__(self, rng: random.Random, scale: int = 1) -> None:
        self.rng, self.scale = rng, scale
        self.root = rng.choice(PLACES).format(rng.choice(DIRS))
        first = pick(rng, DIRS, rng.randint(2, 4))
        self.folders = [self.root] + [f"{self.root}/{name}" for name in first]
        second = pick(rng, [name for name in DIRS if name not in first], rng.randint(2, 4))
        self.folders += [f"{rng.choice(self.folders[1:])}/{name}" for name in second]
        self.files: dict[str, str] = {}

    def fill(self, count: int, endings: tuple[str, ...] = ENDINGS) -> list[str]:
        """Add `count` files (times the scale) with a few lines of words each; returns their paths."""
        paths = []
        while len(paths) < count * self.scale:
            name = f"{self.rng.choice(NAMES)}_{self.rng.randint(1, 99)}.{self.rng.choice(endings)}"
            path = f"{self.rng.choice(self.folders)}/{name}"
            if path not in self.files:
                self.files[path] = sentences(self.rng, self.rng.randint(1, 4))
                paths.append(path)
        return paths

    def init(self) -> list[str]:
        script = [f"mkdir -p {' '.join(self.folders)}"]
        for path, text in sorted(self.files.items()):
            script.append(f"cat > {path} <<'END'\n{text}END")
        return script


def sentences(rng: random.Random, count: int) -> str:
    return "".join(" ".join(rng.choice(WORDS) for _ in range(rng.randint(3, 7))) + "\n" for _ in range(count))


def count_ending(rng: random.Random, scale: int = 1) -> dict[str, Any]:
    tree = Tree(rng, scale)
    tree.fill(rng.randint(20, 50))
    ending = rng.choice(ENDINGS)
    tree.fill(rng.randint(2, 9), (ending,))
    count = sum(path.endswith(f".{ending}") for path in tree.files)
    return problem(f"How many files with the extension .{ending} are there in {tree.root}, sub-folders included? "
                   "Answer with the number only.", tree.init(),
                   [f"find {tree.root} -type f -name '*.{ending}' | wc -l"], answer=("integer", count))


def setting(rng: random.Random, scale: int = 1) -> dict[str, Any]:
    tree = Tree(rng, scale)
    tree.fill(rng.randint(15, 30))
    target, other = pick(rng, [f"{folder}/{name}.conf" for folder in tree.folders for name in NAMES], 2)
    values = {}
    for path in (target, other):
        keys = pick(rng, KEYS, 6)
        values[path] = {key: rng.randint(1, 9999) for key in keys}
        lines = "".join(f"{key} = {value}\n" for key, value in values[path].items())
        tree.files[path] = f"# settings of {path.rsplit('/', 1)[1]}\n{lines}"
    key = rng.choice(list(values[target]))
    name = target.rsplit("/", 1)[1]
    tree.files.pop(other if other.endswith(f"/{name}") else "", None)
    return problem(f"Somewhere below {tree.root} there is a configuration file named {name}. What is the value of its "
                   f"setting '{key}'?", tree.init(), [f"find {tree.root} -name {name}", f"grep '^{key} ' {target}"],
                   answer=("integer", values[target][key]))


def which_file(rng: random.Random, scale: int = 1) -> dict[str, Any]:
    tree = Tree(rng, scale)
    paths = tree.fill(rng.randint(20, 40))
    target, phrase = rng.choice(paths), f"{rng.choice(NAMES)}-{rng.randint(100, 999)}"
    tree.files[target] += f"{rng.choice(WORDS)} {phrase} {rng.choice(WORDS)}\n"
    return problem(f"Exactly one file below {tree.root} contains the code {phrase}. Answer with the full path of that file.",
                   tree.init(), [f"grep -rl {phrase} {tree.root}"], answer=("string", target))


def log_lines(rng: random.Random, count: int) -> list[tuple[str, str, str, int]]:
    """Rows (time, level, user, milliseconds) of a log, in order of time."""
    minutes, day = sorted(rng.sample(range(24 * 60), count)), f"2021-03-{rng.randint(1, 28):02d}"
    return [(f"{day}T{at // 60:02d}:{at % 60:02d}", rng.choice(LEVELS), rng.choice(USERS), rng.randint(1, 2000))
            for at in minutes]


def log_world(rng: random.Random, scale: int) -> tuple[str, list[tuple[str, str, str, int]], list[str]]:
    rows = log_lines(rng, rng.randint(40, 160) * scale)
    folder = rng.choice(PLACES).format(rng.choice(DIRS))
    path = f"{folder}/{rng.choice(NAMES)}.log"
    text = "".join(f"{at} {level} user={user} ms={ms}\n" for at, level, user, ms in rows)
    return path, rows, [f"mkdir -p {folder}", f"cat > {path} <<'END'\n{text}END"]


def count_matching(rng: random.Random, scale: int = 1) -> dict[str, Any]:
    path, rows, init = log_world(rng, scale)
    level, user = rng.choice(LEVELS), rng.choice(rows)[2]
    count = sum(row[1] == level and row[2] == user for row in rows)
    return problem(f"Each line of {path} has a time, a level, a user and a duration. How many lines of level {level} "
                   f"belong to user {user}?", init,
                   [f"head -n 3 {path}", f"grep -c ' {level} user={user} ' {path}"], answer=("integer", count))


def distinct_users(rng: random.Random, scale: int = 1) -> dict[str, Any]:
    path, rows, init = log_world(rng, scale)
    level = rng.choice(LEVELS)
    count = len({row[2] for row in rows if row[1] == level})
    return problem(f"How many different users have at least one line of level {level} in {path}? Answer with the number only.",
                   init, [f"head -n 3 {path}", f"grep ' {level} ' {path} | cut -d ' ' -f 3 | sort -u | wc -l"],
                   answer=("integer", count))


def total_time(rng: random.Random, scale: int = 1) -> dict[str, Any]:
    path, rows, init = log_world(rng, scale)
    user = rng.choice(rows)[2]
    total = sum(row[3] for row in rows if row[2] == user)
    return problem(f"In {path} each line ends with a duration such as ms=15. What is the sum of the durations of user "
                   f"{user}, in milliseconds?", init,
                   [f"head -n 3 {path}", f"total=0; for ms in $(grep ' user={user} ' {path} | sed 's/.*ms=//'); "
                    "do total=$((total + ms)); done; echo $total"], answer=("integer", total))


def largest_file(rng: random.Random, scale: int = 1) -> dict[str, Any]:
    tree = Tree(rng, scale)
    target = rng.choice(tree.fill(rng.randint(15, 35)))
    tree.files[target] = sentences(rng, rng.randint(40, 60))
    return problem(f"Which file below {tree.root}, sub-folders included, is the largest? Answer with its full path.",
                   tree.init(),
                   [f"find {tree.root} -type f -exec wc -c {{}} + | sort -n | tail -n 2"], answer=("string", target))


def total_size(rng: random.Random, scale: int = 1) -> dict[str, Any]:
    tree = Tree(rng, scale)
    tree.fill(rng.randint(15, 35))
    ending = rng.choice(ENDINGS)
    tree.fill(rng.randint(2, 6), (ending,))
    total = sum(len(text) for path, text in tree.files.items() if path.endswith(f".{ending}"))
    return problem(f"How many bytes do all files with the extension .{ending} below {tree.root} hold together?", tree.init(),
                   [f"find {tree.root} -type f -name '*.{ending}' -exec cat {{}} + | wc -c"], answer=("size", total))


def trail(rng: random.Random, scale: int = 1) -> dict[str, Any]:
    """Two to four files, each with the path of the next; the last has the word."""
    tree = Tree(rng, scale)
    route = rng.sample(tree.fill(rng.randint(15, 25)), rng.randint(3, 5))
    word = rng.choice(WORDS) + str(rng.randint(10, 99))
    for path, after in pairwise(route):
        tree.files[path] = f"see {after}\n"
    tree.files[route[-1]] = f"the word is {word}\n"
    return problem(f"The file {route[0]} names another file, and so on; the last one tells a word. What is the word?",
                   tree.init(),
                   [f"cat {path}" for path in route], answer=("string", word))


def executables(rng: random.Random, scale: int = 1) -> dict[str, Any]:
    tree = Tree(rng, scale)
    tree.fill(rng.randint(10, 25))
    scripts = [path for path in tree.fill(rng.randint(3, 8), ("sh",))]
    chosen = rng.sample(scripts, rng.randint(1, len(scripts) - 1))
    init = tree.init() + [f"chmod 700 {' '.join(chosen)}"]
    return problem(f"How many files below {tree.root} may be executed by their owner? Answer with the number only.", init,
                   [f"find {tree.root} -type f -perm -u+x | wc -l"], answer=("integer", len(chosen)))


def make_private(rng: random.Random, scale: int = 1) -> dict[str, Any]:
    tree = Tree(rng, scale)
    tree.fill(rng.randint(10, 25), ("txt", "md", "log"))
    chosen = tree.fill(rng.randint(3, 7), ("conf",))
    init = tree.init() + [f"chmod 644 {' '.join(tree.files)}"]
    return problem(f"Make every .conf file below {tree.root} readable and writable by its owner and closed to everyone "
                   "else. Leave the permissions of all other files as they are.", init,
                   [f"find {tree.root} -type f -name '*.conf' -exec chmod 600 {{}} +"],
                   check=f'[ "$(find {tree.root} -type f -perm 600 | wc -l)" = {len(chosen)} ] && '
                         f"[ \"$(find {tree.root} -type f -name '*.conf' -perm 600 | wc -l)\" = {len(chosen)} ] && "
                         f'[ "$(find {tree.root} -type f -perm 644 | wc -l)" = {len(tree.files) - len(chosen)} ]')


def collect(rng: random.Random, scale: int = 1) -> dict[str, Any]:
    tree = Tree(rng, scale)
    tree.fill(rng.randint(10, 25), ("txt", "csv"))
    moved = tree.fill(rng.randint(3, 7), ("tmp",))
    names = sorted(path.rsplit("/", 1)[1] for path in moved)
    target = f"{tree.root}_old"
    kept = len(tree.files) - len(moved)
    steps = [f"find {tree.root} -name '*.tmp'",
             f"mkdir -p {target} && find {tree.root} -name '*.tmp' -exec mv {{}} {target} ';'"]
    if len(set(names)) < len(names):                         # two of one name would overwrite each other
        return collect(rng, scale)
    return problem(f"Move every .tmp file found in {tree.root} and its sub-folders into one new folder {target}. Touch nothing "
                   "else.", tree.init(), steps,
                   check=f'{only(target, " ".join(names))} && [ "$(find {tree.root} -type f | wc -l)" = {kept} ] && '
                         f"[ -z \"$(find {tree.root} -name '*.tmp')\" ]")


def replace_setting(rng: random.Random, scale: int = 1) -> dict[str, Any]:
    folder, name = rng.choice(PLACES).format(rng.choice(DIRS)), rng.choice(NAMES)
    path, keys = f"{folder}/{name}.conf", pick(rng, KEYS, 6)
    values = {key: rng.randint(1, 999) for key in keys}
    key, source = keys[0], f"{folder}/{name}.new"
    value = rng.randint(1000, 9999)
    text = "".join(f"{key} = {value}\n" for key, value in sorted(values.items()))
    wanted = "".join(f"{k} = {value if k == key else v}\n" for k, v in sorted(values.items()))
    return problem(f"The file {source} holds a number. Write that number as the value of the setting '{key}' into {path}, "
                   "leaving every other line as it is.",
                   [f"mkdir -p {folder}", f"cat > {path} <<'END'\n{text}END", f"echo {value} > {source}"],
                   [f"cat {source}", f"sed -i 's/^{key} = .*/{key} = {value}/' {path}"],
                   check=f"[ \"$(cat {path})\" = \"$(cat <<'END'\n{wanted}END\n)\" ]")


FILES: dict[str, Callable[[random.Random, int], dict[str, Any]]] = {
    "count_ending": count_ending, "setting": setting, "which_file": which_file, "count_matching": count_matching,
    "distinct_users": distinct_users,
    "total_time": total_time, "largest_file": largest_file, "total_size": total_size, "trail": trail,
    "executables": executables,
    "make_private": make_private, "collect": collect, "replace_setting": replace_setting}
