"""BM25 search over product texts: what WebShop gets from Lucene, without a server or Java.

Constants k1 = 0.9 and b = 0.4 and the English analysis (word splitting, possessives, 33 stop words, Porter stemming) are
pyserini's; the scores are `bm25s`'s Lucene variant. Products with equal scores come in the order of the catalogue.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable

import bm25s
import numpy as np
import Stemmer

K1, B = 0.9, 0.4
STOP_WORDS = frozenset("a an and are as at be but by for if in into is it no not of on or such that the their then there these "
                       "they this to was will with".split())
MAX_QUERY_TERMS = 1024                                      # Lucene's clause limit; a longer query is cut
_WORD = re.compile(r"\w+(?:(?<=[^\W\d_])['\u2019.:](?=[^\W\d_])\w+|(?<=\d)[.,'\u2019](?=\d)\w+)*")
_local = threading.local()                                  # a stemmer serves one thread only


def analyse(text: str) -> list[str]:
    """The index terms of `text`, in order, repeats kept."""
    if not hasattr(_local, "stemmer"):
        _local.stemmer = Stemmer.Stemmer("porter")
    words = (word.removesuffix("'s").removesuffix("\u2019s") for word in _WORD.findall(text.lower()))
    return _local.stemmer.stemWords([word for word in words if word not in STOP_WORDS])


class ProductIndex:
    """An index over `texts`; a product is known by its position."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._vocabulary: dict[str, int] = {}
        ids = [[self._vocabulary.setdefault(term, len(self._vocabulary)) for term in analyse(text)] for text in texts]
        self._bm25 = bm25s.BM25(k1=K1, b=B, method="lucene", backend="numpy")
        self._bm25.index((ids, dict(self._vocabulary)), show_progress=False)

    def search(self, query: str, limit: int) -> list[int]:
        """Positions of the `limit` best matches, best first; only products that share a term with the query."""
        terms = [self._vocabulary[term] for term in analyse(query)[:MAX_QUERY_TERMS] if term in self._vocabulary]
        if not terms:
            return []
        scores = np.round(self._bm25.get_scores_from_ids(terms), 4)     # sums that differ in the last bit only are a tie
        found = np.flatnonzero(scores > 0)
        if len(found) > limit:
            floor = np.partition(scores[found], len(found) - limit)[len(found) - limit]
            found = found[scores[found] >= floor]
        return found[np.argsort(-scores[found], kind="stable")][:limit].tolist()
