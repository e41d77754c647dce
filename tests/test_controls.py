"""The control arms: what each does to the clip ranges, own random streams, schedules from records."""

import json
import math

import numpy as np
import pytest
import torch
from method_batches import (MODEL, NAMES, SCHEDULED, STEPS, TASKS, begun, loss_and_gradients, make_batch, parts_of, same, smoke_run,
                            start_folder, stats)

from eppo.algorithms import ALGORITHMS, get_algorithm
from eppo.controls import Schedule, TaskEMA, autoregressive, derangement, read_schedule, shuffled, time_average
from eppo.pacer import standardise
from eppo.types import TaskStats

ARMS = tuple(name for name in NAMES if name[0] == "c" and name[1].isdigit() and name not in SCHEDULED)


def paced(name, steps=STEPS, **settings):
    """The ranges that a method sets over some steps."""
    method = begun(name, **settings)
    return method, [method.pace(stats(step)) for step in steps]


EPPO_STEPS = paced("eppo_no_trend")[1]


def test_the_partner_is_the_golden_trace_without_trend():
    assert EPPO_STEPS[1] == pytest.approx({"db": .15, "kg": .220886, "os": .263128}, abs=1e-6)
    assert EPPO_STEPS[2] == pytest.approx({"db": .15, "kg": .24916, "os": .248251}, abs=1e-6)


@pytest.mark.parametrize("name", ARMS)
def test_arms_share_the_frame_and_log_what_they_set(name):
    method, eps = paced(name)
    settings = method.settings
    assert settings["task_norm"] and settings["kl_coef"] == 1e-4 and settings["dual_clip"] == 3.0
    assert "kappa" not in settings and "trend_mode" not in settings
    for task in TASKS:
        values = [one[task] for one in eps]
        assert all(0.15 <= value <= 0.30 for value in values)
    method.notes = {}
    last = method.pace(stats(STEPS[2]))
    metrics = method.metrics()
    assert {task: metrics[f"control/{task}/eps"] for task in TASKS} == last
    assert metrics["control/eps_mean"] == pytest.approx(sum(last.values()) / 3)
    assert metrics["control/db/eps_mean"] == pytest.approx((sum(one["db"] for one in eps) + last["db"]) / 4)
    if "alpha" in settings and not name.startswith(("c8", "c9", "c11")):
        flat, ranges = paced(name, alpha=0.0)
        assert all(value == pytest.approx(0.2) for one in ranges for value in one.values())
        assert same(loss_and_gradients(flat, make_batch()), loss_and_gradients(begun("agentrl"), make_batch()))


def test_c0_is_agentrl_and_another_width():
    batch = make_batch()
    assert same(loss_and_gradients(begun("c0_fixed"), batch), loss_and_gradients(begun("agentrl"), batch), tolerance=0)
    wide = begun("c0_fixed", eps=0.28)
    assert same(loss_and_gradients(wide, batch), loss_and_gradients(begun("agentrl", clip_low=0.28, clip_high=0.28), batch))


def test_c2a_deals_the_same_values_in_other_orders():
    steps = STEPS * 20
    _, eps = paced("c2a_shuffled", steps)
    _, source = paced("eppo_no_trend", steps)
    orders = set()
    for one, own in zip(eps, source):
        assert sorted(one.values()) == sorted(own.values())
        orders.add(tuple(one[task] == own[task] for task in TASKS))
    assert len(orders) > 2
    assert paced("c2a_shuffled", steps)[1] == eps
    counts = {order: 0 for order in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))}
    for step in range(1200):
        dealt = shuffled({"a": 0, "b": 1, "c": 2}, 5, step)
        counts[tuple(dealt[task] for task in "abc")] += 1
    assert min(counts.values()) > 150 and max(counts.values()) < 250        # 200 each expected


