"""What a step records: per-task entropy, rewards, clip fractions, lengths, statuses. Everything here is a pure function."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Sequence

import torch
from torch import Tensor

from eppo.types import Batch, TaskStats, Trajectory


def task_stats(batch: Batch, clipped: dict[str, tuple[float, float]]) -> dict[str, TaskStats]:
    """TaskStats of every task with sampled tokens. `clipped` holds the previous step's (high, low) clip fractions."""
    stats = {}
    for index, task in enumerate(batch.tasks):
        rows = (batch.task_ids_B == index).nonzero()[:, 0]
        mask_BT = batch.mask_BT[rows]
        if not len(rows) or not bool(mask_BT.any()):
            continue
        entropy_N = batch.entropy_BT[rows][mask_BT].double()
        rewards_B = batch.rewards_B[rows]
        known = ~rewards_B.isnan()
        spreads = [rewards_B[known & (batch.group_ids_B[rows] == group)].double()
                   for group in batch.group_ids_B[rows].unique().tolist()]
        high, low = clipped.get(task, (0.0, 0.0))
        stats[task] = TaskStats(entropy_N.sum().item(), entropy_N.square().sum().item(), len(entropy_N),
                                rewards=rewards_B[known].tolist(),
                                successes=[batch.trajectories[row].success for row in rows[known].tolist()],
                                group_reward_std=[spread.std(correction=0).item() for spread in spreads if len(spread) > 1],
                                clip_high=high, clip_low=low)
    return stats


def entropy_standard_error(entropy_BT: Tensor, mask_BT: Tensor) -> float:
    """Standard error of a task's token-mean entropy, episodes as clusters (tokens of an episode are not independent).

    Linearised ratio estimator over the E episodes with sampled tokens: sqrt(E/(E-1) * sum_e (s_e - H n_e)^2) / sum_e n_e.
    NaN for fewer than two episodes.
    """
    counts_B = mask_BT.sum(1).double()
    sums_B = entropy_BT.double().masked_fill(~mask_BT, 0).sum(1)
    sums_B, counts_B = sums_B[counts_B > 0], counts_B[counts_B > 0]
    episodes = len(counts_B)
    if episodes < 2:
        return math.nan
    residuals_B = sums_B - sums_B.sum() / counts_B.sum() * counts_B
    return (residuals_B.square().sum() * episodes / (episodes - 1)).sqrt().item() / counts_B.sum().item()


def batch_metrics(batch: Batch) -> dict[str, float]:
    """`task/<id>/…` of everything but the update: entropy, rewards, groups, lengths, statuses."""
    metrics: dict[str, float] = {}
    for index, task in enumerate(batch.tasks):
        rows = (batch.task_ids_B == index).nonzero()[:, 0].tolist()
        if rows:
            metrics |= {f"task/{task}/{key}": value for key, value in _one_task(batch, rows).items()}
    return metrics


def _one_task(batch: Batch, rows: list[int]) -> dict[str, float]:
    episodes = [batch.trajectories[row] for row in rows]
    index = torch.tensor(rows)
    mask_BT, known = batch.mask_BT[index], [e for e in episodes if e.reward == e.reward]
    metrics = {"episodes": len(episodes), "reward": _mean([e.reward for e in known]), "env_reward": _mean([e.env_reward for e in known]),
               "success": _mean([float(e.success) for e in known]), "score": _mean([e.score for e in known if e.score is not None]),
               "turns": _mean([len(e.turns) for e in episodes]), "tokens": _mean([len(e.ids_T) for e in episodes]),
               "sampled_tokens": _mean([e.num_sampled_tokens for e in episodes]),
               "max_tokens": max(len(e.ids_T) for e in episodes), "cut_chars": sum(e.info.get("cut_chars", 0) for e in episodes),
               "cut_turn_frac": _mean([float(t.finish_reason == "length") for e in episodes for t in e.turns]),
               "invalid_calls": _mean([e.info.get("invalid_calls", 0) for e in episodes])}
    for status, count in sorted(Counter(e.status for e in episodes).items()):
        metrics[f"status/{status.replace(' ', '_')}_frac"] = count / len(episodes)
    groups: dict[str, list[float]] = {}
    for e in known:
        groups.setdefault(e.group_id, []).append(e.reward)
    spreads = list(groups.values())
    metrics |= {"zero_variance_frac": _mean([float(len(set(g)) == 1) for g in spreads]),
                "all_success_frac": _mean([float(min(g) == 1.0) for g in spreads]),
                "all_fail_frac": _mean([float(max(g) <= 0.0) for g in spreads])}
    if bool(mask_BT.any()):
        entropy_BT, advantages_N = batch.entropy_BT[index], batch.advantages_BT[index][mask_BT]
        entropy_N = entropy_BT[mask_BT].double()
        metrics |= {"entropy": entropy_N.mean().item(), "entropy_se": entropy_standard_error(entropy_BT, mask_BT),
                    "adv_mean": advantages_N.mean().item(), "adv_min": advantages_N.min().item(),
                    "adv_max": advantages_N.max().item(),
                    "adv_std": advantages_N.double().std().item() if len(advantages_N) > 1 else math.nan}
    return metrics


