"""The methods behind their hooks: defaults, identities between them, equivalent ways to run one step, state and warnings."""

import json
import math
from dataclasses import dataclass, replace

import pytest
import torch

from eppo.algorithms import ALGORITHMS, Algorithm, Forward, get_algorithm, register
from eppo.clipping import clip_masks
from eppo.types import Batch, Group, TaskStats, Trajectory

METHODS = ("grpo", "agentrl", "eppo", "eppo_no_task_clip", "eppo_no_trend")
TASKS = ("db", "kg", "os")
NAN = math.nan


def make_batch(seed=0, groups=2, size=4, tasks=TASKS, drift=0.4, rewards=None, lengths=None):
    """`groups` groups of `size` rollouts per task, float64; the policy has moved from the sampler by about `drift` nats."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    count = len(tasks) * groups * size
    lengths = lengths or torch.randint(4, 16, (count,), generator=generator).tolist()
    mask_BT = (uniform(count, max(lengths)) < 0.7) & (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None])
    mask_BT[:, 0], mask_BT[:, 1] = False, True
    group_ids_B = torch.arange(count) // size
    task_ids_B = group_ids_B // groups
    rewards_B = torch.tensor(rewards, dtype=torch.float64) if rewards else (uniform(count) < 0.5).double()
    sampler_BT = -2 * uniform(*mask_BT.shape) * mask_BT
    trajectories = [Trajectory([0] * lengths[row], [], [], [], [], float(rewards_B[row]), 0.0, None, bool(rewards_B[row] == 1),
                               "completed", tasks[task_ids_B[row]], f"i{group_ids_B[row]}", f"g{group_ids_B[row]}", row)
                    for row in range(count)]
    return Batch(tasks, torch.zeros(mask_BT.shape, dtype=torch.long), mask_BT, sampler_BT, task_ids_B, group_ids_B, rewards_B,
                 trajectories, policy_logp_BT=(sampler_BT + drift * torch.randn(mask_BT.shape, generator=generator)) * mask_BT,
                 ref_logp_BT=(sampler_BT - 0.1) * mask_BT)


def stats(entropies, tokens=10, clip_high=0.0, clip_low=0.0):
    return {task: TaskStats(value * tokens, value**2 * tokens, tokens, clip_high=clip_high, clip_low=clip_low)
            for task, value in entropies.items()}


STEPS = [{"db": 1.0, "kg": 0.5, "os": 2.0}, {"db": 0.6, "kg": 0.5, "os": 2.4}, {"db": 0.4, "kg": 0.6, "os": 2.0}]


def loss_and_gradient(method, batch, eps, micro=None, rows=None):
    """One optimiser step's loss as the trainer forms it, and its gradient on the per-token log-probabilities."""
    rows = list(range(len(batch.mask_BT))) if rows is None else rows
    policy_BT = batch.policy_logp_BT.clone().requires_grad_()
    denominator, total = method.denominator(batch.mask_BT), 0.0
    for start in range(0, len(rows), micro or len(rows)):
        picked = rows[start:start + (micro or len(rows))]
        part = batch.select(picked)
        logp_BT = policy_BT[picked, :part.mask_BT.shape[1]]
        lo_BT, hi_BT = method.bounds(part, eps)
        loss_BT = method.token_loss(logp_BT, part, lo_BT, hi_BT) + sum(method.extra(Forward(logp_BT), part).values())
        loss = method.reduce(loss_BT, part.mask_BT, denominator)
        loss.backward()
        total += float(loss.detach())
    return total, policy_BT.grad


def run(method, batch, steps=STEPS, **how):
    """Loss and gradient after the pacer saw `steps`."""
    for step in steps:
        eps = method.pace(stats(step))
    return loss_and_gradient(method, replace(batch, advantages_BT=method.advantages(batch)), eps, **how)