def test_c2b_gives_each_task_another_ones_range_for_the_whole_run():
    for seed in (0, 1):
        method = begun("c2b_deranged")
        method.seed = seed
        eps = [method.pace(stats(step)) for step in STEPS]
        source = derangement(TASKS, seed)
        assert all(one[task] == own[source[task]] for one, own in zip(eps, EPPO_STEPS) for task in TASKS)
    assert derangement("abc", 0) != derangement("abc", 1) and derangement("abc", 2) == derangement("abc", 0)
    assert len({tuple(derangement("abcde", number).items()) for number in range(100)}) == 44
    assert all(task != other for number in range(44) for task, other in derangement("abcde", number).items())
    with pytest.raises(ValueError, match="at least two tasks"):
        get_algorithm("c2b_deranged").begin(MODEL, ("db",), 3, 0)


def test_c3_is_slow_noise_of_its_own():
    before, values = {}, []
    for step in range(1, 4001):
        before = autoregressive(before, ["a", "b"], 0.95, 3, step)
        values.append(before["a"])
    values = np.array(values)
    assert values.std() == pytest.approx(1, abs=0.2)
    assert np.corrcoef(values[:-1], values[1:])[0, 1] == pytest.approx(0.95, abs=0.02)
    torch_state = torch.random.get_rng_state()
    method, eps = paced("c3_random")
    assert torch.equal(torch.random.get_rng_state(), torch_state)
    z = standardise(method.noise)
    assert eps[2] == pytest.approx({task: min(max(.2 * (1 + .4 * math.tanh(z[task])), .15), .3) for task in TASKS})
    other = begun("c3_random")
    other.seed = 1
    assert other.pace(stats(STEPS[0])) != eps[0]
    assert [paced("c3_random", [{"db": 5.0, "kg": 1.0, "os": .1}] * 3)[1]] == [eps]        # entropy plays no part


def test_c5_turns_the_sign():
    eps = paced("c5_inverted")[1][1]
    z = (-1.336305, .267261, 1.069044)
    assert [eps[task] for task in TASKS] == pytest.approx([max(.15, .2 * (1 - .4 * math.tanh(value))) for value in z], abs=1e-6)


def with_outcomes(successes, spreads):
    return {task: TaskStats(1.0, 1.0, 10, successes=successes[task], group_reward_std=spreads[task]) for task in TASKS}


def test_c6_follows_success_and_c7_the_spread():
    first = with_outcomes({"db": [True, True], "kg": [True, False], "os": [False, False]},
                          {"db": [.5], "kg": [0., .2], "os": []})
    second = with_outcomes({"db": [False] * 2, "kg": [], "os": [False] * 2}, {"db": [.1], "kg": [], "os": [.3]})
    method = begun("c6_success")
    eps = method.pace(first)
    assert eps["db"] < eps["kg"] < eps["os"] and eps["os"] == pytest.approx(.2 * (1 + .4 * math.tanh(1.5**.5)))
    method.pace(second)
    assert method.ema.values == pytest.approx({"db": .95, "kg": .5, "os": 0})
    assert method.ema.first == {"db": 1, "kg": .5, "os": 0}
    relative = begun("c6_success", signal="relative")
    relative.pace(first)
    signal = {key: value for key, value in relative.metrics().items() if key.endswith("/signal")}
    assert signal == {"control/db/signal": 0, "control/kg/signal": 1, "control/os/signal": 1}
    spread, flipped = begun("c7_reward_spread"), begun("c7_reward_spread", flip=True)
    eps, mirror = spread.pace(first), flipped.pace(first)
    assert eps["os"] == .2 and eps["db"] > .2 > eps["kg"] and mirror["db"] == eps["kg"]
    spread.pace(second)
    assert spread.ema.values == pytest.approx({"db": .5 * .95 + .1 * .05, "kg": .1, "os": .3})


def test_c8_has_one_range_for_all():
    for one, own in zip(paced("c8_global")[1], EPPO_STEPS):
        assert len(set(one.values())) == 1 and one["db"] == pytest.approx(sum(own.values()) / 3)


