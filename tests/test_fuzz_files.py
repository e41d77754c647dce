"""Official files of ALFWorld and WebShop with random damage: what cannot be used is listed with the reason or named in a fault,
the rest can be played, and nothing else is raised."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_alfworld_official import record
from test_webshop_index import raw
from test_webshop_official import document

import envs
from envs.webshop_env.official import build_index

VALUES = [None, 3, -1.5, True, "", "x" * 1000, [], {}, [3], {"a": 3}, [None], [[]], {"a": None}, float("nan"), "\ud800", "nan", {"a": [3]}]


def damaged(data: bytes, rng: random.Random) -> bytes:
    """`data` cut off, with a bit turned over, with bytes put in, emptied, or replaced by something nested without end."""
    at = rng.randrange(len(data))
    return rng.choice([data[:at], data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1:],
                       data[:at] + rng.randbytes(20) + data[at:], b"", b"[" * 100_000])


def poked(value: Any, rng: random.Random) -> Any:
    """`value`, plain JSON, with one place of it, however deep, replaced."""
    holder = [value]
    places: list[tuple[Any, Any]] = []
    todo: list[tuple[Any, Any]] = [(holder, 0)]
    while todo:
        place = todo.pop()
        places.append(place)
        inner = place[0][place[1]]
        todo += [(inner, key) for key in (inner if isinstance(inner, dict) else range(len(inner)) if isinstance(inner, list) else ())]
    where, key = rng.choice(places)
    where[key] = rng.choice(VALUES)
    return holder[0]


def twisted(text: str, rng: random.Random) -> str:
    """A PDDL text with a line lost, doubled, or with another line's word."""
    lines = text.split("\n")
    for _ in range(rng.choice((1, 1, 3))):
        at, words = rng.randrange(len(lines)), rng.choice(lines).split(" ")
        own = lines[at].split(" ")
        own[rng.randrange(len(own))] = rng.choice([*words, "caf\u00e9_bar_1", "(", "\x00"])
        lines[at:at + 1] = rng.choice([[], [lines[at]] * 2, [" ".join(own)]])
    return "\n".join(lines or [""])


def household_files(rng: random.Random) -> tuple[dict[str, bytes], bool]:
    """Official files of ALFWorld with three games, mostly one of them damaged; and whether only its content is."""
    games: list[Any] = [record(number) for number in range(3)]
    if rng.random() < 0.4:
        games[1]["pddl_problem"] = twisted(games[1]["pddl_problem"], rng)
    else:
        games[1] = poked(games[1], rng)
    data, whole = "\n".join(map(json.dumps, games)).encode(), rng.random() < 0.8
    return {"alfworld/games.jsonl": data if whole else damaged(data, rng)}, whole


def shop_files(rng: random.Random) -> tuple[dict[str, bytes], bool]:
    """Official files of WebShop with three products, one file damaged; and whether only the content of records is."""
    review = {"title": "good", "score": 4.0, "body": "ok"}
    goal = {"instruction": "a mug", "instruction_attributes": ["big"], "instruction_options": ["red"]}
    names = ["documents_3.jsonl.gz"] if rng.random() < 0.5 else ["items_shuffle.json", "items_ins_v2.json"]
    names.append("items_ins_v2.json" if rng.random() < 0.5 else "items_human_ins.json")
    content = {"documents_3.jsonl.gz": [json.loads(document(f"B{number}", Reviews=[review])) for number in range(3)],
               "items_shuffle.json": [raw(f"B{number}") for number in range(3)],
               "items_ins_v2.json": {f"B{number}": {"attributes": ["big"], **goal} for number in range(3)},
               "items_human_ins.json": {"B1": [dict(goal), dict(goal)]}}
    target, whole = rng.choice(names), rng.random() < 0.7
    if isinstance(content[target], list):
        content[target][1] = poked(content[target][1], rng)
    elif whole:
        content[target] = poked(content[target], rng)
    files = {}
    for name in names:
        data = gzip.compress("\n".join(map(json.dumps, content[name])).encode()) if name.endswith("gz") else \
            json.dumps(content[name]).encode()
        files[f"webshop/{name}"] = data if whole or name != target else damaged(data, rng)
    return files, whole


def play(env: envs.Env, rng: random.Random) -> None:
    for index in range(min(3, len(env.instances))):
        env.reset(index)
        while not env.step(env.expert() if rng.random() < 0.8 else env.mistake(rng)).done:
            pass


def damage(task: str, count: int, folder: Path) -> None:
    """`count` times official files with damage."""
    rng, played, refused = random.Random(task), 0, 0
    for number in range(count):
        root = folder / str(number)
        files, whole = household_files(rng) if task == "alfworld" else shop_files(rng)
        for name, data in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data)
        try:
            if task == "webshop" and number % 3 == 0:
                index = build_index(root / "webshop")
                broken = rng.choice(sorted(file for file in index.iterdir() if file.stat().st_size))
                broken.write_bytes(broken.read_bytes() if rng.random() < 0.3 else damaged(broken.read_bytes(), rng))
            env = envs.make(task, source="official", split="train" if task == "alfworld" else "test", path=str(root),
                            rules=rng.choice(("strict", "agentbench")))
            play(env, rng)
        except envs.EnvFault as fault:
            refused += 1
            assert str(root) in str(fault), fault
        else:
            played += 1
            used, left_out = (env.instances, env.skipped) if task == "alfworld" else (env.catalogue.products, env.catalogue.left_out)
            assert not whole or len(used) + len(left_out) == 3, left_out
        shutil.rmtree(root)
    assert played > count // 4 and refused > count // 20


@pytest.mark.parametrize("task", ("alfworld", "webshop"))
def test_damaged_official_files_are_listed_or_named(task: str, tmp_path: Path) -> None:
    damage(task, 150, tmp_path)


@pytest.mark.extended
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("task", ("alfworld", "webshop"))
def test_ten_thousand_damaged_official_files(task: str, tmp_path: Path) -> None:
    damage(task, 10_000, tmp_path)