# ---- the table ----------------------------------------------------------------------------------------------------------
def test_names_and_defaults():
    assert set(METHODS) <= set(ALGORITHMS) and [get_algorithm(name).name for name in METHODS] == list(METHODS)
    common = dict(dual_clip=3.0, kl_coef=1e-4, kl_kind="k3", reduction="token_mean", max_tokens=None, advantage="grpo", ddof=1,
                  mask_zero_variance_groups=False, gradient_cosines=False)
    paced = dict(eps0=0.2, beta=0.95, eps_min=0.15, eps_max=0.30, sigma_floor=0.0, ref_batches=1, warmup_steps=0, z_ddof=0,
                 h_floor=1e-3, n_min=1, claim_prop1=False, entropy_unit="token", entropy_lag=0, reference_from=None)
    trend = dict(kappa=1.0, trend_mode="absolute")
    fixed = dict(clip_low=0.2, clip_high=0.2)
    assert get_algorithm("grpo").settings == common | fixed | dict(task_norm=False)
    assert get_algorithm("agentrl").settings == common | fixed | dict(task_norm=True)
    assert get_algorithm("eppo").settings == common | paced | trend | dict(task_norm=True, alpha=0.4)
    assert get_algorithm("eppo_no_task_clip").settings == common | paced | trend | dict(task_norm=True)
    assert get_algorithm("eppo_no_trend").settings == common | paced | dict(task_norm=True, alpha=0.4)


@pytest.mark.parametrize("name", METHODS)
def test_docstring_is_the_method(name):
    text = ALGORITHMS[name].__doc__
    for part in ("Source:", "arXiv 2", "Differs from", "        1. ", "Defaults:", "Logs:", "Degenerate cases:"):
        assert part in text


@pytest.mark.parametrize("name, settings, message", [
    ("epppo", {}, "unknown method 'epppo'; did you mean 'eppo'"), ("eppo", {"alhpa": 0.2}, "did you mean 'alpha'"),
    ("eppo", {"clip_low": 0.1}, "unknown setting of method 'eppo': 'clip_low'"),
    ("eppo_no_task_clip", {"alpha": 0.1}, "'alpha'"), ("eppo_no_trend", {"kappa": 2.0}, "'kappa'"),
    ("grpo", {"alpha": 0.4}, "unknown setting of method 'grpo': 'alpha'"),
    ("grpo", {"kl_coef": "1e-6"}, "kl_coef must be a number, got '1e-6' .str.; in YAML write it as .* 1.0e-06"),
    ("grpo", {"clip_low": True}, "clip_low must be a number, got True"), ("grpo", {"ddof": 1.0}, "whole number"),
    ("grpo", {"kl_coef": NAN}, "kl_coef must be a number, got nan"), ("grpo", {"task_norm": 1}, "true or false"),
    ("grpo", {"kl_coef": -1.0}, "kl_coef must be at least 0"), ("grpo", {"clip_high": 0.0}, "clip_low must lie"),
    ("grpo", {"dual_clip": 1.0}, "dual_clip must be above 1"), ("grpo", {"kl_kind": "k5"}, "unknown KL kind"),
    ("grpo", {"advantage": "rlo"}, "did you mean 'rloo'"), ("grpo", {"reduction": "token"}, "unknown reduction"),
    ("grpo", {"reduction": "seq_mean_token_sum_norm"}, "needs max_tokens"), ("grpo", {"max_tokens": 9}, "uses no max_tokens"),
    ("grpo", {"mask_zero_variance_groups": True}, "acts on task normalisation only"), ("grpo", {"ddof": 2}, "ddof must be 0"),
    ("eppo", {"eps_min": 0.25}, "ordered"), ("eppo", {"trend_mode": "relativ"}, "did you mean 'relative'")])
def test_bad_settings(name, settings, message):
    with pytest.raises(ValueError, match=message):
        get_algorithm(name, **settings)


def test_register_makes_a_method_available(monkeypatch):
    @dataclass(kw_only=True, eq=False)
    class Tight(Algorithm):
        width: float = 0.05

        def pace(self, stats):
            self.observe(stats)
            return dict.fromkeys(stats, self.width)

    monkeypatch.setattr("eppo.algorithms.ALGORITHMS", dict(ALGORITHMS))
    register("tight", Tight)
    method, batch = get_algorithm("tight", width=0.1), make_batch()
    lo_BT, hi_BT = method.bounds(batch, method.pace(stats({"db": 1.0})))
    assert lo_BT[:, 0].tolist() == pytest.approx([.9] * 8 + [.8] * 16) and hi_BT[0, 0] == pytest.approx(1.1)
    with pytest.raises(ValueError, match="taken by GRPO"):
        register("grpo", Tight)
    with pytest.raises(ValueError, match="lower-case identifier"):
        register("My-Method", Tight)
    with pytest.raises(TypeError, match="subclass"):
        register("other", dict)


