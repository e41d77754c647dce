"""What an engine holds of sessions: their tokens, what a model knows of these, and the turns being sampled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from eppo.generate.protocol import Request


class Known(NamedTuple):
    """Keys and values of a text's beginning: a trunk that it shares with others, and what comes after it."""

    trunk: Tensor | None = None
    own: Tensor | None = None                               # [layers, 2, kv_heads, length, head_dim], as trunks are

    @property
    def length(self) -> int:
        return length(self.trunk) + length(self.own)


def length(cache: Tensor | None) -> int:
    """Positions of keys and values [layers, 2, kv_heads, length, head_dim]."""
    return 0 if cache is None else cache.shape[3]


@dataclass(slots=True)
class Session:
    """`ids`: all tokens so far, those of a turn being sampled included; of these the first `noted` are in the drafts. `caches`: what
    each pool's model knows of them."""

    ids: list[int] = field(default_factory=list)
    noted: int = 0
    caches: dict[str, Known] = field(default_factory=dict)


@dataclass(slots=True)
class Row:
    """A turn being sampled. Its position t is drawn with `noise[t]`."""

    request: Request
    session: Session
    order: int
    noise: list[float]
    ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)

    def take(self, token: int, logp: float) -> bool:
        """Add a sampled token; whether it ends the turn."""
        self.ids.append(token)
        self.logp.append(logp)
        self.session.ids.append(token)
        return token in self.request.stop_ids or len(self.ids) == self.request.max_tokens

    @property
    def left(self) -> int:
        """Tokens that may still be sampled."""
        return self.request.max_tokens - len(self.ids)


@dataclass(slots=True)
class Branch:
    """Turns whose sessions hold the same tokens, sampled at the same temperature: one row of the model's batch."""

    rows: list[Row]
    trunk: Tensor | None

    @property
    def text(self) -> list[int]:
        return self.rows[0].session.ids

    @property
    def left(self) -> int:
        return min(row.left for row in self.rows)

    def own(self, tokens: int) -> int:
        """How many of the first `tokens` tokens come after the trunk."""
        return tokens - length(self.trunk)
