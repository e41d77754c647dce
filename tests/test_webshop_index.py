"""WebShop's saved catalogue and its raw product files: what is written comes back, and what does not fit is named."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import bm25s
import numpy as np
import pytest

import envs
from envs.base import EnvFault
from envs.webshop_env import catalogue, official, search, store
from envs.webshop_env.catalogue import Catalogue, Product, micro_products, large_products
from envs.webshop_env.search import ProductIndex
from envs.webshop_env.tables import Names, Rows

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def products() -> list[Product]:
    return large_products("small", 700)


@pytest.fixture
def saved(products: list[Product], tmp_path: Path) -> Path:
    store.save(products, tmp_path / "index", {"items.json": 5}, {"items.json, record 9": "a reason"})
    return tmp_path / "index"


# ---- what is saved ------------------------------------------------------------------------------------------------------
def test_rows_and_names_come_back(tmp_path: Path) -> None:
    rows = [b"one", b"", "zwei \u203a".encode(), b"x" * 5000]
    Rows.write(tmp_path, "r", rows)
    assert list(Rows(tmp_path, "r")) == rows and len(Rows(tmp_path, "r")) == 4
    with pytest.raises(IndexError):
        Rows(tmp_path, "r")[4]
    names = {"b": 3, "a": 7, "\u00e9t\u00e9": 0, "": 9, "\ud800": 4}
    Names.write(tmp_path, "n", names)
    assert dict(Names(tmp_path, "n")) == names and "c" not in Names(tmp_path, "n")
    Rows.write(tmp_path, "none", [])
    assert list(Rows(tmp_path, "none")) == []


def test_a_saved_catalogue_is_the_catalogue(products: list[Product], saved: Path) -> None:
    built, opened = Catalogue(products), store.load(saved, {"items.json": 5}, "")
    assert list(opened.products) == products and dict(opened.positions) == built.positions
    rng = random.Random(0)
    for _ in range(200):
        product = rng.choice(products)
        words = rng.sample(product.index_text.split(), 3) + [rng.choice(["the", "unheard", "", "nylon"])]
        assert opened.search(" ".join(words), 50) == built.search(" ".join(words), 50)
        assert opened.find(product.asin) == built.find(product.asin.lower())
    for label in store.LABELS:
        for value in (getattr(products[0], label), "no such value"):
            assert opened.labelled(label, value) == built.labelled(label, value)
    assert opened.left_out == {"items.json, record 9": "a reason"} and built.left_out == {}
    with pytest.raises(KeyError):
        opened.find("B000000000")


@pytest.mark.parametrize("chunk", (3, 1000, 2 ** 23))
def test_weights_are_those_of_bm25s(products: list[Product], chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "CHUNK", chunk)
    for sample in (products[:300 if chunk == 3 else 700], micro_products()):
        texts = [product.index_text for product in sample]
        index, words = ProductIndex(texts), [search.analyse(text) for text in texts]
        numbers = index._vocabulary
        theirs = bm25s.BM25(k1=search.K1, b=search.B, method="lucene", backend="numpy")
        theirs.index(([[numbers[word] for word in text] for text in words], dict(numbers)), show_progress=False)
        for own, name in ((index._weights, "data"), (index._positions, "indices"), (index._starts, "indptr")):
            assert np.array_equal(own, theirs.scores[name]), name


def test_search_finds_the_same_whatever_the_number_of_blocks() -> None:
    """Against a sort of all scores: many ties, limits around block and result counts."""
    rng = random.Random(1)
    texts = [" ".join(rng.choices("abcdefgh", weights=range(1, 9), k=rng.randint(1, 6))) + "x" for _ in range(30_000)]
    index = ProductIndex(texts)
    for limit in (1, 50, 58, 59, 200, 40_000):
        for query in ("a", "b c", "g h", "h h a", "zzz", "ax bx"):
            scores = np.zeros(len(texts), dtype=np.float32)
            for term in [word for word in query.split() if word in index._vocabulary]:
                part = slice(*index._starts[index._vocabulary[term]:index._vocabulary[term] + 2])
                np.add.at(scores, index._positions[part], index._weights[part])
            rounded = np.round(scores, 4)
            expected = sorted(np.flatnonzero(rounded > 0), key=lambda position: (-rounded[position], position))[:limit]
            assert index.search(query, limit) == expected, (limit, query)


def test_an_index_that_does_not_fit_is_refused(saved: Path) -> None:
    head = json.loads((saved / "index.json").read_text())
    with pytest.raises(EnvFault, match="made of .*'items.json': 5.*now has .*'items.json': 6.*run this"):
        store.load(saved, {"items.json": 6}, "run this")
    for other in (1, 99):                                    # an older version's and a newer one's
        (saved / "index.json").write_text(json.dumps(head | {"format": other}))
        with pytest.raises(EnvFault, match=f"format is {other}, this version reads format {store.FORMAT}"):
            store.load(saved, {"items.json": 5}, "")
    for broken in ("{", "[]", "{}", "[" * 100_000):
        (saved / "index.json").write_text(broken)
        with pytest.raises(EnvFault, match="cannot be used"):
            store.load(saved, {"items.json": 5}, "")
    (saved / "index.json").write_text(json.dumps(head))
    (saved / "weights.npy").write_bytes((saved / "weights.npy").read_bytes()[:-4])
    with pytest.raises(EnvFault, match="weights.npy has .* bytes instead of"):
        store.load(saved, {"items.json": 5}, "")
    (saved / "weights.npy").unlink()
    with pytest.raises(EnvFault, match="weights.npy"):
        store.load(saved, {"items.json": 5}, "")


def test_damage_inside_an_index_is_a_fault_and_found_by_verify(products: list[Product], saved: Path) -> None:
    """Opening does not read everything: what lies deep is found by `verify`, or where it is used, and is never the agent's."""
    store.verify(saved)
    for name in ("weights.npy", "positions.npy", "products.rows", "products.ends.npy"):
        whole = (saved / name).read_bytes()
        (saved / name).write_bytes(b"\x93NUMPY" + whole[6:20] + b"(" * 20 + whole[40:])
        with pytest.raises(EnvFault, match=f"{name} is damaged"):
            store.load(saved, {"items.json": 5}, "")
        (saved / name).write_bytes(whole[:5000] + b"\x7f" * (len(whole) - 5000))
        if len(whole) > 5000:
            store.load(saved, {"items.json": 5}, "")
            with pytest.raises(EnvFault, match=f"{name} of the saved index .* is damaged"):
                store.verify(saved)
        (saved / name).write_bytes(whole)
    for name in ("positions.npy", "products.rows"):
        whole = (saved / name).read_bytes()
        (saved / name).write_bytes(whole[:5000] + b"\x7f" * (len(whole) - 5000))
        opened = store.load(saved, {"items.json": 5}, "")
        with pytest.raises(EnvFault, match="is damaged"):
            for product in products:
                opened.search(product.title, 50), opened.products[opened.find(product.asin)]
        (saved / name).write_bytes(whole)
    store.verify(saved)


