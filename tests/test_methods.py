"""Every method: golden numbers, identities, gradients, equivalent ways to run a step, and a smoke run of each."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import toy_env
from models import tiny_model, tiny_tokenizer

from eppo.advantages import PromptStats, overlong_penalties, smooth_advantages, turn_advantages
from eppo.algorithms import ALGORITHMS, Forward, get_algorithm
from eppo.algorithms.eppo import EPPO
from eppo.clipping import (balanced_bounds, pick_top, pick_within, positive_share, probability_bounds, sequence_ratio,
                           token_covariance)
from eppo.config import load_recipe
from eppo.losses import bounded_gradient_surrogate, soft_gate
from eppo.records import read_run
from eppo.selection import MAX_ROUNDS, DynamicSampling, is_informative
from eppo.trainer import train
from eppo.turn_entropy import unit_entropies
from eppo.types import Batch, Group, TaskStats, Trajectory, Turn

TASKS = ("db", "kg", "os")
NAN = math.nan
SCHEDULED = ("c1_per_task", "c4_yoked")
FIRST_FIVE = ("grpo", "agentrl", "eppo", "eppo_no_task_clip", "eppo_no_trend")
NAMES = tuple(name for name in ALGORITHMS if name not in SCHEDULED)
METHODS = tuple(name for name in NAMES if name not in FIRST_FIVE)
STILL = {"seal": {"dropout": 0.0}, "gigpo_seal": {"dropout": 0.0}, "clip_cov": {"frac": 1.0, "cov_low": 0.01},
         "kl_cov": {"frac": 0.1}}
STEPS = ({"db": 1.0, "kg": 0.5, "os": 2.0}, {"db": 0.6, "kg": 0.5, "os": 2.4}, {"db": 0.4, "kg": 0.6, "os": 2.0})
MODEL = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=8)),
                        device=torch.device("cpu"))


def make_batch(seed=0, groups=2, size=4, tasks=TASKS, drift=0.4, rewards=None, turns=2):
    """`groups` groups of `size` rollouts per task of two turns, float64; the policy has moved by about `drift` nats."""
    generator = torch.Generator().manual_seed(seed)
    count, length = len(tasks) * groups * size, 14

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    group_ids_B = torch.arange(count) // size
    rewards_B = torch.tensor(rewards, dtype=torch.float64) if rewards else (normal(count) > 0).double()
    mask_BT, trajectories = torch.zeros(count, length, dtype=torch.bool), []
    for row in range(count):
        spans, position = [], 2
        for number in range(turns):
            stop = position + int(torch.randint(1, 4, (1,), generator=generator))
            spans.append(Turn(position, stop, f"page {int(torch.randint(2, (1,), generator=generator))}" if number else "start",
                              float(rewards_B[row]) if number == turns - 1 else 0.0))
            mask_BT[row, position:stop] = True
            position = stop + 2
        trajectories.append(Trajectory([0] * (position - 2), mask_BT[row, :position - 2].int().tolist(), [], [], spans,
                                       float(rewards_B[row]),
                                       float(rewards_B[row]), None, bool(rewards_B[row] == 1), "completed",
                                       tasks[row // (groups * size)], f"i{group_ids_B[row]}", f"g{group_ids_B[row]}", row))
    sampler_BT = -2 * normal(count, length).abs() * mask_BT
    return Batch(tasks, torch.zeros(count, length, dtype=torch.long), mask_BT, sampler_BT, group_ids_B // groups, group_ids_B,
                 rewards_B,
                 trajectories, policy_logp_BT=(sampler_BT + drift * normal(count, length)) * mask_BT,
                 ref_logp_BT=(sampler_BT - 0.1) * mask_BT, entropy_BT=normal(count, length).abs() * mask_BT)


def stats(entropies, tokens=10, **fields):
    return {task: TaskStats(value * tokens, value**2 * tokens, tokens, **fields) for task, value in entropies.items()}


def begun(name, **settings):
    """The method as a run would begin it."""
    method = get_algorithm(name, **STILL.get(name, {}) | settings)
    method.begin(MODEL, TASKS, 3, 0)
    if getattr(method, "head", None) is not None:
        method.head.double()
    return method


def forward_of(batch, seed=1):
    """What the training pass would give, with gradients."""
    generator = torch.Generator().manual_seed(seed)
    hidden_BTD = torch.randn(*batch.mask_BT.shape, 8, generator=generator, dtype=torch.float64)
    return [value.clone().requires_grad_() for value in (batch.policy_logp_BT, batch.entropy_BT, hidden_BTD)]


def parts_of(method, batch):
    """The method's step on a batch up to the loss: pacing, advantages, bounds, denominator."""
    for step in STEPS:
        batch = replace(batch, advantages_BT=method.advantages(batch))
        eps = method.pace(stats({task: value for task, value in step.items() if task in batch.tasks}))
    lo_BT, hi_BT = method.bounds(batch, eps, batch.policy_logp_BT if "policy_pass" in method.needs else None)
    return batch, lo_BT, hi_BT, method.denominator(batch.mask_BT)


def step_loss(method, part, tensors, lo_BT, hi_BT, count):
    terms = [method.token_loss(tensors[0], part, lo_BT, hi_BT), *method.extra(Forward(*tensors), part).values()]
    return sum(method.reduce(term, part.mask_BT, count) for term in terms)


def loss_and_gradients(method, batch, micro=None, rows=None):
    """One optimiser step's loss and its gradients on log-probabilities, entropies and hidden states, as the learner forms
    them."""
    batch, lo_BT, hi_BT, count = parts_of(method, batch)
    tensors, total = forward_of(batch), 0.0
    rows = list(range(len(batch.mask_BT))) if rows is None else rows
    for start in range(0, len(rows), micro or len(rows)):
        picked = rows[start:start + (micro or len(rows))]
        part = batch.select(picked)
        width = part.mask_BT.shape[1]
        loss = step_loss(method, part, [one[picked, :width] for one in tensors], lo_BT[picked, :width], hi_BT[picked, :width],
                         count)
        loss.backward()
        total += float(loss.detach())
    return total, [torch.zeros_like(one) if one.grad is None else one.grad for one in tensors]


def same(one, other, tolerance=1e-10):
    pairs = zip(one[1], other[1])
    return one[0] == pytest.approx(other[0], abs=tolerance) and all(torch.allclose(a, b, atol=tolerance) for a, b in pairs)


