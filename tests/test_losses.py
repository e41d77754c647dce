"""Clipped surrogate, clip masks, KL and reductions: numbers by hand, the literal formula, finite differences, hidden NaN."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eppo.clipping import clip_masks, task_bounds
from eppo.losses import KL_KINDS, REDUCTIONS, clipped_surrogate, kl_penalty, reduce_tokens, reduction_count

RUNS = settings(max_examples=150, deadline=None, derandomize=True)
NAN, INF = math.nan, math.inf


def row(*values):
    return torch.tensor([values], dtype=torch.float64)


def surrogate(ratios, advantages, lo=0.8, hi=1.2, dual_clip=3.0, mask=None):
    mask_BT = torch.ones(1, len(ratios), dtype=torch.bool) if mask is None else torch.tensor([mask]).bool()
    return clipped_surrogate(row(*ratios).log(), torch.zeros(1, len(ratios)), row(*advantages), mask_BT, lo, hi, dual_clip)


def test_dual_clip_and_signs():
    loss_BT, masks = surrogate([10, 10, .5, .5], [-1, 1, -1, 1])
    assert loss_BT[0].tolist() == pytest.approx([3, -1.2, 0.8, -0.5])
    assert [mask.tolist() for mask in masks] == [[[False, True, False, False]], [[False, False, True, False]],
                                                 [[True, False, False, False]]]
    without_BT, masks = surrogate([10, 10, .5, .5], [-1, 1, -1, 1], dual_clip=None)
    assert without_BT[0].tolist() == pytest.approx([10, -1.2, 0.8, -0.5]) and not masks.dual_BT.any()


def test_per_token_bounds_equal_scalar_bounds():
    ratios, advantages = [10, 10, .5, .5, 1.1], [-1, 1, -1, 1, 2]
    scalar, per_token = surrogate(ratios, advantages), surrogate(ratios, advantages, row(*[.8] * 5), row(*[1.2] * 5))
    assert torch.equal(scalar[0], per_token[0]) and all(map(torch.equal, scalar[1], per_token[1]))
    mixed_BT = surrogate([1.5, 1.5, .5, .5], [1, 1, -1, -1], row(.8, .8, .9, .7), row(1.1, 1.3, 1.2, 1.2))[0]
    assert mixed_BT[0].tolist() == pytest.approx([-1.1, -1.3, .9, .7])


def test_clip_fraction_counts_binding_clips_only():
    """eps 0.2 / 0.28; a masked token with ratio 9 counts nowhere: low 1/5, high 1/5, total 2/5."""
    ratios, advantages, mask = [.5, .5, 1.5, 1.5, 1, 9], [1, -1, 1, -1, 1, 1], [1, 1, 1, 1, 1, 0]
    masks = clip_masks(row(*ratios).log(), torch.zeros(1, 6), row(*advantages), torch.tensor([mask]), 0.8, 1.28)
    assert (int(masks.low_BT.sum()), int(masks.high_BT.sum()), int((masks.low_BT | masks.high_BT).sum())) == (1, 1, 2)
    assert masks.low_BT[0].tolist() == [False, True, False, False, False, False]
    assert all(map(torch.equal, masks, surrogate(ratios, advantages, 0.8, 1.28, mask=mask)[1]))


def test_ratio_on_a_bound_is_not_clipped_and_on_policy_nothing_is():
    masks = clip_masks([[0.0, 0.0]], [[0.0, 0.0]], [[1.0, -1.0]], [[1, 1]], 1.0, 1.0)
    assert not any(mask.any() for mask in masks)
    logp_BT = torch.randn(3, 7)
    assert not any(mask.any() for mask in clip_masks(logp_BT, logp_BT, torch.randn(3, 7), torch.ones(3, 7), 0.99, 1.01))


def test_clipped_tokens_have_no_gradient():
    logp_BT = row(2.0, 2.0, .5, .5, 5.0, 1.1).log().requires_grad_()
    advantages_BT = row(1, -1, 1, -1, -1, 2)
    loss_BT, masks = clipped_surrogate(logp_BT, torch.zeros(1, 6), advantages_BT, torch.ones(1, 6), 0.8, 1.2)
    loss_BT.sum().backward()
    clipped_BT = masks.high_BT | masks.low_BT | masks.dual_BT
    assert clipped_BT[0].tolist() == [True, False, False, True, True, False]
    assert logp_BT.grad[0].tolist() == pytest.approx([0, 2, -.5, 0, 0, -2.2])


def test_log_ratio_is_clamped():
    loss_BT, _ = clipped_surrogate(row(100.0, -1000.0), row(-500.0, 0.0), row(-1, -1), torch.ones(1, 2), 0.8, 1.2, None)
    assert loss_BT[0].tolist() == pytest.approx([math.exp(20), 0.8])


@RUNS
@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-2, 2), st.floats(0.05, 0.9), st.floats(0.01, 0.9), st.booleans()),
                min_size=1, max_size=8), st.sampled_from([None, 2.0, 3.0]))
def test_surrogate_equals_its_formula(tokens, dual_clip):
    """The three events and the max / min form are one function; gradients by the formula's own autograd."""
    log_r, adv, low, high, mask = (torch.tensor([column], dtype=torch.float64) for column in zip(*tokens))
    one_BT, two_BT = log_r.clone().requires_grad_(), log_r.clone().requires_grad_()
    loss_BT, _ = clipped_surrogate(one_BT, torch.zeros_like(adv), adv, mask, 1 - low, 1 + high, dual_clip)
    ratio = two_BT.exp()
    literal = torch.maximum(-adv * ratio, -adv * torch.minimum(torch.maximum(ratio, 1 - low), 1 + high))
    if dual_clip is not None:
        literal = torch.where(adv < 0, torch.minimum(literal, -adv * dual_clip), literal)
    literal = literal * mask
    assert torch.allclose(loss_BT, literal, atol=1e-12)
    loss_BT.sum().backward()
    literal.sum().backward()
    assert torch.allclose(one_BT.grad, two_BT.grad, atol=1e-12)


