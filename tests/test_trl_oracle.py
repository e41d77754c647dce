"""The losses against TRL's own code: the same tensors through `GRPOTrainer._compute_loss` and through our hooks, values and
gradients equal to 1e-6 relative in float64. Where TRL defines something else, a test says what.

    TRL                                     here
    loss_type "grpo"                        reduction "seq_mean_token_mean"
    loss_type "bnpo", "dapo"                reduction "token_mean" (bnpo: over a micro-batch; dapo: over the step)
    loss_type "dr_grpo"                     reduction "seq_mean_token_sum_norm", max_completion_length = max_tokens
    delta                                   dual_clip (equal for A < 0; for A > 0 without effect while delta > 1 + epsilon_high)
    epsilon_high of "cispo"                 w_max, a cap and not a distance from 1
    importance_sampling_level "sequence"    gspo
    RLOOTrainer                             rloo_sequence
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from method_batches import begun, make_batch

from eppo.algorithms import Forward

grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="trl is in the dev extra: pip install -e '.[dev]'")
RTOL = 1e-6


def trl_loss(batch, policy_BT, entropy_BT=None, loss_type="grpo", level="token", low=0.2, high=0.2, delta=None, beta=0.0,
             max_tokens=32,
             entropy_coef=0.0, tau_pos=1.0, tau_neg=1.05):
    """TRL's loss of the batch; only the forward pass is replaced, by the log-probabilities given."""
    entropy_BT = torch.zeros_like(policy_BT) if entropy_BT is None else entropy_BT
    args = SimpleNamespace(delta=delta, use_bias_correction_kl=False, sapo_temperature_pos=tau_pos,
                           sapo_temperature_neg=tau_neg,
                           steps_per_generation=1)
    accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x,
                                  reduce=lambda x, reduction: x,
                                  sync_gradients=True)
    trainer = SimpleNamespace(
        args=args, accelerator=accelerator, model=SimpleNamespace(training=True), loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=low, epsilon_high=high, beta=beta, max_completion_length=max_tokens, current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False, aux_loss_enabled=False,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=entropy_coef > 0, entropy_coef=entropy_coef, _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (policy_BT, entropy_BT, None))
    mask_BT = batch.mask_BT.long()
    inputs = {"prompt_ids": batch.ids_BT[:, :0], "prompt_mask": mask_BT[:, :0], "completion_ids": batch.ids_BT,
              "completion_mask": mask_BT,
              "advantages": batch.advantages_BT.sum(1) / batch.mask_BT.sum(1).clamp(min=1),
              "old_per_token_logps": batch.sampler_logp_BT,
              "ref_per_token_logps": batch.ref_logp_BT, "num_items_in_batch": mask_BT.sum()}
    return grpo_trainer.GRPOTrainer._compute_loss(trainer, None, inputs), trainer._metrics["train"]


def both(name, ours, theirs, drift=0.6, seed=3):
    """Loss and gradient from us and from TRL on one batch whose ratios leave every bound."""
    batch = make_batch(seed=seed, drift=drift)
    method = begun(name, **{"kl_coef": 0.0, "task_norm": False} | ours)
    batch.advantages_BT = method.advantages(batch)
    results = []
    for side in ("ours", "trl"):
        policy_BT = batch.policy_logp_BT.clone().requires_grad_()
        entropy_BT = batch.entropy_BT.clone().requires_grad_()
        if side == "trl":
            loss, metrics = trl_loss(batch, policy_BT, entropy_BT, **theirs)
        else:
            lo_BT, hi_BT = method.bounds(batch, {})
            terms = [method.token_loss(policy_BT, batch, lo_BT, hi_BT),
                     *method.extra(Forward(policy_BT, entropy_BT), batch).values()]
            loss = sum(method.reduce(term, batch.mask_BT, method.denominator(batch.mask_BT)) for term in terms)
            events = method.clip_events(batch, batch.policy_logp_BT, lo_BT, hi_BT)
        loss.backward()
        results.append((loss.detach(), policy_BT.grad, torch.zeros_like(entropy_BT)
                        if entropy_BT.grad is None else entropy_BT.grad))
    return *results, events, metrics, batch


def assert_equal(mine, trl):
    assert float(mine[0]) == pytest.approx(float(trl[0]), rel=RTOL)
    for a, b in zip(mine[1:], trl[1:]):
        assert float((a - b).norm()) <= RTOL * float(b.norm())
    assert mine[1].abs().sum() > 0