def update_metrics(batch: Batch, policy_logp_BT: Tensor, masks: Any, lo_BT: Tensor, hi_BT: Tensor) -> dict[str, float]:
    """Clip fractions, ratios and KL of one optimiser step: `loss/…` over all tasks and `task/<id>/…`.

    Args:
        policy_logp_BT: log-probabilities that the step's gradient was taken at.
        masks: ClipMasks of the step.
    """
    metrics: dict[str, float] = {}
    delta_BT = (policy_logp_BT - batch.sampler_logp_BT).masked_fill(~batch.mask_BT, 0).double()
    for task, prefix in [(None, "loss"), *((index, f"task/{task}") for index, task in enumerate(batch.tasks))]:
        mask_BT = batch.mask_BT if task is None else batch.mask_BT & (batch.task_ids_B == task)[:, None]
        if not bool(mask_BT.any()):
            continue
        delta_N = delta_BT[mask_BT]
        ratio_N = delta_N.clamp(-20, 20).exp()
        metrics |= {f"{prefix}/clip_high_frac": masks.high_BT[mask_BT].double().mean().item(),
                    f"{prefix}/clip_low_frac": masks.low_BT[mask_BT].double().mean().item(),
                    f"{prefix}/clip_dual_frac": masks.dual_BT[mask_BT].double().mean().item(),
                    f"{prefix}/approx_kl": -delta_N.mean().item(), f"{prefix}/ratio_mean": ratio_N.mean().item(),
                    f"{prefix}/ratio_max": ratio_N.max().item(), f"{prefix}/ratio_p99": ratio_N.quantile(0.99).item()
                    if len(ratio_N) < 2**24 else math.nan}
        metrics[f"{prefix}/clip_frac"] = metrics[f"{prefix}/clip_high_frac"] + metrics[f"{prefix}/clip_low_frac"]
        if task is not None:
            metrics |= {f"{prefix}/lo": lo_BT.expand_as(mask_BT)[mask_BT].mean().item(),
                        f"{prefix}/hi": hi_BT.expand_as(mask_BT)[mask_BT].mean().item()}
    return metrics


def validation_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`val/<id>/success`, `val/<id>/reward` and their means over tasks; infrastructure faults are counted, not scored."""
    metrics: dict[str, float] = {}
    tasks = list(dict.fromkeys(trajectory.task for trajectory in trajectories))
    for task in tasks:
        episodes = [t for t in trajectories if t.task == task]
        known = [t for t in episodes if t.reward == t.reward]
        metrics |= {f"val/{task}/success": _mean([float(t.success) for t in known]),
                    f"val/{task}/reward": _mean([t.env_reward for t in known]),
                    f"val/{task}/turns": _mean([len(t.turns) for t in known]),
                    f"val/{task}/faults": len(episodes) - len(known)}
    if tasks:
        metrics["val/success"] = _mean([metrics[f"val/{task}/success"] for task in tasks])
    return metrics


def episode_row(trajectory: Trajectory, step: int, split: str) -> dict[str, Any]:
    """One line of episodes.jsonl or eval.jsonl."""
    t = trajectory
    return {"step": step, "split": split, "task": t.task, "instance": t.instance_id, "kind": t.kind, "group": t.group_id, "seed": t.seed,
            "success": t.success, "score": t.score, "reward": t.reward, "env_reward": t.env_reward, "status": t.status,
            "turns": len(t.turns), "tokens": len(t.ids_T), "sampled_tokens": t.num_sampled_tokens,
            "cut_chars": t.info.get("cut_chars", 0), "invalid_calls": t.info.get("invalid_calls", 0),
            "versions": sorted({version for version in t.version_T if version >= 0}), "error": t.info.get("error"),
            "perf/env_s": t.info.get("env_s", 0.0)} | {key: t.info[key] for key in ("sandbox", "executable") if key in t.info}


def trajectory_row(trajectory: Trajectory, step: int) -> dict[str, Any]:
    """One line of trajectories.jsonl: the episode token by token."""
    t = trajectory
    return {"step": step, "task": t.task, "instance": t.instance_id, "group": t.group_id, "seed": t.seed, "reward": t.reward,
            "status": t.status, "ids": t.ids_T, "mask": t.mask_T, "sampler_logp": [round(value, 6) for value in t.sampler_logp_T],
            "version": t.version_T, "turns": [[turn.start, turn.stop, turn.finish_reason] for turn in t.turns]}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
