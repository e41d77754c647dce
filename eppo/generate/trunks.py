"""Attention of rows that begin with the same prompt: its keys and values are stored once and read once for all of them.

A row attends to its trunk, the prompt, and to what is its own. The two parts are computed apart and weighed by their softmax
denominators, which gives the same as attending to both at once (as in cascade attention, FlashInfer, arXiv 2501.01005).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SPARE_SCORES = 1 << 18                                      # of pads, that cost less than a call for every trunk
MOST_SCORES = 1 << 26                                       # attention scores held at once


class Trunks:
    """The trunks of the rows of one forward pass.

    Args:
        of_rows: each row's trunk [layers, 2, kv_heads, length, head_dim], or None; rows of one prompt share one tensor.
        before: the pass before, whose stack of trunks serves again while at least half of it is used.
    """

    def __init__(self, of_rows: Sequence[Tensor | None], before: "Trunks | None" = None) -> None:
        members: dict[int, list[int]] = {}
        distinct: dict[int, Tensor] = {}
        for row, trunk in enumerate(of_rows):
            if trunk is not None:
                distinct[id(trunk)] = trunk
                members.setdefault(id(trunk), []).append(row)
        if before and distinct.keys() <= before.distinct.keys() and 2 * len(distinct) >= len(before.distinct):
            self.distinct, self.data, self.bias_SP = before.distinct, before.data, before.bias_SP
        else:
            self.distinct, (self.data, self.bias_SP) = distinct, _stack(list(distinct.values()))
        device, most = self.data.device, max(map(len, members.values()))
        self.members = [members.get(trunk, []) for trunk in self.distinct]
        self.member_SM = torch.tensor([[*rows, *[0] * (most - len(rows))] for rows in self.members], device=device)    # 0: not read
        places = sorted((row, number * most + place) for number, rows in enumerate(self.members) for place, row in enumerate(rows))
        self.row_N, self.place_N = torch.tensor(places, device=device).T
        self.all = len(places) == len(of_rows)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, layer: int) -> Tensor:
        """Attention [rows, heads, T, head_dim] of queries of that shape over their trunks and over `key` and `value`
        [rows, kv_heads, L, head_dim], under the additive `mask` [rows, 1, T, L]."""
        (rows, heads, length, dim), kv_heads = query.shape, key.shape[1]
        query = query.reshape(rows, kv_heads, -1, dim)                                      # heads of a key head, then tokens
        mask = mask.expand(-1, heads // kv_heads, -1, -1).reshape(rows, 1, -1, mask.shape[-1])
        own, own_lse = attention(query, key, value, mask, scale)
        shared, shared_lse = self._together(query, scale, layer)
        if self.all:
            return _weigh(shared, own, shared_lse, own_lse).view(rows, heads, length, dim)
        both = _weigh(shared, own[self.row_N], shared_lse, own_lse[self.row_N])
        return own.index_copy(0, self.row_N, both).view(rows, heads, length, dim)

    def _together(self, query: Tensor, scale: float, layer: int) -> tuple[Tensor, Tensor]:
        """Attention over the trunks, of the queries [rows, kv_heads, Q, head_dim] of rows that have one."""
        (trunks, most), (_, kv_heads, queries, dim) = self.member_SM.shape, query.shape
        keys, values = self.data[layer]
        spare = (trunks * most - len(self.row_N)) * kv_heads * queries * keys.shape[2]
        if spare <= SPARE_SCORES:
            grouped = query[self.member_SM].transpose(1, 2).reshape(trunks, kv_heads, -1, dim)
            found = attention(grouped, keys, values, self.bias_SP[:, None, None].expand(-1, -1, grouped.shape[2], -1), scale)
            out, lse = (part.view(trunks, kv_heads, most, -1, part.shape[-1]).transpose(1, 2).flatten(0, 1) for part in found)
            return out[self.place_N], lse[self.place_N]
        out, lse = torch.empty_like(query), query.new_empty(*query.shape[:-1], 1, dtype=torch.float32)
        for number, rows in enumerate(self.members):
            if rows:
                grouped = query[rows].transpose(0, 1).reshape(1, kv_heads, -1, dim)
                found = attention(grouped, keys[number, None], values[number, None],
                                  self.bias_SP[number].expand(1, 1, grouped.shape[2], -1), scale)
                out[rows], lse[rows] = (part.view(kv_heads, len(rows), queries, -1).transpose(0, 1) for part in found)
        return (out, lse) if self.all else (out[self.row_N], lse[self.row_N])


def _stack(trunks: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Trunks side by side [layers, 2, S, kv_heads, P, head_dim], and the additive mask [S, P] of what they are shorter by."""
    layers, two, heads, _, dim = trunks[0].shape
    lengths = [trunk.shape[3] for trunk in trunks]
    data = trunks[0].new_zeros(layers, two, len(trunks), heads, max(lengths), dim)
    bias_SP = data.new_zeros(len(trunks), max(lengths))
    for number, (trunk, length) in enumerate(zip(trunks, lengths)):
        data[:, :, number, :, :length] = trunk
        bias_SP[number, length:] = float("-inf")
    return data, bias_SP


def _weigh(one: Tensor, other: Tensor, one_lse: Tensor, other_lse: Tensor) -> Tensor:
    """Attention over two sets of keys from that over each and the logarithms of its denominators, which are float32."""
    return torch.lerp(one.float(), other.float(), torch.sigmoid(other_lse - one_lse)).to(one.dtype)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention [B, H, Q, head_dim], and the logarithm of its softmax denominators [B, H, Q, 1].

    Torch has no public function that gives the latter: on a CPU this is the kernel below its scaled_dot_product_attention.
    """
    if query.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=mask, scale=scale)
        return out, lse[..., None].float()
    return plain_attention(query, key, value, mask, scale)


def plain_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """As `attention`, a few queries at a time: their scores are held in memory."""
    step = max(1, MOST_SCORES // (query.shape[0] * query.shape[1] * key.shape[2]))
    pieces = []
    for at in range(0, query.shape[2], step):
        scores = torch.matmul(query[:, :, at:at + step] * scale, key.transpose(-1, -2)).float() + mask[:, :, at:at + step]
        weights = torch.softmax(scores, dim=-1)
        pieces.append((torch.matmul(weights.to(value.dtype), value), scores.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log()))
    return torch.cat([out for out, _ in pieces], dim=2), torch.cat([lse for _, lse in pieces], dim=2)
