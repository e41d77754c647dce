"""More generated shell problems of sizes small and full: accounts, processes, permissions, dates, records, programs to
write."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from envs.os_env.small_tasks import FILES, PLACES, USERS, Tree
from envs.os_env.tasks import DIRS, NAMES, WORDS, pick, problem

SHELLS = ("/bin/bash", "/bin/sh", "/usr/sbin/nologin", "/bin/false")
GROUPS = ("staff", "devs", "audit", "media", "ops", "sales", "guests", "backup")
TRADERS = ("Alice", "Bob", "Chen", "Dora", "Emil", "Fatima", "Grace", "Hugo")
PROGRAMS: dict[str, tuple[str, str, Callable[[list[int]], int]]] = {  # what it prints, its shell text, the same in Python
    "sum": ("the sum of its arguments", "t=0; for n in \"$@\"; do t=$((t + n)); done; echo $t", sum),
    "largest": ("the largest of its arguments", "m=$1; for n in \"$@\"; do [ $n -gt $m ] && m=$n; done; echo $m", max),
    "even": ("how many of its arguments are even", "c=0; for n in \"$@\"; do [ $((n % 2)) = 0 ] && c=$((c + 1)); done; echo $c",
             lambda numbers: sum(number % 2 == 0 for number in numbers)),
    "squares": ("the sum of the squares of its arguments", "t=0; for n in \"$@\"; do t=$((t + n * n)); done; echo $t",
                lambda numbers: sum(number * number for number in numbers)),
    "span": ("the difference between the largest and the smallest of its arguments",
             "a=$1; b=$1; for n in \"$@\"; do [ $n -lt $a ] && a=$n; [ $n -gt $b ] && b=$n; done; echo $((b - a))",
             lambda numbers: max(numbers) - min(numbers))}


def accounts(rng: random.Random, scale: int) -> tuple[list[tuple[str, int, str]], list[str]]:
    """(name, number, shell) of new accounts, and the script that enters them."""
    names = pick(rng, [f"{user}{tail}" for user in USERS for tail in ("", "_x", "_adm", "2")], rng.randint(5, 12) * scale)
    rows = [(name, 1000 + number, rng.choice(SHELLS)) for number, name in enumerate(names)]
    text = "".join(f"{name}:x:{number}:{number}::/home/{name}:{shell}\n" for name, number, shell in rows)
    return rows, [f"cat >> /etc/passwd <<'END'\n{text}END"]


def login_shells(rng: random.Random, scale: int = 1) -> dict[str, Any]:
    rows, init = accounts(rng, scale)
    shell, low = rng.choice(SHELLS), rng.choice(rows)[1]
    count = sum(row[1] >= low and row[2] == shell for row in rows)
    return problem(f"How many accounts of this system with a user id from {low} to 9999 have {shell} as their login shell? "
                   f"Answer with "
                   "the number only.", init,
                   [f"c=0; while IFS=: read -r n x id g i h s; do [ $id -ge {low} ] && [ $id -le 9999 ] && [ $s = {shell} ] && "
                    "c=$((c + 1)); done < /etc/passwd; echo $c"], answer=("integer", count))


def account_number(rng: random.Random, scale: int = 1) -> dict[str, Any]:
    rows, init = accounts(rng, scale)
    name, number, _ = rng.choice(rows)
    return problem(f"What is the user id of the account {name}?", init, [f"grep '^{name}:' /etc/passwd"],
                   answer=("integer", number))


def group_members(rng: random.Random, scale: int = 1) -> dict[str, Any]:
    rows, init = accounts(rng, scale)
    groups = {name: pick(rng, [row[0] for row in rows], rng.randint(1, len(rows)))
              for name in pick(rng, [f"{group}{digit}" for group in GROUPS for digit in range(1, 9)], 4)}
    text = "".join(f"{name}:x:{2000 + number}:{','.join(members)}\n" for number, (name, members) in enumerate(groups.items()))
    name = rng.choice(sorted(groups))
    return problem(f"How many members are listed for the group {name} in the system's table of groups?",
                   [*init, f"cat >> /etc/group <<'END'\n{text}END"],
                   [f"grep '^{name}:' /etc/group", f"grep '^{name}:' /etc/group | cut -d : -f 4 | tr ',' '\\n' | wc -l"],
                   answer=("integer", len(groups[name])))


def processes(rng: random.Random) -> tuple[dict[str, list[int]], list[str]]:
    """Name -> argument of each running process of that name, and the script that starts them."""
    running = {name: rng.sample(range(100_000, 999_999), rng.randint(1, 4)) for name in pick(rng, NAMES, 4)}
    init = ["mkdir -p /opt/bin"]
    for name, numbers in running.items():
        init += [f"cp /usr/bin/sleep /opt/bin/{name}"]
        init += [f"/opt/bin/{name} {number} >/dev/null 2>&1 &" for number in numbers]
    total, names = sum(map(len, running.values())), "|".join(running)      # each is called "sh" until it has become the program
    return running, [*init, f"until [ $(cat /proc/[0-9]*/comm 2>/dev/null | grep -c -E '^({names})$') = {total} ]; do sleep 0.01; done"]


def count_processes(rng: random.Random, scale: int = 1) -> dict[str, Any]:
    running, init = processes(rng)
    name = rng.choice(sorted(running))
    return problem(f"How many processes named {name} are running now? Answer with the number only.", init,
                   [f"cat /proc/[0-9]*/comm | grep -c '^{name}$'"], answer=("integer", len(running[name])))


def process_argument(rng: random.Random, scale: int = 1) -> dict[str, Any]:
    running, init = processes(rng)
    name = rng.choice(sorted(running))
    return problem(f"Each running process named {name} was started with one number as its argument. What is the largest of "
                   "these numbers?", init,
                   [f"for f in $(grep -l '^{name}$' /proc/[0-9]*/comm); do tr '\\0' ' ' < ${{f%comm}}cmdline; echo; done"],
                   answer=("integer", max(running[name])))


def octal_mode(rng: random.Random, scale: int = 1) -> dict[str, Any]:
    tree = Tree(rng, scale)
    paths = tree.fill(rng.randint(10, 20))
    modes = {path: rng.choice((600, 640, 644, 700, 744, 750, 755, 664)) for path in paths}
    target = rng.choice(paths)
    return problem(f"What are the permissions of {target} as an octal number of three digits?",
                   tree.init() + [f"chmod {mode} {path}" for path, mode in sorted(modes.items())],
                   [f"stat -c %a {target}"], answer=("string", modes[target]))


def changed_since(rng: random.Random, scale: int = 1) -> dict[str, Any]:
    tree = Tree(rng, scale)
    days = {path: rng.randint(1, 28) for path in tree.fill(rng.randint(15, 35))}
    since = rng.randint(8, 20)
    init = tree.init() + [f"touch -d '2021-05-{day:02d} 12:00' {path}" for path, day in sorted(days.items())]
    return problem(f"How many files below {tree.root}, sub-folders included, were last changed after the end of {since} May "
                   f"2021?",
                   init, [f"find {tree.root} -type f -newermt '2021-05-{since:02d} 23:59:59' | wc -l"],
                   answer=("integer", sum(day > since for day in days.values())))


def links(rng: random.Random, scale: int = 1) -> dict[str, Any]:
    tree = Tree(rng, scale)
    paths = tree.fill(rng.randint(15, 30))
    targets = pick(rng, paths, rng.randint(3, 9))
    return problem(f"How many symbolic links are there below {tree.root}, sub-folders included?",
                   tree.init() + [f"ln -s {path} {rng.choice(tree.folders)}/link_{number}" for number,
                                  path in enumerate(targets)],
                   [f"find {tree.root} -type l | wc -l"], answer=("integer", len(targets)))


def nested_program(rng: random.Random, scale: int = 1) -> dict[str, Any]:
    """A chain of folders with a file in each, one of which may be executed and prints a sentence."""
    top, depth = rng.choice(PLACES).format(rng.choice(DIRS)), rng.randint(6, 10)
    chain = [f"{top}/" + "/".join(f"{rng.choice(DIRS)}_{level}" for level in range(depth))]
    while len(chain) < depth:
        chain.append(chain[-1].rsplit("/", 1)[0])
    names = [f"{folder}/{name}" for folder, name in zip(chain, pick(rng, NAMES, depth))]
    target, sentence = rng.choice(names), " ".join(rng.choice(WORDS) for _ in range(4))
    init = [f"mkdir -p {chain[0]}"] + [f"echo {rng.choice(WORDS)} > {name}" for name in names]
    return problem(f"Somewhere below {top} there is exactly one file that may be executed. Run it. What does it print?",
                   [*init, f"printf '#!/bin/sh\\necho {sentence}\\n' > {target}; chmod 755 {target}"],
                   [f"find {top} -type f -perm -u+x", target], answer=("string", sentence))


def trades(rng: random.Random, scale: int) -> tuple[str, list[tuple[str, str, int, int]], list[str]]:
    rows = [(rng.choice(TRADERS), rng.choice(("Purchase", "Sell")), rng.randint(0, 99), rng.randint(0, 999))
            for _ in range(rng.randint(60, 120) * scale)]
    path = f"{rng.choice(PLACES).format(rng.choice(DIRS))}/trades.log"
    text = "".join(f"{name} | {what} | {stock} | {count}\n" for name, what, stock, count in rows)
    return path, rows, [f"mkdir -p {path.rsplit('/', 1)[0]}", f"cat > {path} <<'END'\n{text}END"]


def trade_count(rng: random.Random, scale: int = 1) -> dict[str, Any]:
    path, rows, init = trades(rng, scale)
    name, what = rng.choice(rows)[:2]
    return problem(f"The lines of {path} are records: trader | Purchase or Sell | stock | count. How many records of kind "
                   f"{what} "
                   f"does {name} have?", init, [f"head -n 3 {path}", f"grep -c '^{name} | {what} ' {path}"],
                   answer=("integer", sum(row[:2] == (name, what) for row in rows)))


def trade_total(rng: random.Random, scale: int = 1) -> dict[str, Any]:
    path, rows, init = trades(rng, scale)
    stock = rng.choice(rows)[2]
    return problem(f"The lines of {path} are records: trader | Purchase or Sell | stock | count. Over all traders, how many "
                   f"units "
                   f"of stock {stock} were sold (records of kind Sell)?", init,
                   [f"head -n 3 {path}",
                    f"t=0; for n in $(grep '| Sell | {stock} | ' {path} | sed 's/.*| //'); do t=$((t + n)); done; echo $t"],
                   answer=("integer", sum(row[3] for row in rows if row[1:3] == ("Sell", stock))))


def sort_words(rng: random.Random, scale: int = 1) -> dict[str, Any]:
    folder, name = rng.choice(PLACES).format(rng.choice(DIRS)), rng.choice(NAMES)
    words = [rng.choice(WORDS) for _ in range(rng.randint(20, 40) * scale)]
    source, target, kept = f"{folder}/{name}.txt", f"{folder}/{name}.sorted", "".join(f"{word}\n" for word in words)
    wanted = "".join(f"{word}\n" for word in sorted(set(words)))
    return problem(f"Write the different lines of {source} into {target}, each once and in alphabetical order. Leave {source} "
                   f"as it "
                   "is.", [f"mkdir -p {folder}", f"cat > {source} <<'END'\n{kept}END"],
                   [f"LC_ALL=C sort -u {source} > {target}"],
                   check=f"[ \"$(cat {target})\" = \"$(cat <<'END'\n{wanted}END\n)\" ] && "
                         f"[ \"$(cat {source})\" = \"$(cat <<'END'\n{kept}END\n)\" ]")


def rename(rng: random.Random, scale: int = 1) -> dict[str, Any]:
    tree = Tree(rng, scale)
    tree.fill(rng.randint(10, 20), ("txt", "csv"))
    chosen, old, new = tree.fill(rng.randint(3, 6), ("dat",)), "dat", rng.choice(("bin", "raw", "old"))
    kept = len(tree.files) - len(chosen)
    present = " && ".join(f"[ -f {path.removesuffix(old)}{new} ]" for path in sorted(chosen))
    return problem(f"Rename every file below {tree.root} that ends in .{old} so that it ends in .{new}, in the same folder.",
                   tree.init(), [f"for f in $(find {tree.root} -name '*.{old}'); do mv $f ${{f%.{old}}}.{new}; done"],
                   check=f"{present} && [ \"$(find {tree.root} -type f | wc -l)\" = {kept + len(chosen)} ] && "
                         f"[ -z \"$(find {tree.root} -name '*.{old}')\" ]")


def program(rng: random.Random, scale: int = 1) -> dict[str, Any]:
    kind, name = rng.choice(sorted(PROGRAMS)), rng.choice(NAMES)
    prints, text, compute = PROGRAMS[kind]
    path = f"/usr/local/bin/{name}"
    cases = [[rng.randint(1, 99) for _ in range(rng.randint(2, 6))] for _ in range(6)]
    wanted = " && ".join(f'[ "$({path} {" ".join(map(str, case))})" = {compute(case)} ]' for case in cases)
    return problem(f"Make an executable program {path} that takes integers as its arguments and prints {prints}. For example, "
                   f"'{name} 1 2 3' prints {compute([1, 2, 3])}.", ["mkdir -p /usr/local/bin"],
                   [f"cat > {path} <<'END'\n#!/bin/sh\n{text}\nEND\nchmod 755 {path}", f"{path} 1 2 3"], check=wanted)


SYSTEM: dict[str, Callable[[random.Random, int], dict[str, Any]]] = {
    "login_shells": login_shells, "account_number": account_number, "group_members": group_members,
    "count_processes": count_processes, "process_argument": process_argument, "octal_mode": octal_mode,
    "changed_since": changed_since, "links": links, "nested_program": nested_program, "trade_count": trade_count,
    "trade_total": trade_total, "sort_words": sort_words, "rename": rename, "program": program}
KINDS = FILES | SYSTEM


def draw_small(rng: random.Random, index: int) -> tuple[str, dict[str, Any]]:
    """One small problem; kinds in turn."""
    kind = list(KINDS)[index % len(KINDS)]
    return kind, KINDS[kind](rng, 1)


def draw_full(rng: random.Random, index: int) -> tuple[str, dict[str, Any]]:
    """One problem with worlds four times as large; kinds in turn."""
    kind = list(KINDS)[index % len(KINDS)]
    return kind, KINDS[kind](rng, 4)