# ---- the table ----------------------------------------------------------------------------------------------------------
def test_every_name_of_the_papers_and_the_controls_is_there():
    papers = ("grpo dr_grpo rloo rloo_eppo agentrl eppo eppo_no_task_clip eppo_no_trend dcpo bapo dapo ce_gppo gspo cispo sapo "
              "gigpo gigpo_seal seal entropy_bonus epo epo_hinge clip_cov kl_cov pcgrad cagrad").split()
    controls = ("c0_fixed c1_per_task c2a_shuffled c2b_deranged c3_random c4_yoked c5_inverted c6_success c7_reward_spread "
                "c8_global c9_clip_equaliser c10_level c11_weights").split()
    assert set(ALGORITHMS) == {*papers, *controls, "dcpo_native", "bapo_native"}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_docstring_is_the_method(name):
    text = ALGORITHMS[name].__doc__
    for part in ("Source:", "Differs from", "        1. ", "Defaults:", "Logs:", "Degenerate cases:"):
        assert part in text, part


def test_published_defaults():
    expected = {"dr_grpo": dict(advantage="mean_only", reduction="seq_mean_token_sum_norm", kl_coef=0.0),
                "rloo": dict(advantage="rloo", task_norm=True, kl_coef=1e-4),
                "rloo_eppo": dict(advantage="rloo", alpha=0.4, kappa=1.0),
                "dcpo": dict(clip_low=0.16, clip_high=0.20, r_max=10.0, dual_clip=10.0, task_norm=True, kl_coef=1e-4),
                "dcpo_native": dict(task_norm=False, kl_coef=0.0, reduction="seq_mean_token_mean"),
                "bapo": dict(target=0.4, low_start=0.6, low_end=0.9, high_start=1.2, high_end=3.0, low_step=0.02,
                             high_step=0.05,
                             dual_clip=3.0, contribution="surrogate"),
                "bapo_native": dict(task_norm=False, kl_coef=0.0, dual_clip=None),
                "dapo": dict(clip_low=0.2, clip_high=0.28, kl_coef=0.0, dual_clip=10.0, dynamic=True, max_rounds=10),
                "ce_gppo": dict(clip_low=0.2, clip_high=0.2, beta_low=0.75, beta_high=1.0, dual_clip=10.0, kl_coef=0.0),
                "gspo": dict(clip_low=3e-4, clip_high=4e-4, dual_clip=None, reduction="seq_mean_token_mean"),
                "cispo": dict(w_min=0.0, w_max=5.0, reduction="token_mean"),
                "sapo": dict(tau_pos=1.0, tau_neg=1.05, reduction="seq_mean_token_mean"),
                "gigpo": dict(omega=1.0, gamma=0.95, norm="mean", episode_stats="turns", kl_coef=0.01),
                "seal": dict(coef=0.02, layers=3, dropout=0.1, level="token", zero_adv="positive", kl_coef=0.01),
                "entropy_bonus": dict(coef=0.001, target_nats=None), "epo": dict(coef=0.001, smooth=1.0, max_ratio=2.0),
                "clip_cov": dict(frac=2e-4, cov_low=1.0, cov_high=5.0), "kl_cov": dict(frac=2e-3, cov_coef=1.0),
                "cagrad": dict(c=0.5)}
    for name, values in expected.items():
        settings = get_algorithm(name).settings
        assert {key: settings[key] for key in values} == values, name


@pytest.mark.parametrize("name, settings, message", [
    ("cisppo", {}, "did you mean 'cispo'"), ("c5_invert", {}, "did you mean 'c5_inverted'"),
    ("dcpo", {"r_max": 0.5}, "r_max must be above 1"),
    ("bapo", {"target": 1.0}, "target must lie"), ("bapo", {"low_start": 0.95}, "ordered"),
    ("bapo", {"clip_low": 0.2}, "unknown setting"),
    ("bapo", {"contribution": "gradients"}, "did you mean 'gradient'"),
    ("dapo", {"max_rounds": 11}, "max_rounds must lie in 1 to 10"),
    ("dapo", {"overlong_buffer": 5}, "needs overlong_max"),
    ("dapo", {"overlong_max": 100, "overlong_buffer": 101}, "overlong_buffer must lie"),
    ("dapo", {"filter_metric": "sucess"}, "did you mean 'success'"), ("ce_gppo", {"beta_low": -1.0}, "beta_low and beta_high"),
    ("cispo", {"w_max": 0.2}, "caps, not distances"), ("cispo", {"dual_clip": 3.0}, "unknown setting"),
    ("sapo", {"tau_pos": 0.0}, "above 0"),
    ("gigpo", {"norm": "std"}, "unknown GiGPO norm"), ("gigpo", {"gamma": 1.5}, "gamma lie"),
    ("seal", {"level": "tokens"}, "did you mean 'token'"),
    ("seal", {"dropout": 1.0}, "dropout lie"), ("entropy_bonus", {"coef": -0.1}, "at least 0"),
    ("epo", {"max_ratio": 0.0}, "min_ratio"),
    ("clip_cov", {"cov_low": 6.0}, "cov_low below cov_high"), ("kl_cov", {"frac": 0.0}, "frac must lie"),
    ("cagrad", {"c": 1.0}, "c must lie"),
    ("dr_grpo", {"max_tokens": None}, "needs max_tokens"), ("c4_yoked", {}, "schedule_from must name the folder of one"),
    ("c4_yoked", {"schedule_from": "a,b"}, "one finished run"), ("c1_per_task", {}, "folders of finished runs"),
    ("c0_fixed", {"eps": 1.0}, "eps must lie"), ("c9_clip_equaliser", {"target": 1.0}, "target lie"),
    ("c6_success", {"signal": "x"}, "C6 signal"),
    ("c10_level", {"mode": "levels"}, "did you mean 'level'"), ("c11_weights", {"lever": "los"}, "did you mean 'loss'"),
    ("c5_inverted", {"kappa": 1.0}, "unknown setting"), ("c0_fixed", {"alpha": 0.4}, "unknown setting"),
    ("c4_yoked", {"eps0": 0.2}, "unknown setting")])
def test_bad_settings(name, settings, message):
    with pytest.raises(ValueError, match=message):
        get_algorithm(name, **settings)


# ---- golden numbers -------------------------------------------------------------------------------------------------------
RATIO, SIGNS = (torch.tensor(values, dtype=torch.float64) for values in ((1.5, .9, 1.0, .5, 1.1, .4),
                                                                         (1., 1., 1., -1., -1., -2.)))


@pytest.mark.parametrize("mode, shares", [("surrogate", (.5167, .5397, .4493, .4722)),
                                          ("gradient", (.6333, .7556, .6333, .7556))])
def test_bapo_shares(mode, shares):
    bounds = ((0.6, 1.2), (0.6, 1.6), (0.9, 1.2), (0.9, 3.0))
    assert [positive_share(RATIO, SIGNS, lo, hi, mode) for lo, hi in bounds] == pytest.approx(shares, abs=5e-5)


