"""BM25 search over product texts: what WebShop gets from Lucene, without a server or Java.

Constants k1 = 0.9 and b = 0.4 and the English analysis (word splitting, possessives, 33 stop words, Porter stemming) are
pyserini's; the weights are those of package bm25s, variant "lucene", made in a quarter of its memory. Products with equal
scores come in the order of the catalogue.
"""

from __future__ import annotations

import math
import re
import threading
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import Stemmer

from envs.webshop_env.tables import Names, in_place

K1, B = 0.9, 0.4
STOP_WORDS = frozenset("a an and are as at be but by for if in into is it no not of on or such that the their then there these "
                       "they this to was will with".split())
MAX_QUERY_TERMS = 1024                                      # Lucene's clause limit; a longer query is cut
ROUNDING = 5e-5                                             # scores are compared at four decimals
BLOCK = 64                                                  # products per group when the best are searched
CHUNK = 2 ** 23                                             # occurrences handled at once while an index is made
_SHIFT = 32                                                 # a key is term << _SHIFT | product: sorted by term, then by product
_WORD = re.compile(r"\w+(?:(?<=[^\W\d_])['\u2019.:](?=[^\W\d_])\w+|(?<=\d)[.,'\u2019](?=\d)\w+)*")
_local = threading.local()                                  # a stemmer serves one thread only


def analyse(text: str) -> list[str]:
    """The index terms of `text`, in order, repeats kept."""
    if not hasattr(_local, "stemmer"):
        _local.stemmer = Stemmer.Stemmer("porter")
    words = (word.removesuffix("'s").removesuffix("\u2019s") for word in _WORD.findall(text.lower()))
    return _local.stemmer.stemWords([word for word in words if word not in STOP_WORDS])


class ProductIndex:
    """An index over texts; a product is known by its position.

    Per term: the positions of the products that have it, and what it adds to their scores.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        vocabulary: dict[str, int] = {}
        keys, lengths = array("q"), array("i")
        for number, text in enumerate(texts):
            before = len(keys)
            keys.extend(vocabulary.setdefault(term, len(vocabulary)) << _SHIFT | number for term in analyse(text))
            lengths.append(len(keys) - before)
        self._fill(vocabulary, len(lengths), *_postings(np.frombuffer(keys, dtype=np.int64), np.array(lengths), len(vocabulary)))

    def _fill(self, vocabulary: Mapping[str, int], count: int, weights: np.ndarray, positions: np.ndarray,
              starts: np.ndarray) -> None:
        self._vocabulary, self._count, self._weights, self._positions, self._starts = \
            vocabulary, count, weights, positions, starts

    def save(self, folder: Path) -> None:
        """Write the index into `folder`, from where `load` opens it."""
        Names.write(folder, "terms", self._vocabulary)
        for name, values in (("weights", self._weights), ("positions", self._positions), ("starts", self._starts)):
            np.save(folder / f"{name}.npy", values)

    @classmethod
    def load(cls, folder: Path, count: int) -> "ProductIndex":
        """The index of `count` products that `save` wrote, read in place."""
        index = cls.__new__(cls)
        index._fill(Names(folder, "terms"), count, *(in_place(folder / f"{name}.npy")
                                                     for name in ("weights", "positions", "starts")))
        return index

    def search(self, query: str, limit: int) -> list[int]:
        """Positions of the `limit` best matches, best first; only products that share a term with the query."""
        scores = np.zeros(self._count, dtype=np.float32)
        for term in analyse(query)[:MAX_QUERY_TERMS]:
            if (number := self._vocabulary.get(term)) is not None:
                postings = slice(self._starts[number], self._starts[number + 1])
                np.add.at(scores, self._positions[postings], self._weights[postings])
        found = np.flatnonzero(scores >= _least(scores, limit))
        rounded = np.round(scores[found], 4)                 # sums that differ in the last bit only are a tie
        floor = np.partition(rounded, len(rounded) - limit)[len(rounded) - limit] if len(rounded) > limit else 0.0
        kept = (rounded >= floor) & (rounded > 0)
        found, rounded = found[kept], rounded[kept]
        return found[np.argsort(-rounded, kind="stable")][:limit].tolist()


def _postings(keys: np.ndarray, lengths: np.ndarray, vocabulary: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(weights, positions, starts): for each term number its products in order, and BM25's weight there, Lucene's form:
    idf = ln(1 + (N - df + 1/2) / (df + 1/2)), in single precision, times tf / (k1 (1 - b + b length / mean length) + tf).

    Args:
        keys: term << 32 | product for every word of every product; they are sorted in place.
        lengths: words of each product.
    """
    count = len(lengths)
    keys.sort()
    frequencies = np.zeros(vocabulary, dtype=np.int64)       # products that have the term
    for term, _, _ in _occurrences(keys):
        frequencies += np.bincount(term, minlength=vocabulary)
    starts = np.concatenate(([0], np.cumsum(frequencies)))
    idf = np.array([math.log(1 + (count - own + 0.5) / (own + 0.5)) for own in frequencies.tolist()], dtype=np.float32)
    damping = K1 * ((1 - B) + B * lengths / (lengths.mean() if len(keys) else 1.0))
    weights, positions, done = np.empty(starts[-1], dtype=np.float32), np.empty(starts[-1], dtype=np.int32), 0
    for term, product, times in _occurrences(keys):
        part = slice(done, done := done + len(term))
        positions[part], weights[part] = product, idf[term] * (times / (damping[product] + times))
    return weights, positions, starts


def _occurrences(keys: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(term, product, how often) for sorted keys, some millions at a time."""
    begin = 0
    while begin < len(keys):
        end = min(begin + CHUNK, len(keys))
        end = int(np.searchsorted(keys, keys[end - 1], side="right"))         # a run of equal keys stays together
        part = keys[begin:end]
        runs = np.flatnonzero(np.concatenate(([True], part[1:] != part[:-1])))
        yield part[runs] >> _SHIFT, part[runs] & (1 << _SHIFT) - 1, np.diff(runs, append=end - begin)
        begin = end


def _least(scores: np.ndarray, limit: int) -> float:
    """A score that none of the `limit` best is below, ties included: the `limit`-th best of the best scores of groups."""
    whole = len(scores) // BLOCK * BLOCK
    best = scores[:whole].reshape(BLOCK, -1).max(axis=0)     # groups of every so many-th product: much faster than neighbours
    if len(best) <= limit:
        return ROUNDING
    return max(float(np.partition(best, len(best) - limit)[len(best) - limit]) - 2 * ROUNDING, ROUNDING)