# ---- advantages -----------------------------------------------------------------------------------------------------------
def golden(**changes):
    """Groups with rewards (1, 0) and (0, 0) and 10, 30, 20, 20 sampled tokens, one task."""
    batch = make_batch(tasks=("db",), size=2, rewards=[1, 0, 0, 0], lengths=[31, 31, 31, 31])
    return replace(batch, mask_BT=torch.arange(31)[None] < torch.tensor([10, 30, 20, 20])[:, None], **changes)


def test_golden_task_normalisation_through_the_hook():
    method = get_algorithm("agentrl")
    advantages_BT = method.advantages(golden())
    assert advantages_BT[:, 0].tolist() == pytest.approx([1.87797, -1.12678, .37559, .37559], abs=1e-5)
    assert (advantages_BT[0, 10:] == 0).all()
    assert method.metrics() == {"task/db/reinforced_failure_frac": 0.5}             # the group that failed as a whole
    masked = get_algorithm("agentrl", mask_zero_variance_groups=True)
    assert masked.advantages(golden())[:, 0].tolist() == pytest.approx([1.7102, -.5701, 0, 0], abs=1e-4)
    assert masked.metrics() == {"task/db/reinforced_failure_frac": 0.0}
    assert get_algorithm("grpo").advantages(golden())[:, 0].tolist() == pytest.approx([.70711, -.70711, 0, 0], abs=5e-6)


