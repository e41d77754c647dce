"""Known answers for eval.statistics, and the cases in which such code is usually wrong."""

import numpy as np
import pandas as pd
import pytest

from eval.statistics import (aggregate, clearly_best, instance_macro, paired_difference, pass_at_k, seed_band, seed_summary, show,
                             wilson)

FOUR = [0.50, 0.52, 0.48, 0.54]
# IQM and its interval of this matrix (4 seeds x 5 tasks) by rliable 1.2.0, 20,000 resamples: 0.683 [0.571, 0.784].
SCORES_SK = np.array([[0.71, 0.88, 0.80, 0.45, 0.50], [0.87, 0.30, 0.83, 0.82, 0.60],
                      [0.50, 0.48, 0.47, 0.59, 0.63], [0.66, 0.95, 0.82, 0.70, 0.94]])


def table(scores_SK):
    return pd.DataFrame(scores_SK, columns=list("abcde"))


# ---- seeds
def test_four_seeds():
    summary = seed_summary(FOUR)
    assert summary.mean == pytest.approx(0.51) and summary.std == pytest.approx(0.0258199, abs=1e-7)     # ddof 0: 0.0224
    assert (summary.low, summary.high) == pytest.approx((0.468915, 0.551085), abs=1e-6)                  # t(3) = 3.1824
    assert summary.n == 4 and summary.values == tuple(FOUR)
    assert str(summary) == "0.510 ± 0.026 (n = 4)"


def test_one_seed_has_no_spread():
    summary = seed_summary([0.5])
    assert (summary.mean, summary.std, summary.low, summary.high, summary.n) == (0.5, None, None, None, 1)
    assert str(summary) == "0.500 ± n/a (n = 1)"
    assert str(seed_summary([])) == "n/a ± n/a (n = 0)"
    assert show(float("nan")) == show(None) == "n/a"


def test_seeds_by_task():
    frame = seed_summary(pd.DataFrame({"db": FOUR, "os": [0.3, np.nan, np.nan, np.nan]}))
    assert list(frame.index) == ["db", "os"] and frame.loc["db", "std"] == pytest.approx(0.0258199, abs=1e-7)
    assert frame.loc["os", "n"] == 1 and frame.loc["os", "std"] is None


def test_band_spans_seeds_and_counts_them():
    scores_ST = np.repeat([[0.2], [0.5], [0.8]], 10, axis=1)                  # constant curves: between-seed spread only
    band = seed_band(scores_ST)
    assert (band["high"] - band["low"]).to_numpy() == pytest.approx(2 * 4.302653 * 0.3 / 3 ** 0.5, abs=1e-5)
    ragged_ST = np.full((4, 100), 0.5) + np.arange(4)[:, None] / 10
    ragged_ST[3, 60:] = np.nan
    band = seed_band(ragged_ST)
    assert list(band["n"][[59, 60]]) == [4, 3] and band["mean"][99] == pytest.approx(0.6)
    alone = seed_band(ragged_ST[3:])
    assert alone["mean"][59] == pytest.approx(0.8) and np.isnan(alone["low"][59]) and alone["n"][60] == 0


# ---- instances
def test_wilson():
    assert wilson(5, 10) == pytest.approx((0.236593, 0.763407), abs=1e-6)
    assert wilson(0, 20) == pytest.approx((0.0, 0.161125), abs=1e-6)          # the normal interval would be [0, 0]
    assert wilson(1, 1)[0] == pytest.approx(0.206549, abs=1e-6) and wilson(0, 0) == (None, None)
    with pytest.raises(ValueError, match="3 of 2"):
        wilson(3, 2)


def test_pass_at_k_is_unbiased():
    assert [pass_at_k(4, 1, k) for k in (1, 2, 4)] == [0.25, 0.5, 1.0]        # with replacement 4 tries would give 0.684
    assert pass_at_k(4, 0, 4) == 0.0 and pass_at_k(200, 3, 10) == pytest.approx(1 - 190 * 189 * 188 / (200 * 199 * 198))
    with pytest.raises(ValueError, match="k = 5"):
        pass_at_k(4, 1, 5)


def test_paired_difference_sees_what_unpaired_intervals_hide():
    rng = np.random.default_rng(0)
    difficulty = rng.random(200)
    ours = pd.Series(difficulty + 0.05)
    result = paired_difference(ours, pd.Series(difficulty + rng.normal(0, 0.02, 200)))
    assert result.mean == pytest.approx(0.05, abs=0.005) and 0.04 < result.low < result.high < 0.06
    assert result.n == 200 and result.wins > 190


def test_paired_difference_repeats_for_its_seed():
    rng = np.random.default_rng(1)
    ours, theirs = rng.random(30), rng.random(30)
    assert paired_difference(ours, theirs, seed=3) == paired_difference(ours, theirs, seed=3)
    assert paired_difference(ours, theirs, seed=3).low != paired_difference(ours, theirs, seed=4).low


