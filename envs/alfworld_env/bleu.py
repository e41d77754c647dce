"""Sentence BLEU as AgentBench uses it to map a free action to an admissible command: NLTK's, with smoothing method 4.

Chen and Cherry 2014, method 4, in the form of nltk.translate.bleu_score (up to 4-grams, equal weights, k = 5).
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Sequence

THRESHOLD = 0.01                                            # AgentBench: a best score at or below it maps to nothing


def sentence_bleu(reference: Sequence[str], hypothesis: Sequence[str]) -> float:
    """BLEU-4 of `hypothesis` against one `reference` (token lists), smoothed; 0 where no word is shared."""
    grams = {n: Counter(zip(*(hypothesis[i:] for i in range(n)))) for n in range(1, 5)}
    return _score(reference, len(hypothesis), grams)


def _score(reference: Sequence[str], length: int, grams: dict[int, Counter]) -> float:
    precisions: list[float] = []
    smoothed = 0
    for n in range(1, 5):
        wanted = Counter(zip(*(reference[i:] for i in range(n))))
        hits = sum(min(count, grams[n][gram]) for gram, count in wanted.items() if gram in grams[n])
        total = max(1, length - n + 1)
        if n == 1 and hits == 0:
            return 0.0
        if hits == 0 and length > 1:
            smoothed += 1
            precisions.append(math.log(length) / (2 ** smoothed * 5) / total)
        else:
            precisions.append(hits / total)
    brevity = 1.0 if length > len(reference) else math.exp(1 - len(reference) / length)
    return brevity * math.exp(math.fsum(0.25 * math.log(p) for p in precisions if p > 0))


def nearest_command(action: str, commands: Sequence[str]) -> str:
    """`action` itself if admissible; else the command most like it, the first of equals; else `action` as it is."""
    if action in commands or not commands:
        return action
    words = action.split()
    grams = {n: Counter(zip(*(words[i:] for i in range(n)))) for n in range(1, 5)}
    scores = [_score(command.split(), len(words), grams) for command in commands]
    best = max(range(len(commands)), key=scores.__getitem__)
    return commands[best] if scores[best] > THRESHOLD else action
