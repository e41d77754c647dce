"""Which weights sample: the off-policyness of a run, made explicit (recipe keys `lag`, `stale_refresh`).

The fresh pool samples step t with the weights of step t - lag, constant as in a pipelined run. The stale pool gets the fresh
pool's weights every `stale_refresh` steps (AgentRL's cross-policy sampling, arXiv 2510.04206; 25 in its release).
"""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import torch
from torch import nn

from eppo.generate.protocol import FRESH, STALE, Generator


def cpu_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """A detached copy of the module's weights on the CPU."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in module.state_dict().items()}


class WeightPools:
    """Pushes due weights to a generator. A version is the number of training steps that made the weights.

    Args:
        lag: steps between the weights that learn and those that sample, >= 0.
        stale_refresh: steps between refreshes of the stale pool; None: there is no stale pool.
    """

    def __init__(self, generator: Generator, module: nn.Module, *, lag: int, stale_refresh: int | None) -> None:
        self.generator, self.lag, self.stale_refresh = generator, lag, stale_refresh
        self._history: deque[tuple[int, dict[str, torch.Tensor]]] = deque(maxlen=lag + 1)
        self._stale: tuple[int, dict[str, torch.Tensor]] | None = None
        self._carrier = copy.deepcopy(module)               # a sync takes a module; lagged weights travel in this one
        self.record(module, 0)
        self.push(1)

    def record(self, module: nn.Module, version: int) -> None:
        """Remember the weights that `version` training steps made."""
        self._history.append((version, cpu_weights(module)))

    def push(self, step: int) -> None:
        """Give the generator what step number `step` (the first is 1) samples with."""
        version, weights = self._history[0]
        self._send(version, weights, FRESH)
        if self.stale_refresh is not None and (self._stale is None or (step - 1) % self.stale_refresh == 0):
            self._stale = (version, weights)
            self._send(version, weights, STALE)

    def push_current(self) -> None:
        """Give the fresh pool the newest weights, for validation; `push` undoes it."""
        self._send(*self._history[-1], FRESH)

    def _send(self, version: int, weights: dict[str, torch.Tensor], pool: str) -> None:
        self._carrier.load_state_dict(weights)
        self.generator.sync(self._carrier, version, pool)

    def state_dict(self) -> dict[str, Any]:
        return {"history": list(self._history), "stale": self._stale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore history and stale weights and give the generator both: a resumed run never samples from the start model."""
        self._history = deque(((version, weights) for version, weights in state["history"]), maxlen=self.lag + 1)
        self._stale = None if state["stale"] is None else tuple(state["stale"])
        self._send(*self._history[0], FRESH)
        if self._stale is not None:
            self._send(*self._stale, STALE)
