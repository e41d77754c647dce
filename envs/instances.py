"""Task instances: seeded generation into disjoint splits, and loading and saving through `datasets`.

Membership of a split depends on the content alone: a hash of the instance decides whether it belongs to train, dev or test,
so no instance can be in two splits, whatever the seed, the order, the number of workers or PYTHONHASHSEED.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

SPLIT_SIZES = {"micro": {"train": 1000, "dev": 64, "test": 128},
               "small": {"train": 1000, "dev": 64, "test": 200},
               "full": {"train": 2000, "dev": 100, "test": 200}}


@dataclass(frozen=True, slots=True)
class Instance:
    """One problem. `kind` groups instances for breakdowns (query class, household task type, …); `data` is plain JSON."""

    id: str
    task: str
    kind: str
    data: dict[str, Any]


def fingerprint(content: Any) -> str:
    """Hex SHA-256 of the canonical JSON of `content`."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()).hexdigest()


def split_of(content: Any) -> str:
    """The split to which `content` belongs: one tenth dev, one tenth test, the rest train."""
    return {0: "dev", 1: "test"}.get(int(fingerprint(content)[:8], 16) % 10, "train")


def generate(task: str, size: str, split: str, draw: Callable[[random.Random, int], tuple[str, dict[str, Any]]],
             *, count: int | None = None, key: Callable[[dict[str, Any]], Any] | None = None,
             max_attempts: int = 1000) -> list[Instance]:
    """`count` distinct instances of one split.

    Args:
        draw: `draw(rng, index) -> (kind, data)`; cycle kinds by `index` to balance them.
        key: the part of `data` that makes two instances the same problem (default: all of it).

    Raises:
        RuntimeError: the generator cannot produce enough distinct instances.
    """
    count = SPLIT_SIZES[size][split] if count is None else count
    key = key or (lambda data: data)
    seen: set[str] = set()
    instances = []
    for index in range(count):
        for attempt in range(max_attempts):
            kind, data = draw(random.Random(f"{task}/{size}/{split}/{index}/{attempt}"), index)
            mark = fingerprint(key(data))
            if split_of(key(data)) == split and mark not in seen:
                break
        else:
            raise RuntimeError(f"{task}/{size}/{split}: no new instance after {max_attempts} draws at index {index}")
        seen.add(mark)
        instances.append(Instance(f"{task}-{size}-{split}-{index}", task, kind, data))
    return instances


def save_instances(instances: list[Instance], path: str | Path) -> None:
    """Write a `datasets` folder; nested `data` travels as JSON text."""
    import datasets

    datasets.Dataset.from_list([{"id": i.id, "task": i.task, "kind": i.kind, "data": json.dumps(i.data, ensure_ascii=False)}
                                for i in instances]).save_to_disk(str(path))


def load_instances(path: str | Path) -> list[Instance]:
    """Read what `save_instances` wrote."""
    import datasets

    return [Instance(row["id"], row["task"], row["kind"], json.loads(row["data"]))
            for row in datasets.load_from_disk(str(path))]
