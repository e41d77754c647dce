"""Sampling with a Hugging Face model on CPU or one GPU: ragged batches, continuous refilling, a KV cache kept across turns.

One engine per weight pool. An engine samples one token per active row and tick; rows whose turn ends leave, waiting rows
enter (their missing tokens are pre-filled together). A session's cache belongs to a pool and a weight version: a turn
pre-fills only what that model has not seen, and a sync drops it. Prompts that several sessions share are pre-filled once.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Sequence

import torch
from torch import Tensor, nn

from eppo.generate.kv_cache import ATTENTION, KVBatch
from eppo.generate.protocol import FRESH, Completion, FollowUp, Request
from eppo.policy import splits_cleanly

ADMIT_EVERY = 4                                             # ticks between admissions of follow-up turns: fewer, larger prefills


@dataclass(slots=True)
class _Session:
    ids: list[int] = field(default_factory=list)
    caches: dict[str, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class _Row:
    request: Request
    session: _Session
    order: int
    noise: list[float]
    ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)


class _Engine:
    """The rows of one pool: its weights, its working batch, its shared prompts."""

    def __init__(self, module: nn.Module, version: int, pool: str, prefixes: int) -> None:
        self.model, self.version, self.pool, self.max_prefixes = copy.deepcopy(module).eval(), version, pool, prefixes
        self.model.requires_grad_(False)
        self.model.set_attn_implementation(ATTENTION)
        self.whole = not splits_cleanly(self.model)
        self.kv = KVBatch(self.model)
        self.rows: list[_Row] = []
        self.prefixes: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()

    def load(self, module: nn.Module, version: int) -> None:
        self.model.load_state_dict(module.state_dict())
        self.version = version
        self.prefixes.clear()

    def _forward(self, ids_BT: Tensor, write_BT: Tensor, start: int, length: int, last_B: Tensor) -> Tensor:
        """Logits [B, V] of position `last_B` of each fed row."""
        mask = self.kv.place(start, start + len(ids_BT), write_BT, length)
        feed = {"input_ids": ids_BT, "attention_mask": mask, "position_ids": write_BT, "past_key_values": self.kv, "use_cache": True}
        rows = torch.arange(len(ids_BT), device=ids_BT.device)
        if self.whole:
            return self.model(**feed).logits[rows, last_B].float()
        hidden_BTD = self.model.base_model(**feed).last_hidden_state
        return self.model.get_output_embeddings()(hidden_BTD[rows, last_B]).float()

    def admit(self, rows: list[_Row]) -> list[_Row]:
        """Enter `rows`: pre-fill what this model has not seen of each and sample its first token. Returns the finished ones.

        Rows with a prompt that a row before them has too wait for it and copy its cache instead of computing it again.
        """
        first, later, seen = [], [], set()
        for row in rows:
            prompt = tuple(row.session.ids)
            shared = self.pool not in row.session.caches and len(prompt) > 1
            (later if shared and prompt[:-1] in seen else first).append(row)
            if shared:
                seen.add(prompt[:-1])
        done = self._admit(first)
        return done + (self._admit(later) if later else [])

    def _admit(self, rows: list[_Row]) -> list[_Row]:
        feeds, starts = [], []
        for row in rows:
            ids, stored = row.session.ids, row.session.caches.get(self.pool)
            if stored is None:
                stored = self.prefixes.get(tuple(ids[:-1]))
            start = 0 if stored is None else stored.shape[3]
            self.kv.reserve(len(self.rows) + 1, len(ids) + row.request.max_tokens)
            if stored is not None:
                self.kv.load(len(self.rows), stored)
            self.rows.append(row)
            feeds.append(ids[start:])
            starts.append(start)
        device, width = self.model.device, max(map(len, feeds))
        lens_B = torch.tensor([len(feed) for feed in feeds], device=device)
        ids_BT = torch.tensor([list(feed) + [0] * (width - len(feed)) for feed in feeds], device=device)
        starts_B = torch.tensor(starts, device=device)
        write_BT = starts_B[:, None] + torch.arange(width, device=device)
        length = int(write_BT.max()) + 1
        self.kv.reserve(len(self.rows), length)
        base = len(self.rows) - len(rows)
        logits_BV = self._forward(ids_BT, write_BT, base, length, lens_B - 1)
        for offset, row in enumerate(rows):
            prompt = tuple(row.session.ids[:-1])
            if starts[offset] == 0 and len(prompt) > 0 and prompt not in self.prefixes and self.max_prefixes:
                self.prefixes[prompt] = self.kv.store(base + offset, len(prompt))
                if len(self.prefixes) > self.max_prefixes:
                    self.prefixes.popitem(last=False)
        return self._sample(logits_BV, list(range(base, len(self.rows))))

    def tick(self) -> list[_Row]:
        """One token for every active row; the rows that finished leave and are returned in their order of arrival."""
        device = self.model.device
        ids_BT = torch.tensor([[row.ids[-1]] for row in self.rows], device=device)
        write_BT = torch.tensor([[len(row.session.ids) + len(row.ids) - 1] for row in self.rows], device=device)
        zeros_B = torch.zeros(len(self.rows), dtype=torch.long, device=device)
        logits_BV = self._forward(ids_BT, write_BT, 0, int(write_BT.max()) + 1, zeros_B)
        return self._sample(logits_BV, list(range(len(self.rows))))

    def _sample(self, logits_BV: Tensor, rows: list[int]) -> list[_Row]:
        """Draw by inverting each row's cumulative distribution at its own noise; greedy where the temperature is 0."""
        temperature_B = torch.tensor([self.rows[row].request.temperature for row in rows], device=logits_BV.device)
        greedy_B = temperature_B == 0
        logps_BV = torch.log_softmax(logits_BV / temperature_B.masked_fill(greedy_B, 1.0)[:, None], dim=-1)
        noise_B = torch.tensor([self.rows[row].noise[len(self.rows[row].ids)] for row in rows], device=logits_BV.device)
        cumulative_BV = logps_BV.exp().cumsum(-1)
        chosen_B = (cumulative_BV <= noise_B[:, None] * cumulative_BV[:, -1:]).sum(-1).clamp_(max=logits_BV.shape[1] - 1)
        if bool(greedy_B.any()):
            chosen_B = torch.where(greedy_B, logits_BV.argmax(-1), chosen_B)
        logp_B = logps_BV.gather(1, chosen_B[:, None])[:, 0]
        finished = []
        for row_index, token, logp in zip(rows, chosen_B.tolist(), logp_B.tolist()):
            row = self.rows[row_index]
            row.ids.append(token)
            row.logp.append(logp)
            if token in row.request.stop_ids or len(row.ids) == row.request.max_tokens:
                finished.append(row_index)
        return self._leave(finished)

    def _leave(self, indices: list[int]) -> list[_Row]:
        left = [self.rows[index] for index in indices]
        for index in sorted(indices, reverse=True):
            row, last = self.rows[index], len(self.rows) - 1
            length = len(row.session.ids) + len(row.ids) - 1       # the last sampled token was never fed
            row.session.caches[self.pool] = self.kv.store(index, length)
            if index != last:
                mover = self.rows[last]
                self.kv.move(last, index, len(mover.session.ids) + len(mover.ids))
                self.rows[index] = mover
            self.rows.pop()
        for row in left:
            row.session.ids.extend(row.ids)
        return left

    def completion(self, row: _Row) -> Completion:
        stopped = row.ids[-1] in row.request.stop_ids
        return Completion(row.ids, row.logp, "stop" if stopped else "length", self.version, self.pool)


