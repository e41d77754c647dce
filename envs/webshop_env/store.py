"""A catalogue in a folder: products and search index are read in place, so that it opens at once whatever its size, and all
processes share one copy in memory.

`index.json`, written last, names the format, the files that the catalogue was made of, and the size of every file in the
folder.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from functools import lru_cache
from pathlib import Path

import numpy as np

from envs.base import EnvFault
from envs.webshop_env.catalogue import Catalogue, Product
from envs.webshop_env.search import ProductIndex
from envs.webshop_env.tables import Names, Rows, in_place

FORMAT = 1
LABELS = ("category", "query")
PRODUCTS_KEPT = 4096
_HEAD = "index.json"


class StoredProducts(Sequence[Product]):
    """The products of a folder, each parsed when it is asked for; the last few thousand are kept."""

    def __init__(self, folder: Path) -> None:
        self._rows = Rows(folder, "products")
        self._product = lru_cache(PRODUCTS_KEPT)(lambda position: _decode(self._rows[position]))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, position: int) -> Product:
        return self._product(int(position))


class StoredCatalogue(Catalogue):
    """A catalogue that `save` wrote."""

    def __init__(self, folder: Path) -> None:
        products = StoredProducts(folder)
        super().__init__(products, Names(folder, "asins"), ProductIndex.load(folder, len(products)))
        self._labels = {label: (Names(folder, label), in_place(folder / f"{label}.codes.npy")) for label in LABELS}

    def labelled(self, label: str, value: str) -> list[int]:
        names, codes = self._labels[label]
        return np.flatnonzero(codes == names[value]).tolist() if value in names else []


def save(products: Iterable[Product], folder: Path, sources: Mapping[str, int]) -> None:
    """Write a catalogue, in place of whatever `folder` holds; an interrupted call leaves `folder` as it was.

    Args:
        sources: name and size in bytes of the files that the products come from.
    """
    work = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    positions: dict[str, int] = {}
    codes: dict[str, dict[str, int]] = {label: {} for label in LABELS}
    columns: dict[str, list[int]] = {label: [] for label in LABELS}

    def rows() -> Iterable[bytes]:
        for product in products:
            positions[product.asin.lower()] = len(positions)
            for label in LABELS:
                columns[label].append(codes[label].setdefault(getattr(product, label), len(codes[label])))
            yield _encode(product)

    try:
        Rows.write(work, "products", rows())
        Names.write(work, "asins", positions)
        for label in LABELS:
            Names.write(work, label, codes[label])
            np.save(work / f"{label}.codes.npy", np.array(columns[label], dtype=np.int32))
        stored = Rows(work, "products")
        ProductIndex(_decode(row).index_text for row in stored).save(work)
        sizes = {file.name: file.stat().st_size for file in sorted(work.iterdir())}
        head = {"format": FORMAT, "products": len(stored), "sources": dict(sources), "files": sizes}
        (work / _HEAD).write_text(json.dumps(head, indent=1), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def load(folder: Path, sources: Mapping[str, int], remedy: str) -> StoredCatalogue:
    """Open the catalogue in `folder`.

    Raises:
        EnvFault: it is of another format, of other sources, or damaged; the message ends with `remedy`.
    """
    try:
        head = json.loads((folder / _HEAD).read_text(encoding="utf-8"))
        if head["format"] != FORMAT:
            raise ValueError(f"its format is {head['format']}, this version reads format {FORMAT}")
        if head["sources"] != dict(sources):
            raise ValueError(f"it was made of {head['sources']}, the folder now has {dict(sources)}")
        for name, size in head["files"].items():
            if (folder / name).stat().st_size != size:
                raise ValueError(f"{name} has {(folder / name).stat().st_size} bytes instead of {size}")
        return StoredCatalogue(folder)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise EnvFault(f"webshop: the saved index {folder} cannot be used: {error}; {remedy}") from error


def _encode(product: Product) -> bytes:
    return json.dumps(astuple(product), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _decode(row: bytes) -> Product:
    asin, title, query, category, path, attributes, options, pricing, price_tag, description, bullets, rating, reviews = \
        json.loads(row.decode("utf-8", "surrogatepass"))
    return Product(asin, title, query, category, path, tuple(attributes),
                   {name: tuple(values) for name, values in options.items()}, tuple(pricing), price_tag, description,
                   tuple(bullets), rating, tuple(reviews))
