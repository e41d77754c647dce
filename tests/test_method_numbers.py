"""The methods' golden numbers, worked out by hand or given by their sources."""

import math

import pytest
import torch
from method_batches import make_batch

from eppo.advantages import PromptStats, overlong_penalties, smooth_advantages, turn_advantages
from eppo.algorithms import get_algorithm
from eppo.clipping import balanced_bounds, pick_top, pick_within, positive_share, probability_bounds, token_covariance
from eppo.losses import bounded_gradient_surrogate, soft_gate

RATIO, SIGNS = (torch.tensor(values, dtype=torch.float64) for values in ((1.5, .9, 1.0, .5, 1.1, .4),
                                                                         (1., 1., 1., -1., -1., -2.)))


@pytest.mark.parametrize("mode, shares", [("surrogate", (.5167, .5397, .4493, .4722)),
                                          ("gradient", (.6333, .7556, .6333, .7556))])
def test_bapo_shares(mode, shares):
    bounds = ((0.6, 1.2), (0.6, 1.6), (0.9, 1.2), (0.9, 3.0))
    assert [positive_share(RATIO, SIGNS, lo, hi, mode) for lo, hi in bounds] == pytest.approx(shares, abs=5e-5)


def test_bapo_search():
    found = balanced_bounds(RATIO, SIGNS, 0.4)
    assert (found.lo, found.hi, found.search_steps) == (0.6, 1.2, 0)
    missed = balanced_bounds(RATIO, SIGNS, 0.55)
    assert (missed.lo, missed.hi) == pytest.approx((0.9, 3.0)) and missed.search_steps == 51
    assert missed.share == pytest.approx(.4722, abs=5e-5) and missed.share_start == pytest.approx(.5167, abs=5e-5)
    upper = balanced_bounds(RATIO, SIGNS, 0.53)
    assert upper.lo == 0.6 and upper.hi == pytest.approx(1.4) and upper.search_steps == 4 and upper.share >= 0.53
    lower = balanced_bounds(RATIO, SIGNS, 0.4, low=(0.6, 0.6))
    assert (lower.lo, lower.hi, lower.search_steps) == (0.6, 1.2, 0)
    assert balanced_bounds(RATIO, SIGNS.abs(), 0.4).share == 1.0 and balanced_bounds(RATIO, SIGNS.abs(), 0.4).search_steps == 0
    none = balanced_bounds(RATIO, torch.zeros_like(SIGNS), 0.4)
    assert math.isnan(none.share) and none.search_steps == 0 and not none.missed_frac
    ends = [(one.lo_end_frac, one.hi_end_frac) for one in (found, missed, upper)]
    assert ends == [(False, False), (True, True), (False, False)]
    assert missed.missed_frac and not upper.missed_frac


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
    noise = torch.tensor([[.9, .1, .5, 0.], [.2, .3, 0., 0.]], dtype=torch.float64)
    assert pick_top(cov, mask, 2, noise).nonzero().tolist() == [[0, 0], [1, 1]]
    assert pick_top(torch.ones_like(cov), mask, 2, noise).nonzero().tolist() == [[0, 1], [1, 0]]        # ties: the least noise
    assert pick_within(cov, mask, 0.5, 3.0, 1, noise).nonzero().tolist() == [[1, 1]]
    assert pick_within(cov, mask, 0.5, 3.0, 9, noise).nonzero().tolist() == [[0, 0], [1, 1]]
    assert not pick_within(cov, mask, 5.0, 9.0, 3, noise).any()