def test_bapo_search():
    found = balanced_bounds(RATIO, SIGNS, 0.4)
    assert (found.lo, found.hi, found.steps) == (0.6, 1.2, 0)
    missed = balanced_bounds(RATIO, SIGNS, 0.55)
    assert (missed.lo, missed.hi) == pytest.approx((0.9, 3.0)) and missed.steps == 51
    assert missed.share == pytest.approx(.4722, abs=5e-5) and missed.start_share == pytest.approx(.5167, abs=5e-5)
    upper = balanced_bounds(RATIO, SIGNS, 0.53)
    assert upper.lo == 0.6 and upper.hi == pytest.approx(1.4) and upper.steps == 4 and upper.share >= 0.53
    lower = balanced_bounds(RATIO, SIGNS, 0.4, low=(0.6, 0.6))
    assert (lower.lo, lower.hi, lower.steps) == (0.6, 1.2, 0)
    assert balanced_bounds(RATIO, SIGNS.abs(), 0.4).share == 1.0 and balanced_bounds(RATIO, SIGNS.abs(), 0.4).steps == 0
    none = balanced_bounds(RATIO, torch.zeros_like(SIGNS), 0.4)
    assert math.isnan(none.share) and none.steps == 0


@pytest.mark.parametrize("q, lo, hi", [(1, .800, 1.171), (.9, .769, 1.187), (.5, .5, 1.306), (.1, .5, 2.0), (.01, .5, 5.0),
                                       (.64, .5, 1.25),
                                       (.05, .5, 2.5616), (1e-3, .5, 10), (0, .5, 10)])
def test_dcpo_bounds(q, lo, hi):
    found = probability_bounds(torch.tensor([[float(q)]], dtype=torch.float64).log())
    assert [float(bound) for bound in found] == pytest.approx([lo, hi], abs=6e-4)
    if q > 0.7:                                             # on the bounds the constraint itself holds with equality
        r = float(found[0])
        assert (1 - r) * r * q == pytest.approx(0.16)


def test_dcpo_smooth_advantages():
    first, after = smooth_advantages([1.0, 0.0, 0.0, 1.0], None)
    assert first == pytest.approx([.866025, -.866025, -.866025, .866025], abs=1e-6)
    assert after == pytest.approx((.5, .57735, 1), abs=1e-5)
    flat, unchanged = smooth_advantages([1.0, 1.0], None)
    assert flat == [0, 0] and unchanged == (1.0, 0.0, 1)
    second, total = smooth_advantages([1.0, 1.0], PromptStats(0.0, 0.0, 1))
    # means: (0 + 1) / 2; variance (0 + 0 + 1/2 * 1) / 2 = 1/4; A_new = 0, A_tot = 1: SA_new = SA_tot = 1/2
    assert total == (0.5, 0.5, 2) and second == [0.5, 0.5]
    third, _ = smooth_advantages([1.0, 0.0], PromptStats(0.5, 0.5, 2))
    # A_new = +-0.7071; var_t = (2 * .25 + .5 + 0) / 3 = 1/3, A_tot = +-0.8660; the smaller mixture is (2 A_new + A_tot) / 3
    assert third == pytest.approx([(2 * .5**.5 + .75**.5) / 3, -(2 * .5**.5 + .75**.5) / 3])


def test_sapo_gate():
    assert [float(soft_gate(torch.tensor(r), 1.0)) for r in (.5, 1., 1.2)] == pytest.approx([1.5102, 2, 2.1993], abs=5e-5)
    assert [float(soft_gate(torch.tensor(r), 1.05)) for r in (1., 2.)] == pytest.approx([1.9048, 2.8220], abs=5e-5)
    r = torch.ones((), dtype=torch.float64, requires_grad=True)
    assert float(torch.autograd.grad(soft_gate(r, 1.05), r)[0]) == pytest.approx(1.0)


def test_ce_gppo_values_and_gradients_at_the_bounds():
    logr = torch.tensor([[1.5, .5, 1.5, .5, 12., 1.]], dtype=torch.float64).log().requires_grad_()
    advantages = torch.tensor([[1., 1., -1., -1., -1., 2.]], dtype=torch.float64)
    loss = bounded_gradient_surrogate(logr, torch.zeros(1, 6), advantages, torch.ones(1, 6), .8, 1.2, .75, 1.0, 10.0)
    assert loss.tolist()[0] == pytest.approx([-1.2, -.5, 1.5, .75 * .8, 10., -2.])
    gradient, = torch.autograd.grad(loss.sum(), logr)
    assert gradient.tolist()[0] == pytest.approx([-1.2, -.5, 1.5, .75 * .8, 0., -2.])


def test_overlong_penalties():
    assert overlong_penalties([100, 16384, 18432, 20480, 22528], 20480, 4096) == pytest.approx([0, 0, -.5, -1, -1.5])
    method = get_algorithm("dapo", overlong_max=8192)
    assert method.buffer == 1638
    method = get_algorithm("dapo", overlong_max=6, overlong_buffer=4)
    batch = make_batch()
    method.advantages(batch)
    lengths = batch.mask_BT.sum(1).double()
    assert method.metrics()["dapo/overlong_penalty"] == pytest.approx(float(-((lengths - 2) / 4).clamp(min=0).mean()))


def test_gigpo_by_hand():
    rewards, anchors = [[0.0, 1.0], [0.0, 0.0, 0.0]], [["a", "b"], ["a", "b", "a"]]
    # returns .95 1 / 0 0 0; anchor a: .95 0 0, b: 1 0; episode over turns: 1 1 0 0 0, mean .4; over trajectories: mean .5
    credit = turn_advantages(rewards, anchors)
    step = [[.95 * 2 / 3, .5], [-.95 / 3, -.5, -.95 / 3]]
    assert credit.advantages_GU[0] == pytest.approx([.6 + step[0][0], .6 + step[0][1]])
    assert credit.advantages_GU[1] == pytest.approx([-.4 + value for value in step[1]])
    assert credit.sizes_GU == [[3, 2], [3, 2, 3]]
    paper = turn_advantages(rewards, anchors, omega=0.0, episode_stats="trajectories")
    assert paper.advantages_GU == [[.5, .5], [-.5, -.5, -.5]]
    scaled = turn_advantages(rewards, anchors, omega=0.0, norm="mean_std", episode_stats="trajectories").advantages_GU
    assert scaled[0][0] == pytest.approx(.5 / (.5**.5 + 1e-6))
    alone = turn_advantages(rewards, [["a", "b"], ["c", "d", "e"]])
    assert alone.advantages_GU[1] == pytest.approx([-.4] * 3) and alone.sizes_GU[0] == [1, 1]
    assert turn_advantages([[], [1.0]], [[], ["a"]]).advantages_GU == [[], [0.0]]


