"""The engine of one weight pool: a working batch of turns being sampled, one token per row and tick.

Rows whose turn ends leave, waiting rows enter; their missing tokens are pre-filled together, and what prompts share only once.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from eppo.generate.kv_cache import ATTENTION, KVBatch
from eppo.generate.protocol import Completion, Request
from eppo.policy import splits_cleanly
from eppo.prefixes import common

PASS_TOKENS = 64                                            # tokens that take as long as a forward pass takes at least
SHARE_FROM = 32                                             # tokens that a row must spare to wait for another's pass


@dataclass(slots=True)
class Session:
    ids: list[int] = field(default_factory=list)
    caches: dict[str, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Row:
    request: Request
    session: Session
    order: int
    noise: list[float]
    ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)


def _parts(entering: list[tuple[Row, int, Tensor | None]]) -> list[list[tuple[Row, int, Tensor | None]]]:
    """Rows by the number of tokens that they have to be fed, apart where padding would cost more than another forward pass."""
    def new(entry: tuple[Row, int, Tensor | None]) -> int:
        return len(entry[0].session.ids) - entry[1]

    parts: list[list[tuple[Row, int, Tensor | None]]] = []
    left = len(entering)
    for entry in sorted(entering, key=new, reverse=True):
        if not parts or (new(parts[-1][0]) - new(entry)) * left > PASS_TOKENS:
            parts.append([])
        parts[-1].append(entry)
        left -= 1
    return parts


class Engine:
    """The rows of one pool: its weights, its working batch, its shared prompts."""

    def __init__(self, module: nn.Module, version: int, pool: str, prefixes: int) -> None:
        self.model, self.version, self.pool, self.max_prefixes = copy.deepcopy(module).eval(), version, pool, prefixes
        self.model.requires_grad_(False)
        self.model.set_attn_implementation(ATTENTION)
        self.whole = not splits_cleanly(self.model)
        self.kv = KVBatch(self.model)
        self.rows: list[Row] = []
        self.prefixes: OrderedDict[tuple[int, ...], tuple[np.ndarray, Tensor]] = OrderedDict()

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

    def admit(self, rows: list[Row]) -> list[Row]:
        """Enter `rows`: pre-fill what this model has not seen of each and sample its first token. Returns the finished ones.

        A row that begins like a row before it waits for that one and copies its cache instead of computing it again: first one
        prompt of each kind is pre-filled, then what its like add to it, then the last token of everybody else.
        """
        self.kv.reserve(len(self.rows) + len(rows), max(len(row.session.ids) + row.request.max_tokens for row in rows))
        done: list[Row] = []
        while rows:
            now, later = [], []
            coming: dict[tuple[int, ...], np.ndarray] = {}
            for row in rows:
                start, cache = self._known(row)
                prompt = tuple(row.session.ids[:-1])
                if self.max_prefixes and self.pool not in row.session.caches and start < len(prompt):
                    ids = np.array(prompt)
                    if prompt in coming or any(common(ids, other) >= start + SHARE_FROM for other in coming.values()):
                        later.append(row)
                        continue
                    coming[prompt] = ids
                now.append((row, start, cache))
            for part in _parts(now):
                done += self._admit(part)
            rows = later
        return done

    def _known(self, row: Row) -> tuple[int, Tensor | None]:
        """How many of the row's tokens, its last one apart, this model has seen at the start of a text, and the cache of these."""
        if self.pool in row.session.caches:
            cache = row.session.caches[self.pool]
            return cache.shape[3], cache
        prompt = tuple(row.session.ids[:-1])
        if prompt not in self.prefixes:
            ids = np.array(prompt)
            start, prompt = max(((common(ids, other), key) for key, (other, _) in self.prefixes.items()), default=(0, ()))
            if not start:
                return 0, None
        else:
            start = len(prompt)
        self.prefixes.move_to_end(prompt)
        return start, self.prefixes[prompt][1]

    def _admit(self, entering: list[tuple[Row, int, Tensor | None]]) -> list[Row]:
        """One forward pass for rows of which `start` tokens are in a cache."""
        feeds, base = [], len(self.rows)
        for row, start, cache in entering:
            if start:
                self.kv.load(len(self.rows), cache[:, :, :, :start])
            self.rows.append(row)
            feeds.append(row.session.ids[start:])
        device, width = self.model.device, max(map(len, feeds))
        lens_B = torch.tensor([len(feed) for feed in feeds], device=device)
        ids_BT = torch.tensor([list(feed) + [0] * (width - len(feed)) for feed in feeds], device=device)
        starts_B = torch.tensor([start for _, start, _ in entering], device=device)
        write_BT = starts_B[:, None] + torch.arange(width, device=device)
        length = int(write_BT.max()) + 1
        self.kv.reserve(len(self.rows), length)
        logits_BV = self._forward(ids_BT, write_BT, base, length, lens_B - 1)
        for index, (row, _, _) in enumerate(entering, base):
            prompt = tuple(row.session.ids[:-1])
            if self.max_prefixes and prompt and self.pool not in row.session.caches and prompt not in self.prefixes:
                self.prefixes[prompt] = np.array(prompt), self.kv.store(index, len(prompt))
                if len(self.prefixes) > self.max_prefixes:
                    self.prefixes.popitem(last=False)
        return self._sample(logits_BV, list(range(base, len(self.rows))))

    def tick(self) -> list[Row]:
        """One token for every active row; the rows that finished leave and are returned in their order of arrival."""
        device = self.model.device
        ids_BT = torch.tensor([[row.ids[-1]] for row in self.rows], device=device)
        write_BT = torch.tensor([[len(row.session.ids) + len(row.ids) - 1] for row in self.rows], device=device)
        zeros_B = torch.zeros(len(self.rows), dtype=torch.long, device=device)
        logits_BV = self._forward(ids_BT, write_BT, 0, int(write_BT.max()) + 1, zeros_B)
        return self._sample(logits_BV, list(range(len(self.rows))))

    def _sample(self, logits_BV: Tensor, rows: list[int]) -> list[Row]:
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

    def _leave(self, indices: list[int]) -> list[Row]:
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

    def completion(self, row: Row) -> Completion:
        stopped = row.ids[-1] in row.request.stop_ids
        return Completion(row.ids, row.logp, "stop" if stopped else "length", self.version, self.pool)
