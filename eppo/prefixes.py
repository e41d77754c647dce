"""Computing what rollouts of one prompt have in common only once.

The state at a token of a causal model depends on the tokens up to it alone. The rows of a group begin with the same prompt, and
often with the same first turns, so a batch is a few prefix trees. `pack` lays each tree out as one row of its distinct prefixes,
with a mask by which a token sees its ancestors; gathering each row's states from it gives the same values, and the same gradients,
as running every row by itself.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn


class Packed(NamedTuple):
    """R packed rows of at most N tokens, and where the original tokens lie in them."""

    ids_RN: Tensor                                          # long
    positions_RN: Tensor                                    # long: of each token in its own row
    seen_RNN: Tensor                                        # bool: [r, i, j] token i attends to token j
    row_B: Tensor                                           # long: packed row of each original row
    place_BT: Tensor                                        # long: place of each original token there; 0 beyond the row's length


def can_share(model: nn.Module) -> bool:
    """Whether `model` takes a mask of our own: full attention everywhere, in an implementation that adds masks."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return kinds == {"full_attention"} and config._attn_implementation in ("sdpa", "eager")


def trees(rows: list[np.ndarray], width: int, limit: float = math.inf) -> list[list[tuple[int, int]]]:
    """Rows, by index, put into packs: lists of (row, number of leading tokens shared with the row before it in the pack).

    A row joins the pack before it where that costs less than a pack of its own. For a token, a layer of `width` costs about
    `6 * width` multiply-adds in its matrices for each one in attention and token seen; a packed row attends densely.

    Args:
        rows: token ids of each row.
        width: the model's hidden size.
        limit: most tokens of a pack of several rows; its mask has their square.
    """
    order = sorted(range(len(rows)), key=lambda row: (rows[row].tolist(), row))
    packs: list[list[tuple[int, int]]] = []
    size = 0
    for before, row in zip([None, *order], order):
        length = len(rows[row])
        shared = 0 if before is None else common(rows[before], rows[row])
        new = length - shared
        if packs and size + new <= limit and new * (6 * width + 2 * size + new) <= length * (6 * width + length):
            packs[-1].append((row, shared))
            size += new
        else:
            packs.append([(row, 0)])
            size = length
    return packs


def common(a: np.ndarray, b: np.ndarray) -> int:
    """Number of leading tokens that `a` and `b` share."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


def pack_size(rows: list[np.ndarray], pack: list[tuple[int, int]]) -> int:
    """Distinct prefixes of a pack: the tokens that the model has to compute."""
    return sum(len(rows[row]) - shared for row, shared in pack)


def pack(ids_BT: Tensor, length_B: Tensor, width: int) -> Packed:
    """Lay the first `length_B[b]` tokens of each row out as prefix trees.

    Args:
        ids_BT: token ids on any device.
        length_B: tokens that count, 0 to T.
        width: as in `trees`.
    """
    ids = ids_BT.cpu().numpy()
    rows = [row[:length] for row, length in zip(ids, length_B.tolist())]
    packs = trees(rows, width)
    longest = max([pack_size(rows, members) for members in packs] + [1])
    packed_ids, positions = (np.zeros((len(packs), longest), dtype=np.int64) for _ in range(2))
    seen = np.zeros((len(packs), longest, longest), dtype=bool)
    seen[:, np.arange(longest), np.arange(longest)] = True  # an unused place sees itself: a softmax over nothing is NaN
    row_B, place = np.zeros(len(rows), dtype=np.int64), np.zeros(ids.shape, dtype=np.int64)
    for number, members in enumerate(packs):
        path, size = np.zeros(0, dtype=np.int64), 0
        for row, shared in members:
            length = len(rows[row])
            new = slice(size, size + length - shared)
            path = np.concatenate([path[:shared], np.arange(new.start, new.stop)])
            packed_ids[number, new], positions[number, new] = rows[row][shared:], np.arange(shared, length)
            seen[number, new, :][:, path] = np.tril(np.ones((length - shared, length), dtype=bool), k=shared)
            row_B[row], place[row, :length], size = number, path, new.stop
    return Packed(*(torch.from_numpy(array).to(ids_BT.device) for array in (packed_ids, positions, seen, row_B, place)))


def shared_states(model: nn.Module, ids_BT: Tensor, length_B: Tensor) -> tuple[Tensor, Packed]:
    """Last hidden states [R, N, D] of the packed rows, with where to find each token: `states[packed.row_B[b], packed.place_BT[b, t]]`."""
    packed = pack(ids_BT, length_B, model.config.get_text_config().hidden_size)
    mask = torch.zeros(packed.seen_RNN.shape, dtype=model.dtype, device=ids_BT.device)
    mask.masked_fill_(~packed.seen_RNN, torch.finfo(model.dtype).min)
    states_RND = model.base_model(input_ids=packed.ids_RN, position_ids=packed.positions_RN, attention_mask=mask[:, None],
                                  use_cache=False).last_hidden_state
    return states_RND, packed