def test_covariance_picks():
    logp = torch.tensor([[-1., -2., -3., 7.], [0., -4., 7., 7.]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]], dtype=torch.bool)
    advantages = torch.tensor([[1.], [-1.]], dtype=torch.float64)
    cov = token_covariance(logp, advantages, mask)                      # means: -2 and 0.2
    assert cov[mask].tolist() == pytest.approx([.8, 0, -.8, -2.4, 2.4]) and not cov[~mask].any()
    assert pick_top(cov, mask, 2).nonzero().tolist() == [[0, 0], [1, 1]]
    found = pick_within(cov, mask, 0.5, 3.0, 1, torch.Generator().manual_seed(0))
    assert found.sum() == 1 and bool((found & (cov > 0.5)).any())
    assert not pick_within(cov, mask, 5.0, 9.0, 3, torch.Generator()).any()


# ---- identities -----------------------------------------------------------------------------------------------------------
def common(name, **settings):
    """The method on grpo's pipeline, so that only its own part differs."""
    return begun(name, **{"kl_coef": 0.0, "task_norm": False, "dual_clip": 3.0} | settings)


def test_ce_gppo_without_betas_has_the_clipped_gradient():
    batch = make_batch()
    one = loss_and_gradients(common("ce_gppo", beta_low=0.0, beta_high=0.0), batch)
    other = loss_and_gradients(common("grpo"), batch)
    assert torch.allclose(one[1][0], other[1][0], atol=1e-12) and one[0] != pytest.approx(other[0])
    kept = loss_and_gradients(common("ce_gppo"), batch)
    assert (kept[1][0] != 0).sum() > (other[1][0] != 0).sum()


def test_dcpo_first_visit_is_grpo_and_the_second_is_not():
    batch, method = make_batch(), begun("dcpo", task_norm=False)
    plain = begun("grpo").advantages(batch)
    assert torch.allclose(method.advantages(batch), plain, atol=1e-5)
    flipped = replace(batch, rewards_B=1 - batch.rewards_B.where(batch.group_ids_B % 2 == 0,
                                                                 torch.ones(1, dtype=torch.float64)))
    assert not torch.allclose(method.advantages(flipped), begun("grpo").advantages(flipped), atol=1e-3)
    assert method.metrics()["dcpo/visits_mean"] == 2.0
    assert torch.equal(begun("dcpo", task_norm=False, smooth=False).advantages(batch), plain)


def test_dapo_with_equal_bounds_and_no_filter_is_grpo():
    batch = make_batch()
    assert same(loss_and_gradients(common("dapo", clip_high=0.2, dynamic=False), batch),
                loss_and_gradients(common("grpo"), batch))
    assert not same(loss_and_gradients(common("dapo", dynamic=False), batch), loss_and_gradients(common("grpo"), batch))


def test_bapo_with_one_lower_bound_is_a_fixed_clip():
    batch = make_batch()
    fixed = common("grpo", clip_low=0.4, clip_high=0.2)
    assert same(loss_and_gradients(common("bapo", low_end=0.6, target=0.99), batch), loss_and_gradients(fixed, batch))
    searched = loss_and_gradients(common("bapo", target=0.99), batch)
    assert same(searched, loss_and_gradients(common("grpo", clip_low=0.1, clip_high=2.0), batch))


def test_gigpo_without_steps_is_grpo():
    batch = make_batch()
    settings = dict(omega=0.0, episode_stats="trajectories", norm="mean_std")
    assert same(loss_and_gradients(common("gigpo", **settings), batch), loss_and_gradients(common("grpo"), batch))
    assert not same(loss_and_gradients(common("gigpo"), batch), loss_and_gradients(common("grpo"), batch))


def test_rloo_with_task_normalisation_is_mean_only_with_it():
    batch = make_batch()
    one, other = begun("rloo").advantages(batch), begun("agentrl", advantage="mean_only").advantages(batch)
    assert torch.allclose(one, other, atol=1e-5)
    paced = begun("rloo_eppo", alpha=0.0, kappa=0.0)
    assert same(loss_and_gradients(paced, batch), loss_and_gradients(begun("rloo"), batch))


def test_at_ratio_one_all_clip_methods_share_one_gradient():
    batch = make_batch(drift=0.0)
    reference = loss_and_gradients(common("grpo"), batch)[1][0]
    assert reference.abs().sum() > 0
    for name in ("agentrl", "eppo", "dapo", "dcpo", "bapo", "ce_gppo", "c5_inverted", "c9_clip_equaliser", "pcgrad"):
        gradient = loss_and_gradients(common(name, **{"smooth": False} if name == "dcpo" else {}), batch)[1][0]
        assert torch.allclose(gradient, reference, atol=1e-12), name
    assert torch.allclose(loss_and_gradients(begun("cispo"), batch)[1][0], reference, atol=1e-12)
    assert torch.allclose(loss_and_gradients(begun("kl_cov"), batch)[1][0], reference, atol=1e-12)
    by_sequence = loss_and_gradients(common("grpo", reduction="seq_mean_token_mean"), batch)[1][0]
    assert torch.allclose(loss_and_gradients(begun("sapo"), batch)[1][0], by_sequence, atol=1e-12)
    assert torch.allclose(loss_and_gradients(begun("gspo"), batch)[1][0], by_sequence, atol=1e-12)


def test_extra_terms_with_coefficient_zero_are_grpo():
    batch, reference = make_batch(), loss_and_gradients(common("grpo"), make_batch())
    assert same(loss_and_gradients(common("entropy_bonus", coef=0.0), batch), reference)
    assert same(loss_and_gradients(common("epo", coef=0.0), batch), reference)
    assert same(loss_and_gradients(common("seal", coef=0.0), batch), reference)
    assert same(loss_and_gradients(common("clip_cov", cov_low=100.0, cov_high=200.0), batch), reference)


def test_released_epo_trains_like_an_entropy_bonus_and_the_hinge_does_not():
    batch = make_batch()
    bonus = loss_and_gradients(common("entropy_bonus"), batch)
    literal = loss_and_gradients(common("epo", max_ratio=0.5), batch)
    assert all(torch.allclose(a, b, atol=1e-14) for a, b in zip(literal[1], bonus[1]))
    assert literal[0] != pytest.approx(bonus[0], abs=1e-9)
    hinge = loss_and_gradients(common("epo_hinge", max_ratio=0.5, smooth=20.0), batch)
    assert not torch.allclose(hinge[1][1], bonus[1][1], atol=1e-9)


