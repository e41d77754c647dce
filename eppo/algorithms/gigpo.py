"""GiGPO: credit per turn, from turns of the same prompt in which the policy saw the same thing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eppo.advantages import EPISODE_STATS, GIGPO_NORMS, turn_advantages, turn_rewards
from eppo.algorithms.base import Algorithm
from eppo.checks import check_name
from eppo.types import Batch


@dataclass(kw_only=True, eq=False)
class GiGPO(Algorithm):
    """Group-in-group policy optimisation: the episode's advantage plus a step advantage among turns with one anchor.

    Source: arXiv 2505.10978, eq. 3 and its released code (gigpo/core_gigpo.py); formulas in `advantages.turn_advantages`.

    Differs from grpo:
        1. A token's advantage is its turn's: (episode reward - mean) + omega (discounted return - mean over the anchor group).
        2. No std ("mean"); "mean_std" divides both parts by theirs.
        3. KL 0.01.

    A turn's reward is the environment's; what the rule for abnormal endings changes falls to the last turn. Similarity
    grouping of anchors is left out (off in the released code); reward scale and penalty for invalid calls belong to the recipe.

    Defaults: omega 1, gamma 0.95; `episode_stats` "turns" as released, where an episode counts once per turn; the paper prints
    "trajectories". Task normalisation, if chosen, comes last.

    Logs: gigpo/anchor_group_size, gigpo/singleton_frac (turns whose anchor nobody else saw), gigpo/step_adv_abs.

    Degenerate cases: anchors with volatile text (counters, times) make every anchor group a singleton and the step part 0: see
    singleton_frac. omega 0 with "trajectories" and "mean_std" is grpo. A group of one rollout has no episode part.
    """

    kl_coef: float = 0.01
    omega: float = 1.0
    gamma: float = 0.95
    norm: str = "mean"
    episode_stats: str = "turns"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("GiGPO norm", self.norm, GIGPO_NORMS)
        check_name("GiGPO episode_stats", self.episode_stats, EPISODE_STATS)
        if self.omega < 0 or not 0 <= self.gamma <= 1:
            raise ValueError(f"omega must be at least 0 and gamma lie in [0, 1], got {self.omega} and {self.gamma}")

    def group_credit(self, batch: Batch) -> Tensor:
        credit_BT, sizes, steps = torch.zeros_like(batch.sampler_logp_BT), [], []
        known_B = ~batch.rewards_B.isnan()
        for group in batch.group_ids_B.unique().tolist():
            rows = ((batch.group_ids_B == group) & known_B).nonzero()[:, 0].tolist()
            rollouts = [batch.trajectories[row] for row in rows]
            rewards = [turn_rewards(one, float(batch.rewards_B[row])) for one, row in zip(rollouts, rows)]
            anchors = [[turn.anchor for turn in one.turns] for one in rollouts]
            found = turn_advantages(rewards, anchors, self.gamma, self.omega, self.norm, self.episode_stats)
            episode = turn_advantages(rewards, anchors, self.gamma, 0.0, self.norm, self.episode_stats)
            for row, one, values, base in zip(rows, rollouts, found.advantages_GU, episode.advantages_GU):
                for turn, value in zip(one.turns, values):
                    credit_BT[row, turn.start:turn.stop] = value
                steps += [abs(value - other) for value, other in zip(values, base)]
            sizes += [size for turns in found.sizes_GU for size in turns]
        if sizes:
            self.note_all({"anchor_group_size": sum(sizes) / len(sizes), "singleton_frac": sizes.count(1) / len(sizes),
                           "step_adv_abs": sum(steps) / len(steps)}, "gigpo/")
        return credit_BT * self.trained_mask(batch)