def test_finite_differences():
    generator = torch.Generator().manual_seed(2)
    logp_BT, other_BT, advantages_BT = (torch.randn(3, 6, generator=generator, dtype=torch.float64) for _ in range(3))
    mask_BT = torch.rand(3, 6, generator=generator) < 0.7
    logp_BT.requires_grad_()
    for how in REDUCTIONS:
        def loss(x, how=how):
            return reduce_tokens(clipped_surrogate(x, other_BT, advantages_BT, mask_BT, 0.8, 1.2)[0], mask_BT, how,
                                 40 if how == "seq_mean_token_sum_norm" else None)
        assert torch.autograd.gradcheck(loss, (logp_BT,))
    for kind in ("k1", "k2", "k3"):
        assert torch.autograd.gradcheck(lambda x, kind=kind: kl_penalty(x, other_BT, kind, mask_BT), (logp_BT,))


# ---- KL ---------------------------------------------------------------------------------------------------------------
def test_kl_values():
    policy_BT, ref_BT = row(-1.0, -1.0, -2.0), row(-1.0, -1.5, -1.0)
    assert kl_penalty(policy_BT, ref_BT, "k1")[0].tolist() == pytest.approx([0, .5, -1])
    assert kl_penalty(policy_BT, ref_BT, "k2")[0].tolist() == pytest.approx([0, .125, .5])
    k3 = [0, math.exp(-.5) + .5 - 1, math.e - 2]
    assert kl_penalty(policy_BT, ref_BT)[0].tolist() == pytest.approx(k3)
    assert kl_penalty(policy_BT, ref_BT, "k3+")[0].tolist() == pytest.approx(k3)
    assert kl_penalty(row(-30.0, -900.0), row(-1.0, NAN), "k3", [[1, 0]])[0].tolist() == [10.0, 0.0]


def test_k3_plus_has_the_value_of_k3_and_the_gradient_of_k2():
    grads = {}
    for kind in KL_KINDS:
        policy_BT = row(-1.0, -2.0, -.1).requires_grad_()
        kl_penalty(policy_BT, row(-1.5, -1.0, -.2), kind).sum().backward()
        grads[kind] = policy_BT.grad[0].tolist()
    assert grads["k3+"] == grads["k2"] == pytest.approx([.5, -1, .1]) and grads["k1"] == [1, 1, 1]
    assert grads["k3"] == pytest.approx([1 - math.exp(-.5), 1 - math.e, 1 - math.exp(-.1)])


@RUNS
@given(st.floats(-50, 0), st.floats(-50, 0))
def test_k3_is_never_negative_and_zero_for_equal_policies(policy, ref):
    assert float(kl_penalty([[policy]], [[ref]])) >= 0 and float(kl_penalty([[policy]], [[policy]])) == 0


@pytest.mark.parametrize("kind", ["k2", "k3", "k3+"])
def test_one_step_on_the_penalty_reduces_the_kl(kind):
    generator = torch.Generator().manual_seed(3)
    logits_V = torch.randn(16, generator=generator, dtype=torch.float64, requires_grad=True)
    ref_V = torch.log_softmax(torch.randn(16, generator=generator, dtype=torch.float64), -1)

    def exact_kl():
        logp_V = torch.log_softmax(logits_V.detach(), -1)
        return float((logp_V.exp() * (logp_V - ref_V)).sum())

    before = exact_kl()
    ids = torch.multinomial(torch.softmax(logits_V.detach(), -1), 4000, replacement=True, generator=generator)
    kl_penalty(torch.log_softmax(logits_V, -1)[ids][None], ref_V[ids][None], kind).mean().backward()
    with torch.no_grad():
        logits_V -= 0.5 * logits_V.grad
    assert 0 < exact_kl() < 0.95 * before


