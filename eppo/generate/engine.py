"""The engine of one weight pool: a working batch of turns being sampled, a forward pass a tick.

Turns that end leave, waiting ones enter. No text is computed twice: turns of sessions that hold the same tokens are one row of the
batch until they are sampled apart, prompts that begin alike are pre-filled from where they differ, and rows with the same prompt
read it together.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from eppo.generate.drafts import Drafts
from eppo.generate.kv_cache import ATTENTION, KVBatch
from eppo.generate.protocol import Completion
from eppo.generate.session import Branch, Known, Row, length
from eppo.policy import splits_cleanly
from eppo.prefixes import common

PASS_TOKENS = 64                                            # tokens that take as long as a forward pass takes at least
SHARE_FROM = 32                                             # tokens that a prompt must spare to wait for another's pass
TRUNK_FROM = 128                                            # tokens of a prompt that rows share in attention, not by copies


def _parts(new: Sequence[int]) -> list[list[int]]:
    """Indices of rows that are fed `new` tokens each, apart where padding would cost more than another forward pass."""
    parts: list[list[int]] = []
    order = sorted(range(len(new)), key=lambda index: -new[index])
    for count, index in enumerate(order):
        if not parts or (new[parts[-1][0]] - new[index]) * (len(order) - count) > PASS_TOKENS:
            parts.append([])
        parts[-1].append(index)
    return parts


class Engine:
    """The turns of one pool: its weights, its working batch, the prompts it knows."""

    def __init__(self, module: nn.Module, version: int, pool: str, prefixes: int, drafts: Drafts) -> None:
        self.model, self.version, self.pool, self.max_prefixes = copy.deepcopy(module).eval(), version, pool, prefixes
        self.model.requires_grad_(False)
        self.model.set_attn_implementation(ATTENTION)
        self.whole = not splits_cleanly(self.model)
        self.kv, self.prompts_kv = KVBatch(self.model), KVBatch(self.model)
        self.branches: list[Branch] = []                    # one for each row of `kv`
        self.drafts = drafts
        self.prefixes: OrderedDict[tuple[int, ...], tuple[np.ndarray, Tensor]] = OrderedDict()
        self.trunks: set[tuple[int, ...]] = set()           # of these: prompts that rows share in attention

    @property
    def rows(self) -> list[Row]:
        return [row for branch in self.branches for row in branch.rows]

    def load(self, module: nn.Module, version: int) -> None:
        self.model.load_state_dict(module.state_dict())
        self.version = version
        self.forget()

    def forget(self) -> None:
        """Start from nothing that other turns left behind."""
        self.kv.clear()
        self.prefixes.clear()
        self.trunks.clear()

    def drop(self) -> None:
        """Take unfinished turns out after a failure: their sessions hold again what they held before."""
        for row in self.rows:
            del row.session.ids[len(row.session.ids) - len(row.ids):]
            row.session.noted = min(row.session.noted, len(row.session.ids))
        self.branches.clear()

    # turns that enter ------------------------------------------------------------------------------------------------
    def admit(self, rows: list[Row]) -> list[Row]:
        """Enter `rows`: pre-fill what this model has not seen of each and sample its first token. Returns the finished ones."""
        opening = Counter(tuple(row.session.ids[:-1]) for row in rows if self.pool not in row.session.caches)
        if self.max_prefixes:
            self._learn([prompt for prompt in opening if prompt and prompt not in self.prefixes])
        same: dict[tuple[object, ...], list[Row]] = {}
        for row in rows:
            same.setdefault((row.request.temperature, *row.session.ids), []).append(row)
        known = [self._known(members, opening) for members in same.values()]
        branches = [Branch(members, cache.trunk) for members, cache in zip(same.values(), known)]
        longest = max(branch.own(len(branch.text) + row.left) for branch in branches for row in branch.rows)
        self.kv.reserve(len(self.rows) + len(rows), longest)
        done: list[Row] = []
        for part in _parts([len(branch.text) - cache.length for branch, cache in zip(branches, known)]):
            done += self._admit([branches[index] for index in part], [known[index] for index in part])
        while len(self.prefixes) > self.max_prefixes:
            self.trunks.discard(self.prefixes.popitem(last=False)[0])
        return done

    def _learn(self, prompts: list[tuple[int, ...]]) -> None:
        """Pre-fill prompts. One that begins like another waits for that one, and copies what they share."""
        self.prompts_kv.clear()
        for prompt in prompts:
            self.drafts.note(prompt, 0)
        while prompts:
            now, later = [], []
            for prompt in prompts:
                ids, cache = np.array(prompt), self._like(prompt)
                if any(common(ids, other) >= length(cache) + SHARE_FROM for _, other, _ in now):
                    later.append(prompt)
                else:
                    now.append((prompt, ids, cache))
            for part in _parts([len(ids) - length(cache) for _, ids, cache in now]):
                self._prefill([now[index] for index in part])
            prompts = later

    def _prefill(self, prompts: list[tuple[tuple[int, ...], np.ndarray, Tensor | None]]) -> None:
        """One forward pass over prompts, of which `cache` holds the beginning."""
        self.prompts_kv.reserve(len(prompts), max(len(prompt) for prompt, _, _ in prompts))
        for row, (_, _, cache) in enumerate(prompts):
            self.prompts_kv.load(row, cache)
        starts = [length(cache) for _, _, cache in prompts]
        self._feed(self.prompts_kv, 0, [prompt[start:] for (prompt, _, _), start in zip(prompts, starts)], starts)
        for row, (prompt, ids, _) in enumerate(prompts):
            self.prefixes[prompt] = ids, self.prompts_kv.store(row, len(prompt))

    def _like(self, prompt: tuple[int, ...]) -> Tensor | None:
        """What is known of the beginning of a prompt, its last token apart: a forward pass needs one to begin with."""
        ids = np.array(prompt)[:-1]
        shared, like = max(((common(ids, other), key) for key, (other, _) in self.prefixes.items()), default=(0, ()))
        return self.prefixes[like][1][:, :, :, :shared] if shared else None

    def _known(self, rows: list[Row], opening: Counter[tuple[int, ...]]) -> Known:
        """What this model has seen of the text that all of `rows` hold, its last token apart."""
        for row in rows:
            if self.pool in row.session.caches:
                return row.session.caches[self.pool]
        prompt = tuple(rows[0].session.ids[:-1])
        if prompt not in self.prefixes:
            return Known()
        self.prefixes.move_to_end(prompt)
        for row in rows:
            row.session.noted = len(prompt)
        if prompt in self.trunks or len(prompt) >= TRUNK_FROM and opening[prompt] > 1:
            self.trunks.add(prompt)
            return Known(self.prefixes[prompt][1])
        return Known(None, self.prefixes[prompt][1])

    def _admit(self, branches: list[Branch], known: list[Known]) -> list[Row]:
        """One forward pass for texts of which the beginning is known."""
        base = len(self.branches)
        for index, cache in enumerate(known, base):
            self.kv.load(index, cache.own)
        self.branches += branches
        feeds = [branch.text[cache.length:] for branch, cache in zip(branches, known)]
        logits_NV = self._feed(self.kv, base, feeds, [cache.length for cache in known], trunks=[branch.trunk for branch in branches])
        return self._sample(logits_NV, base, [[]] * len(branches))

    # a forward pass --------------------------------------------------------------------------------------------------
    def tick(self) -> list[Row]:
        """A forward pass for all turns: one token for each, and as many more as were guessed right. Returns the finished ones."""
        guesses = self.drafts.guess([(branch.text, len(branch.rows), branch.left - 1) for branch in self.branches], PASS_TOKENS)
        feeds = [[branch.text[-1], *guess] for branch, guess in zip(self.branches, guesses)]
        logits_NV = self._feed(self.kv, 0, feeds, [len(branch.text) - 1 for branch in self.branches],
                               last=[len(feed) for feed in feeds], trunks=[branch.trunk for branch in self.branches])
        return self._sample(logits_NV, 0, guesses)

    def _feed(self, kv: KVBatch, base: int, feeds: Sequence[Sequence[int]], starts: list[int], *, last: list[int] | None = None,
              trunks: Sequence[Tensor | None] = ()) -> Tensor:
        """A forward pass of rows `base` and following of `kv`, each fed at its start.

        Returns:
            Logits [N, V] after the `last` so many tokens of each row (its last one, unless said).
        """
        device, width = self.model.device, max(map(len, feeds))
        beyond = [length(trunk) for trunk in trunks] or [0] * len(feeds)
        ends = [start + len(feed) for start, feed in zip(starts, feeds)]
        if kv.window is not None and max(ends) > kv.window:
            raise ValueError(f"episodes longer than the model's attention window ({kv.window}) are not served here; lower max_tokens")
        ids_BT = torch.tensor([[*feed, *[0] * (width - len(feed))] for feed in feeds], device=device)
        starts_B, ends_B, beyond_B = torch.tensor([starts, ends, beyond], device=device)
        place_BT = starts_B[:, None] + torch.arange(width, device=device)
        kv.reserve(base + len(feeds), width + max(start - skipped for start, skipped in zip(starts, beyond)))
        mask = kv.place(base, base + len(feeds), place_BT - beyond_B[:, None],
                        max(end - skipped for end, skipped in zip(ends, beyond)), trunks)
        row_N, at_N = torch.tensor([(row, at) for row, (feed, count) in enumerate(zip(feeds, last or [1] * len(feeds)))
                                    for at in range(len(feed) - count, len(feed))], device=device).T
        feed = {"input_ids": ids_BT, "attention_mask": mask, "past_key_values": kv, "use_cache": True,
                "position_ids": place_BT.minimum(ends_B[:, None] - 1)}                     # pads need no position of their own
        if self.whole:
            return self.model(**feed).logits[row_N, at_N].float()
        hidden_BTD = self.model.base_model(**feed).last_hidden_state
        return self.model.get_output_embeddings()(hidden_BTD[row_N, at_N]).float()

    def _sample(self, logits_NV: Tensor, base: int, guesses: list[list[int]]) -> list[Row]:
        """Draw for every turn of branches `base` and following, by inverting its distribution at the position's own noise; greedy
        where the temperature is 0. Logits are of one more position a branch than there are guesses.

        Turns that drew different tokens part; what was drawn after a wrong guess is void. Returns the finished turns, which leave.
        """
        branches, device = self.branches[base:], logits_NV.device
        places = [(branch, place) for branch, guess in zip(branches, guesses) for place in range(len(guess) + 1)]
        temperature_N = torch.tensor([branch.rows[0].request.temperature for branch, _ in places], device=device)
        most = max(len(branch.rows) for branch in branches)
        noise_NM = torch.tensor([[row.noise[len(row.ids) + place] for row in branch.rows] + [0.0] * (most - len(branch.rows))
                                 for branch, place in places], device=device)
        greedy_N = temperature_N == 0
        logps_NV = torch.log_softmax(logits_NV / temperature_N.masked_fill(greedy_N, 1.0)[:, None], dim=-1)
        cumulative_NV = logps_NV.exp().cumsum(-1)
        chosen_NM = torch.searchsorted(cumulative_NV, noise_NM * cumulative_NV[:, -1:], right=True).clamp_(max=logits_NV.shape[1] - 1)
        if not bool(torch.isfinite(cumulative_NV[:, -1]).all()):
            self.kv.tainted = self.prompts_kv.tainted = True
        if bool(greedy_N.any()):
            chosen_NM = torch.where(greedy_N[:, None], logits_NV.argmax(-1, keepdim=True), chosen_NM)
        drawn = zip(chosen_NM.tolist(), logps_NV.gather(1, chosen_NM).tolist())
        finished: list[Row] = []
        for index, (branch, guess) in enumerate(zip(branches, guesses), base):
            finished += self._part(index, branch, guess, [next(drawn) for _ in range(len(guess) + 1)])
        self._close_gaps()
        return finished

    def _part(self, index: int, branch: Branch, guess: list[int], drawn: list[tuple[list[int], list[float]]]) -> list[Row]:
        """Give a branch's turns their tokens and part those that differ; the first of them keep its row. Returns the finished."""
        same: dict[tuple[bool, tuple[int, ...]], list[Row]] = {}
        for member, row in enumerate(branch.rows):
            before = len(row.ids)
            for guessed, (tokens, logps) in zip([*guess, None], drawn):
                ended = row.take(tokens[member], logps[member])
                if ended or tokens[member] != guessed:
                    break
            same.setdefault((ended, tuple(row.ids[before:])), []).append(row)
            self.drafts.note(row.session.ids, row.session.noted)
            row.session.noted = len(row.session.ids)
        finished, staying = [], []
        for (ended, _), rows in same.items():
            held = branch.own(len(rows[0].session.ids) - 1)                                # the last sampled token was never fed
            if ended:
                cache = Known(branch.trunk, self.kv.store(index, held))
                for row in rows:
                    row.session.caches[self.pool] = cache
                finished += rows
            else:
                staying.append((rows, held))
        branch.rows = staying[0][0] if staying else []
        for rows, held in staying[1:]:
            self.kv.move(index, len(self.branches), held)
            self.branches.append(Branch(rows, branch.trunk))
        return finished

    def _close_gaps(self) -> None:
        """Rows whose branch has no turns left are taken by the last ones: those in use stay a contiguous beginning."""
        for index in range(len(self.branches) - 1, -1, -1):
            if not self.branches[index].rows:
                branch = self.branches.pop()
                if index != len(self.branches):
                    self.kv.move(len(self.branches), index, branch.own(len(branch.text)))
                    self.branches[index] = branch

    def completion(self, row: Row) -> Completion:
        stopped = row.ids[-1] in row.request.stop_ids
        return Completion(row.ids, row.logp, "stop" if stopped else "length", self.version, self.pool)
