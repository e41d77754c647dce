"""Sampling with a Hugging Face model on CPU or one GPU: ragged batches, continuous refilling, a KV cache kept across turns.

One engine per weight pool. A tick is a forward pass over every active turn, which gets a token, and more where a guess was right;
turns that end leave, waiting ones enter. A session's cache belongs to a pool and a weight version: a turn pre-fills only what that
model has not seen, and a sync drops it. What texts of several sessions share is computed once (`eppo.generate.engine`).
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from typing import Sequence

import torch
from torch import nn

from eppo.generate.drafts import Drafts
from eppo.generate.engine import Engine
from eppo.generate.protocol import FRESH, Completion, FollowUp, Request
from eppo.generate.session import Row, Session

ADMIT_EVERY = 4                                             # ticks between admissions of follow-up turns: fewer, larger prefills


class TransformersGenerator:
    """See the module's docstring. Threads may share it: whoever waits drives the batch that holds everybody's rows.

    Args:
        module: the model to copy for the "fresh" pool; other pools appear with their first `sync`.
        version: the policy version of these weights.
        max_active: rows decoded together; further requests wait.
        shared_prompts: prompts whose cache is kept until the next sync.
    """

    def __init__(self, module: nn.Module, version: int = 0, *, max_active: int = 128, shared_prompts: int = 64) -> None:
        self._engines: dict[str, Engine] = {}
        self._sessions: dict[str, Session] = {}
        self._drafts = Drafts()
        self._prefixes, self.max_active = shared_prompts, max_active
        self._waiting: deque[Row] = deque()
        self._changed = threading.Condition()
        self._driving = False
        self._results: dict[int, Completion | BaseException] = {}
        self._asked: set[int] = set()                       # orders of `generate`'s rows without a result
        self._count = 0
        self.sync(module, version, FRESH)

    # weights -------------------------------------------------------------------------------------------------------
    def sync(self, module: nn.Module, version: int, pool: str = FRESH) -> None:
        """Copy weights into `pool`; every cache of that pool is dropped. Not while turns are being sampled."""
        with self._changed:
            if self._driving:
                raise RuntimeError("sync while turns are being sampled")
            if pool in self._engines:
                self._engines[pool].load(module, version)
            else:
                self._engines[pool] = Engine(module, version, pool, self._prefixes, self._drafts)
            for session in self._sessions.values():
                session.caches.pop(pool, None)

    def fingerprint(self, pool: str = FRESH) -> str:
        """Hex digest of the pool's weights."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self._engines[pool].model.state_dict().items()):
            digest.update(name.encode() + tensor.detach().float().cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    def end(self, session: str) -> None:
        """Forget a session and free its cache."""
        self._sessions.pop(session, None)

    def close(self) -> None:
        self._sessions.clear()
        self._engines.clear()

    # sampling ------------------------------------------------------------------------------------------------------
    def _rows(self, requests: Sequence[Request]) -> list[Row]:
        """Rows of all `requests`, or a ValueError that leaves every session as it is."""
        for request in requests:
            self._check(request)
        return [self._row(request) for request in requests]

    def _check(self, request: Request) -> None:
        if request.pool not in self._engines:
            raise ValueError(f"unknown pool {request.pool!r}; known: {', '.join(self._engines)}")
        if request.max_tokens < 1:
            raise ValueError(f"session {request.session!r}: max_tokens must be at least 1, not {request.max_tokens}")
        if len(request.new_ids) == 0 and request.session not in self._sessions:
            raise ValueError(f"session {request.session!r}: no tokens to continue from")

    def _row(self, request: Request) -> Row:
        session = self._sessions.setdefault(request.session, Session())
        session.ids.extend(request.new_ids)
        noise = torch.rand(request.max_tokens, generator=torch.Generator().manual_seed(request.seed)).tolist()
        self._count += 1
        return Row(request, session, self._count, noise)

    def _advance(self, waiting: deque[Row]) -> list[Row]:
        """Admit what fits, then one tick of every pool; the finished rows in a fixed order."""
        finished = []
        room = self.max_active - sum(len(engine.rows) for engine in self._engines.values())
        entering = [waiting.popleft() for _ in range(min(room, len(waiting)))]
        with torch.inference_mode():
            for pool, engine in self._engines.items():
                mine = [row for row in entering if row.request.pool == pool]
                if engine.branches:
                    finished += engine.tick()
                if mine:
                    finished += engine.admit(mine)
        return sorted(finished, key=lambda row: row.order)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample one turn per request; blocks until all are done."""
        with self._changed:
            rows = self._rows(requests)
            self._waiting.extend(rows)
            wanted = {row.order for row in rows}
            self._asked |= wanted
        while True:
            with self._changed:
                while self._driving and not wanted <= self._results.keys():
                    self._changed.wait()
                if wanted <= self._results.keys():
                    results = [self._results.pop(row.order) for row in rows]
                    break
                self._driving = True
            self._drive(wanted)
        for result in results:
            if isinstance(result, BaseException):
                raise RuntimeError("generation failed in another thread") from result
        return results

    def _drive(self, wanted: set[int]) -> None:
        """Sample until `wanted` is done or sampling fails; a failure reaches everyone who has rows in the batch."""
        try:
            while not wanted <= self._results.keys():
                for row in self._advance(self._waiting):
                    with self._changed:
                        self._results[row.order] = self._engines[row.request.pool].completion(row)
                        self._asked.discard(row.order)
                        self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._results.update(dict.fromkeys(self._asked - wanted, error))
                for order in wanted:                        # the caller gets the error itself
                    self._results.pop(order, None)
                self._asked.clear()
                for engine in self._engines.values():
                    engine.drop()
                self._waiting.clear()
            raise
        finally:
            with self._changed:
                self._driving = False
                self._changed.notify_all()

    def stream(self, requests: Sequence[Request], follow_up: FollowUp, max_active: int | None = None) -> None:
        """Play many sessions to their ends, refilling the batch as turns finish, with the same batches in every run.

        Args:
            requests: the opening request of each session.
            follow_up: `follow_up(i, completion)` gets what session i's request led to and returns a Future of the session's
                next request, or of None at its end. The request joins at a tick that does not depend on how long the Future
                took, so that equal inputs give equal batches and equal bits.
        """
        with self._changed:
            if self._driving:
                raise RuntimeError("stream while other turns are being sampled")
            self._driving = True
            self._drafts.clear()
            for engine in self._engines.values():           # what earlier calls left behind must not decide a last bit
                engine.forget()
        try:
            rows = self._rows(requests)
            owner = {row.order: index for index, row in enumerate(rows)}
            waiting, due, tick = deque(rows), deque(), 0
            while waiting or due or any(engine.branches for engine in self._engines.values()):
                busy = bool(waiting) or any(engine.branches for engine in self._engines.values())
                if due and not busy:
                    tick = max(tick, due[0][0])
                while due and due[0][0] <= tick:
                    _, index, future = due.popleft()
                    request = future.result()
                    if request is not None:
                        row, = self._rows([request])
                        owner[row.order] = index
                        waiting.append(row)
                for row in self._advance(waiting):
                    index = owner.pop(row.order)
                    turn = self._engines[row.request.pool].completion(row)
                    due.append(((tick // ADMIT_EVERY + 1) * ADMIT_EVERY, index, follow_up(index, turn)))
                tick += 1
        finally:
            with self._changed:
                for engine in self._engines.values():
                    engine.drop()
                self._driving = False
                self._changed.notify_all()