# ---- reductions ---------------------------------------------------------------------------------------------------------
LOSS = torch.tensor([[1.0, 2.0, 3.0, 9.0], [4.0, 9.0, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()


@pytest.mark.parametrize("how, max_tokens, value, count", [
    ("token_mean", None, 10 / 4, 4), ("seq_mean_token_mean", None, (2 + 4) / 2, 2),
    ("seq_mean_token_sum_norm", 5, 10 / (2 * 5), 2), ("seq_sum_token_mean", None, 6.0, 1)])
def test_reductions(how, max_tokens, value, count):
    """The third sequence has no sampled token and counts nowhere."""
    assert float(reduce_tokens(LOSS, MASK, how, max_tokens)) == pytest.approx(value)
    assert reduction_count(MASK, how) == count
    parts = [reduce_tokens(LOSS[rows], MASK[rows], how, max_tokens, count) for rows in ([0], [1, 2])]
    assert float(sum(parts)) == pytest.approx(value)
    pad = torch.nn.functional.pad
    wide = reduce_tokens(pad(LOSS, (0, 40), value=NAN), pad(MASK, (0, 40)), how, max_tokens)
    assert float(wide) == pytest.approx(value)
    assert float(reduce_tokens(LOSS, torch.zeros_like(MASK), how, max_tokens)) == 0.0


def test_mean_of_micro_batch_means_is_another_number():
    means = [reduce_tokens(LOSS[rows], MASK[rows]) for rows in ([0], [1])]
    assert float(sum(means) / 2) == 3.0 != float(reduce_tokens(LOSS, MASK))


@pytest.mark.parametrize("call, message", [
    (lambda: reduce_tokens(LOSS, MASK, "token-mean"), "did you mean 'token_mean'"),
    (lambda: reduce_tokens(LOSS, MASK, "seq_mean_token_sum_norm"), "needs max_tokens"),
    (lambda: reduce_tokens(LOSS, MASK, "token_mean", 5), "uses no max_tokens"),
    (lambda: reduce_tokens(LOSS, MASK, denominator=-1), "denominator must be a count"),
    (lambda: kl_penalty(LOSS, LOSS, "k4"), "unknown KL kind 'k4'"),
    (lambda: clipped_surrogate(LOSS, LOSS, LOSS, MASK, .8, 1.2, 0.9), "dual_clip must be above 1")])
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ---- masks --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("how", REDUCTIONS)
def test_nothing_leaks_through_the_mask(poison, how):
    """Every input is poisoned behind the mask; loss and gradient are those of position 0 alone."""
    def bad(value):
        return torch.tensor([[value, NAN, poison]], dtype=torch.float64)

    mask_BT = torch.tensor([[1, 0, 0]]).bool()
    logp_BT = bad(.1).requires_grad_()
    loss_BT, masks = clipped_surrogate(logp_BT, bad(.0), bad(1.0), mask_BT, bad(.8), bad(1.2))
    kl_BT = kl_penalty(logp_BT, bad(.2), "k3", mask_BT)
    total = reduce_tokens(loss_BT + kl_BT, mask_BT, how, 1 if how == "seq_mean_token_sum_norm" else None)
    total.backward()
    assert float(total.detach()) == pytest.approx(-math.exp(.1) + math.exp(.1) - 1.1)
    assert logp_BT.grad[0].tolist() == pytest.approx([-math.exp(.1) + 1 - math.exp(.1), 0, 0])
    assert not any(mask[0, 1:].any() for mask in masks) and loss_BT[0, 1:].tolist() == kl_BT[0, 1:].tolist() == [0, 0]
    loose = torch.tensor([[.1, NAN, poison]], requires_grad=True)
    reduce_tokens(loose, mask_BT).backward()
    assert loose.grad[0].tolist() == [1, 0, 0]


def test_a_nan_on_a_sampled_token_stays_visible():
    loss_BT, _ = clipped_surrogate(row(NAN, 0.0), row(0.0, 0.0), row(1, 1), torch.ones(1, 2), 0.8, 1.2)
    assert torch.isnan(reduce_tokens(loss_BT, torch.ones(1, 2)))


def test_task_bounds():
    lo_BT, hi_BT = task_bounds(torch.tensor([1, 0, 1]), [.2, .15], [.2, .3], torch.zeros(3, 2))
    assert lo_BT.shape == hi_BT.shape == (3, 2) and lo_BT.dtype == torch.float32
    assert lo_BT[:, 0].tolist() == pytest.approx([.85, .8, .85]) and hi_BT[:, 1].tolist() == pytest.approx([1.3, 1.2, 1.3])