SEQUENCES = {"reduction": "seq_mean_token_mean"}
TAU = float(torch.tensor(1.05))                             # TRL's temperatures pass through float32, whatever the dtype
CASES = {
    "grpo": ("grpo", SEQUENCES | {"dual_clip": None}, {"loss_type": "grpo"}),
    "grpo with kl": ("grpo", SEQUENCES | {"dual_clip": None, "kl_coef": 0.04}, {"loss_type": "grpo", "beta": 0.04}),
    "grpo with delta": ("grpo", SEQUENCES | {"dual_clip": 1.5}, {"loss_type": "grpo", "delta": 1.5}),
    "bnpo": ("grpo", {"dual_clip": None}, {"loss_type": "bnpo"}),
    "dapo": ("dapo", {"dual_clip": None}, {"loss_type": "dapo", "high": 0.28}),
    "dapo with delta": ("dapo", {"dual_clip": 2.0}, {"loss_type": "dapo", "high": 0.28, "delta": 2.0}),
    "dapo with kl": ("dapo", {"dual_clip": None, "kl_coef": 0.04}, {"loss_type": "dapo", "high": 0.28, "beta": 0.04}),
    "dr_grpo": ("dr_grpo", {"dual_clip": None, "max_tokens": 32}, {"loss_type": "dr_grpo"}),
    "cispo": ("cispo", {}, {"loss_type": "cispo", "high": 5.0}),
    "cispo with a low cap": ("cispo", {"w_max": 1.1}, {"loss_type": "cispo", "high": 1.1}),
    "sapo": ("sapo", {"tau_neg": TAU}, {"loss_type": "sapo"}),
    "sapo with other temperatures": ("sapo", {"tau_pos": 0.75, "tau_neg": 2.0},
                                     {"loss_type": "sapo", "tau_pos": 0.75, "tau_neg": 2.0}),
    "gspo": ("gspo", {}, {"loss_type": "grpo", "level": "sequence", "low": 3e-4, "high": 4e-4}),
    "gspo with a wide clip": ("gspo", {"clip_low": .1, "clip_high": .2},
                              {"loss_type": "grpo", "level": "sequence", "low": .1, "high": .2}),
    "entropy bonus": ("entropy_bonus", {"dual_clip": None, "coef": 0.01}, {"loss_type": "bnpo", "entropy_coef": 0.01}),
}


@pytest.mark.parametrize("case", CASES)
def test_same_loss_and_gradient(case):
    name, ours, theirs = CASES[case]
    for seed in (3, 4, 5):
        mine, trl, *_ = both(name, ours, theirs, seed=seed)
        assert_equal(mine, trl)


@pytest.mark.parametrize("case", ["bnpo", "dapo"])
def test_same_clip_fractions(case):
    name, ours, theirs = CASES[case]
    _, _, events, metrics, batch = both(name, ours, theirs)
    tokens = int(batch.mask_BT.sum())
    assert int(events.high_BT.sum()) / tokens == pytest.approx(metrics["clip_ratio/high_mean"][0])
    assert int(events.low_BT.sum()) / tokens == pytest.approx(metrics["clip_ratio/low_mean"][0])
    assert events.high_BT.any() and events.low_BT.any()


def test_gspo_counts_the_same_episodes_as_clipped_but_weighs_them_by_tokens():
    name, ours, theirs = CASES["gspo with a wide clip"]
    _, _, events, metrics, batch = both(name, ours, theirs)
    assert float(events.high_BT.any(1).double().mean()) == pytest.approx(metrics["clip_ratio/high_mean"][0])
    assert float(events.low_BT.any(1).double().mean()) == pytest.approx(metrics["clip_ratio/low_mean"][0])


