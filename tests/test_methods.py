"""Every method: the table of names and settings, identities, gradients, and equivalent ways to run a step."""

import json
import math
from dataclasses import replace

import pytest
import torch
from method_batches import NAMES, NAN, begun, common, forward_of, loss_and_gradients, make_batch, parts_of, same, step_loss

from eppo.algorithms import ALGORITHMS, get_algorithm
from eppo.clipping import sequence_ratio, token_covariance

# ---- the table ----------------------------------------------------------------------------------------------------------
def test_every_name_of_the_papers_and_the_controls_is_there():
    papers = ("grpo dr_grpo rloo rloo_eppo agentrl eppo eppo_no_task_clip eppo_no_trend dcpo bapo dapo ce_gppo gspo cispo sapo "
              "gigpo gigpo_seal seal entropy_bonus epo epo_hinge clip_cov kl_cov pcgrad cagrad").split()
    controls = ("c0_fixed c1_per_task c2a_shuffled c2b_deranged c3_random c4_yoked c5_inverted c6_success c7_reward_spread "
                "c8_global c9_clip_equaliser c10_level c11_weights").split()
    assert set(ALGORITHMS) == {*papers, *controls, "dcpo_native", "bapo_native", "rloo_sequence"}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_docstring_is_the_method(name):
    text = ALGORITHMS[name].__doc__
    for part in ("Source:", "Differs from", "        1. ", "Defaults:", "Logs:", "Degenerate cases:"):
        assert part in text, part


def test_published_defaults():
    expected = {"dr_grpo": dict(advantage="mean_only", reduction="seq_mean_token_sum_norm", kl_coef=0.0),
                "rloo": dict(advantage="rloo", task_norm=True, kl_coef=1e-4),
                "rloo_eppo": dict(advantage="rloo", alpha=0.4, kappa=1.0),
                "dcpo": dict(clip_low=0.16, clip_high=0.20, r_max=10.0, dual_clip=10.0, task_norm=True, kl_coef=1e-4,
                             smooth=True),
                "rloo_sequence": dict(clip_low=0.2, clip_high=0.2, kl_coef=0.05, dual_clip=None, reduction="seq_mean_token_mean",
                                      task_norm=False),
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


# ---- identities ---------------------------------------------------------------------------------------------------------
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


def test_bapo_after_task_normalisation_is_balanced_at_ratio_one():
    method = begun("bapo")
    parts_of(method, make_batch(drift=0.0, tasks=("db",)))
    assert method.metrics()["bapo/share"] == pytest.approx(0.5) and method.metrics()["bapo/search_steps"] == 0


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
    method = common("clip_cov", frac=1.0)
    one, other = loss_and_gradients(method, batch)[1][0], loss_and_gradients(plain, batch)[1][0]
    filled, lo_BT, hi_BT, _ = parts_of(common("clip_cov", frac=1.0), batch)
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
STOPPED = ("ce_gppo", "cispo", "gspo")                      # their losses hold stopped gradients: the next test


@pytest.mark.parametrize("name", [name for name in NAMES if name not in STOPPED])
def test_gradient_by_finite_differences(name):
    batch = make_batch(groups=1, size=2, rewards=[1, 0, 1, 0, 0, 1])
    method = begun(name, kl_coef=0.1)
    batch, lo_BT, hi_BT, count = parts_of(method, batch)
    fast = "hidden" in method.needs                         # 672 entries of hidden states: one random direction in place of each
    assert torch.autograd.gradcheck(lambda *values: step_loss(method, batch, values, lo_BT, hi_BT, count), forward_of(batch),
                                    fast_mode=fast)


def test_gradients_behind_stopped_ones_by_finite_differences():
    """CISPO's weight, CE-GPPO's scale and GSPO's sequence ratio are constants: freeze them at a point, then differentiate."""
    batch = make_batch(groups=1, size=2, rewards=[1, 0, 1, 0, 0, 1])
    point_BT, h = batch.policy_logp_BT, 1e-6
    for name in STOPPED:
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
    if name not in ("gigpo", "gigpo_seal", "rloo_sequence"):            # discounts differ with the turn; a KL stands in the reward
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
    head = {"head": state.pop("head")} if "head" in state else {}               # tensors, which a checkpoint stores as such
    second.load_state_dict(json.loads(json.dumps(state, allow_nan=False)) | head)
    later = replace(make_batch(seed=9), entropy_BT=batch.entropy_BT)
    assert same(loss_and_gradients(second, later), loss_and_gradients(whole, later), tolerance=0)
    assert second.metrics() == whole.metrics()
    ours, theirs = second.state_dict(), whole.state_dict()
    assert json.dumps({**ours, "head": 0}) == json.dumps({**theirs, "head": 0})
