"""WebShop's own product files, in a folder: `items_shuffle*.json` as published, or documents made of it.

`items_shuffle.json` is one array of 1.18 million raw records (some 5 GB); it is read record by record, turned into products
as upstream does, with the attributes of `items_ins_v2*.json`. `documents*.jsonl.gz` has a line {id, contents, product} per
product, attributes included. A large file is used through the index that `build_index` saves beside it
(`python -m envs fetch webshop`).
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envs.base import EnvFault
from envs.webshop_env import store
from envs.webshop_env.catalogue import NO_PRICE, Catalogue, Product, shared

INDEX = "index"
MOST_BYTES = 32 * 2 ** 20                                   # a product file above this size is used through a saved index
NO_ATTRIBUTES = ("DUMMY_ATTR",)                             # upstream's attributes of a product that has none
DOCUMENT_FIELDS = {"asin": str, "Title": str, "Description": str, "BulletPoints": list, "options": dict, "Attributes": list,
                   "Price": str, "pricing": list, "category": str, "query": str, "product_category": str,
                   "Rating": (str, float, int)}
RAW_FIELDS = {"asin": str, "name": str, "full_description": str, "small_description": (str, list), "category": str,
              "query": str, "product_category": str}
_CHUNK, _LONGEST = 2 ** 20, 2 ** 24                          # characters read at once; characters of the longest record
_GAP, _SPACE = re.compile(r"[\s,]*"), re.compile(r"\s*")


def official_folder(path: str | None) -> Path:
    """The folder `webshop` below `path` or below the folder that EPPO_DATA names. EnvFault: there is none."""
    root = path or os.environ.get("EPPO_DATA")
    if not root:
        raise EnvFault("webshop: source='official' needs the folder of official files: path=... or the variable EPPO_DATA")
    folder = Path(root) / "webshop"
    if not folder.is_dir():
        raise EnvFault(f"webshop: {folder} is not a folder")
    return folder


def official_catalogue(folder: Path) -> Catalogue:
    """The products in `folder`, one catalogue per folder and process.

    Raises:
        EnvFault: no product file, a bad record, an index that does not fit, or none for a large file.
    """
    def build() -> Catalogue:
        if (folder / INDEX).exists():
            return _stored(folder)
        if needs_index(folder):
            raise EnvFault(f"webshop: {_sources(folder)[0]} is large and has no saved index; {_remedy(folder)}")
        return Catalogue(list(read_products(_sources(folder))))
    return shared(("catalogue", str(folder.resolve())), build)


def needs_index(folder: Path) -> bool:
    """Whether `build_index` has something to do: the products are many, or the saved index cannot be used."""
    if not (folder / INDEX).exists():
        return _sources(folder)[0].stat().st_size > MOST_BYTES
    try:
        _stored(folder)
    except EnvFault:
        return True
    return False


def _stored(folder: Path) -> Catalogue:
    return store.load(folder / INDEX, _sizes(_sources(folder)), _remedy(folder))


def _remedy(folder: Path) -> str:
    return f"python -m envs fetch webshop --path {folder.parent} builds it"


def build_index(folder: Path) -> Path:
    """Save the index of the products in `folder`; returns its folder. EnvFault as in `official_catalogue`."""
    files = _sources(folder)
    store.save(read_products(files), folder / INDEX, _sizes(files))
    return folder / INDEX


def instruction_files(folder: Path) -> list[Path]:
    """`items_ins_v2.json` (of all products), then those of samples."""
    return sorted(folder.glob("items_ins_v2*.json"))


def _sources(folder: Path) -> list[Path]:
    """The product file and, for raw records, the file of attributes."""
    for pattern in ("items_shuffle.json", "items_shuffle_*.json", "documents*.jsonl.gz"):
        for products in sorted(folder.glob(pattern)):
            if pattern.startswith("documents"):
                return [products]
            attributes = folder / products.name.replace("items_shuffle", "items_ins_v2")
            if not attributes.exists():
                raise EnvFault(f"webshop: {products} needs {attributes.name} beside it")
            return [products, attributes]
    raise EnvFault(f"webshop: neither items_shuffle*.json nor documents*.jsonl.gz in {folder}; "
                   "python -m envs fetch webshop says where they come from, or use source='generated'")


def _sizes(files: list[Path]) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in files}


def read_products(files: list[Path]) -> Iterator[Product]:
    """The products of the files that `_sources` names, in file order, without repeated ids and, as upstream, without
    records whose id is "nan" or longer than 10 characters. EnvFault names file and record of what cannot be read."""
    seen: set[str] = set()
    try:
        for product in _documents(files[0]) if len(files) == 1 else _raw_products(*files):
            if product.asin not in seen and product.asin != "nan" and len(product.asin) <= 10:
                seen.add(product.asin)
                yield product
    except (OSError, EOFError, ValueError) as error:
        raise EnvFault(f"webshop: {files[0]} cannot be read: {error}") from error


def _documents(path: Path) -> Iterator[Product]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            record = json.loads(line)
            yield _document_product(record.get("product") if isinstance(record, dict) else None, f"{path}, line {number}")


def _raw_products(path: Path, attributes_path: Path) -> Iterator[Product]:
    records = json.loads(attributes_path.read_text(encoding="utf-8"))
    if not isinstance(records, dict):
        raise EnvFault(f"webshop: {attributes_path} is not an object {{asin: {{attributes: [...]}}}}")
    attributes = {asin: tuple(record["attributes"]) for asin, record in records.items()
                  if not bad_fields(record, {"attributes": list})}
    del records
    for number, record in enumerate(read_array(path), 1):
        yield raw_product(record, attributes, f"{path}, record {number}")


def read_array(path: Path) -> Iterator[Any]:
    """The elements of a JSON file that holds one array, one after the other, without reading it whole.

    Raises:
        ValueError: not an array, or a record that cannot be parsed; it says at which character the record starts.
    """
    decoder, text, start, done = json.JSONDecoder(), "", 0, 0
    with path.open(encoding="utf-8") as file:
        if not (text := file.read(_CHUNK)).lstrip().startswith("["):
            raise ValueError("it is not a JSON array")
        start = text.index("[") + 1
        while True:
            start = _GAP.match(text, start).end()
            if text.startswith("]", start):
                return
            try:
                element, stop = decoder.raw_decode(text, start)
                end = _SPACE.match(text, stop).end()
                if text[end:end + 1] in (",", "]"):          # else it may go on in the next chunk, as a number can
                    yield element
                    start = stop
                    continue
            except json.JSONDecodeError as error:
                if len(text) - start > _LONGEST:
                    raise ValueError(f"the record at character {done + start} cannot be parsed: {error.msg}") from error
            done, text, start = done + start, text[start:], 0
            more = file.read(max(_CHUNK, len(text)))
            if not more:
                raise ValueError(f"the record at character {done} is cut off or damaged")
            text += more


def bad_fields(item: Any, fields: dict[str, Any]) -> str:
    """Which of `fields` (name to type) the record `item` lacks, as a sentence; "" if none."""
    bad = sorted(fields) if not isinstance(item, dict) else \
        [name for name, kind in fields.items() if not isinstance(item.get(name), kind)]
    return f"missing or of another type: {', '.join(bad)}" if bad else ""


def _checked(item: Any, fields: dict[str, Any], where: str) -> dict[str, Any]:
    if bad := bad_fields(item, fields):
        raise EnvFault(f"webshop: {where}: {bad}")
    return item


def _document_product(record: Any, where: str) -> Product:
    item = _checked(record, DOCUMENT_FIELDS, where)
    reviews = tuple(part for review in item.get("Reviews") or []
                    for part in (f'"{review.get("title", "")}"', str(review.get("score", "")), str(review.get("body", ""))))
    return Product(item["asin"], item["Title"], item["query"].lower().strip(), item["category"], item["product_category"],
                   tuple(item["Attributes"]), {name: tuple(values) for name, values in item["options"].items()},
                   tuple(map(float, item["pricing"])), item["Price"], item["Description"], tuple(item["BulletPoints"]),
                   str(item["Rating"]), reviews)


def raw_product(record: Any, attributes: dict[str, tuple[str, ...]], where: str) -> Product:
    """A record of `items_shuffle.json` as upstream shows it: prices out of the text, options in lower case, no reviews."""
    item = _checked(record, RAW_FIELDS, where)
    small, prices = item["small_description"], _prices(item.get("pricing"))
    try:
        options = {name.lower(): tuple(content["value"].strip().replace("/", " | ").lower() for content in contents)
                   for name, contents in (item.get("customization_options") or {}).items() if contents is not None}
    except (AttributeError, TypeError, KeyError) as error:
        raise EnvFault(f"webshop: {where}: customization_options are not {{name: [{{value}}, ...]}}") from error
    return Product(item["asin"], item["name"], item["query"].lower().strip(), item["category"], item["product_category"],
                   attributes.get(item["asin"], NO_ATTRIBUTES), options, prices, " to ".join(f"${price}" for price in prices),
                   item["full_description"], tuple(small) if isinstance(small, list) else (small,))


def _prices(text: str | None) -> tuple[float, ...]:
    """The first two dollar amounts of a text such as "$1,019.99 - $25"."""
    amounts = [re.sub(r"[^\d.]", "", part) for part in (text or "").split("$")[1:3]]
    return tuple(map(float, amounts)) or (NO_PRICE,)