class TransformersGenerator:
    """See the module's docstring. Threads may share it: whoever waits drives the batch that holds everybody's rows.

    Args:
        module: the model to copy for the "fresh" pool; other pools appear with their first `sync`.
        version: the policy version of these weights.
        max_active: rows decoded together; further requests wait.
        shared_prompts: prompts whose cache is kept until the next sync.
    """

    def __init__(self, module: nn.Module, version: int = 0, *, max_active: int = 128, shared_prompts: int = 64) -> None:
        self._engines: dict[str, _Engine] = {}
        self._sessions: dict[str, _Session] = {}
        self._prefixes, self.max_active = shared_prompts, max_active
        self._waiting: deque[_Row] = deque()
        self._changed = threading.Condition()
        self._driving = False
        self._results: dict[int, Completion | BaseException] = {}
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
                self._engines[pool] = _Engine(module, version, pool, self._prefixes)
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
    def _row(self, request: Request) -> _Row:
        if request.pool not in self._engines:
            raise ValueError(f"unknown pool {request.pool!r}; known: {', '.join(self._engines)}")
        if request.max_tokens < 1:
            raise ValueError(f"session {request.session!r}: max_tokens must be at least 1, not {request.max_tokens}")
        session = self._sessions.setdefault(request.session, _Session())
        session.ids.extend(request.new_ids)
        if not session.ids:
            raise ValueError(f"session {request.session!r}: no tokens to continue from")
        noise = torch.rand(request.max_tokens, generator=torch.Generator().manual_seed(request.seed)).tolist()
        self._count += 1
        return _Row(request, session, self._count, noise)

    def _advance(self, waiting: deque[_Row]) -> list[_Row]:
        """Admit what fits, then one tick of every pool; the finished rows in a fixed order."""
        finished = []
        room = self.max_active - sum(len(engine.rows) for engine in self._engines.values())
        entering = [waiting.popleft() for _ in range(min(room, len(waiting)))]
        with torch.inference_mode():
            for pool, engine in self._engines.items():
                mine = [row for row in entering if row.request.pool == pool]
                before = len(engine.rows)
                if before:
                    finished += engine.tick()
                if mine:
                    finished += engine.admit(mine)
        return sorted(finished, key=lambda row: row.order)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample one turn per request; blocks until all are done."""
        with self._changed:
            rows = [self._row(request) for request in requests]
            self._waiting.extend(rows)
        wanted = {row.order for row in rows}
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
                        self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                stuck = [row for engine in self._engines.values() for row in engine.rows] + list(self._waiting)
                for row in stuck:
                    self._results[row.order] = error
                for engine in self._engines.values():
                    engine.rows.clear()
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
            for engine in self._engines.values():           # what earlier calls left behind must not decide a last bit
                engine.kv.clear()
                engine.prefixes.clear()
        try:
            rows = [self._row(request) for request in requests]
            owner = {row.order: index for index, row in enumerate(rows)}
            waiting, due, tick = deque(rows), deque(), 0
            while waiting or due or any(engine.rows for engine in self._engines.values()):
                busy = bool(waiting) or any(engine.rows for engine in self._engines.values())
                if due and not busy:
                    tick = max(tick, due[0][0])
                while due and due[0][0] <= tick:
                    _, index, future = due.popleft()
                    request = future.result()
                    if request is not None:
                        row = self._row(request)
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
                    engine.rows.clear()
                self._driving = False
                self._changed.notify_all()