def test_repeats_of_an_instance_are_one_observation():
    rng = np.random.default_rng(2)
    once = pd.Series(rng.random(20), index=pd.Index([f"i{i}" for i in range(20)], name="instance_id"))
    four = pd.concat({seed: once for seed in range(4)}, names=["eval_seed"])
    zero = once * 0
    assert paired_difference(four, pd.concat({0: zero}, names=["eval_seed"])) == paired_difference(once, zero)
    assert paired_difference(four, zero).n == 20


def test_paired_difference_is_macro_over_tasks():
    pairs = [("db", i) for i in range(30)] + [("os", i) for i in range(10)]
    index = pd.MultiIndex.from_tuples(pairs, names=["task", "instance_id"])
    ours = pd.Series([1.0] * 30 + [0.0] * 10, index=index)
    result = paired_difference(ours, ours * 0)
    assert result.mean == 0.5 and (result.low, result.high) == (0.5, 0.5)     # item-weighted: 0.75


def test_paired_difference_refuses_what_is_not_paired():
    with pytest.raises(ValueError, match="in one only: 2, such as 'a'"):
        paired_difference({"a": 1.0, "b": 0.0}, {"b": 1.0, "c": 0.0})
    with pytest.raises(ValueError, match="1 of 2 scores are NaN"):
        paired_difference([1.0, float("nan")], [1.0, 0.0])
    with pytest.raises(ValueError, match="occurs twice"):
        paired_difference(pd.Series([1.0, 0.0], index=["a", "a"]), {"a": 1.0})
    one = paired_difference([1.0], [0.0])
    assert (one.mean, one.low, one.high, one.n) == (1.0, None, None, 1)       # no crash, no interval from one instance


# ---- tasks
def test_overall_is_macro_and_names_the_other():
    result = aggregate({"db": 0.6, "os": 0.2}, counts={"db": 300, "os": 100})
    assert result.macro == pytest.approx(0.4) and result.item_weighted == pytest.approx(0.5)
    assert (result.std, result.low) == (None, None)                           # one seed: no spread
    assert aggregate({"db": 0.6, "os": 0.2}).item_weighted is None


def test_a_missing_task_is_not_averaged_away():
    for scores in ({"db": 0.6}, {"db": 0.6, "os": float("nan")}):
        result = aggregate(scores, tasks=["db", "os"], counts={"db": 3, "os": 1})
        assert (result.macro, result.item_weighted, result.iqm, result.missing) == (None, None, None, ("os",))


def test_std_of_the_average_is_that_of_the_seed_averages():
    result = aggregate(table(SCORES_SK))
    assert result.std == pytest.approx(SCORES_SK.mean(1).std(ddof=1)) and result.n_seeds == 4
    assert result.macro == pytest.approx(SCORES_SK.mean())


def test_iqm_and_interval_agree_with_rliable():
    result = aggregate(table(SCORES_SK), resamples=20_000)
    assert result.iqm == pytest.approx(0.683, abs=1e-12)
    assert (result.iqm_low, result.iqm_high) == pytest.approx((0.571, 0.784), abs=0.006)       # Monte-Carlo noise of both
    assert aggregate(table(SCORES_SK), resamples=20_000) == result
    assert aggregate(table(SCORES_SK), resamples=20_000, seed=1) != result


def test_bootstrap_is_stratified_by_task():
    """Tasks differ, seeds agree: resampling seeds within tasks leaves no spread; resampling all scores would leave much."""
    result = aggregate(table(np.tile([0.1, 0.3, 0.5, 0.7, 0.9], (4, 1))))
    assert (result.low, result.high, result.iqm_low, result.iqm_high) == pytest.approx((0.5, 0.5, 0.5, 0.5))


def test_equal_scores_are_no_certainty():
    """Two instances a task, all lost: a bootstrap of them would print [0, 0] beside Wilson's [0, 0.66]."""
    lost = instance_macro({"db": [0, 0], "os": [0, 0]})
    assert (lost.macro, lost.low, lost.high) == (0.0, None, None)
    mixed = instance_macro({"db": [0, 0], "os": [0, 1]})
    assert mixed.macro == 0.25 and (mixed.low, mixed.high) == (0.0, 0.5)


def test_bold_only_where_the_interval_supports_it():
    assert clearly_best([(0.1, 0.3), (0.4, 0.6)]) == 1
    assert clearly_best([(0.1, 0.45), (0.4, 0.6)]) is None
    assert clearly_best([(0.1, 0.3), (None, None)]) is None and clearly_best([(0.1, 0.3)]) is None


def test_intervals_do_not_depend_on_the_order_of_the_rows():
    rng = np.random.default_rng(5)
    scores = {task: rng.integers(0, 2, 128).astype(float) for task in ("db", "os", "kg")}
    shuffled = {task: rng.permutation(values) for task, values in scores.items()}
    assert any((scores[task] != shuffled[task]).any() for task in scores)
    one, other = aggregate(scores), aggregate(shuffled)
    assert (one.low, one.high, one.iqm_low, one.iqm_high) == (other.low, other.high, other.iqm_low, other.iqm_high)
