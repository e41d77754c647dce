"""Guesses of a turn's next tokens, which the model then checks several at a time: speculative decoding by look-up, without a draft
model (arXiv 2304.04487, 2211.17192).

What followed the same few tokens before, in this session or another, is the guess. Every position of a turn has its own random
number, with which the engine samples it from the model whatever was guessed, so that a guess changes how many forward passes a turn
takes and nothing of what is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence

ORDERS = (5, 3, 2)                                          # so many tokens before are looked up, or else so many
MOST_PLACES = 1 << 18                                       # remembered; then it begins anew
LONGEST = 8                                                 # tokens guessed at once


class Drafts:
    """What followed each run of `ORDERS` tokens last, and how often in a row it did, over all texts that were noted."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], tuple[int, int]] = {}

    def clear(self) -> None:
        self._next.clear()

    def note(self, text: Sequence[int], start: int) -> None:
        """Take in `text[start:]`."""
        if len(self._next) > MOST_PLACES:
            self.clear()
        for order in ORDERS:
            for place in range(max(start, order), len(text)):
                before, token = tuple(text[place - order:place]), text[place]
                last, times = self._next.get(before, (token, 0))
                self._next[before] = (token, times + 1 if last == token else 1)

    def guess(self, texts: Sequence[tuple[list[int], int, int]], pass_tokens: int) -> list[list[int]]:
        """Tokens that may follow each of `texts`: (tokens, number of turns that continue them, most tokens to guess).

        What came n times in a row comes again with a chance of n / (n + 1), less where few tokens before it were looked up: so it is
        about, as measured. Guesses are as long as gives most expected tokens for a forward pass over all texts, which costs as much as
        `pass_tokens` more tokens than it is fed, pads included.
        """
        guesses, gains, turns = [], [0.0] * LONGEST, sum(turns for _, turns, _ in texts)
        for text, times, most in texts:
            context, guess, chance = text[-ORDERS[0]:], [], 1.0
            while len(guess) < min(most, LONGEST):
                order, (token, seen) = next(((order, found) for order in ORDERS if (found := self._next.get(tuple(context[-order:])))),
                                            (0, (0, 0)))
                if not seen:
                    break
                chance *= seen / (seen + 1) * (1 - 0.5 ** (order - 1))
                gains[len(guess)] += chance * times
                guess.append(token)
                context = [*context[1:], token]
            guesses.append(guess)
        width = max(range(LONGEST + 1), key=lambda width: (turns + sum(gains[:width])) / (pass_tokens + len(texts) * (width + 1)))
        return [guess[:width] for guess in guesses]
