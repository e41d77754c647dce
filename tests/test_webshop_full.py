"""WebShop at the size of the published catalogue: 1.18 million products, raw files, saved index, environment.

The products are synthetic, in the published form (`items_shuffle.json`, `items_ins_v2.json`, `items_human_ins.json`): titles
of 12 and descriptions of 40 words out of 40,000 in Zipf's proportions, half of them with options. It takes some ten minutes
and 3 GB of disk. By hand:  python tests/test_webshop_full.py files FOLDER 1180000; python -m envs fetch webshop --path FOLDER;
python tests/test_webshop_full.py use FOLDER
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
COUNT, GOALS, WORDS = 1_180_000, 12_087, 40_000
SIZES = ("small", "medium", "large", "x-large")
COLORS = ("black", "white", "navy blue", "sky blue", "red", "forest green")
LETTERS = "bcdfghjklmnpqrstvwz"


def words() -> list[str]:
    """Distinct pronounceable words, the frequent ones short."""
    vowels = "aeiou"
    made: dict[str, None] = {}
    rng = np.random.default_rng(0)
    while len(made) < WORDS:
        syllables = 1 + len(made) // 400 if len(made) < 800 else 3
        stem = "".join(LETTERS[rng.integers(19)] + vowels[rng.integers(5)] for _ in range(syllables))
        made[stem + LETTERS[rng.integers(19)]] = None
    return list(made)


def texts(count: int, length: int, seed: int) -> Iterator[list[str]]:
    """`count` lists of `length` words in Zipf's proportions."""
    known, rng = np.array(words(), dtype=object), np.random.default_rng(seed)
    shares = np.cumsum(1.0 / np.arange(3, WORDS + 3))
    for start in range(0, count, 10_000):
        size = min(10_000, count - start)
        ranks = np.searchsorted(shares, rng.random((size, length)) * shares[-1])
        yield from known[ranks].tolist()


def write_files(folder: Path, count: int) -> None:
    """The three published files with `count` products, of which each `count // GOALS`-th has a human goal."""
    folder.mkdir(parents=True, exist_ok=True)
    human, step = {}, max(1, count // GOALS)
    with (folder / "items_shuffle.json").open("w") as items, (folder / "items_ins_v2.json").open("w") as attributes:
        items.write("["), attributes.write("{")
        for number, text in enumerate(texts(count, 64, 1)):
            asin, title = f"B{number:09d}", " ".join(text[:12])
            own = [" ".join(text[12:14]), " ".join(text[20:22])]
            choices = {"Color": [{"value": COLORS[number % 6]}, {"value": COLORS[(number + 1) % 6]}],
                       "Size": [{"value": size, "image": None} for size in SIZES]} if number % 2 else ""
            low = number % 97 + 0.99
            record = {"name": title, "asin": asin, "full_description": " ".join(text[12:52]), "customization_options": choices,
                      "small_description": [" ".join(text[52:]), " ".join(own)], "images": ["x"], "category": f"c{number % 5}",
                      "pricing": f"${low}" if number % 5 else f"${low} - ${low + 8}", "query": f"{text[0]} {text[1]}",
                      "product_category": f"Shop \u203a {text[0]} \u203a {text[1]}"}
            items.write(",\n" * (number > 0) + json.dumps(record))
            attributes.write(", " * (number > 0) + f'"{asin}": {json.dumps({"attributes": own})}')
            if number % step == 0 and len(human) < GOALS:
                human[asin] = [{"asin": asin, "instruction": f"i want {' '.join(text[:4])}.", "attributes": own, "options": [],
                                "instruction_attributes": own[:1], "worker_id": "w", "assignment_id": "a",
                                "instruction_options": [SIZES[number % 4]] if choices else []}]
        items.write("]"), attributes.write("}")
    (folder / "items_human_ins.json").write_text(json.dumps(human))


def use(folder: Path) -> dict[str, float]:
    """Open the environment, play the first goals and search: seconds, milliseconds and megabytes."""
    start = time.perf_counter()
    import envs

    imported = time.perf_counter()
    env = envs.make("webshop", source="official", split="test", path=str(folder))
    env.reset(0)
    ready = time.perf_counter()
    rewards = []
    for index in range(40):
        env.reset(index)
        for turn in env.oracle(index):
            result = env.step(turn)
        rewards.append(result.reward)
    queries = [" ".join(text[:3 + number % 8]) for number, text in enumerate(texts(400, 12, 2))]
    spent = []
    for query in queries:
        begin = time.perf_counter()
        env.catalogue.index.search(query, 50)
        spent.append(1000 * (time.perf_counter() - begin))
    rollup = dict(line.split()[:2] for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return {"import_s": imported - start, "warm_start_s": ready - imported, "goals": float(len(env._official_goals()[0])),
            "oracle": statistics.mean(rewards), "query_ms_median": statistics.median(spent),
            "query_ms_p95": sorted(spent)[len(spent) * 95 // 100], "rss_mb": int(rollup["Rss:"]) / 1024,
            "own_mb": int(rollup["Anonymous:"]) / 1024}      # the rest are pages of files, which processes share


def child(*arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT)}).stdout


@pytest.mark.extended
@pytest.mark.timeout(3600)
def test_catalogue_of_the_published_size(tmp_path: Path) -> None:
    shop = tmp_path / "webshop"
    write_files(shop, COUNT)
    start = time.perf_counter()
    built = json.loads(child(__file__, "index", str(shop)))
    print("index", built, f"{time.perf_counter() - start:.0f} s")
    assert built["peak_mb"] <= 4096
    used = json.loads(child(__file__, "use", str(tmp_path)))
    print("use", used)
    assert used["goals"] == GOALS and used["oracle"] > 0.9
    assert used["warm_start_s"] <= 10 and used["query_ms_median"] <= 10 and used["rss_mb"] <= 4096
    assert used["own_mb"] <= 512


def test_the_small_form_of_the_same_files(tmp_path: Path) -> None:
    shop = tmp_path / "webshop"
    write_files(shop, 1500)
    assert json.loads(child(__file__, "index", str(shop)))["products"] == 1500
    figures = json.loads(child(__file__, "use", str(tmp_path)))
    assert figures["goals"] == 1500 and figures["oracle"] == 1.0


def main(command: str, folder: str, count: str = str(COUNT)) -> None:
    if command == "files":
        write_files(Path(folder) / "webshop", int(count))
    elif command == "index":
        from envs.webshop_env.official import build_index, official_catalogue

        build_index(Path(folder))
        print(json.dumps({"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                          "products": len(official_catalogue(Path(folder)).products)}))
    else:
        print(json.dumps(use(Path(folder))))


if __name__ == "__main__":
    main(*sys.argv[1:])