def test_gspo_is_the_loss_on_sequences():
    method, batch = begun("gspo", clip_low=0.1, clip_high=0.1), make_batch()
    _, gradients = loss_and_gradients(method, batch)
    policy_BT = batch.policy_logp_BT.clone().requires_grad_()
    advantages_B = begun("grpo").advantages(batch).sum(1) / batch.mask_BT.sum(1)
    log_ratio_BT = (policy_BT - batch.sampler_logp_BT).where(batch.mask_BT, 0)
    s_B = (log_ratio_BT.sum(1) / batch.mask_BT.sum(1)).exp()
    torch.maximum(-advantages_B * s_B, -advantages_B * s_B.clamp(.9, 1.1)).mean().backward()
    assert torch.allclose(gradients[0], policy_BT.grad, atol=1e-12)
    events = method.clip_events(replace(batch, advantages_BT=begun("grpo").advantages(batch)), batch.policy_logp_BT,
                                torch.full((1, 1), .9), torch.full((1, 1), 1.1))
    assert torch.equal(events.high_BT.any(1), (s_B > 1.1) & (advantages_B > 0)) and events.high_BT.any() and events.low_BT.any()
    assert torch.allclose(sequence_ratio(batch.policy_logp_BT, batch.sampler_logp_BT, batch.mask_BT)[batch.mask_BT],
                          s_B[:, None].expand_as(batch.mask_BT)[batch.mask_BT].detach())


def test_clip_cov_leaves_the_picked_tokens_out():
    batch, plain = make_batch(), common("grpo")
    method = common("clip_cov")
    one, other = loss_and_gradients(method, batch)[1][0], loss_and_gradients(plain, batch)[1][0]
    filled, lo_BT, hi_BT, _ = parts_of(common("clip_cov"), batch)
    picked_BT, cov_BT = hi_BT == 0, token_covariance(batch.policy_logp_BT, filled.advantages_BT, batch.mask_BT)
    clipped = common("grpo").clip_events(filled, batch.policy_logp_BT, torch.tensor(.8), torch.tensor(1.2))
    unclipped_BT = batch.mask_BT & ~clipped.high_BT & ~clipped.low_BT
    assert torch.equal(picked_BT, unclipped_BT & (cov_BT > 0.01) & (cov_BT < 5)) and torch.equal(lo_BT == 0, picked_BT)
    assert other[picked_BT].any() and torch.equal(one, other.masked_fill(picked_BT, 0))
    assert method.metrics()["clip_cov/picked_frac"] == pytest.approx(int(picked_BT.sum()) / int(batch.mask_BT.sum()))
    assert int((parts_of(common("clip_cov", frac=1e-9), batch)[2] == 0).sum()) == 1


def test_kl_cov_penalises_the_top_tokens_only():
    method, batch = begun("kl_cov"), make_batch()
    free, held = begun("kl_cov", cov_coef=0.0), loss_and_gradients(method, batch)[1][0]
    difference_BT = held - loss_and_gradients(free, batch)[1][0]
    picked = difference_BT.nonzero()
    assert len(picked) == int(0.1 * batch.mask_BT.sum())
    rows, columns = picked.T
    moved = (batch.policy_logp_BT - batch.sampler_logp_BT)[rows, columns]
    assert torch.allclose(difference_BT[rows, columns], moved.sign() / batch.mask_BT.sum())


# ---- gradients and equivalent ways to run a step -----------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_gradient_by_finite_differences(name):
    batch = make_batch(groups=1, size=2, rewards=[1, 0, 1, 0, 0, 1])
    method = begun(name, kl_coef=0.1)
    batch, lo_BT, hi_BT, count = parts_of(method, batch)
    tensors = forward_of(batch)
    detached = {"ce_gppo", "cispo", "gspo"}                             # the loss holds stopped gradients: see their own tests
    if name in detached:
        return
    assert torch.autograd.gradcheck(lambda *values: step_loss(method, batch, values, lo_BT, hi_BT, count), tensors)


def test_gradients_behind_stopped_ones_by_finite_differences():
    """CISPO's weight, CE-GPPO's scale and GSPO's sequence ratio are constants: freeze them at a point, then differentiate."""
    batch = make_batch(groups=1, size=2, rewards=[1, 0, 1, 0, 0, 1])
    point_BT, h = batch.policy_logp_BT, 1e-6
    for name in ("cispo", "ce_gppo", "gspo"):
        method = begun(name, **{"clip_low": 0.1, "clip_high": 0.1} if name == "gspo" else {})
        batch, lo_BT, hi_BT, count = parts_of(method, batch)
        logp_BT = point_BT.clone().requires_grad_()
        method.reduce(method.token_loss(logp_BT, batch, lo_BT, hi_BT), batch.mask_BT, count).backward()
        ratio_BT = (point_BT - batch.sampler_logp_BT).exp()
        if name == "gspo":
            ratio_BT = sequence_ratio(point_BT, batch.sampler_logp_BT, batch.mask_BT)
        a_BT = batch.advantages_BT
        high_BT, low_BT = (a_BT > 0) & (ratio_BT > hi_BT), (a_BT < 0) & (ratio_BT < lo_BT)
        if name == "cispo":
            slope_BT = ratio_BT.clamp(0, 5)
        elif name == "ce_gppo":
            slope_BT = ratio_BT.where(~high_BT, hi_BT * method.beta_high).where(~low_BT, lo_BT * method.beta_low)
        else:
            slope_BT = ratio_BT.masked_fill(high_BT | low_BT, 0)

        def frozen(value_BT, method=method, weight_BT=-a_BT * slope_BT, mask_BT=batch.mask_BT, count=count):
            return method.reduce(weight_BT * value_BT, mask_BT, count)

        for row, column in batch.mask_BT.nonzero().tolist():
            step_BT = torch.zeros_like(point_BT)
            step_BT[row, column] = h
            difference = float(frozen(point_BT + step_BT) - frozen(point_BT - step_BT)) / (2 * h)
            assert float(logp_BT.grad[row, column]) == pytest.approx(difference, abs=1e-7), name