def test_c9_levels_the_clip_fraction():
    method = begun("c9_clip_equaliser")
    assert method.pace(stats(STEPS[0])) == dict.fromkeys(TASKS, .2)
    eps = method.pace(stats(STEPS[1], clip_high=.2, clip_low=.12))
    assert eps["db"] == pytest.approx(.2 * math.exp(.1 * .3))
    for _ in range(300):
        eps = method.pace(stats(STEPS[1]))
    assert eps["os"] == .15
    for _ in range(300):
        eps = method.pace(stats(STEPS[1], clip_high=.5))
    assert eps["os"] == .30


def test_c10_without_reference_and_without_cohort():
    level = paced("c10_level")[1][1]
    z = standardise({"db": .98, "kg": .5, "os": 2.02})
    assert level == pytest.approx({task: min(max(.2 * (1 + .4 * math.tanh(z[task])), .15), .3) for task in TASKS})
    fixed = paced("c10_level", mode="fixed_scale")[1][1]
    assert fixed == pytest.approx({task: .2 * (1 + .4 * math.tanh((ratio - 1) / .25)) for task, ratio in
                                   {"db": .98, "kg": 1., "os": 1.01}.items()})


    floored = begun("c10_level", mode="fixed_scale", h_floor=0.9)
    for step in STEPS:
        eps = floored.pace(stats(step))
    assert eps["kg"] == .2 and eps["os"] > .2               # kg's reference, 0.5 nats, is below the floor: out, as in eppo


def test_c11_moves_weights_or_bonuses_and_no_clip():
    batch = make_batch()
    method = begun("c11_weights")
    batches = [{task: TaskStats(value * tokens, 0., tokens) for (task, value), tokens in zip(step.items(), (10, 20, 30))}
               for step in STEPS]
    eps = [method.pace(one) for one in batches]
    assert all(one == dict.fromkeys(TASKS, .2) for one in eps)
    z = (-1.414175, .716114, .698061)
    raw = [1 + .4 * math.tanh(value) for value in z]
    mean = (raw[0] * 10 + raw[1] * 20 + raw[2] * 30) / 60
    assert [method.weights[task] for task in TASKS] == pytest.approx([value / mean for value in raw], abs=1e-6)
    weighted, plain = (begun(name, kl_coef=0.0) for name in ("c11_weights", "agentrl"))
    one, other = (loss_and_gradients(method, batch)[1][0] for method in (weighted, plain))
    for index, task in enumerate(TASKS):
        rows = batch.task_ids_B == index
        assert torch.allclose(one[rows], other[rows] * weighted.weights[task])
    bonus = begun("c11_weights", lever="entropy")
    assert "entropy" in bonus.needs and "entropy" not in weighted.needs
    gradient = loss_and_gradients(bonus, batch)[1][1]
    row = int((batch.task_ids_B == 0).nonzero()[0])
    assert gradient[row][batch.mask_BT[row]].tolist() == pytest.approx(
        [-.001 * (1 - .4 * math.tanh(z[0])) / int(batch.mask_BT.sum())] * int(batch.mask_BT[row].sum()), rel=1e-5)


def test_mean_matched_arm():
    plain, matched = (paced("c10_level", match_mean=flag)[1][1] for flag in (False, True))
    assert sum(matched.values()) == pytest.approx(sum(EPPO_STEPS[1].values())) != pytest.approx(sum(plain.values()))
    assert matched["db"] / plain["db"] == pytest.approx(matched["os"] / plain["os"])


def test_an_absent_task_keeps_its_place():
    for name in ARMS:
        method = begun(name)
        method.pace(stats(STEPS[0]))
        eps = method.pace(stats({"db": 0.5, "os": 2.0}))
        assert set(eps) <= set(TASKS) and all(math.isfinite(value) for value in eps.values())
        parts_of(begun(name), make_batch().select(range(16)))


