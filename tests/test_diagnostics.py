"""The three measures of Fig. 1(c) on series whose answer is known."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eppo.diagnostics import crossover_count, headline_window, late_spike, smooth_entropy, trend_r2

RUNS = settings(max_examples=100, deadline=None, derandomize=True)
NAN = math.nan
TABLES = st.integers(2, 4).flatmap(lambda tasks: st.lists(
    st.lists(st.just(NAN) | st.floats(0, 3), min_size=tasks, max_size=tasks), min_size=2, max_size=20)).map(
        lambda columns: np.array(columns).T)
SPIKY = [1, .9, .8, .7, .6, .5, .4, .3, .5, .45, .7, .2]


@pytest.mark.parametrize("curves, count", [
    ([[1, 0, 1, 0], [.5] * 4], 3), ([[1, .5, 1], [.5, .5, .5]], 0), ([[1, .5, 0], [.5, .5, .5]], 1), ([[.5, 1], [.5, .5]], 0),
    ([[1, NAN, 0], [.5, .5, .5]], 1), ([[3, 2, 1], [2, 2.5, 2], [1, 1, 1.5]], 2)])
def test_golden_crossovers(curves, count):
    assert crossover_count(curves).count == count


@pytest.mark.parametrize("gap, count", [([1, 0, 1], 0), ([1, 0, -1], 1), ([1, -1, 1], 2), ([0, 0, 1], 0), ([1, NAN, -1], 1),
                                        ([1, 1e-12, -1], 1)])
def test_touching_is_not_crossing(gap, count):
    assert crossover_count([gap, [0, 0, 0]]).count == count


def test_crossover_rate_pairs_and_flags():
    result = crossover_count([[3, 2, 1], [2, 2.5, 2], [1, 1, 1.5]])
    assert result.pairs == 3 and result.rate == pytest.approx(100 * 2 / (3 * 2)) and result.flagged == ()
    sparse = crossover_count([[1, NAN, NAN], [0, 2, 1], [NAN, 1, 2]])
    assert (sparse.count, sparse.flagged) == (1, ((0, 1), (0, 2)))
    alone = crossover_count([[1.0, 2.0]])
    assert (alone.count, alone.pairs) == (0, 0) and math.isnan(alone.rate)


def test_crossover_tolerance():
    curves = [[1, .49, .7, .2], [.5] * 4]
    assert [crossover_count(curves, tol=tol).count for tol in (0.0, 0.02, 0.4)] == [3, 1, 0]
    with pytest.raises(ValueError, match="tol"):
        crossover_count(curves, tol=-1)


def test_golden_trend():
    steps = np.arange(1, 51)
    falling = trend_r2([2 - 0.3 * np.log(steps)])
    assert falling.mean == pytest.approx(1) and falling.slope_K[0] == pytest.approx(-0.3) and falling.valid == 1
    assert trend_r2([[1, 2, 3, 4]]).mean == pytest.approx(0.960760, abs=1e-6)
    assert trend_r2([[1, .5, .4, .3, .9, .2]]).mean == pytest.approx(0.316622, abs=1e-6)
    constant = trend_r2([[.7] * 9])
    assert math.isnan(constant.mean) and math.isnan(constant.slope_K[0]) and constant.valid == 0


def test_trend_skips_what_it_cannot_fit():
    result = trend_r2([[1, 2, 3, 4], [.5] * 4, [1, NAN, NAN, 2], [4, NAN, 2, 1]])
    assert result.valid == 2 and np.isnan(result.per_task_K).tolist() == [False, True, True, False]
    assert result.slope_K[0] > 0 > result.slope_K[3]
    assert result.per_task_K[3] == pytest.approx(np.corrcoef(np.log([1, 3, 4]), [4, 2, 1])[0, 1] ** 2)
    assert result.mean == pytest.approx((result.per_task_K[0] + result.per_task_K[3]) / 2)


def test_golden_spikes():
    spike = late_spike([SPIKY])
    assert spike.start == 9 and (spike.step, spike.drawup) == pytest.approx((.25, .25))
    rising = late_spike([[1, .9, .8, .7, .6, .5, .4, .3, .5, .6]])
    assert rising.start == 8 and (rising.step, rising.drawup) == pytest.approx((.2, .3))
    assert late_spike(np.zeros((1, 700))).start == 491


def test_spike_over_tasks():
    spike = late_spike([SPIKY, [2.0] * 11 + [2.1], [NAN] * 12])
    assert spike.step == pytest.approx(.25) and spike.mean_step == pytest.approx((.25 + .1) / 2)
    assert spike.relative == pytest.approx(.25) and late_spike([np.array(SPIKY) * 4]).relative == pytest.approx(.25)
    gap = late_spike([[1] * 8 + [.5, NAN, .9, NAN]])
    assert gap.step == pytest.approx(.4)
    assert math.isnan(late_spike([[1] * 11 + [NAN] * 9]).step) and late_spike([[3, 2, 1, .5, .4, .3, .2, .1]]).step == 0


def test_smoothing():
    assert headline_window(700) == 15 and headline_window(99) == 1
    assert smooth_entropy([[1, 2, 6, 3, 10]], 5).tolist() == [[1, 3, 4.4, 19 / 3, 10]]
    assert smooth_entropy([[1, NAN, 3, 5]], 3)[0].tolist() == pytest.approx([1, NAN, 4, 5], nan_ok=True)
    noisy = [[1, 0, 1, 0, 1, 0, 1], [.5] * 7]
    assert crossover_count(noisy).count == 6 and crossover_count([[1, 1, 1, 0, 1, 1, 1], [.5] * 7], smooth=3).count == 0
    assert late_spike([SPIKY], smooth=3).step < 0.25 and trend_r2([[1, .5, .4, .3, .9, .2]], smooth=3).mean > 0.4


@pytest.mark.parametrize("call, message", [
    (lambda: crossover_count([1.0, 2.0]), "tasks x steps"), (lambda: trend_r2([[1, math.inf, 2]]), "infinite: 1"),
    (lambda: late_spike([[1, 2, 3]], smooth=2), "odd number"), (lambda: late_spike([[1, 2, 3]], smooth=0), "odd number")])
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@RUNS
@given(TABLES)
def test_invariances(entropy_KT):
    """The order of tasks changes nothing; a common scale changes spikes by that scale and the others not at all."""
    for measure in (crossover_count, late_spike):
        assert measure(entropy_KT)[0] == pytest.approx(measure(entropy_KT[::-1])[0], nan_ok=True)
    assert crossover_count(entropy_KT * 2).count == crossover_count(entropy_KT).count
    assert late_spike(entropy_KT * 2).step == pytest.approx(2 * late_spike(entropy_KT).step, nan_ok=True)
    spike, result = late_spike(entropy_KT), trend_r2(entropy_KT)
    assert math.isnan(spike.step) or 0 <= spike.step <= spike.drawup + 1e-12
    assert all(math.isnan(value) or -1e-9 <= value <= 1 + 1e-9 for value in result.per_task_K)