@pytest.mark.parametrize("name", NAMES)
def test_accumulation_order_and_padding_do_not_matter(name):
    batch = make_batch(seed=5)
    whole = loss_and_gradients(begun(name), batch)
    assert math.isfinite(whole[0]) and whole[1][0].abs().sum() > 0
    for micro in (1, 5):
        assert same(loss_and_gradients(begun(name), batch, micro=micro), whole)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0)).tolist()
    assert same(loss_and_gradients(begun(name), batch, rows=order, micro=7), whole)
    moved = replace(batch.select(order), trajectories=[batch.trajectories[row] for row in order])
    narrow = moved.mask_BT.shape[1]
    shuffled = parts_of(begun(name), moved)
    straight = parts_of(begun(name), batch)
    for index in (1, 2):
        a, b = shuffled[index].expand_as(moved.mask_BT), straight[index].expand_as(batch.mask_BT)[order, :narrow]
        assert torch.allclose(a[moved.mask_BT], b[moved.mask_BT], equal_nan=True)
    assert torch.allclose(shuffled[0].advantages_BT, straight[0].advantages_BT[order, :narrow], atol=1e-10)
    wide = replace(batch, **{key: torch.nn.functional.pad(getattr(batch, key), (0, 30), value=0 if key == "mask_BT" else 7)
                             for key in ("ids_BT", "mask_BT", "sampler_logp_BT", "policy_logp_BT", "ref_logp_BT",
                                         "entropy_BT")})
    padded_batch, lo_BT, hi_BT, count = parts_of(begun(name), wide)
    assert count == straight[3] and torch.allclose(padded_batch.advantages_BT[:, :14], straight[0].advantages_BT, atol=1e-12)
    assert not padded_batch.advantages_BT[:, 14:].any()
    tensors = [torch.nn.functional.pad(one.detach(), (0, 0, 0, 30) if one.ndim == 3 else (0, 30), value=NAN).requires_grad_()
               for one in forward_of(batch)]
    method = begun(name)
    padded_batch, lo_BT, hi_BT, count = parts_of(method, wide)
    loss = step_loss(method, padded_batch, tensors, lo_BT, hi_BT, count)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(whole[0], abs=1e-10)
    assert torch.allclose(tensors[0].grad[:, :14], whole[1][0], atol=1e-10)
    assert not tensors[0].grad[:, 14:].any()