def test_an_interrupted_save_leaves_the_old_index(products: list[Product], saved: Path) -> None:
    def stream() -> object:
        yield products[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(stream(), saved, {"items.json": 6}, {})
    assert len(store.load(saved, {"items.json": 5}, "").products) == 700
    assert [entry.name for entry in saved.parent.iterdir()] == ["index"]


# ---- the published files ------------------------------------------------------------------------------------------------
def raw(asin: str, **changes: object) -> dict[str, object]:
    return {"asin": asin, "name": f"Tea Mug {asin}", "full_description": "A mug.", "small_description": ["Big", "Blue"],
            "pricing": "$1,012.50", "category": "home", "query": " Tea MUG ", "product_category": "Home \u203a Mugs",
            "customization_options": {"Color": [{"value": " Red/Blue ", "image": None}, {"value": "GREEN"}], "Size": None},
            "images": ["x"]} | changes


def write_raw(folder: Path, records: object, attributes: dict[str, object]) -> Path:
    shop = folder / "webshop"
    shop.mkdir(parents=True)
    (shop / "items_shuffle.json").write_text(records if isinstance(records, str) else json.dumps(records), encoding="utf-8")
    (shop / "items_ins_v2.json").write_text(json.dumps(attributes))
    return shop


def test_raw_records_become_products(tmp_path: Path) -> None:
    records = [raw("B1"), raw("B2", pricing="$5 - $7.5", small_description="one", customization_options=""),
               raw("B1", name="again"), raw("nan"), raw("B1234567890"), raw("B3", pricing=None), raw("B4", pricing="")]
    shop = write_raw(tmp_path, records, {"B1": {"attributes": ["big handle"]}, "B2": {"attributes": []}})
    first, second, third, fourth = official.official_catalogue(shop).products
    assert first == Product("B1", "Tea Mug B1", "tea mug", "home", "Home \u203a Mugs", ("big handle",),
                            {"color": ("red | blue", "green")}, (1012.5,), "$1012.5", "A mug.", ("Big", "Blue"))
    assert (second.pricing, second.price_tag, second.bullets, second.options) == ((5.0, 7.5), "$5.0 to $7.5", ("one",), {})
    assert (second.attributes, third.attributes) == ((), official.NO_ATTRIBUTES)
    assert third.pricing == fourth.pricing == (100.0,) and third.price_tag == "$100.0"


@pytest.mark.parametrize("chunk", (3, 7, 64, 2 ** 20))
def test_an_array_is_read_record_by_record_whatever_the_chunks(tmp_path: Path, chunk: int,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(official, "_CHUNK", chunk)
    values = [{"a": "x]},{" * 20, "b": [1, [2.5, None]]}, 17, "\u203a \" \\", [], {}, -3.25, True]
    for text in (json.dumps(values), json.dumps(values, indent=3), " \n" + json.dumps(values, ensure_ascii=False) + " \n"):
        (tmp_path / "a.json").write_text(text, encoding="utf-8")
        assert list(official.read_array(tmp_path / "a.json")) == values
    (tmp_path / "a.json").write_text("[]")
    assert list(official.read_array(tmp_path / "a.json")) == []


@pytest.mark.parametrize(("text", "message"), [
    ("", "not a JSON array"), ('{"a": 1}', "not a JSON array"), ('[{"asin": 1}', "cut off"), ("[{]", "cut off or damaged"),
    ("[" * 100_000, "nested too deeply"), ("[]", "no usable product"),
    ("[{}]", "no usable product .*; items_shuffle.json, record 1: missing or of another type: asin, name, full_description"),
    ("[3]", "record 1: missing")])
def test_damaged_raw_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    shop = write_raw(tmp_path, text, {})
    with pytest.raises(EnvFault, match=message):
        official.official_catalogue(shop)


def test_raw_records_that_cannot_be_used_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason, from the files as from the saved index; what upstream leaves out too."""
    records = [raw("B1"), raw("B2", customization_options={"Color": ["red"]}), raw("B3", pricing="$free"), raw("B4", pricing=3),
               raw("B5", name="\ud800"), raw("B1"), raw("nan"), raw("B1234567890"), raw("B/6"), raw("B7", small_description=[None]),
               raw("B8"), 3]
    shop = write_raw(tmp_path, records, {"B8": {"attributes": "none"}, "B9": 3})
    reasons = {2: "customization_options are not {name: [{value}, ...]}", 3: "pricing '$free' is not a text of dollar amounts",
               4: "pricing is not a text", 5: "missing or of another type: name", 6: "its id 'B1' came before",
               7: "its id 'nan' is left out as upstream does ('nan', or longer than 10 characters)",
               8: "its id 'B1234567890' is left out as upstream does ('nan', or longer than 10 characters)",
               9: "its id 'B/6' is not of letters and digits", 10: "missing or of another type: small_description",
               11: "its attributes are not a list of texts",
               12: "missing or of another type: " + ", ".join(sorted(official.RAW_FIELDS))}
    expected = {f"items_shuffle.json, record {number}": reason for number, reason in reasons.items()}
    assert official.official_catalogue(shop).left_out == expected
    official.build_index(shop)
    monkeypatch.setattr(catalogue, "_shared", {})
    opened = official.official_catalogue(shop)
    assert isinstance(opened, store.StoredCatalogue) and opened.left_out == expected and len(opened.products) == 1


def test_missing_and_damaged_companions_are_named(tmp_path: Path) -> None:
    shop = write_raw(tmp_path / "b", [raw("B1")], {})
    (shop / "items_ins_v2.json").unlink()
    with pytest.raises(EnvFault, match="needs items_ins_v2.json"):
        official.official_catalogue(shop)
    shop = write_raw(tmp_path / "c", [raw("B1")], {})
    for broken in ("{", "[" * 100_000, "[]"):
        (shop / "items_ins_v2.json").write_text(broken)
        with pytest.raises(EnvFault, match="items_shuffle.json cannot be read|items_ins_v2.json"):
            official.official_catalogue(shop)


def test_a_large_file_needs_its_index_and_a_changed_one_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = write_raw(tmp_path, [raw(f"B{number}") for number in range(40)], {})
    assert not official.needs_index(shop)
    monkeypatch.setattr(official, "MOST_BYTES", 100)
    assert official.needs_index(shop)
    with pytest.raises(EnvFault, match="no saved index; python -m envs fetch webshop"):
        official.official_catalogue(shop)
    official.build_index(shop)
    assert not official.needs_index(shop) and isinstance(official.official_catalogue(shop), store.StoredCatalogue)
    weights = shop / "index" / "weights.npy"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    assert official.needs_index(shop)                        # fetch finds damage that opening does not
    official.build_index(shop)
    assert not official.needs_index(shop)
    (shop / "items_shuffle.json").write_text(json.dumps([raw("B1")]))
    assert official.needs_index(shop)


def test_raw_form_of_the_real_products_gives_the_real_products(eppo_data: Callable[[str], Path], tmp_path: Path) -> None:
    """Upstream's documents hold each raw field beside what upstream made of it."""
    documents = eppo_data("webshop/documents_1k.jsonl.gz")
    with gzip.open(documents, "rt", encoding="utf-8") as lines:
        items = [json.loads(line)["product"] for line in lines]
    attributes = {item["asin"]: {"attributes": item["Attributes"]} for item in items}
    for item in items:
        tags = [f"${amount}" for amount in item["pricing"]]
        item["pricing"] = " - ".join(tags)
    shop = write_raw(tmp_path, items, attributes)
    assert list(official.official_catalogue(shop).products) == list(official.official_catalogue(documents.parent).products)


# ---- several processes --------------------------------------------------------------------------------------------------
def test_results_do_not_depend_on_the_index_or_the_process(tmp_path: Path) -> None:
    """One episode over the raw files, over the saved index, and in another process: the same texts."""
    shop = write_raw(tmp_path, [raw(f"B{number}", name=f"Tea Mug {number % 7} x{number}") for number in range(60)], {})
    instruction = {"instruction": "i want a mug.", "instruction_attributes": ["tea mug"], "instruction_options": ["green"],
                   "attributes": [], "options": [], "asin": "B5", "worker_id": "w", "assignment_id": "a"}
    (shop / "items_human_ins.json").write_text(json.dumps({"B5": [instruction], "B9": [instruction | {"asin": "B9"}]}))
    program = ("import sys, envs, json; env = envs.make('webshop', source='official', split='test', rules='agentbench', "
               "path=sys.argv[1]); told = [env.reset(1)]\n"
               "for turn in env.oracle(1): told.append([env.step(turn).messages, env.step(turn).reward])\n"
               "print(json.dumps(told))")

    def play() -> str:
        return subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=True, capture_output=True,
                              text=True).stdout

    first = play()
    official.build_index(shop)
    assert play() == play() == first and "1.0]" in first
    assert envs.make("webshop", source="official", split="test", path=str(tmp_path)).catalogue.labelled("category", "home")
