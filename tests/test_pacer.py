"""The entropy pacer: golden numbers of a hand-sized run, the corrected propositions, degenerate cases, state."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eppo.pacer import EntropyPacer, standardise
from eppo.types import TaskStats

TRACE = {"db": [1.0, 0.6, 0.4], "kg": [0.5, 0.5, 0.6], "os": [2.0, 2.4, 2.0]}
RUNS = settings(max_examples=100, deadline=None, derandomize=True)
CURVES = st.integers(1, 5).flatmap(lambda tasks: st.lists(
    st.lists(st.none() | st.floats(0.0, 12.0), min_size=tasks, max_size=tasks), min_size=2, max_size=12))


def feed(pacer, *steps, tokens=1):
    """Observe steps of {task: mean entropy}; the last readings."""
    for step in steps:
        readings = pacer.observe({task: (value * tokens, tokens) for task, value in step.items()})
    return readings


def columns(steps):
    return [{f"t{i}": value for i, value in enumerate(step) if value is not None} for step in steps]


def test_golden_trace():
    table = EntropyPacer.replay(list(TRACE.values()), tasks=list(TRACE)).set_index(["step", "task"])
    expected = {
        1: dict(ema=(1, .5, 2), ratio=(1, 1, 1), z=(0, 0, 0), paced_eps=(.2,) * 3, trend_divisor=(1, 1, 1), eps=(.2,) * 3),
        2: dict(ema=(.98, .5, 2.02), ratio=(.98, 1, 1.01), z=(-1.336305, .267261, 1.069044),
                paced_eps=(.130337, .220886, .263128), trend_divisor=(1, 1, 1.02), eps=(.15, .220886, .257969)),
        3: dict(ema=(.951, .505, 2.019), ratio=(.951, 1.01, 1.0095), z=(-1.414175, .716114, .698061),
                paced_eps=(.12893, .24916, .248251), trend_divisor=(1, 1.005, 1), eps=(.15, .24792, .248251))}
    for step, fields in expected.items():
        for name, values in fields.items():
            assert table.loc[step][name].tolist() == pytest.approx(values, abs=1e-6), (step, name)
    assert table.loc[3].at_floor.tolist() == [True, False, False] and not table.at_ceiling.any() and table.observed.all()
    assert table.loc[3].reference.tolist() == [1.0, 0.5, 2.0] and table.loc[2].entropy.tolist() == [0.6, 0.5, 2.4]


@pytest.mark.parametrize("ratios", [(0.2, 0.4, 0.6, 0.8, 1.0), (0.5, 0.501, 0.502, 0.503, 0.504)])
def test_pacing_is_free_of_scale(ratios):
    readings = feed(EntropyPacer(beta=0.0, kappa=0.0), dict.fromkeys("abcde", 1.0), dict(zip("abcde", ratios)))
    assert [round(readings[task].eps, 4) for task in "abcde"] == [0.15, 0.1513, 0.2, 0.2487, 0.2711]


@pytest.mark.parametrize("count, ddof, reach", [(2, 0, (.1391, .2609)), (3, 0, (.1289, .2711)), (5, 0, (.1229, .2771)),
                                                (3, 1, (.1345, .2655)), (5, 1, (.1243, .2757))])
def test_reach_before_the_clamp(count, ddof, reach):
    """One outlier among equals is the largest |z| that so many tasks allow."""
    paced = []
    for outlier in (0.5, 2.0):
        start = {f"t{i}": 1.0 for i in range(count)}
        readings = feed(EntropyPacer(beta=0.0, kappa=0.0, ddof=ddof), start, start | {"t0": outlier})
        paced.append(readings["t0"].paced_eps)
        peak = math.sqrt(count - 1) if ddof == 0 else (count - 1) / math.sqrt(count)
        assert abs(readings["t0"].z) == pytest.approx(peak, abs=1e-6)
    assert paced == pytest.approx(reach, abs=5e-5)


def test_clamp_binds_where_the_constants_say():
    """alpha 0.4: the floor binds below z = -0.7332 and the ceiling never; 0.6: below -0.4437 and above 1.1989."""
    assert 0.2 * (1 + 0.4 * math.tanh(-0.7332)) == pytest.approx(0.15, abs=1e-5) and 0.2 * 1.4 < 0.30
    assert 0.2 * (1 + 0.6 * math.tanh(-0.4437)) == pytest.approx(0.15, abs=1e-5)
    assert 0.2 * (1 + 0.6 * math.tanh(1.1989)) == pytest.approx(0.30, abs=1e-5)
    start = dict.fromkeys("abcde", 1.0)
    wide = feed(EntropyPacer(alpha=0.6, beta=0.0, kappa=0.0), start, start | {"a": 3.0})
    assert wide["a"].at_ceiling and wide["a"].eps == 0.30 and wide["b"].at_floor        # b: z = -0.5
    narrow = feed(EntropyPacer(alpha=0.2, beta=0.0, kappa=0.0), start, start | {"a": 0.1})
    assert not narrow["a"].at_floor and narrow["a"].eps == pytest.approx(0.2 * (1 - 0.2 * math.tanh(2)), abs=1e-6)


@pytest.mark.parametrize("jump, divisor", [(0.1, 1.005), (1.0, 1.05), (5.0, 1.25), (math.log(151936), 1.5965607)])
def test_trend_constraint_is_nearly_inert(jump, divisor):
    assert feed(EntropyPacer(), {"os": 1.0}, {"os": 1.0 + jump})["os"].trend_divisor == pytest.approx(divisor, abs=1e-6)


def test_trend_modes_and_gain():
    steps = {"os": 2.0}, {"os": 3.0}
    assert feed(EntropyPacer(kappa=20.0), *steps)["os"].trend_divisor == pytest.approx(2.0)
    assert feed(EntropyPacer(trend_mode="relative"), *steps)["os"].trend_divisor == pytest.approx(1.025)
    assert feed(EntropyPacer(kappa=0.0), *steps)["os"].eps == 0.2


def test_one_task_has_only_the_trend():
    pacer = EntropyPacer()
    reading = feed(pacer, {"os": 1.0}, {"os": 2.0})["os"]
    assert (reading.z, reading.paced_eps) == (0.0, 0.2) and reading.eps == pytest.approx(0.2 / 1.05)
    assert pacer.warnings == ["EPPO with one task: z is 0, only the trend constraint acts."]


def test_two_tasks_are_always_at_plus_and_minus_one():
    pacer = EntropyPacer()
    assert feed(pacer, {"a": 1.0, "b": 1.0})["a"].z == 0.0
    readings = feed(pacer, {"a": 0.99, "b": 0.9})
    assert (readings["a"].z, readings["b"].z) == pytest.approx((1, -1), abs=1e-4)
    assert (readings["a"].eps, readings["b"].eps) == pytest.approx((0.260928, 0.15), abs=1e-5)
    assert len(pacer.warnings) == 1 and "two tasks" in pacer.warnings[0]
    robust = EntropyPacer(sigma_floor=0.05)
    assert feed(robust, {"a": 1.0, "b": 1.0}, {"a": 0.99, "b": 0.9})["b"].z == 0.0 and robust.warnings == []


def test_absent_task_stays_in_the_cohort():
    pacer = EntropyPacer(beta=0.5)
    feed(pacer, {"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 0.5, "b": 2.0, "c": 1.0})
    before = pacer.readings
    after = pacer.observe({"a": (0.75, 1), "c": (0.0, 0)})
    assert not after["b"].observed and math.isnan(after["b"].entropy) and not after["c"].observed
    assert after["b"].ema == before["b"].ema == 1.5 and after["b"].delta == 0.0 and after["b"].trend_divisor == 1.0
    assert [after[task].z for task in "abc"] == pytest.approx([before[task].z for task in "abc"])       # a stays at 0.75
    assert "pacer/b/entropy" not in pacer.metrics() and pacer.metrics()["pacer/b/observed"] == 0.0


def test_task_that_arrives_late():
    pacer = EntropyPacer(beta=0.0)
    feed(pacer, {"a": 1.0, "b": 1.0}, {"a": 0.5, "b": 0.4})
    readings = feed(pacer, {"a": 0.5, "b": 0.4, "late": 0.3})
    assert readings["late"].reference == 0.3 and readings["late"].ratio == 1.0 and readings["late"].z > 1.3
    assert list(readings) == ["a", "b", "late"]


def test_too_few_tokens_is_not_measured():
    readings = EntropyPacer(n_min=10).observe({"a": (5.0, 9), "b": (5.0, 10)})
    assert not readings["a"].observed and math.isnan(readings["a"].ema) and readings["a"].eps == 0.2
    assert readings["b"].observed and readings["b"].ema == 0.5


def test_reference_of_several_batches():
    pacer = EntropyPacer(ref_batches=2, beta=0.5)
    first = pacer.observe({"a": (10.0, 10), "b": (1.0, 1)})
    assert math.isnan(first["a"].reference) and first["a"].eps == 0.2 and first["a"].ema == 1.0
    second = pacer.observe({"a": (90.0, 30), "b": (1.0, 1)})
    assert second["a"].reference == 2.5 and second["a"].ema == 2.0 and second["a"].ratio == 0.8
    assert second["a"].z == pytest.approx(-1, abs=1e-6) and second["a"].trend_divisor == 2.0
    waiting = EntropyPacer(ref_batches=5)
    reading = feed(waiting, {"a": 1.0, "b": 1.0}, {"a": 3.0, "b": 1.0})["a"]
    assert (reading.z, reading.eps, reading.trend_divisor) == (0.0, 0.2, 1.0) and reading.ema == pytest.approx(1.1)


def test_warm_up_observes_and_does_not_act():
    pacer = EntropyPacer(warmup_steps=2)
    held = feed(pacer, {"a": 1.0, "b": 1.0}, {"a": 9.0, "b": 0.1})
    assert {reading.eps for reading in held.values()} == {0.2} and held["a"].ema == pytest.approx(1.4)
    assert feed(pacer, {"a": 9.0, "b": 0.1})["b"].eps == 0.15


def test_floored_reference_leaves_the_cohort():
    pacer = EntropyPacer()
    readings = feed(pacer, {"a": 1.0, "b": 1.0, "dead": 1e-5}, {"a": 0.9, "b": 1.0, "dead": 0.5})
    assert readings["dead"].reference == 1e-3 and readings["dead"].eps == 0.2 and readings["dead"].trend_divisor == 1.0
    assert (readings["a"].z, readings["b"].z) == pytest.approx((-1, 1), abs=1e-4)
    assert any("'dead'" in text and "h_floor" in text for text in pacer.warnings)


@pytest.mark.parametrize("value", [(math.nan, 5), (math.inf, 5), (1.0, -1), (-1.0, 5), (1.0, math.nan)])
def test_bad_input_names_the_task_and_changes_nothing(value):
    pacer = EntropyPacer()
    feed(pacer, {"db": 1.0, "os": 1.0})
    before = pacer.state_dict()
    with pytest.raises(ValueError, match="task 'os': entropy sum and token count must be finite and not negative"):
        pacer.observe({"db": (2.0, 1), "os": value})
    assert pacer.state_dict() == before


def test_rounding_below_zero_of_a_collapsed_policy_counts_as_zero():
    assert EntropyPacer().observe({"os": (-1e-6, 100)})["os"].entropy == 0.0


@pytest.mark.parametrize("setting, message", [
    (dict(eps0=0.1), "ordered"), (dict(eps_max=1.5), "ordered"), (dict(alpha=1.0), "alpha"), (dict(beta=1.0), "beta"),
    (dict(kappa=-1), "kappa"), (dict(ref_batches=0), "ref_batches"), (dict(ddof=2), "ddof"), (dict(h_floor=0.0), "h_floor"),
    (dict(trend_mode="relativ"), "did you mean 'relative'"), (dict(alpha="0.4"), "alpha must be a number, got '0.4'"),
    (dict(ref_batches=1.5), "whole number"), (dict(beta=math.nan), "beta must be a number")])
def test_bad_settings(setting, message):
    with pytest.raises(ValueError, match=message):
        EntropyPacer(**setting)


def test_lower_bound_of_the_first_proposition_is_only_claimed_where_it_holds():
    assert EntropyPacer().warnings == []
    assert "Prop. 1" in EntropyPacer(alpha=0.2).warnings[0]         # 0.15 < 0.8 * 0.2
    assert EntropyPacer(alpha=0.2, kappa=0.0).warnings == []


def test_state_survives_json_exactly():
    noise = np.random.default_rng(3).lognormal(sigma=0.3, size=(40, 4))
    steps = [{task: value for task, value in zip("wxyz", row) if value < 1.6} for row in noise]
    whole, first = EntropyPacer(ref_batches=3), EntropyPacer(ref_batches=3)
    for index, step in enumerate(steps):
        expected = feed(whole, step, tokens=7)
        if index == 2:
            resumed = EntropyPacer(ref_batches=3)
            feed(first, *steps[:3], tokens=7)
            resumed.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
        elif index > 2:
            assert repr(feed(resumed, step, tokens=7)) == repr(expected)
    assert resumed.state_dict() == whole.state_dict() and resumed.metrics() == whole.metrics()
    with pytest.raises(ValueError, match="not a pacer state"):
        resumed.load_state_dict({"steps": 3})


def test_readings_do_not_depend_on_the_order_of_tasks():
    values = {"a": 0.3, "b": 0.7, "c": 1.9, "d": 0.1}
    start = dict.fromkeys(values, 1.0)
    one = feed(EntropyPacer(), start, values)
    other = feed(EntropyPacer(), dict(reversed(start.items())), dict(reversed(values.items())))
    assert one == other and list(one) == list(other)


def test_task_stats_and_pairs_are_the_same_input():
    stats = TaskStats(entropy_sum=6.0, entropy_sq_sum=12.0, tokens=4)
    assert EntropyPacer().observe({"os": stats}) == EntropyPacer().observe({"os": (6.0, 4)})


def test_replay_leaves_out_what_was_absent_and_checks_shapes():
    table = EntropyPacer.replay([[1.0, math.nan], [math.nan, 2.0]], tasks=["a", "b"], n_min=5)
    assert table[["step", "task", "observed"]].values.tolist() == [[1, "a", True], [2, "a", False], [2, "b", True]]
    with pytest.raises(ValueError, match="one row for each of the 3 tasks"):
        EntropyPacer.replay([[1.0]], tasks=["a", "b", "c"])
    with pytest.raises(ValueError, match="task 'b'"):
        EntropyPacer.replay([[1.0], [-1.0]], tasks=["a", "b"])


def test_metrics_carry_the_cohort():
    pacer = EntropyPacer()
    assert pacer.metrics() == {}
    feed(pacer, *columns(zip(*TRACE.values()))[:2])
    metrics = pacer.metrics()
    assert metrics["pacer/ratio_mean"] == pytest.approx(0.99666667) and metrics["pacer/ratio_std"] == pytest.approx(0.0124722)
    assert metrics["pacer/eps_mean"] == pytest.approx((0.15 + 0.220886 + 0.257969) / 3, abs=1e-6)
    assert metrics["pacer/t0/at_floor"] == 1.0


@RUNS
@given(CURVES, st.sampled_from([0.0, 0.4, 0.9]), st.sampled_from([0.0, 1.0, 20.0]), st.sampled_from([0, 1]),
       st.sampled_from(["absolute", "relative"]))
def test_corrected_propositions(steps, alpha, kappa, ddof, mode):
    """Prop. 1 in its tight form; Prop. 2 (i), (ii) before the clamp; (iii) with the change of the paced value, after it too."""
    pacer, seen = EntropyPacer(alpha=alpha, kappa=kappa, ddof=ddof, trend_mode=mode), {}
    for step in columns(steps):
        readings = feed(pacer, step) if step else pacer.observe({})
        if not readings:
            continue
        top = 0.2 * (1 + alpha * math.tanh(math.sqrt(len(readings) - 1)))
        for task, now in readings.items():
            assert 0.15 <= now.eps <= min(0.30, top) + 1e-15
            assert now.trend_divisor >= 1 and (now.trend_divisor == 1 or (now.delta > 0 and kappa > 0))
            assert now.at_floor or now.at_ceiling or now.eps == now.paced_eps / now.trend_divisor
            if task in seen:
                change = abs(now.trend_divisor - seen[task].trend_divisor)          # kappa * change of the rise
                limit = abs(now.paced_eps - seen[task].paced_eps) + (1 + alpha) * 0.2 * change
                assert abs(now.eps - seen[task].eps) <= limit + 1e-12
            seen[task] = now


def test_second_proposition_as_printed_fails():
    """Two steps with equal rises (0.025 nat) and different paced values: eq. 17 would allow no change at all."""
    pacer = EntropyPacer()
    one = feed(pacer, {"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 1.5, "b": 1.0, "c": 1.2})["a"]
    two = feed(pacer, {"a": 1.525, "b": 3.0, "c": 1.2})["a"]
    assert one.delta == pytest.approx(0.025) and two.delta == pytest.approx(0.025) and abs(two.eps - one.eps) > 0.03


@RUNS
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8))
def test_standardised_scores(values):
    scores = standardise(dict(enumerate(values)))
    peak = math.sqrt(len(values) - 1)
    assert all(abs(score) <= peak + 1e-9 for score in scores.values())
    if np.std(values) > 1e-3:
        assert sum(scores.values()) == pytest.approx(0, abs=1e-6)
        assert max(scores.values()) >= 1 / peak - 1e-4 and min(scores.values()) <= -1 / peak + 1e-4


@pytest.mark.parametrize("noise", [0.02, 0.10])
def test_noise_alone_is_paced_at_full_strength(noise):
    """700 steps, five tasks with one true decay and log-normal measurement noise: the spread of eps is nearly the largest that
    five tasks allow, the trend does nothing, and sigma_floor is the remedy."""
    rng = np.random.default_rng(7)
    decay_T = 1.0 - 0.1 * np.log(np.arange(1, 701))
    curves_KT = decay_T * rng.lognormal(sigma=noise, size=(5, 700))
    table = EntropyPacer.replay(curves_KT, tasks=list("abcde"))
    eps_TK = table.pivot(index="step", columns="task", values="eps").to_numpy()[1:]
    assert 0.105 < (eps_TK.max(axis=1) - eps_TK.min(axis=1)).mean() < 0.128
    lowest = table[table.step > 1].pivot(index="step", columns="task", values="ratio").to_numpy().argmin(axis=1)
    assert np.bincount(lowest).max() / len(lowest) > 0.6 and table.trend_divisor.max() <= 1.012
    calm = EntropyPacer.replay(curves_KT, tasks=list("abcde"), sigma_floor=0.05 if noise < 0.05 else 0.3, kappa=0.0)
    assert set(calm.eps) == {0.2}
