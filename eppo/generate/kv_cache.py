"""Key-value storage for ragged, continuously refilled batches of any Hugging Face decoder.

A `KVBatch` holds the working batch, one row per turn being sampled: [layers, 2, rows, kv_heads, length, head_dim]. A row enters
with what its session has stored, leaves with that and what it gained; leaving moves the last row into the gap, so that active rows are
always a contiguous prefix and attention reads views, not copies.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from contextvars import ContextVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_utils import AttentionInterface

from eppo.generate.trunks import Trunks

ATTENTION = "eppo_ragged_sdpa"
BLOCK = 256                                                 # positions
FEW = 8                                                     # new tokens a row
# Of the forward pass that runs in this thread: a model hands attention its keys, and nothing that says where they come from.
_RUNNING: ContextVar[weakref.ref["KVBatch"]] = ContextVar("running")


def _grouped_sdpa(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Scaled dot-product attention that does not repeat keys: that costs four times the attention itself.

    For few new tokens the query heads that share a key head become further queries of it, a fifth faster than torch's own grouping.
    """
    (rows, heads, length, dim), kv_heads = query.shape, key.shape[1]
    batch = _RUNNING.get()()
    if batch.trunks is not None:
        scaling = dim ** -0.5 if scaling is None else scaling
        return batch.trunks.attend(query, key, value, attention_mask, scaling, batch.layer).transpose(1, 2).contiguous(), None
    few = length <= FEW and attention_mask is not None
    if few and heads != kv_heads:
        query = query.reshape(rows, kv_heads, -1, dim)
        attention_mask = attention_mask.expand(-1, heads // kv_heads, -1, -1).reshape(rows, 1, query.shape[2], -1)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling,
                                                           enable_gqa=not few and heads != kv_heads)
    return out.reshape(rows, heads, length, dim).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _grouped_sdpa)


class KVBatch(Cache):
    """The working batch, seen by the model as its cache. `place` says where the coming forward pass reads and writes."""

    def __init__(self, model: torch.nn.Module) -> None:
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds - {"full_attention", "sliding_attention"}:
            raise ValueError(f"{type(model).__name__} has layers of kind {sorted(kinds)}; this generator serves full attention; "
                             "for evaluation there is backend vllm")
        self.window = config.sliding_window if "sliding_attention" in kinds else None
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.shape = (config.num_hidden_layers, 2, kv_heads, head_dim)
        self.dtype, self.device = model.dtype, model.device
        self.layers = []
        self.tainted = False                                # may hold what is not finite: no memory to be used again
        self.trunks: Trunks | None = None
        self._trunks_before: Trunks | None = None
        self._spare = self.data = torch.zeros(self._sizes(0, 0), dtype=self.dtype, device=self.device)

    def clear(self) -> None:
        """Start from an empty layout. Its size decides how rows lie in memory, and that, through the kernels chosen, the last bit of
        a result: whoever wants the same bits starts from none. On a CPU the memory is kept: fresh pages cost as much as a prefill."""
        if self.tainted:
            self._spare = self.data.new_empty(0)
        elif self.device.type == "cpu" and self.data.numel() > self._spare.numel():
            self._spare = self.data
        self.tainted = False
        self.data = self._spare.new_empty(self._sizes(0, 0))
        self.trunks = self._trunks_before = None

    def _sizes(self, rows: int, length: int) -> tuple[int, ...]:
        layers, two, heads, dim = self.shape
        return layers, two, rows, heads, length, dim

    def _empty(self, rows: int, length: int) -> Tensor:
        """Keys and values that may be read behind a mask: finite ones, whatever they are. Zeros, or what `clear` kept if it is enough."""
        sizes = self._sizes(rows, length)
        spare, count = self._spare, math.prod(sizes)
        if count > spare.numel():
            return torch.zeros(sizes, dtype=self.dtype, device=self.device)
        self._spare = spare.new_empty(0)
        return spare.flatten()[:count].view(sizes)

    def reserve(self, rows: int, length: int) -> None:
        """Grow to at least this size, by doubling and in whole blocks of `BLOCK` positions; what is stored stays."""
        old_rows, old_length = self.data.shape[2], self.data.shape[4]
        if rows > old_rows or length > old_length:
            blocks = -(-max(length, min(2 * old_length, length + BLOCK)) // BLOCK)
            grown = self._empty(max(rows, min(2 * old_rows, rows + 64)) if rows > old_rows else old_rows,
                                blocks * BLOCK if length > old_length else old_length)
            grown[:, :, :old_rows, :, :old_length] = self.data
            self.data = grown

    def load(self, row: int, stored: Tensor | None) -> None:
        """Put a session's keys and values [layers, 2, kv_heads, length, head_dim], if there are any, at the start of `row`."""
        if stored is not None:
            self.data[:, :, row, :, :stored.shape[3]] = stored

    def store(self, row: int, length: int) -> Tensor:
        """A copy of the first `length` positions of `row`."""
        return self.data[:, :, row, :, :length].clone()

    def move(self, source: int, target: int, length: int) -> None:
        """Copy row `source` over row `target`."""
        self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]

    def place(self, start: int, stop: int, write_BT: Tensor, length: int, trunks: Sequence[Tensor | None] = ()) -> Tensor:
        """The coming pass feeds rows `start:stop`, writes position `write_BT[b, t]` and reads the first `length` positions.

        Args:
            trunks: what a fed row's positions come after [layers, 2, kv_heads, trunk length, head_dim], stored elsewhere; or None.

        Returns:
            The additive attention mask [B, 1, T, length]: position t sees what lies at or before `write_BT[b, t]`.
        """
        _RUNNING.set(weakref.ref(self))                     # a thread's context outlives the batch
        self.trunks = Trunks(trunks, self._trunks_before) if any(trunk is not None for trunk in trunks) else None
        self._trunks_before = self.trunks or self._trunks_before
        self._view = self.data[:, :, start:stop]
        self._rows, self._write, self._length = torch.arange(stop - start, device=self.device)[:, None], write_BT, length
        seen_BTL = torch.arange(length, device=self.device) <= write_BT[..., None]
        return torch.zeros(seen_BTL.shape, dtype=self.dtype, device=self.device).masked_fill_(~seen_BTL, float("-inf"))[:, None]

    # what the model calls ------------------------------------------------------------------------------------------
    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.layer = layer_idx
        keys, values = self._view[layer_idx]
        keys[self._rows, :, self._write] = key_states.transpose(1, 2)
        values[self._rows, :, self._write] = value_states.transpose(1, 2)
        return keys[:, :, :self._length], values[:, :, :self._length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._length, 0

    @property
    def is_compileable(self) -> bool:
        return False
