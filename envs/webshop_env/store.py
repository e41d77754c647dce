"""A catalogue in a folder: products and search index are read in place, so that it opens at once whatever its size, and all
processes share one copy in memory.

`index.json`, written last, names the format, the files that the catalogue was made of, what of them was left out, and size and
checksums of every file in the folder. Opening compares sizes and beginnings, which takes no time; `verify` reads everything.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from envs.base import EnvFault
from envs.webshop_env.catalogue import Catalogue, Product
from envs.webshop_env.schema import parse_json
from envs.webshop_env.search import ProductIndex
from envs.webshop_env.tables import Names, Rows, in_place

FORMAT = 2
LABELS = ("category", "query")
PRODUCTS_KEPT = 4096
_HEAD = "index.json"
_BEGINNING, _CHUNK = 4096, 2 ** 22                           # bytes that `load` compares; bytes read at once


class StoredProducts(Sequence[Product]):
    """The products of a folder, each parsed when it is asked for; the last few thousand are kept."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._rows = folder, Rows(folder, "products")
        self._product = lru_cache(PRODUCTS_KEPT)(self._read)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, position: int) -> Product:
        return self._product(int(position))

    def _read(self, position: int) -> Product:
        row = self._rows[position]
        try:
            return _decode(row)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise EnvFault(f"webshop: product {position} of the saved index {self._folder} is damaged: {error}") from error


class StoredCatalogue(Catalogue):
    """A catalogue that `save` wrote. EnvFault: what is looked up lies in a damaged part of it."""

    def __init__(self, folder: Path, left_out: Mapping[str, str]) -> None:
        products = StoredProducts(folder)
        super().__init__(products, Names(folder, "asins"), ProductIndex.load(folder, len(products)), left_out)
        self._folder = folder
        self._labels = {label: (Names(folder, label), in_place(folder / f"{label}.codes.npy")) for label in LABELS}

    def search(self, keywords: str, limit: int) -> list[int]:
        try:
            return super().search(keywords, limit)
        except IndexError as error:
            raise EnvFault(f"webshop: the saved index {self._folder} is damaged: {error}") from error

    def labelled(self, label: str, value: str) -> list[int]:
        names, codes = self._labels[label]
        return np.flatnonzero(codes == names[value]).tolist() if value in names else []


def save(products: Iterable[Product], folder: Path, sources: Mapping[str, int], left_out: Mapping[str, str]) -> None:
    """Write a catalogue, in place of whatever `folder` holds; an interrupted call leaves `folder` as it was.

    Args:
        sources: name and size in bytes of the files that the products come from.
        left_out: records of them that cannot be used, and why; read after the last product.
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
        positions.clear(), codes.clear(), columns.clear()    # not needed beside the index that is made now
        stored = Rows(work, "products")
        ProductIndex(_decode(row).index_text for row in stored).save(work)
        files = {file.name: [file.stat().st_size, _checksum(file, _BEGINNING), _checksum(file)] for file in sorted(work.iterdir())}
        head = {"format": FORMAT, "products": len(stored), "sources": dict(sources), "left_out": dict(left_out), "files": files}
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
        head = _read_head(folder)
        if head["sources"] != dict(sources):
            raise ValueError(f"it was made of {head['sources']}, the folder now has {dict(sources)}")
        for name, (size, beginning, _) in head["files"].items():
            if (folder / name).stat().st_size != size:
                raise ValueError(f"{name} has {(folder / name).stat().st_size} bytes instead of {size}")
            if _checksum(folder / name, _BEGINNING) != beginning:
                raise ValueError(f"{name} is damaged")
        return StoredCatalogue(folder, head["left_out"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise EnvFault(f"webshop: the saved index {folder} cannot be used: {error}; {remedy}") from error


def verify(folder: Path) -> None:
    """Read every file of the catalogue in `folder` whole. EnvFault: one is not what `save` wrote."""
    for name, (_, _, whole) in _read_head(folder)["files"].items():
        if _checksum(folder / name) != whole:
            raise EnvFault(f"webshop: {name} of the saved index {folder} is damaged")


def _read_head(folder: Path) -> dict[str, Any]:
    """The content of `index.json`. ValueError, OSError, TypeError, KeyError: it is not of this format."""
    head = parse_json((folder / _HEAD).read_text(encoding="utf-8"))
    if head["format"] != FORMAT:
        raise ValueError(f"its format is {head['format']}, this version reads format {FORMAT}")
    return head


def _checksum(file: Path, most: int | None = None) -> int:
    """CRC-32 of the first `most` bytes of a file; of all where `most` is None."""
    with file.open("rb") as content:
        if most is not None:
            return zlib.crc32(content.read(most))
        value = 0
        while chunk := content.read(_CHUNK):
            value = zlib.crc32(chunk, value)
        return value


def _encode(product: Product) -> bytes:
    return json.dumps(astuple(product), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _decode(row: bytes) -> Product:
    asin, title, query, category, path, attributes, options, pricing, price_tag, description, bullets, rating, reviews = \
        json.loads(row.decode("utf-8", "surrogatepass"))
    return Product(asin, title, query, category, path, tuple(attributes),
                   {name: tuple(values) for name, values in options.items()}, tuple(pricing), price_tag, description,
                   tuple(bullets), rating, tuple(reviews))
