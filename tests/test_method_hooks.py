"""Hooks of single methods: dynamic sampling, entropy terms, SEAL's head, warnings."""

from dataclasses import fields, replace

import pytest
import torch
from method_batches import NAN, STEPS, begun, forward_of, make_batch, parts_of, stats

from eppo.algorithms import Forward, get_algorithm
from eppo.algorithms.paced import Paced
from eppo.pacer import EntropyPacer
from eppo.selection import MAX_ROUNDS, DynamicSampling, is_informative
from eppo.turn_entropy import unit_entropies
from eppo.types import Group, TaskStats, Trajectory

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
    batch, method = make_batch(rewards=rewards), begun("seal", task_norm=True, kl_coef=0.0, dropout=0.0)
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


def test_paced_methods_have_the_pacers_defaults():
    """Every setting of the pacer is one of the methods that pace, with the same default; `ddof` is theirs under another name."""
    pacer = {one.name: (one.default, one.type) for one in fields(EntropyPacer) if one.init}
    paced = {one.name: (one.default, one.type) for one in fields(Paced) if one.init}
    assert len(pacer) > 10
    for name, default in pacer.items():
        assert paced["z_ddof" if name == "ddof" else name] == default, name
    made = get_algorithm("eppo").pacer
    assert {name: getattr(made, name) for name in pacer} == {name: value for name, (value, _) in pacer.items()}


def test_paced_methods_hand_every_setting_to_the_pacer():
    changed = {"eps0": 0.22, "alpha": 0.3, "beta": 0.9, "eps_min": 0.16, "eps_max": 0.28, "kappa": 2.0, "sigma_floor": 0.02,
               "ref_batches": 2, "warmup_steps": 3, "ddof": 1, "h_floor": 2e-3, "n_min": 4, "trend_mode": "relative", "claim_prop1": True}
    assert set(changed) == {one.name for one in fields(EntropyPacer) if one.init}
    made = get_algorithm("eppo", **{"z_ddof" if name == "ddof" else name: value for name, value in changed.items()}).pacer
    assert {name: getattr(made, name) for name in changed} == changed
    assert all(value != getattr(EntropyPacer(), name) for name, value in changed.items())