@pytest.mark.parametrize("name", METHODS)
def test_row_without_reward_is_out(name):
    batch = make_batch()
    batch.rewards_B[3] = NAN
    batch.mask_BT[3, 1:] = True                                                     # even with its mask left on
    advantages_BT = get_algorithm(name).advantages(batch)
    assert (advantages_BT[3] == 0).all() and torch.isfinite(advantages_BT).all()
    rest = [row for row in range(24) if row != 3]
    assert torch.allclose(get_algorithm(name).advantages(batch.select(rest)), advantages_BT[rest], atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_a_batch_without_signal_or_without_a_task(name):
    flat = make_batch(rewards=[1.0] * 24)
    assert (get_algorithm(name).advantages(flat) == 0).all()
    two_tasks = make_batch().select(range(16))
    method = get_algorithm(name)
    assert torch.isfinite(method.advantages(two_tasks)).all() and "task/os/reinforced_failure_frac" not in method.metrics()


# ---- pacing and bounds ------------------------------------------------------------------------------------------------------
def test_paced_ranges_reach_the_tokens_of_their_task():
    method, batch = get_algorithm("eppo"), make_batch()
    for step in STEPS:
        eps = method.pace(stats(step))
    assert eps == pytest.approx({"db": .15, "kg": .24792, "os": .248251}, abs=1e-6)
    rows = [0, 20, 9, 23]
    lo_BT, hi_BT = method.bounds(batch.select(rows), eps)
    assert lo_BT[:, 0].tolist() == pytest.approx([.85, .751749, .75208, .751749], abs=1e-6)
    assert hi_BT[:, -1].tolist() == pytest.approx([1.15, 1.248251, 1.24792, 1.248251], abs=1e-6)


def test_ablations_keep_the_other_half():
    eps = {name: [get_algorithm(name)] for name in METHODS}
    for name, (method,) in eps.items():
        eps[name] = [method.pace(stats(step)) for step in STEPS]
    assert eps["grpo"] == eps["agentrl"] == [{}, {}, {}]
    assert eps["eppo_no_task_clip"][1] == pytest.approx({"db": .2, "kg": .2, "os": .2 / 1.02})
    assert eps["eppo_no_task_clip"][2] == pytest.approx({"db": .2, "kg": .2 / 1.005, "os": .2})
    assert eps["eppo_no_trend"][1] == pytest.approx({"db": .15, "kg": .220886, "os": .263128}, abs=1e-6)


def test_other_methods_watch_the_same_pacer_without_acting():
    baseline, paced = get_algorithm("agentrl"), get_algorithm("eppo")
    for step in STEPS:
        baseline.pace(stats(step))
        paced.pace(stats(step))
    assert baseline.metrics() == paced.metrics() and baseline.metrics()["pacer/os/eps"] == pytest.approx(.248251, abs=1e-6)
    lo_BT, hi_BT = baseline.bounds(make_batch(), {})
    assert set(lo_BT.flatten().tolist()) == {0.8} and set(hi_BT.flatten().tolist()) == {1.2}


def test_every_setting_of_the_pacer_reaches_it():
    settings = dict(eps0=0.22, alpha=0.3, beta=0.9, eps_min=0.1, eps_max=0.4, kappa=2.0, sigma_floor=0.01, ref_batches=2,
                    warmup_steps=3, h_floor=0.01, n_min=4, trend_mode="relative")
    pacer = get_algorithm("eppo", z_ddof=1, **settings).pacer
    assert {name: getattr(pacer, name) for name in (*settings, "ddof")} == settings | {"ddof": 1}


def test_asymmetric_clip_and_base_range():
    lo_BT, hi_BT = get_algorithm("grpo", clip_high=0.28).bounds(make_batch(), {})
    assert float(lo_BT[0, 0]) == pytest.approx(0.8) and float(hi_BT[0, 0]) == pytest.approx(1.28)
    assert float(get_algorithm("eppo", eps0=0.25).bounds(make_batch(), {})[0][0, 0]) == pytest.approx(0.75)


# ---- identities -----------------------------------------------------------------------------------------------------------
def same(one, other):
    return one[0] == pytest.approx(other[0], abs=1e-12) and torch.allclose(one[1], other[1], atol=1e-12)


@pytest.mark.parametrize("name, settings", [("eppo", dict(alpha=0.0, kappa=0.0)), ("eppo_no_task_clip", dict(kappa=0.0)),
                                            ("eppo_no_trend", dict(alpha=0.0))])
def test_without_pacing_and_trend_it_is_agentrl(name, settings):
    batch = make_batch()
    one, other = run(get_algorithm(name, **settings), batch), run(get_algorithm("agentrl"), batch)
    assert one[0] == other[0] and torch.equal(one[1], other[1])
    assert not same(run(get_algorithm("eppo"), batch), other)


def test_agentrl_without_task_normalisation_is_grpo():
    batch = make_batch()
    assert same(run(get_algorithm("agentrl", task_norm=False), batch), run(get_algorithm("grpo"), batch))
    assert not same(run(get_algorithm("agentrl"), batch), run(get_algorithm("grpo"), batch))


def test_task_normalisation_makes_leave_one_out_and_mean_only_one():
    batch = make_batch()
    one, other = (run(get_algorithm("eppo", advantage=kind), batch) for kind in ("rloo", "mean_only"))
    assert one[0] == pytest.approx(other[0], rel=1e-5) and torch.allclose(one[1], other[1], rtol=1e-5)


def test_at_ratio_one_all_methods_share_one_gradient():
    batch = make_batch(drift=0.0)
    results = [run(get_algorithm(name, task_norm=False), batch) for name in METHODS]
    assert all(same(one, results[0]) for one in results) and results[0][1].abs().sum() > 0
    normed = [run(get_algorithm(name), batch) for name in METHODS[1:]]
    assert all(same(one, normed[0]) for one in normed)


def test_a_single_task_without_trend_is_agentrl():
    batch, step = make_batch(tasks=("os",)), [{"os": 1.0}, {"os": 2.0}]
    assert same(run(get_algorithm("eppo_no_trend"), batch, step), run(get_algorithm("agentrl"), batch, step))
    assert not same(run(get_algorithm("eppo", kappa=20.0), batch, step), run(get_algorithm("agentrl"), batch, step))


# ---- one step, many ways to run it ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reduction", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm", "seq_sum_token_mean"])
@pytest.mark.parametrize("name", ["grpo", "eppo"])
def test_accumulation_order_and_padding_do_not_matter(name, reduction):
    def method():
        return get_algorithm(name, reduction=reduction, max_tokens=32 if reduction == "seq_mean_token_sum_norm" else None)

    batch = make_batch(seed=5)
    whole = run(method(), batch)
    for micro in (1, 5, 8):
        assert same(run(method(), batch, micro=micro), whole)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0)).tolist()
    assert same(run(method(), batch, rows=order, micro=4), whole)
    shuffled = run(method(), batch.select(order))
    assert shuffled[0] == pytest.approx(whole[0], abs=1e-12) and torch.allclose(shuffled[1], whole[1][order], atol=1e-12)
    wide = replace(batch, **{key: torch.nn.functional.pad(getattr(batch, key), (0, 50), value=0 if key == "mask_BT" else 7)
                             for key in ("ids_BT", "mask_BT", "sampler_logp_BT", "policy_logp_BT", "ref_logp_BT")},
                   trajectories=[replace(one, ids_T=[0] * (batch.mask_BT.shape[1] + 50)) for one in batch.trajectories])
    padded = run(method(), wide)
    assert padded[0] == pytest.approx(whole[0], abs=1e-12) and not padded[1][:, -50:].any()
    assert torch.allclose(padded[1][:, :-50], whole[1], atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_gradient_by_finite_differences(name):
    method, batch = get_algorithm(name, kl_coef=0.1), make_batch(groups=1, size=2, rewards=[1, 0, 1, 0, 0, 1])
    for step in STEPS:
        eps = method.pace(stats(step))
    batch = replace(batch, advantages_BT=method.advantages(batch))
    lo_BT, hi_BT = method.bounds(batch, eps)

    def loss(policy_BT):
        loss_BT = method.token_loss(policy_BT, batch, lo_BT, hi_BT) + method.extra(Forward(policy_BT), batch)["kl"]
        return method.reduce(loss_BT, batch.mask_BT, method.denominator(batch.mask_BT))

    masks = clip_masks(batch.policy_logp_BT, batch.sampler_logp_BT, batch.advantages_BT, batch.mask_BT, lo_BT, hi_BT, 3.0)
    assert masks.high_BT.any() and masks.low_BT.any()
    assert torch.autograd.gradcheck(loss, (batch.policy_logp_BT.clone().requires_grad_(),))


# ---- the other hooks ---------------------------------------------------------------------------------------------------------
def test_kl_term_and_what_it_needs():
    batch = make_batch()
    extra = get_algorithm("grpo", kl_coef=0.5).extra(Forward(batch.policy_logp_BT), batch)
    d_BT = (batch.ref_logp_BT - batch.policy_logp_BT)[batch.mask_BT]
    assert list(extra) == ["kl"] and torch.allclose(extra["kl"][batch.mask_BT], 0.5 * (d_BT.exp() - d_BT - 1))
    assert not extra["kl"][~batch.mask_BT].any()
    broken_BT = batch.ref_logp_BT.masked_fill(~batch.mask_BT, NAN)
    again = get_algorithm("grpo", kl_coef=0.5).extra(Forward(batch.policy_logp_BT), replace(batch, ref_logp_BT=broken_BT))
    assert torch.equal(again["kl"], extra["kl"])
    assert get_algorithm("eppo").needs == {"ref_logp"}
    without = get_algorithm("eppo", kl_coef=0)
    assert without.needs == frozenset() and without.extra(Forward(batch.policy_logp_BT), batch) == {}


def test_defaults_of_selection_combination_and_parameters():
    method, groups = get_algorithm("eppo"), [Group("g", "os", "i", [])]
    assert method.select(groups) == (groups, {}) and list(method.extra_parameters()) == []
    combined = method.combine({"db": torch.tensor([1.0, 2.0]), "os": torch.tensor([-3.0, 0.5])})
    assert combined.tolist() == [-2.0, 2.5]


@pytest.mark.parametrize("name", METHODS)
def test_state_survives_json_exactly(name):
    whole, first, second = (get_algorithm(name) for _ in range(3))
    first.pace(stats(STEPS[0]))
    first.pace(stats(STEPS[1], clip_high=0.013, clip_low=0.1))
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    whole.pace(stats(STEPS[0]))
    whole.pace(stats(STEPS[1], clip_high=0.013, clip_low=0.1))
    assert second.pace(stats(STEPS[2])) == whole.pace(stats(STEPS[2])) and second.metrics() == whole.metrics()
    assert second.state_dict() == whole.state_dict()


def test_warning_of_a_clip_that_never_binds():
    method = get_algorithm("agentrl")
    method.pace(stats(STEPS[0], clip_high=0.5))                     # before the first optimiser step: not counted
    for _ in range(9):
        method.pace(stats(STEPS[1], clip_high=0.0004, clip_low=0.0005))
    assert method.warnings == []
    method.pace(stats(STEPS[1], clip_high=0.0004, clip_low=0.0005))
    assert len(method.warnings) == 1 and "clip never binds" in method.warnings[0]
    method.pace(stats(STEPS[1], clip_high=0.01))
    assert method.warnings == []


def test_warnings_of_the_pacer_belong_to_methods_that_pace():
    two = [{"db": 1.0, "os": 1.0}, {"db": 0.9, "os": 0.8}]
    texts = {}
    for name in METHODS:
        method = get_algorithm(name)
        for step in two:
            method.pace(stats(step))
        texts[name] = [text for text in method.warnings if "two tasks" in text]
    assert {name: len(found) for name, found in texts.items()} == {"grpo": 0, "agentrl": 0, "eppo": 1, "eppo_no_task_clip": 0,
                                                                  "eppo_no_trend": 1}
