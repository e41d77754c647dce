"""What a generator is: token ids in, sampled token ids with their log-probabilities out."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Callable, Protocol, Sequence

from torch import nn

FRESH, STALE = "fresh", "stale"


@dataclass(frozen=True, slots=True)
class Request:
    """Sample one turn of a session.

    `new_ids` are the tokens that follow what the session holds so far (prompt first, later the observation): the generator
    keeps the session's whole history, sampled tokens included. `max_tokens` > 0; `temperature` >= 0 (0 is greedy); sampling
    stops after a token of `stop_ids`; equal `seed`s draw equal noise; `pool` names the weights ("fresh" or "stale").
    """

    session: str
    new_ids: Sequence[int]
    max_tokens: int
    temperature: float
    stop_ids: tuple[int, ...]
    seed: int
    pool: str = FRESH


@dataclass(frozen=True, slots=True)
class Completion:
    """The sampled `ids` (a stop token included), their `logp` at the sampling temperature, "stop" or "length", and the
    policy `version` and `pool` that sampled them."""

    ids: list[int]
    logp: list[float]
    finish_reason: str
    version: int
    pool: str


class Generator(Protocol):
    """`generate` blocks, answers in order, and may be called from several threads, whose requests are batched together."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...
    def end(self, session: str) -> None: ...
    def sync(self, module: nn.Module, version: int, pool: str = FRESH) -> None: ...
    def fingerprint(self, pool: str = FRESH) -> str: ...
    def close(self) -> None: ...


FollowUp = Callable[[int, Completion], "Future[Request | None]"]


class StreamingGenerator(Generator, Protocol):
    """A generator that refills its batch as turns finish, with the same batches, hence the same bits, in every run."""

    def stream(self, requests: Sequence[Request], follow_up: FollowUp, max_active: int) -> None: ...


def stable_seed(*parts: object) -> int:
    """A 63-bit seed from any printable parts; independent of PYTHONHASHSEED."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
