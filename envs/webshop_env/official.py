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
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from envs.base import EnvFault
from envs.webshop_env import store
from envs.webshop_env.catalogue import NO_PRICE, Catalogue, Product, shared
from envs.webshop_env.schema import NOTHING, bad_fields, fits, parse_json

INDEX = "index"
MOST_BYTES = 32 * 2 ** 20                                   # a product file above this size is used through a saved index
NO_ATTRIBUTES = ("DUMMY_ATTR",)                             # upstream's attributes of a product that has none
LONGEST_ID = 10
DOCUMENT_FIELDS = {"asin": str, "Title": str, "Description": str, "BulletPoints": [str], "options": {str: [str]},
                   "Attributes": [str], "Price": str, "pricing": [float], "category": str, "query": str,
                   "product_category": str, "Rating": (str, float)}
RAW_FIELDS = {"asin": str, "name": str, "full_description": str, "small_description": (str, [str]), "category": str,
              "query": str, "product_category": str}
_UNREADABLE = (OSError, EOFError, ValueError, zlib.error)
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
        EnvFault: no product file, none with a usable record, an index that does not fit, or none for a large file.
    """
    def build() -> Catalogue:
        if (folder / INDEX).exists():
            return _stored(folder)
        if needs_index(folder):
            raise EnvFault(f"webshop: {_sources(folder)[0]} is large and has no saved index; {_remedy(folder)}")
        left_out: dict[str, str] = {}
        return Catalogue(list(read_products(_sources(folder), left_out)), left_out=left_out)
    return shared(("catalogue", str(folder.resolve())), build)


def needs_index(folder: Path) -> bool:
    """Whether `build_index` has something to do: the products are many, or the saved index, which is read whole here, cannot
    be used."""
    if not (folder / INDEX).exists():
        return _sources(folder)[0].stat().st_size > MOST_BYTES
    try:
        _stored(folder)
        store.verify(folder / INDEX)
    except EnvFault:
        return True
    return False


def _stored(folder: Path) -> Catalogue:
    return store.load(folder / INDEX, _sizes(_sources(folder)), _remedy(folder))


def _remedy(folder: Path) -> str:
    return f"python -m envs fetch webshop --path {folder.parent} builds it"


def build_index(folder: Path) -> Path:
    """Save the index of the products in `folder`; returns its folder. EnvFault as in `official_catalogue`."""
    files, left_out = _sources(folder), {}
    store.save(read_products(files, left_out), folder / INDEX, _sizes(files), left_out)
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


def read_products(files: list[Path], left_out: dict[str, str]) -> Iterator[Product]:
    """The products of the files that `_sources` names, in file order. EnvFault: a file cannot be read, or none is usable.

    Args:
        left_out: is filled with the records that cannot be used (file and place) and why: those of another form, and, as
            upstream, those whose id came before, is "nan" or is longer than 10 characters.
    """
    seen: set[str] = set()
    try:
        for where, record in _documents(files[0]) if len(files) == 1 else _raw_records(*files):
            try:
                product = record()
                if bad := _unfit(product.asin, seen):
                    raise ValueError(f"its id {product.asin[:20]!r} {bad}")
            except ValueError as error:
                left_out[f"{files[0].name}, {where}"] = str(error)
                continue
            seen.add(product.asin)
            yield product
    except _UNREADABLE as error:
        raise EnvFault(f"webshop: {files[0]} cannot be read: {error}") from error
    if not seen:
        first = next((f"; {where}: {why}" for where, why in left_out.items()), "")
        raise EnvFault(f"webshop: no usable product in {files[0]}{first}")


def _unfit(asin: str, seen: set[str]) -> str:
    """Why the shop cannot take the product of this id; "" if it can."""
    if asin in seen:
        return "came before"
    if asin == "nan" or len(asin) > LONGEST_ID:
        return f"is left out as upstream does ('nan', or longer than {LONGEST_ID} characters)"
    return "" if asin.isalnum() else "is not of letters and digits"


def _documents(path: Path) -> Iterator[tuple[str, Callable[[], Product]]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            yield f"line {number}", partial(_document_product, line)


def _raw_records(path: Path, attributes_path: Path) -> Iterator[tuple[str, Callable[[], Product]]]:
    records = parse_json(attributes_path.read_text(encoding="utf-8"))
    if not isinstance(records, dict):
        raise EnvFault(f"webshop: {attributes_path} is not an object {{asin: {{attributes: [...]}}}}")
    attributes = {asin: _attributes_of(record) for asin, record in records.items()}
    del records                                              # it holds much more than the attributes
    for number, record in enumerate(read_array(path), 1):
        yield f"record {number}", partial(raw_product, record, attributes)


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
            except RecursionError as error:
                raise ValueError(f"the record at character {done + start} is nested too deeply") from error
            except json.JSONDecodeError as error:
                if len(text) - start > _LONGEST:
                    raise ValueError(f"the record at character {done + start} cannot be parsed: {error.msg}") from error
            done, text, start = done + start, text[start:], 0
            more = file.read(max(_CHUNK, len(text)))
            if not more:
                raise ValueError(f"the record at character {done} is cut off or damaged")
            text += more


def _checked(item: Any, fields: dict[str, Any]) -> dict[str, Any]:
    if bad := bad_fields(item, fields):
        raise ValueError(bad)
    return item


def _document_product(line: str) -> Product:
    document = parse_json(line)
    item = _checked(document.get("product") if isinstance(document, dict) else None, DOCUMENT_FIELDS)
    reviews = _checked({"Reviews": item.get("Reviews") or []}, {"Reviews": [{str: (str, float, NOTHING)}]})["Reviews"]
    told = tuple(part for review in reviews for part in (f'"{review.get("title", "")}"', str(review.get("score", "")),
                                                         str(review.get("body", ""))))
    return Product(item["asin"], item["Title"], item["query"].lower().strip(), item["category"], item["product_category"],
                   tuple(item["Attributes"]), {name: tuple(values) for name, values in item["options"].items()},
                   tuple(map(float, item["pricing"])), item["Price"], item["Description"], tuple(item["BulletPoints"]),
                   str(item["Rating"]), told)


def raw_product(record: Any, attributes: dict[str, tuple[str, ...] | None]) -> Product:
    """A record of `items_shuffle.json` as upstream shows it: prices out of the text, options in lower case, no reviews.

    Args:
        attributes: of products, by id, out of `items_ins_v2.json`; None where they cannot be used.

    Raises:
        ValueError: the product cannot be used; the message says why.
    """
    item = _checked(record, RAW_FIELDS)
    own = attributes.get(item["asin"], NO_ATTRIBUTES)
    if own is None:
        raise ValueError("its attributes are not a list of texts")
    small, prices = item["small_description"], _prices(item.get("pricing"))
    return Product(item["asin"], item["name"], item["query"].lower().strip(), item["category"], item["product_category"],
                   own, _options(item.get("customization_options")), prices, " to ".join(f"${price}" for price in prices),
                   item["full_description"], tuple(small) if isinstance(small, list) else (small,))


def _options(choices: Any) -> dict[str, tuple[str, ...]]:
    """Name to values, in lower case. ValueError: `choices` are neither empty nor {name: [{value: text}, ...] or null}."""
    form = "customization_options are not {name: [{value}, ...]}"
    try:
        options = {name.lower(): tuple(content["value"].strip().replace("/", " | ").lower() for content in contents)
                   for name, contents in (choices or {}).items() if contents is not None}
    except (AttributeError, TypeError, KeyError) as error:
        raise ValueError(form) from error
    if not all(fits([name, *values], [str]) for name, values in options.items()):
        raise ValueError(form)
    return options


def _attributes_of(record: Any) -> tuple[str, ...] | None:
    if not isinstance(record, dict) or not fits(record.get("attributes", []), [str]):
        return None
    return tuple(record["attributes"]) if "attributes" in record else NO_ATTRIBUTES


def _prices(text: Any) -> tuple[float, ...]:
    """The first two dollar amounts of a text such as "$1,019.99 - $25". ValueError: it is something else."""
    if text and not fits(text, str):
        raise ValueError("pricing is not a text")
    amounts = [re.sub(r"[^\d.]", "", part) for part in (text or "").split("$")[1:3]]
    try:
        return tuple(map(float, amounts)) or (NO_PRICE,)
    except ValueError as error:
        raise ValueError(f"pricing {text[:40]!r} is not a text of dollar amounts") from error
