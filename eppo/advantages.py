"""Rewards to advantages: within a group of rollouts of one prompt, then within a task. Pure functions, float64 inside.

B sequences, T tokens, G rollouts of a prompt. A NaN (or None) reward means that infrastructure left none: the row has
advantage 0 and enters no statistic.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Sequence

import torch
from torch import Tensor

from eppo.checks import check_name
from eppo.types import Batch, Trajectory

KINDS = ("grpo", "mean_only", "rloo")
MIN_STD = 1e-12                                             # below it a task's advantages are all equal: rounding, no signal


def group_advantages(rewards_B: Any, group_ids_B: Any, kind: str = "grpo", ddof: int = 1, eps: float = 1e-6) -> Tensor:
    """One advantage per sequence, in input order, from the rewards of its group.

        grpo       (R - mean) / (std + eps)
        mean_only  R - mean                                 Dr. GRPO's advantage
        rloo       R - mean of the others = G / (G - 1) * (R - mean)

    A group whose known rewards are all equal, or that has one, gets exactly 0.

    Args:
        rewards_B: any scale; NaN or None where there is none.
        group_ids_B: ints or strings; groups need neither be adjacent nor of equal size.
        ddof: 1 is the sample std (all public code), 0 the population std (eq. 2 of the paper); only "grpo" uses it.
        eps: added to the std.

    Raises:
        ValueError: an unknown kind, an infinite reward, ddof other than 0 or 1, or lengths that differ.

    Source: EPPO eq. 2 (arXiv 2607.07178), GRPO (2402.03300), Dr. GRPO (2503.20783), RLOO (2402.14740).
    """
    check_name("advantage kind", kind, KINDS)
    if ddof not in (0, 1):
        raise ValueError(f"ddof must be 0 (population std) or 1 (sample std), got {ddof!r}")
    rewards, dtype = _rewards(rewards_B)
    advantages = torch.zeros_like(rewards)
    for rows in _groups(rewards, group_ids_B):
        group_G = rewards[rows]
        if bool((group_G == group_G[0]).all()):             # also a group of one
            continue
        centred_G = group_G - group_G.mean()
        if kind == "grpo":
            centred_G = centred_G / (centred_G.square().sum() / (len(rows) - ddof)).sqrt().add(eps)
        elif kind == "rloo":
            centred_G = centred_G * (len(rows) / (len(rows) - 1))
        advantages[rows] = centred_G
    return advantages.to(dtype)


def baseline_metrics(rewards_B: Tensor, advantages_B: Tensor) -> dict[str, float]:
    """`rloo/baseline_std`, population std over episodes of reward minus advantage, and `rloo/adv_abs`, the mean |advantage|, before
    any normalisation; nothing without a reward."""
    known_B = ~rewards_B.isnan()
    baselines_N = (rewards_B - advantages_B)[known_B].double()
    if not len(baselines_N):
        return {}
    return {"rloo/baseline_std": float(baselines_N.std(correction=0)), "rloo/adv_abs": float(advantages_B[known_B].abs().mean())}


def without_spread(rewards_B: Any, group_ids_B: Any) -> Tensor:
    """Bool [B]: the known rewards of the row's group are all equal (or there is one): a zero-variance group. False where the
    row itself has no reward. Arguments and errors as in `group_advantages`."""
    rewards, _ = _rewards(rewards_B)
    flat_B = torch.zeros(len(rewards), dtype=torch.bool)
    for rows in _groups(rewards, group_ids_B):
        flat_B[rows] = bool((rewards[rows] == rewards[rows[0]]).all())
    return flat_B


def normalise_per_task(advantages_BT: Any, mask_BT: Any, task_ids_B: Any) -> Tensor:
    """AgentRL's task advantage normalisation: (A - mean) / (std + 1e-6) over all sampled tokens of a task; 0 where masked.

    Mean and sample std are token-weighted: a trajectory of 900 tokens counts 900 times. Call it on the whole step's batch,
    before any mini-batch or shard is cut. It breaks the zero sum within a group: a group of equal rewards gets -mean / std.
    A task with one token, or whose tokens all have the same advantage, gets 0.

    Args:
        advantages_BT: broadcastable to the mask's [B, T].
        mask_BT: true on sampled tokens that are to be trained.
        task_ids_B: ints or strings.

    Source: AgentRL (arXiv 2510.04206); EPPO eq. 4 (2607.07178).
    """
    mask_BT = torch.as_tensor(mask_BT, dtype=torch.bool)
    advantages_BT = torch.as_tensor(advantages_BT)
    source_BT = advantages_BT.double().expand_as(mask_BT)
    result_BT = torch.zeros_like(source_BT)
    codes_B = _codes(task_ids_B).to(mask_BT.device)
    _same_length(len(mask_BT), codes_B)
    for code in codes_B.unique():
        where_BT = mask_BT & (codes_B == code)[:, None]
        tokens_N = source_BT[where_BT]
        if len(tokens_N) < 2:
            continue
        std = tokens_N.std(correction=1)
        if std >= MIN_STD:
            result_BT[where_BT] = (tokens_N - tokens_N.mean()) / (std + 1e-6)
    return result_BT.to(advantages_BT.dtype if advantages_BT.is_floating_point() else torch.get_default_dtype())


class PromptStats(NamedTuple):
    """Running reward statistics of one prompt over its visits: mean, std, number of visits."""

    mean: float
    std: float
    visits: int


def smooth_advantages(rewards_G: Sequence[float], before: PromptStats | None) -> tuple[list[float], PromptStats]:
    """DCPO's smooth advantage standardisation of one prompt's fresh rewards, and its statistics after this visit.

    On visit i the rewards are standardised by their own statistics and by those of all visits; the two are mixed with weights
    (i - 1) / i and 1 / i both ways, and per rollout the mixture of smaller size counts. The first visit is plain GRPO with
    nothing added to the std. A std of 0 gives 0.

    Args:
        rewards_G: finite, at least one.
        before: None on the first visit.

    Source: arXiv 2509.02333, section 3.2.
    """
    count = len(rewards_G)
    mean = math.fsum(rewards_G) / count
    flat = all(reward == rewards_G[0] for reward in rewards_G)
    std = 0.0 if flat else math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards_G) / (count - 1))
    earlier = before or PromptStats(mean, std, 0)
    visit = earlier.visits + 1
    total_mean = (earlier.visits * earlier.mean + mean) / visit
    total_std = math.sqrt((earlier.visits * earlier.std**2 + std**2
                           + earlier.visits / visit * (mean - earlier.mean) ** 2) / visit)
    after = PromptStats(total_mean, total_std if visit > 1 else std, visit)
    advantages = []
    for reward in rewards_G:
        new = (reward - mean) / std if std else 0.0
        total = (reward - after.mean) / after.std if after.std else 0.0
        one, other = ((visit - 1) * new + total) / visit, (new + (visit - 1) * total) / visit
        advantages.append(one if abs(one) < abs(other) else other)
    return advantages, after


def smooth_batch(batch: Batch, prompts: dict[str, dict[str, Sequence[float]]]) -> tuple[Tensor, list[int]]:
    """`smooth_advantages` of every prompt in a batch: scores_B in float64, 0 without a reward, and each prompt's visits so far.

    Args:
        prompts: task -> instance -> the three numbers of `PromptStats`; brought up to date in place.
    """
    scores_B, visits = torch.zeros(len(batch.rewards_B), dtype=torch.float64), []
    for rows in _groups(batch.rewards_B.double().cpu(), batch.group_ids_B):
        first = batch.trajectories[int(rows[0])]
        seen = prompts.setdefault(first.task, {})
        before = seen.get(first.instance_id)
        scores, after = smooth_advantages(batch.rewards_B[rows].tolist(), before and PromptStats(*before))
        scores_B[rows], seen[first.instance_id] = torch.tensor(scores, dtype=torch.float64), list(after)
        visits.append(after.visits)
    return scores_B, visits


GIGPO_NORMS, EPISODE_STATS = ("mean", "mean_std"), ("turns", "trajectories")


class TurnCredit(NamedTuple):
    """GiGPO's result for one prompt: an advantage for each turn of each rollout, and the size of each turn's anchor group."""

    advantages_GU: list[list[float]]
    sizes_GU: list[list[int]]


def turn_advantages(turn_rewards_GU: Sequence[Sequence[float]], anchors_GU: Sequence[Sequence[str]], gamma: float = 0.95,
                    omega: float = 1.0, norm: str = "mean", episode_stats: str = "turns") -> TurnCredit:
    """GiGPO's advantages of one prompt's rollouts: episode part + omega * step part.

    The episode part centres the sum of a rollout's rewards; the step part centres the discounted return of a turn among all
    turns of the prompt, in any rollout and at any position, at which the policy saw the same anchor.

    Args:
        turn_rewards_GU, anchors_GU: one list per rollout, one entry per turn.
        norm: "mean" only centres, "mean_std" also divides by the sample std + 1e-6.
        episode_stats: "turns" takes mean and std over turns, so long rollouts weigh more (the released code); "trajectories"
            over rollouts (the paper's eq. 3).

    Source: arXiv 2505.10978.
    """
    check_name("GiGPO norm", norm, GIGPO_NORMS)
    check_name("GiGPO episode_stats", episode_stats, EPISODE_STATS)
    totals_G = [math.fsum(rewards) for rewards in turn_rewards_GU]
    weights_G = [len(rewards) if episode_stats == "turns" else 1 for rewards in turn_rewards_GU]
    population = [total for total, weight in zip(totals_G, weights_G) for _ in range(weight)]
    returns_GU = [_discounted(rewards, gamma) for rewards in turn_rewards_GU]
    seen: dict[str, list[float]] = {}
    for returns, anchors in zip(returns_GU, anchors_GU):
        for value, anchor in zip(returns, anchors):
            seen.setdefault(anchor, []).append(value)
    advantages_GU = [[_standard(total, population, norm) + omega * _standard(value, seen[anchor], norm)
                      for value, anchor in zip(returns, anchors)]
                     for total, returns, anchors in zip(totals_G, returns_GU, anchors_GU)]
    return TurnCredit(advantages_GU, [[len(seen[anchor]) for anchor in anchors] for anchors in anchors_GU])


def _discounted(rewards_U: Sequence[float], gamma: float) -> list[float]:
    returns, value = [], 0.0
    for reward in reversed(rewards_U):
        value = reward + gamma * value
        returns.append(value)
    return returns[::-1]


def _standard(value: float, population: Sequence[float], norm: str) -> float:
    """`value` centred by its population, and scaled with "mean_std"; 0 where all of that are equal."""
    if all(other == population[0] for other in population):
        return 0.0
    mean = math.fsum(population) / len(population)
    if norm == "mean":
        return value - mean
    return (value - mean) / (math.sqrt(math.fsum((other - mean) ** 2 for other in population) / (len(population) - 1)) + 1e-6)


def turn_rewards(trajectory: Trajectory, reward: float) -> list[float]:
    """The turns' rewards, with the last one changed so that they sum to the reward that trains."""
    rewards = [turn.reward for turn in trajectory.turns]
    if rewards:
        rewards[-1] += reward - sum(rewards)
    return rewards


def overlong_penalties(tokens_B: Sequence[int], max_tokens: int, buffer: int, factor: float = 1.0) -> list[float]:
    """DAPO's soft overlong punishment, to add to the reward: 0 up to max_tokens - buffer, then falling to -factor at
    max_tokens, and further beyond. Source: arXiv 2503.14476, eq. 13 (released code).

    Args:
        tokens_B: sampled tokens of each episode.
    """
    return [min(-(tokens - (max_tokens - buffer)) / buffer * factor, 0.0) for tokens in tokens_B]


def _rewards(rewards_B: Any) -> tuple[Tensor, torch.dtype]:
    """Rewards in float64 on the CPU with NaN for None, and the dtype to answer in."""
    if not isinstance(rewards_B, Tensor):
        rewards_B = torch.as_tensor([float("nan") if reward is None else reward for reward in rewards_B])
    rewards = rewards_B.detach().cpu().double()
    if rewards.ndim != 1 or rewards.isinf().any():
        raise ValueError(f"rewards must be one finite number (or NaN) per sequence, got shape {tuple(rewards.shape)}, "
                         f"infinite: {int(rewards.isinf().sum())}")
    return rewards, rewards_B.dtype if rewards_B.is_floating_point() else torch.get_default_dtype()


def _groups(rewards: Tensor, group_ids_B: Any) -> list[Tensor]:
    """Row indices of each group's known rewards; groups without any are left out."""
    codes_B = _codes(group_ids_B).cpu()
    _same_length(len(rewards), codes_B)
    known_B = ~rewards.isnan()
    rows = [(known_B & (codes_B == code)).nonzero()[:, 0] for code in codes_B.unique()]
    return [index for index in rows if len(index)]


def _codes(ids_B: Sequence[Any] | Tensor) -> Tensor:
    """Ids of any kind as whole numbers."""
    if isinstance(ids_B, Tensor):
        return ids_B
    numbers: dict[Any, int] = {}
    return torch.tensor([numbers.setdefault(one, len(numbers)) for one in ids_B], dtype=torch.long)


def _same_length(count: int, codes_B: Tensor) -> None:
    if codes_B.shape != (count,):
        raise ValueError(f"ids must be one per sequence: {count} sequences, ids of shape {tuple(codes_B.shape)}")