@pytest.mark.parametrize("name", NAMES)
def test_odd_batches(name):
    """All rewards equal, a task that is missing, a single group, unequal groups, a row without reward."""
    flat = begun(name)
    batch, *_ = parts_of(flat, make_batch(rewards=[1.0] * 24))
    if not ALGORITHMS[name].__name__.startswith("GiGPO"):               # its anchors see discounts, which differ with the turn
        assert not batch.advantages_BT.any()
    whole = make_batch()
    for rows in (range(16), range(4), [0, 1, 2, 4, 8, 9, 10, 11, 12], [0]):
        result = loss_and_gradients(begun(name), whole.select(rows))
        assert math.isfinite(result[0]) and all(torch.isfinite(one).all() for one in result[1])
    lost = make_batch()
    lost.rewards_B[3] = NAN
    lost.mask_BT[3] = False
    method = begun(name)
    result = loss_and_gradients(method, lost)
    assert math.isfinite(result[0]) and not result[1][0][3].any()
    assert all(math.isfinite(value) for value in method.metrics().values())
    rest = [row for row in range(24) if row != 3]
    alone = begun(name).advantages(lost.select(rest))
    assert torch.allclose(begun(name).advantages(lost)[rest, :alone.shape[1]], alone, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_state_survives_json_exactly(name):
    batch = make_batch()
    whole, first, second = (begun(name) for _ in range(3))
    for method in (whole, first):
        parts_of(method, batch)
    state = first.state_dict()
    if "head" in state:
        second.head.load_state_dict(state["head"])
        state = {**state, "head": None}
    second.load_state_dict(json.loads(json.dumps(state, allow_nan=False)))
    later = replace(make_batch(seed=9), entropy_BT=batch.entropy_BT)
    assert same(loss_and_gradients(second, later), loss_and_gradients(whole, later), tolerance=0)
    assert second.metrics() == whole.metrics()
    ours, theirs = second.state_dict(), whole.state_dict()
    assert json.dumps({**ours, "head": 0}) == json.dumps({**theirs, "head": 0})


# ---- the other hooks ---------------------------------------------------------------------------------------------------------
def group(task, number, *successes):
    return Group(f"{task}/{number}", task, f"i{number}", [
        Trajectory([], [], [], [], [], NAN if one is None else float(one), 0.0, None, bool(one), "completed", task,
                   f"i{number}",
                   f"{task}/{number}", index) for index, one in enumerate(successes)])


def test_dynamic_sampling_refills_each_task_up_to_its_own_quota():
    method = get_algorithm("dapo")
    first = [group("db", 0, 1, 0), group("os", 0, 1, 1), group("db", 1, 0, 0), group("os", 1, 0, 1)]
    kept, missing = method.select(first)
    assert [one.group_id for one in kept] == ["db/0", "os/1"] and missing == {"db": 1, "os": 1}
    kept, missing = method.select([*kept, group("db", 2, 0, 1), group("os", 2, 0, 0)])
    assert [one.group_id for one in kept] == ["db/0", "os/1", "db/2"] and missing == {"os": 1}
    kept, missing = method.select([*kept, group("os", 3, 0, 1), group("os", 4, 0, 1)])
    assert missing == {} and [one.group_id for one in kept] == ["db/0", "os/1", "db/2", "os/3"]      # the surplus is trimmed
    metrics = method.metrics()
    assert metrics["sampling/os/generated"] == 5 and metrics["sampling/db/generated"] == 3 and metrics["sampling/rounds"] == 3
    assert metrics["sampling/os/all_success"] == 1 and metrics["sampling/os/all_fail"] == 1
    assert metrics["sampling/db/all_fail"] == 1
    assert metrics["sampling/used_frac"] == 4 / 8 and metrics["sampling/os/missing"] == 0
    again = [group("db", 9, 1, 0)]
    assert method.select(again) == (again, {}) and method.metrics()["sampling/rounds"] == 1     # the next step starts anew
    assert get_algorithm("dapo", dynamic=False).select(first) == (first, {})


def test_dynamic_sampling_gives_up_at_its_cap_without_another_task():
    sampling = DynamicSampling(max_rounds=3)
    groups, rounds = [group("db", 0, 1, 0), group("os", 0, 0, 0)], 0
    while True:
        groups, missing = sampling.select(groups)
        rounds += 1
        if not missing:
            break
        assert missing == {"os": 1}
        groups = [*groups, group("os", rounds, 0, 0)]
    assert rounds == 3 and [one.task for one in groups] == ["db"]
    assert sampling.metrics()["sampling/os/missing"] == 1 and sampling.metrics()["sampling/os/generated"] == 3
    hopeless = DynamicSampling(max_rounds=1)
    kept, missing = hopeless.select([group("db", 0, 0, 0)])
    assert [one.group_id for one in kept] == ["db/0"] and missing == {} and MAX_ROUNDS == 10


def test_informative_groups():
    assert is_informative(group("db", 0, 1, 0)) and not is_informative(group("db", 0, 1, 1))
    assert not is_informative(group("db", 0, 1, None, 1)) and not is_informative(group("db", 0, None, None))
    spread = group("db", 0, 0, 0)
    spread.trajectories[0].reward = -0.2
    assert not is_informative(spread) and is_informative(spread, "reward")


def test_entropy_units():
    batch = make_batch(groups=1, size=2)
    entropies_BT = batch.entropy_BT.where(batch.mask_BT, 0)
    for unit, count in (("token", int(batch.mask_BT[:2].sum())), ("turn_sum", 4), ("traj_sum", 2)):
        assert unit_entropies(batch, unit)["db"] == (pytest.approx(float(entropies_BT[:2].sum())), count)
    means = entropies_BT[:2].sum(1) / batch.mask_BT[:2].sum(1)
    assert unit_entropies(batch, "traj_mean")["db"] == (pytest.approx(float(means.sum())), 2)
    readings = {}
    for unit in ("token", "turn_sum", "traj_sum", "traj_mean"):
        method = begun("eppo", entropy_unit=unit)
        method.advantages(batch)
        method.pace({task: TaskStats(float(entropies_BT[rows].sum()), 0.0, int(batch.mask_BT[rows].sum()))
                     for task, rows in (("db", [0, 1]), ("kg", [2, 3]), ("os", [4, 5]))})
        readings[unit] = method.metrics()["pacer/db/entropy"]
    assert readings["turn_sum"] == pytest.approx(float(entropies_BT[:2].sum()) / 4)
    assert readings["token"] < readings["turn_sum"] < readings["traj_sum"]
    assert readings["traj_mean"] == pytest.approx(float(means.mean()))
    with pytest.raises(ValueError, match="did you mean 'turn_sum'"):
        get_algorithm("eppo", entropy_unit="turnsum")


def test_adaptive_entropy_bonus():
    method = get_algorithm("entropy_bonus", coef=0.01, target_nats=1.0, step=0.005)
    acted = []
    for entropy in (0.5, 0.5, 2.0, 0.5):
        method.pace(stats({"db": entropy}))
        acted.append((method.acting, method.current))
    assert acted == [(0.01, pytest.approx(.015)), (pytest.approx(.015), pytest.approx(.02)), (0.0, pytest.approx(.015)),
                     (pytest.approx(.015), pytest.approx(.02))]


def test_epo_band_follows_the_history_of_its_turn():
    batch, method = make_batch(), begun("epo", penalty=0.1, min_ratio=0.5, max_ratio=1.5)
    method.advantages(batch)
    assert method.past == {}                                            # the first batch has nothing to be judged by
    method.advantages(batch)
    for number in (0, 1):
        rows = [row for row in range(24) if batch.trajectories[row].task == "kg"]
        spans = [batch.trajectories[row].turns[number] for row in rows]
        tokens = torch.cat([batch.entropy_BT[row, one.start:one.stop] for row, one in zip(rows, spans)])
        assert method.past["kg"][number] == pytest.approx(float(tokens.mean()))
    entropy_BT = batch.entropy_BT.clone()
    turn = batch.trajectories[0].turns[1]
    mean = method.past["db"][1]
    entropy_BT[:] = mean
    entropy_BT[0, turn.start:turn.stop] = 1.6 * mean
    extra = method.extra(Forward(batch.policy_logp_BT, entropy_BT), batch)
    assert torch.allclose(extra["smoothing"][0, turn.start:turn.stop], torch.tensor(1e-4, dtype=torch.float64))
    late = begun("epo", late_turns=3, max_ratio=0.1)
    late.advantages(batch)
    late.advantages(batch)
    assert not late.extra(Forward(batch.policy_logp_BT, batch.entropy_BT), batch)["smoothing"].any()


def test_seal_separates_by_the_sign_before_task_normalisation():
    rewards = [1, 0, 0, 0] + [0, 0, 0, 0] * 5
    batch, method = make_batch(rewards=rewards), begun("seal", task_norm=True, kl_coef=0.0)
    batch = replace(batch, advantages_BT=method.advantages(batch))
    assert (batch.advantages_BT[:8][batch.mask_BT[:8]] != 0).all()      # normalised: the all-fail group has an advantage
    tensors = forward_of(batch)
    term_BT = method.extra(Forward(*tensors), batch)["seal"]
    logits_BT = method.head(tensors[2])
    good_BT = torch.ones_like(batch.mask_BT)
    good_BT[1:4] = False
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits_BT, good_BT.double(), reduction="none")
    assert torch.allclose(term_BT[batch.mask_BT], 0.02 * expected[batch.mask_BT]) and not term_BT[~batch.mask_BT].any()
    method.reduce(term_BT, batch.mask_BT, 1).backward()
    assert tensors[2].grad.abs().sum() > 0 and all(one.grad is not None for one in method.extra_parameters())
    assert set(method.metrics()) >= {"seal/accuracy", "seal/auc", "seal/cosine_gap"}
    masked = begun("seal", zero_adv="mask", kl_coef=0.0)
    masked.advantages(batch)
    assert not masked.extra(Forward(*tensors), batch)["seal"][4:].any()
    whole = begun("seal", level="trajectory", kl_coef=0.0)
    whole.advantages(batch)
    values_BT = whole.extra(Forward(*tensors), batch)["seal"]
    assert all(len(values_BT[row][batch.mask_BT[row]].unique()) == 1 for row in range(24))


def test_a_seal_head_is_made_from_the_seed_alone():
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    one = begun("seal")
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    other = begun("seal")
    assert all(torch.equal(a, b) for a, b in zip(one.extra_parameters(), other.extra_parameters()))
    assert sum(p.numel() for p in one.extra_parameters()) == 2 * (8 * 8 + 8 + 16) + 9


def test_warnings():
    batch = make_batch()
    dcpo = begun("dcpo")
    for number in range(10):
        dcpo.advantages(replace(batch, trajectories=[replace(one, instance_id=f"{one.instance_id}-{number}")
                                                     for one in batch.trajectories]))
        dcpo.pace(stats(STEPS[0], clip_high=0.1))
    assert [text for text in dcpo.warnings if "no prompt was visited twice" in text]
    dcpo.advantages(replace(batch, trajectories=[replace(one, instance_id=f"{one.instance_id}-0")
                                                 for one in batch.trajectories]))
    assert not [text for text in dcpo.warnings if "visited twice" in text]
    bapo = begun("bapo", target=0.99)
    parts_of(bapo, batch)
    assert [text for text in bapo.warnings if "below the target share" in text]
    shortest = int(batch.mask_BT[:4].sum(1).argmin())
    failing, agentrl = make_batch(rewards=[float(row == shortest) for row in range(24)]), begun("agentrl")
    for _ in range(10):
        assert not [text for text in agentrl.warnings if "reinforces failures" in text]
        agentrl.advantages(failing)
    assert agentrl.metrics()["task/db/reinforced_failure_frac"] == 0.5
    assert [text for text in agentrl.warnings if "reinforces failures" in text]
    for name in ("cispo", "sapo", "kl_cov"):                # nothing of theirs removes gradients: nothing to warn of
        method = begun(name)
        for _ in range(12):
            method.pace(stats(STEPS[0]))
        assert method.warnings == []


