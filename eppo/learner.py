"""The learner: the trained model, its frozen reference and its optimiser; scores batches and takes optimiser steps.

Sums run over the whole optimiser step: denominators are counted before the first micro-batch, so that any micro-batch size, any
number of processes and any padding give the same gradient. Of several processes (`eppo.distributed`) each passes its share of the
rows through the model; the whole batch, its scores and the summed gradient every one has.
"""

from __future__ import annotations

import copy
from typing import Any, Iterable, Iterator

import torch
from torch import Tensor, nn

from eppo import distributed
from eppo.algorithms import Algorithm, Forward
from eppo.batching import microbatches
from eppo.config import RunConfig
from eppo.measure import update_metrics
from eppo.policy import Scores, splits_cleanly, token_scores
from eppo.prefixes import can_share
from eppo.types import Batch


class Learner:
    """Model, reference and optimiser of one run.

    Args:
        model: trained in place.
        reference: frozen; None copies the model as it is now.
    """

    def __init__(self, model: nn.Module, algorithm: Algorithm, config: RunConfig, reference: nn.Module | None = None) -> None:
        self.model, self.algorithm, self.config = model.train(), algorithm, config
        algorithm.begin(model, config.tasks, config.steps, config.seed)
        needs_reference = "ref_logp" in algorithm.needs
        self.reference = (reference or copy.deepcopy(model)).eval().requires_grad_(False) if needs_reference else None
        self.parameters = [p for p in (*model.parameters(), *algorithm.extra_parameters()) if p.requires_grad]
        optim = config.optim
        self.optimizer = torch.optim.AdamW(self.parameters, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay,
                                           foreach=True)
        share = config.optim.share_prefixes and "hidden" not in algorithm.needs and splits_cleanly(model) and can_share(model)
        self.share_width = model.config.get_text_config().hidden_size if share else None
        self.updates = 0

    # scores without gradient ---------------------------------------------------------------------------------------
    def score(self, batch: Batch) -> None:
        """Fill `policy_logp_BT` and `entropy_BT` (pi_theta before the first gradient of this batch) and, where the method needs
        it, `ref_logp_BT`."""
        scores = self._score(self.model, batch, entropy=True)
        batch.policy_logp_BT, batch.entropy_BT = scores.logp_BT, scores.entropy_BT
        self._require_finite(batch, policy_logp=scores.logp_BT, entropy=scores.entropy_BT)
        if self.reference is not None:
            batch.ref_logp_BT = self._score(self.reference, batch, entropy=False).logp_BT

    @torch.no_grad()
    def _score(self, model: nn.Module, batch: Batch, *, entropy: bool) -> Scores:
        logp_BT, entropy_BT = (torch.zeros(batch.ids_BT.shape, dtype=torch.float32) for _ in range(2))
        for rows in self._own_microbatches(batch):
            part = batch.select(rows)
            scores = token_scores(model, part.ids_BT, part.mask_BT, self.config.rollout.temperature, entropy=entropy,
                                  share=self.share_width is not None)
            logp_BT[rows, :part.ids_BT.shape[1]] = scores.logp_BT.cpu()
            entropy_BT[rows, :part.ids_BT.shape[1]] = scores.entropy_BT.cpu()
        return Scores(distributed.total(logp_BT), distributed.total(entropy_BT), None)

    def _own_microbatches(self, batch: Batch) -> Iterator[list[int]]:
        """The rows of each micro-batch; of several processes: a share of the rows with a share of the tokens, neighbours together."""
        limit, width = self.config.optim.micro_batch_tokens, self.share_width
        if distributed.size() == 1:
            yield from microbatches(batch, limit, width)
            return
        order = [row for rows in microbatches(batch, limit, width) for row in rows]
        own = distributed.share(order, [len(batch.trajectories[row].ids_T) for row in order])
        if own:
            for rows in microbatches(batch.select(own), limit, width):
                yield [own[row] for row in rows]

    # one optimiser step --------------------------------------------------------------------------------------------
    def update(self, batch: Batch, eps: dict[str, float]) -> dict[str, float]:
        """One optimiser step on a mini-batch, with the clip ranges `eps` of this rollout batch; returns its metrics.

        Raises:
            FloatingPointError: a log-probability, a loss or a gradient is not finite; names task and tensor. Weights are untouched.
        """
        algorithm = self.algorithm
        before = self._score(self.model, batch, entropy=False).logp_BT if "policy_pass" in algorithm.needs else None
        lo_BT, hi_BT = algorithm.bounds(batch, eps, before)
        count = algorithm.denominator(batch.mask_BT)
        by_task = "per_task_grad" in algorithm.needs
        parts = self._task_parts(batch) if by_task else {"": list(range(len(batch.trajectories)))}
        gradients, metrics, logp_BT = {}, {}, torch.zeros(batch.ids_BT.shape)
        self.optimizer.zero_grad(set_to_none=True)          # what an update left that failed in another process
        with distributed.total_notes(algorithm.notes), distributed.failing_together():
            for task, rows in parts.items():
                for micro in self._own_microbatches(batch.select(rows)):
                    chosen = [rows[row] for row in micro]
                    scores = self._backward(batch, chosen, lo_BT, hi_BT, count, metrics)
                    logp_BT[chosen, :scores.shape[1]] = scores
                if by_task:
                    gradients[task] = self._take_gradient()
        if by_task:
            self._set_gradient(algorithm.combine({task: distributed.total(gradient) for task, gradient in gradients.items()}))
        else:
            distributed.total_gradients(self.parameters)
        metrics, logp_BT = distributed.total_values(metrics), distributed.total(logp_BT)
        metrics |= update_metrics(batch, logp_BT, algorithm.clip_events(batch, logp_BT, lo_BT, hi_BT), lo_BT, hi_BT)
        metrics["loss/grad_norm"] = self._step()
        return metrics

    def _backward(self, batch: Batch, rows: list[int], lo_BT: Tensor, hi_BT: Tensor, count: int, metrics: dict[str, float]) -> Tensor:
        """Forward and backward of one micro-batch; returns its log-probabilities."""
        algorithm, part = self.algorithm, batch.select(rows)
        width = part.ids_BT.shape[1]
        scores = token_scores(self.model, part.ids_BT, part.mask_BT, self.config.rollout.temperature,
                              entropy="entropy" in algorithm.needs, entropy_grad="entropy" in algorithm.needs,
                              hidden="hidden" in algorithm.needs, share=self.share_width is not None)
        terms = {"policy": algorithm.token_loss(scores.logp_BT, part, lo_BT[rows, :width], hi_BT[rows, :width]),
                 **algorithm.extra(Forward(*scores), part)}
        losses = {name: algorithm.reduce(loss_BT, part.mask_BT, count) for name, loss_BT in terms.items()}
        for name, loss_BT in terms.items():
            self._require_finite(part, **{f"loss/{name}": loss_BT})
            metrics[f"loss/{name}"] = metrics.get(f"loss/{name}", 0.0) + losses[name].item()
        sum(losses.values()).backward()
        return scores.logp_BT.detach().cpu()

    def _step(self) -> float:
        optim = self.config.optim
        norm = nn.utils.clip_grad_norm_(self.parameters, optim.grad_clip)
        if not torch.isfinite(norm):
            names = [name for name, p in self.model.named_parameters() if p.grad is not None and not torch.isfinite(p.grad).all()]
            self.optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(f"the gradient of {names[0] if names else 'an extra parameter'} is not finite (norm {norm.item()})")
        for group in self.optimizer.param_groups:
            group["lr"] = optim.lr * min(1.0, (self.updates + 1) / max(1, optim.warmup_steps))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        return norm.item()

    # per-task gradients (PCGrad, CAGrad) ----------------------------------------------------------------------------
    def _task_parts(self, batch: Batch) -> dict[str, list[int]]:
        parts = {task: (batch.task_ids_B == index).nonzero()[:, 0].tolist() for index, task in enumerate(batch.tasks)}
        return {task: rows for task, rows in parts.items() if rows}

    def _take_gradient(self) -> Tensor:
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in self.parameters])
        self.optimizer.zero_grad(set_to_none=True)
        return flat

    def _set_gradient(self, flat: Tensor) -> None:
        for p, piece in zip(self.parameters, flat.split([p.numel() for p in self.parameters])):
            p.grad = piece.view_as(p).clone()

    # checks and state ----------------------------------------------------------------------------------------------
    def _require_finite(self, batch: Batch, **tensors: Tensor) -> None:
        for name, tensor_BT in tensors.items():
            bad_BT = ~torch.isfinite(tensor_BT.detach().cpu()) & batch.mask_BT
            if bool(bad_BT.any()):
                row = int(bad_BT.any(1).nonzero()[0, 0])
                trajectory = batch.trajectories[row]
                self.optimizer.zero_grad(set_to_none=True)
                raise FloatingPointError(f"{name} is not finite in an episode of task {trajectory.task!r} "
                                         f"(instance {trajectory.instance_id})")

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]


def mean_metrics(updates: Iterable[dict[str, float]]) -> dict[str, float]:
    """Metrics of a rollout batch from those of its optimiser steps: means, but the largest of every `…_max`."""
    updates = list(updates)
    keys = dict.fromkeys(key for metrics in updates for key in metrics)
    values = {key: [metrics[key] for metrics in updates if key in metrics] for key in keys}
    return {key: max(found) if key.endswith("_max") else sum(found) / len(found) for key, found in values.items()}