def test_ema():
    ema = TaskEMA(0.9)
    assert ema.update({"a": 1.0}) == {"a": 1.0} and ema.update({"a": 0.0, "b": 2.0}) == pytest.approx({"a": .9, "b": 2.0})
    again = TaskEMA(0.9)
    again.load_state_dict(json.loads(json.dumps(ema.state_dict())))
    assert again.update({"a": 1.0}) == ema.update({"a": 1.0}) and again.first == {"a": 1.0, "b": 2.0}


# ---- arms that replay a record -----------------------------------------------------------------------------------------
@pytest.fixture(scope="session")
def start(tmp_path_factory):
    return start_folder(tmp_path_factory)


@pytest.fixture(scope="session")
def source(start, tmp_path_factory):
    """A finished run of eppo with seed 7."""
    out = tmp_path_factory.mktemp("source") / "run"
    return smoke_run(start, out, "eppo", seed=7)


def test_yoked_replays_the_schedule(start, source, tmp_path):
    run = smoke_run(start, tmp_path / "yoked", "c4_yoked", schedule_from=str(source.path))
    for task in ("toy_coin", "toy_dice"):
        theirs = source.steps[source.steps["step"] > 0][f"pacer/{task}/eps"]
        ours = run.steps[run.steps["step"] > 0]
        assert ours[f"control/{task}/eps"].tolist() == theirs.tolist()
        assert ours[f"task/{task}/hi"].tolist() == pytest.approx((1 + theirs).tolist(), abs=1e-6)
        assert ours[f"pacer/{task}/entropy"].iloc[-1] != source.steps[f"pacer/{task}/entropy"].iloc[-1]


def test_per_task_averages_over_runs(start, source, tmp_path):
    other = smoke_run(start, tmp_path / "other", "eppo_no_trend", seed=8)
    run = smoke_run(start, tmp_path / "fixed", "c1_per_task", schedule_from=f"{source.path}, {other.path}")
    for task in ("toy_coin", "toy_dice"):
        values = [one.steps[one.steps["step"] > 0][f"pacer/{task}/eps"].mean() for one in (source, other)]
        assert run.steps[f"control/{task}/eps"].dropna().tolist() == pytest.approx([sum(values) / 2] * 3)


def test_schedules_that_do_not_match_are_refused(start, source, tmp_path):
    tasks = ("toy_coin", "toy_dice")
    schedule = read_schedule(str(source.path), tasks, 3, 0)
    assert schedule.seed == 7 and len(schedule.eps) == 3 and set(schedule.eps[0]) == set(tasks)
    with pytest.raises(ValueError, match="has the tasks .*toy_coin.* this run has .*'db'"):
        read_schedule(str(source.path), ("db", "toy_coin"), 3, 0)
    with pytest.raises(ValueError, match="has 3 of 3 steps, this run has 4"):
        read_schedule(str(source.path), tasks, 4, 0)
    with pytest.raises(ValueError, match="has this run's seed, 7"):
        read_schedule(str(source.path), tasks, 3, 7)
    with pytest.raises(ValueError, match="no run in"):
        read_schedule(str(tmp_path), tasks, 3, 0)
    baseline = smoke_run(start, tmp_path / "agentrl", "agentrl", seed=7)
    with pytest.raises(ValueError, match="'agentrl', in which EPPO's pacer set nothing"):
        read_schedule(str(baseline.path), tasks, 3, 0)
    with pytest.raises(ValueError, match="this run has 2; they must be the same"):
        get_algorithm("c4_yoked", schedule_from=str(source.path)).begin(MODEL, tasks, 2, 0)


def test_averages_leave_out_what_is_missing():
    schedules = [Schedule("a", 0, ({"db": .2}, {"db": .3, "os": .1})), Schedule("b", 1, ({"os": .3},))]
    assert time_average(schedules) == pytest.approx({"db": .25, "os": .2})


def test_eleven_arms_need_no_record_and_two_do():
    assert len(ARMS) == 11 and {"c1_per_task", "c4_yoked"} == {name for name in ALGORITHMS if name[1].isdigit()} - set(ARMS)