@pytest.mark.parametrize("drift", [0.02, 0.1, 0.6])
def test_rloo_on_sequences(drift):
    """TRL's RLOOTrainer: one ratio per episode, the KL in the reward. At 0.02 hardly anything is clipped, at 0.6 nearly all."""
    rloo_trainer = pytest.importorskip("trl.trainer.rloo_trainer")
    batch = make_batch(seed=3, drift=drift)
    method = begun("rloo_sequence")
    batch.advantages_BT = method.advantages(batch)
    mask_BT, groups = batch.mask_BT.long(), batch.rewards_B.view(-1, 4)
    kl_G = ((batch.sampler_logp_BT - batch.ref_logp_BT) * mask_BT).sum(1).view(-1, 4)
    shaped_G = groups - 0.05 * kl_G
    expected_B = (shaped_G - (shaped_G.sum(1, keepdim=True) - shaped_G) / 3).flatten()     # as its trainer writes the baseline
    advantages_B = batch.advantages_BT.sum(1) / batch.mask_BT.sum(1)
    assert torch.allclose(advantages_B, expected_B, rtol=RTOL)
    results = []
    for side in ("ours", "trl"):
        policy_BT = batch.policy_logp_BT.clone().requires_grad_()
        if side == "ours":
            lo_BT, hi_BT = method.bounds(batch, {})
            assert method.extra(Forward(policy_BT), batch) == {}
            loss = method.reduce(method.token_loss(policy_BT, batch, lo_BT, hi_BT), batch.mask_BT, method.denominator(batch.mask_BT))
            events = method.clip_events(batch, batch.policy_logp_BT, lo_BT, hi_BT)
        else:
            metrics = defaultdict(lambda: defaultdict(list))
            trainer = SimpleNamespace(
                model=SimpleNamespace(training=True), aux_loss_enabled=False, epsilon_low=0.2, epsilon_high=0.2, _metrics=metrics,
                accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x),
                _get_per_token_logps_and_entropies=lambda *_, policy_BT=policy_BT, **__: (policy_BT, torch.zeros_like(policy_BT), None))
            loss = rloo_trainer.RLOOTrainer._compute_loss(trainer, None, {
                "prompt_ids": batch.ids_BT[:, :0], "prompt_mask": mask_BT[:, :0], "completion_ids": batch.ids_BT,
                "completion_mask": mask_BT,
                "advantages": advantages_B, "old_logps": (batch.sampler_logp_BT * mask_BT).sum(1)})
        loss.backward()
        results.append((loss.detach(), policy_BT.grad))
    assert_equal(*results)
    for side, event_BT in (("high", events.high_BT), ("low", events.low_BT)):
        assert float(event_BT.any(1).double().mean()) == pytest.approx(metrics["train"][f"clip_ratio/{side}_mean"][0])


# ---- where TRL defines something else -----------------------------------------------------------------------------------
def test_trl_averages_over_episodes_without_a_token():
    """TRL's "grpo" divides by all sequences, ours by those with a sampled token: the gradients differ by that factor."""
    batch = make_batch(seed=3, drift=0.6)
    method = begun("grpo", kl_coef=0.0, dual_clip=None, **SEQUENCES)
    batch.advantages_BT = method.advantages(batch)
    batch.mask_BT[:6] = False
    policy_BT = batch.policy_logp_BT.clone().requires_grad_()
    batch.advantages_BT = batch.advantages_BT.where(batch.mask_BT, 0)
    lo_BT, hi_BT = method.bounds(batch, {})
    loss_BT = method.token_loss(policy_BT, batch, lo_BT, hi_BT)
    mine, = torch.autograd.grad(method.reduce(loss_BT, batch.mask_BT, method.denominator(batch.mask_BT)), policy_BT)
    kept = batch.select(range(6, 24))
    without, = torch.autograd.grad(trl_loss(kept, policy_BT[6:, :kept.mask_BT.shape[1]])[0], policy_BT)
    assert torch.allclose(without, mine, rtol=RTOL) and mine.abs().sum() > 0
    theirs, = torch.autograd.grad(trl_loss(batch, policy_BT)[0], policy_BT)
    assert torch.allclose(theirs, mine * 18 / 24, rtol=RTOL)


def test_trl_does_not_clamp_log_ratio_or_kl():
    """Here the log-ratio is clamped to +-20 and k3 to 10; on tokens beyond that TRL's loss is larger."""
    batch = make_batch(seed=3)
    batch.ref_logp_BT = batch.policy_logp_BT + 4.0          # k3 = e^4 - 5 = 49.6
    method = begun("grpo", kl_coef=1.0, dual_clip=None)
    batch.advantages_BT = torch.zeros_like(batch.sampler_logp_BT)
    kl_BT = method.extra(Forward(batch.policy_logp_BT), batch)["kl"]
    assert float(kl_BT[batch.mask_BT].max()) == 10.0
    _, metrics = trl_loss(batch, batch.policy_logp_BT.clone().requires_grad_(), loss_type="bnpo", beta=1.0)
    assert metrics["kl"][0] == pytest.approx(torch.tensor(4.0).double().exp().item() - 5)


def test_dr_grpo_of_trl_keeps_the_std_unless_told():
    """TRL's "dr_grpo" changes the reduction alone; the advantage without std is its `scale_rewards="none"`, our default."""
    batch = make_batch(seed=3)
    method = begun("dr_grpo")
    advantages_B = method.advantages(batch).sum(1) / batch.mask_BT.sum(1)
    means = torch.stack([batch.rewards_B[batch.group_ids_B == group].mean() for group in batch.group_ids_B])
    assert torch.allclose(advantages_B, batch.rewards_B - means)


def test_the_largest_difference_over_all_cases_is_rounding():
    worst = 0.0
    for name, ours, theirs in CASES.values():
        mine, trl, *_ = both(name, ours, theirs)
        worst = max(worst, float((mine[1] - trl[1]).norm() / trl[1].norm()), abs(float(mine[0] / trl[0]) - 1))
    assert worst < 1e-12
