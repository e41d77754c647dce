"""What a method is: settings, and hooks that the trainer calls. The defaults are GRPO's; a method overrides what differs.

`begin` once, before `extra_parameters`. Order of calls in one training step: `select` on the rolled-out groups; `advantages` on
the whole batch; `pace` with the per-task statistics of the pass before the first gradient; then per optimiser step `bounds` and
`denominator` on the whole mini-batch, per micro-batch `token_loss` and `extra`, each through `reduce`, `combine` if gradients
are kept per task, and `clip_events` on the step's log-probabilities. `metrics` and `warnings` go to the record.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Iterable, Mapping, NamedTuple, Sequence, get_type_hints

from torch import Tensor, nn

from eppo.advantages import KINDS, baseline_metrics, group_advantages, normalise_per_task, without_spread
from eppo.checks import check_name, check_type
from eppo.clipping import ClipMasks, clip_masks, task_bounds
from eppo.gradients import cosine_metrics
from eppo.losses import KL_KINDS, check_reduction, clipped_surrogate, kl_penalty, reduce_tokens, reduction_count
from eppo.pacer import EntropyPacer, Reading
from eppo.types import Batch, Group, TaskStats

RARE_CLIP = 1e-3                                            # below this share of clipped tokens, clip methods cannot differ
STEPS_TO_JUDGE = 10
MANY_REINFORCED = 0.05                                      # share of episodes that failed with their group and are reinforced


class Forward(NamedTuple):
    """What the training pass gives `extra`: log-probabilities at the sampling temperature with gradient; entropies in nats,
    with gradient if "entropy" is in `needs`; the last hidden states if "hidden" is."""

    policy_logp_BT: Tensor
    entropy_BT: Tensor | None = None
    hidden_BTD: Tensor | None = None


@dataclass(kw_only=True, eq=False)
class Algorithm:
    """Base of all methods; its fields are the settings that every method shares.

    Args:
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high] for a task without a range from `pace`.
        dual_clip: cap of the ratio where A < 0, above 1; None for none.
        kl_coef, kl_kind: weight and estimator of the KL to the reference (`losses.kl_penalty`); 0 needs no reference.
        reduction, max_tokens: `losses.reduce_tokens`.
        advantage, ddof: kind and std of `advantages.group_advantages`.
        task_norm: task advantage normalisation after the group advantage.
        mask_zero_variance_groups: leave groups of equal rewards out of that normalisation, with advantage 0.
        gradient_cosines: log the cosines between the tasks' gradients; one backward pass per task, N gradients in memory.

    Raises:
        ValueError: a setting of the wrong type, out of range, or without effect beside the others.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    kl_coef: float = 1e-4
    kl_kind: str = "k3"
    reduction: str = "token_mean"
    max_tokens: int | None = None
    advantage: str = "grpo"
    ddof: int = 1
    task_norm: bool = False
    mask_zero_variance_groups: bool = False
    gradient_cosines: bool = False

    name: ClassVar[str] = ""                                # set by `register`
    clips: ClassVar[bool] = True                            # False: no bound of this method removes gradients
    needs_moved_ratio: ClassVar[bool] = False               # True: what it changes acts only where ratios have left 1
    own_bounds: ClassVar[bool] = False                      # True: its bounds do not look at the ranges of `pace`
    compares_group: ClassVar[bool] = True                   # False: an episode's advantage needs no others of its prompt
    carried: ClassVar[tuple[str, ...]] = ("clip_steps", "clip_sum", "failure_steps", "failure_sum")
    tasks: tuple[str, ...] = field(default=(), init=False, repr=False)
    steps: int = field(default=0, init=False, repr=False)
    seed: int = field(default=0, init=False, repr=False)
    notes: dict[str, tuple[float, float]] = field(default_factory=dict, init=False, repr=False)
    clip_steps: int = field(default=0, init=False, repr=False)
    clip_sum: float = field(default=0.0, init=False, repr=False)
    failure_steps: int = field(default=0, init=False, repr=False)
    failure_sum: float = field(default=0.0, init=False, repr=False)
    pacer: EntropyPacer = field(init=False, repr=False)

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for name in self.setting_names():
            setattr(self, name, check_type(f"{self.name or type(self).__name__}: {name}", getattr(self, name), hints[name]))
        check_name("advantage kind", self.advantage, KINDS)
        check_name("KL kind", self.kl_kind, KL_KINDS)
        check_reduction(self.reduction, self.max_tokens)
        if not 0 < self.clip_low <= 1 or not self.clip_high > 0:
            raise ValueError(f"clip_low must lie in (0, 1] and clip_high above 0, got {self.clip_low} and {self.clip_high}")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip must be above 1 (3 is usual) or null, got {self.dual_clip}")
        if self.kl_coef < 0:
            raise ValueError(f"kl_coef must be at least 0, got {self.kl_coef}")
        if self.ddof not in (0, 1):
            raise ValueError(f"ddof must be 0 (population std) or 1 (sample std), got {self.ddof}")
        if self.mask_zero_variance_groups and not self.task_norm:
            raise ValueError("mask_zero_variance_groups acts on task normalisation only; set task_norm or leave it out")
        self.pacer = self.make_pacer()

    @classmethod
    def setting_names(cls) -> tuple[str, ...]:
        """The settings that may be given to this method."""
        return tuple(one.name for one in fields(cls) if one.init)

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting with its value, for the record."""
        return {name: getattr(self, name) for name in self.setting_names()}

    def make_pacer(self) -> EntropyPacer:
        """The pacer that watches the run. Here it only observes: its readings are logged, and move nothing."""
        return EntropyPacer()

    # ---- hooks ------------------------------------------------------------------------------------------------------
    @property
    def needs(self) -> frozenset[str]:
        """Subset of {"policy_pass", "ref_logp", "entropy", "hidden", "per_task_grad"}: what the trainer must provide."""
        return frozenset(({"ref_logp"} if self.kl_coef else set()) | ({"per_task_grad"} if self.gradient_cosines else set()))

    def begin(self, model: nn.Module, tasks: Sequence[str], steps: int, seed: int) -> None:
        """The run that this method will see: its policy, its tasks in order, its length and its seed.

        Raises:
            ValueError: the method cannot do this run.
        """
        self.tasks, self.steps, self.seed = tuple(tasks), steps, seed

    def select(self, groups: Sequence[Group]) -> tuple[Sequence[Group], dict[str, int]]:
        """Groups to keep, and how many more to roll out per task. Default: all, none."""
        return groups, {}

    def group_credit(self, batch: Batch) -> Tensor:
        """advantages_BT before task normalisation: one value per sequence on its sampled tokens, 0 elsewhere."""
        scores_B = group_advantages(batch.rewards_B, batch.group_ids_B, self.advantage, self.ddof)
        if self.advantage == "rloo":
            self.note_all(baseline_metrics(batch.rewards_B, scores_B))
        return scores_B.to(batch.sampler_logp_BT)[:, None] * self.trained_mask(batch)

    def advantages(self, batch: Batch) -> Tensor:
        """advantages_BT of the whole step's batch, 0 off the sampled tokens and in rows without a reward."""
        self.notes = {}
        advantages_BT, mask_BT = self.group_credit(batch), self.trained_mask(batch)
        if not self.task_norm:
            return advantages_BT
        flat_B = without_spread(batch.rewards_B, batch.group_ids_B).to(mask_BT.device)
        if self.mask_zero_variance_groups:
            mask_BT = mask_BT & ~flat_B[:, None]
        advantages_BT = normalise_per_task(advantages_BT, mask_BT, batch.task_ids_B)
        self._count_reinforced_failures(batch, advantages_BT, flat_B)
        return advantages_BT

    def pace(self, stats: Mapping[str, TaskStats]) -> dict[str, float]:
        """Clip range per task, once per rollout batch; a task that is missing keeps clip_low and clip_high. Default: none, but
        the pacer observes."""
        self.observe(stats)
        return {}

    def bounds(self, minibatch: Batch, eps: Mapping[str, float], policy_logp_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Ratio bounds lo_BT and hi_BT of a mini-batch, 1 -+ the task's range, once per optimiser step."""
        return task_bounds(minibatch.task_ids_B, [eps.get(task, self.clip_low) for task in minibatch.tasks],
                           [eps.get(task, self.clip_high) for task in minibatch.tasks], minibatch.sampler_logp_BT)

    def token_loss(self, policy_logp_BT: Tensor, minibatch: Batch, lo_BT: Tensor, hi_BT: Tensor) -> Tensor:
        """The policy-gradient loss per token, to minimise."""
        return clipped_surrogate(policy_logp_BT, minibatch.sampler_logp_BT, minibatch.advantages_BT, minibatch.mask_BT,
                                 lo_BT, hi_BT, self.dual_clip)[0]

    def extra(self, forward: Forward, minibatch: Batch) -> dict[str, Tensor]:
        """Further losses per token, each already multiplied by its coefficient. Default: "kl" where kl_coef > 0."""
        if not self.kl_coef:
            return {}
        return {"kl": self.kl_coef * kl_penalty(forward.policy_logp_BT, minibatch.ref_logp_BT, self.kl_kind, minibatch.mask_BT)}

    def extra_parameters(self) -> Iterable[nn.Parameter]:
        """Parameters of the method's own to train beside the policy's."""
        return ()

    def combine(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """One gradient from the tasks' gradients (needs "per_task_grad"). Default: the sum, which is the joint gradient."""
        self.note_all(cosine_metrics(gradients))
        return sum(gradients.values())

    def clip_events(self, minibatch: Batch, policy_logp_BT: Tensor, lo_BT: Tensor, hi_BT: Tensor) -> ClipMasks:
        """Which tokens the bounds clipped in this optimiser step, for the record."""
        return clip_masks(policy_logp_BT, minibatch.sampler_logp_BT, minibatch.advantages_BT, minibatch.mask_BT, lo_BT, hi_BT,
                          self.dual_clip)

    def denominator(self, mask_BT: Tensor) -> int:
        """What `reduce` divides by, for one optimiser step's whole mask, of all micro-batches and processes."""
        return reduction_count(mask_BT, self.reduction)

    def reduce(self, loss_BT: Tensor, mask_BT: Tensor, denominator: float) -> Tensor:
        """A micro-batch's share of the optimiser step's loss."""
        return reduce_tokens(loss_BT, mask_BT, self.reduction, self.max_tokens, denominator)

    # ---- state and records ------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """What a resume needs: the pacer and the fields in `carried` of the class and its bases, each a JSON value or something
        with a state_dict of its own (a module's holds tensors)."""
        return {"pacer": self.pacer.state_dict()} | {name: _state(getattr(self, name)) for name in self._all_carried()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.pacer.load_state_dict(state["pacer"])
        for name in self._all_carried():
            if hasattr(own := getattr(self, name), "load_state_dict"):
                own.load_state_dict(state[name])
            else:
                setattr(self, name, copy.deepcopy(state[name]))

    @classmethod
    def _all_carried(cls) -> list[str]:
        return [name for base in reversed(cls.__mro__) for name in vars(base).get("carried", ())]

    def note(self, name: str, value: float, weight: float = 1.0) -> None:
        """Log `value` under `name` in this step; the record holds the weighted mean of all that a step notes."""
        total, mass = self.notes.get(name, (0.0, 0.0))
        self.notes[name] = (total + float(value) * weight, mass + weight)

    def note_all(self, values: Mapping[str, float], prefix: str = "", weight: float = 1.0) -> None:
        """`note` for each of `values`."""
        for name, value in values.items():
            self.note(prefix + name, value, weight)

    def metrics(self) -> dict[str, float]:
        """This step's numbers, flat: pacer/<task>/<field> (of a method that does not pace: what the pacer would have said);
        with task normalisation task/<task>/reinforced_failure_frac, the share of the task's episodes that failed together
        with their whole group and still got a positive advantage."""
        return self.pacer.metrics() | {name: total / mass for name, (total, mass) in self.notes.items() if mass}

    @property
    def warnings(self) -> list[str]:
        """What a reader of the run must know, as constant texts; a text goes when its reason does."""
        texts = []
        if self.clips and self.clip_steps >= STEPS_TO_JUDGE and self.clip_sum / self.clip_steps < RARE_CLIP:
            texts.append("The clip never binds: fewer than 0.1 % of tokens were clipped on average, so methods that differ in "
                         "the clip range cannot differ here; use more minibatches, epochs or lag.")
        if self.failure_steps >= STEPS_TO_JUDGE and self.failure_sum / self.failure_steps > MANY_REINFORCED:
            texts.append("Task normalisation reinforces failures: more than 5 % of episodes failed with their whole group and "
                         "got a positive advantage (task/<task>/reinforced_failure_frac); mask_zero_variance_groups avoids it.")
        return texts

    def observe(self, stats: Mapping[str, TaskStats]) -> dict[str, Reading]:
        """Feed the pacer and the watch on the clip fraction; the readings per task."""
        seen = [one.clip_high + one.clip_low for one in stats.values() if one.tokens]
        if self.pacer.steps and seen:                       # before the first optimiser step there is no clip fraction
            self.clip_steps += 1
            self.clip_sum += sum(seen) / len(seen)
        return self.pacer.observe(self.entropies(stats))

    def entropies(self, stats: Mapping[str, TaskStats]) -> Mapping[str, TaskStats | tuple[float, float]]:
        """What the pacer takes as each task's entropy, a sum in nats and a count. Default: the tokens'."""
        return stats

    @staticmethod
    def trained_mask(batch: Batch) -> Tensor:
        """mask_BT without the rows that have no reward."""
        return batch.mask_BT & ~batch.rewards_B.isnan().to(batch.mask_BT.device)[:, None]

    def _count_reinforced_failures(self, batch: Batch, advantages_BT: Tensor, flat_B: Tensor) -> None:
        reinforced_B, total = ((advantages_BT > 0).any(dim=1) & flat_B).tolist(), 0
        for index, task in enumerate(batch.tasks):
            rows = (batch.task_ids_B == index).nonzero()[:, 0].tolist()
            if rows:
                hits = sum(reinforced_B[row] and not batch.trajectories[row].success for row in rows)
                self.note(f"task/{task}/reinforced_failure_frac", hits / len(rows))
                total += hits
        self.failure_steps += 1
        self.failure_sum += total / max(len(reinforced_B), 1)


def _state(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else copy.deepcopy(value)