# ---- smoke runs -------------------------------------------------------------------------------------------------------------
TINY = {"steps": 3, "rollout.prompts_per_task": 1, "rollout.group_size": 5, "rollout.max_tokens": 96,
        "rollout.max_turn_tokens": 12,
        "rollout.lag": 0, "optim.minibatches": 1, "optim.epochs": 2, "optim.lr": 3e-3, "validation.instances": 0,
        "validate_every": 0,
        "checkpoint_every": 3, "trajectories": "none", "threads": 1}


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    """A model folder that the smoke runs train from."""
    folder = tmp_path_factory.mktemp("start")
    tiny_model(scale=1.5).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def smoke_run(start, out, name, seed=0, **changes):
    """Three steps of ten episodes on toy tasks; the record."""
    settings = {f"algorithm.{key}": value for key, value in changes.items() if "." not in key}
    list(train(load_recipe("micro", method=name, tasks=list(toy_env.GAMBLES), seed=seed, out=str(out),
                           **{"model.path": str(start), **TINY, **settings})))
    return read_run(out)


LOGGED = {"dcpo": ["dcpo/visits_mean", "dcpo/lo_half_frac"], "dcpo_native": ["dcpo/hi_max_frac"],
          "bapo": ["bapo/lo", "bapo/search_steps"],
          "bapo_native": ["bapo/share"], "dapo": ["sampling/used_frac", "sampling/toy_coin/generated"],
          "gigpo": ["gigpo/singleton_frac"],
          "gigpo_seal": ["gigpo/anchor_group_size", "seal/accuracy", "loss/seal"], "seal": ["seal/accuracy", "loss/seal"],
          "entropy_bonus": ["entropy_bonus/coef", "loss/entropy"], "epo": ["epo/outside_frac", "loss/smoothing"],
          "epo_hinge": ["loss/smoothing"], "clip_cov": ["clip_cov/picked_frac", "cov/max"], "kl_cov": ["kl_cov/abs_log_ratio"],
          "pcgrad": ["gradient/conflict_frac", "gradient/update_ratio"],
          "cagrad": ["gradient/toy_coin/weight", "gradient/toy_coin/toy_dice/cosine"],
          "grpo": ["pacer/toy_coin/eps"], "agentrl": ["task/toy_coin/reinforced_failure_frac"]}
BOUNDS = {"grpo": (.8, 1.2), "agentrl": (.8, 1.2), "dr_grpo": (.8, 1.2), "rloo": (.8, 1.2), "dapo": (.8, 1.28),
          "ce_gppo": (.8, 1.2),
          "gspo": (.9997, 1.0004), "cispo": (0, 5), "gigpo": (.8, 1.2), "seal": (.8, 1.2), "pcgrad": (.8, 1.2),
          "cagrad": (.8, 1.2),
          "entropy_bonus": (.8, 1.2), "epo": (.8, 1.2)}


@pytest.mark.parametrize("name", NAMES)
def test_smoke_run(start, tmp_path, name):
    run = smoke_run(start, tmp_path / "run", name)
    assert run.info["status"] == "finished" and len(run.episodes) == 30
    rows = run.steps[run.steps["step"] > 0]
    assert len(rows) == 3 and (rows["loss/grad_norm"] >= 0).all() and rows["loss/grad_norm"].max() > 0
    assert all(key in rows for key in LOGGED.get(name, [])), [key for key in LOGGED.get(name, []) if key not in rows]
    if name in BOUNDS:
        for side, bound in zip(("lo", "hi"), BOUNDS[name]):
            assert rows[f"task/toy_coin/{side}"].tolist() == pytest.approx([bound] * 3, abs=1e-6)
    if name in ("sapo", "kl_cov"):
        assert rows["task/toy_coin/hi"].isna().all()
    if name.startswith("dcpo"):
        assert (rows["task/toy_coin/lo"] < 0.8).all() and (rows["task/toy_coin/hi"] > 1.17).all()
    if issubclass(ALGORITHMS[name], EPPO) and not name.startswith("c"):
        assert rows["task/toy_coin/hi"].tolist() == pytest.approx((1 + rows["pacer/toy_coin/eps"]).tolist(), abs=1e-6)
    if name.startswith("c") and name[1].isdigit():
        assert rows["task/toy_coin/hi"].tolist() == pytest.approx((1 + rows["control/toy_coin/eps"]).tolist(), abs=1e-6)
    from safetensors.torch import load_file

    before, after = (load_file(folder / "model.safetensors") for folder in (start, tmp_path / "run" / "model"))
    assert all(torch.isfinite(value).all() for value in after.values())
    assert any(not torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", ["seal", "dcpo", "epo", "clip_cov", "c3_random", "c7_reward_spread", "pcgrad"])
def test_a_stopped_run_resumes_to_the_same_bits(start, tmp_path, name):
    from eppo.records import compare_steps

    smoke_run(start, tmp_path / "whole", name)
    config = load_recipe("micro", method=name, tasks=list(toy_env.GAMBLES), seed=0, out=str(tmp_path / "cut"),
                         **{"model.path": str(start), **TINY})
    running = train(config)
    for record in running:
        if record.step == 2:
            break
    running.close()
    list(train(config, resume=True))
    assert compare_steps(tmp_path / "whole", tmp_path / "cut") == []


def test_gradient_cosines_are_recorded_on_request(start, tmp_path):
    run = smoke_run(start, tmp_path / "run", "eppo", gradient_cosines=True)
    cosines = run.steps["gradient/toy_coin/toy_dice/cosine"].dropna()
    assert len(cosines) > 0 and cosines.abs().max() <= 1 + 1e-6
    plain = smoke_run(start, tmp_path / "plain", "eppo")
    assert not [name for name in plain.steps if name.startswith("gradient/")]
    assert run.steps["loss/grad_norm"].dropna().tolist() == pytest.approx(plain.steps["loss/grad_norm"].dropna().tolist(),
                                                                          rel=1e-3)
