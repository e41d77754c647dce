"""Group advantages and task normalisation, in numbers worked by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eppo.advantages import group_advantages, normalise_per_task, without_spread

RUNS = settings(max_examples=100, deadline=None, derandomize=True)
NAN = math.nan


def close(result, expected, abs=1e-6):
    assert torch.as_tensor(result).tolist() == pytest.approx(expected, abs=abs)


def test_three_kinds_give_three_results():
    """Groups [0, 1] and [0, 10]: the std is taken out, or stays."""
    rewards, groups = [0.0, 1.0, 0.0, 10.0], [0, 0, 1, 1]
    close(group_advantages(rewards, groups), [-.7071058, .7071058, -.7071067, .7071067])
    close(group_advantages(rewards, groups, "mean_only"), [-.5, .5, -5, 5])
    close(group_advantages(rewards, groups, "rloo"), [-1, 1, -10, 10])
    close(group_advantages(rewards, groups, ddof=0), [-.999998, .999998, -1, 1])


def test_sample_and_population_std_differ_by_a_constant():
    rewards, groups = torch.tensor([0, 0, 0, 1, 1, 0, 0, 1.0]), torch.zeros(8, dtype=torch.long)
    ratio = group_advantages(rewards, groups, ddof=1, eps=0.0) / group_advantages(rewards, groups, ddof=0, eps=0.0)
    close(ratio, [math.sqrt(7 / 8)] * 8)


@pytest.mark.parametrize("kind", ["grpo", "mean_only", "rloo"])
def test_equal_rewards_give_exactly_zero(kind):
    rewards, groups = [1.0] * 4 + [0.0] * 4 + [-0.5] * 4 + [0.1] * 3, [0] * 4 + [1] * 4 + [2] * 4 + [3] * 3
    assert group_advantages(rewards, groups, kind).tolist() == [0.0] * 15
    assert without_spread(rewards, groups).all()


@pytest.mark.parametrize("missing", [NAN, None])
def test_missing_reward_is_out_of_the_statistics(missing):
    close(group_advantages([1, missing, 0, 1], [0] * 4, "mean_only"), [1 / 3, 0, -2 / 3, 1 / 3])
    close(group_advantages([1.0, missing, 0.0, 1.0], [0] * 4)[[0, 2, 3]], group_advantages([1.0, 0.0, 1.0], [0] * 3).tolist())
    assert group_advantages([missing, missing, 1.0, 0.0], ["a", "a", "b", "b"], "rloo").tolist() == [0, 0, 1, -1]
    assert without_spread([1.0, missing, 1.0, 0.0, 1.0], [0, 0, 0, 1, 1]).tolist() == [True, False, True, False, False]


@pytest.mark.parametrize("kind", ["grpo", "mean_only", "rloo"])
def test_group_of_one_has_no_advantage(kind):
    assert group_advantages([0.8, 0.5, NAN, NAN, NAN], [0, 1, 1, 1, 1], kind).tolist() == [0.0] * 5


def test_negative_rewards_and_large_offsets():
    assert (group_advantages([-1, -1, -0.5, -1], [0] * 4) > 0).tolist() == [False, False, True, False]
    small = torch.tensor([0.0, 1, 0, 1])
    close(group_advantages(small, [0] * 4), group_advantages(small + 10_000, [0] * 4).tolist(), abs=1e-6)


def test_input_order_is_kept_whatever_the_ids():
    rewards = [1.0, 5.0, 0.0, 7.0, 6.0]
    expected = [0.5, -1.0, -0.5, 1.0, 0.0]
    for groups in ([0, 1, 0, 1, 1], ["q", "p", "q", "p", "p"], torch.tensor([9, 3, 9, 3, 3])):
        assert group_advantages(rewards, groups, "mean_only").tolist() == expected


def test_leave_one_out_baseline():
    rewards = torch.tensor([1.0, 4.0, 2.0, 0.0], dtype=torch.float64)
    others = [(rewards.sum() - reward) / 3 for reward in rewards]
    close(group_advantages(rewards, [0] * 4, "rloo"), [float(reward - other) for reward, other in zip(rewards, others)])


@pytest.mark.parametrize("call, message", [
    (lambda: group_advantages([1.0, 0.0], [0, 0], "gpro"), "did you mean 'grpo'"),
    (lambda: group_advantages([1.0, math.inf], [0, 0]), "infinite: 1"),
    (lambda: group_advantages([1.0, 0.0], [0, 0], ddof=2), "ddof"),
    (lambda: group_advantages([1.0, 0.0], [0, 0, 1]), "one per sequence: 2 sequences"),
    (lambda: normalise_per_task(torch.ones(2, 3), torch.ones(2, 3), [0]), "one per sequence: 2 sequences")])
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def golden_batch(width=30):
    """One task, two groups of two: rewards (1, 0) with 10 and 30 tokens, (0, 0) with 20 and 20."""
    mask_BT = torch.arange(width)[None] < torch.tensor([10, 30, 20, 20])[:, None]
    return group_advantages([1.0, 0.0, 0.0, 0.0], [0, 0, 1, 1]), mask_BT


def test_golden_task_normalisation():
    advantages_B, mask_BT = golden_batch()
    close(advantages_B, [.7071058, -.7071058, 0, 0])
    tokens = advantages_B[:, None].expand_as(mask_BT)[mask_BT].double()
    assert float(tokens.mean()) == pytest.approx(-.176776, abs=1e-6) and float(tokens.std()) == pytest.approx(.470657, abs=1e-6)
    result_BT = normalise_per_task(advantages_B[:, None], mask_BT, ["db"] * 4)
    close(result_BT[:, 0], [1.87797, -1.12678, .37559, .37559], abs=1e-5)
    assert (result_BT[~mask_BT] == 0).all() and result_BT.dtype == torch.float32


def test_normalised_tokens_have_mean_zero_and_std_one_within_each_task():
    generator = torch.Generator().manual_seed(0)
    values_BT = torch.randn(12, 20, generator=generator) * 3 + 5
    mask_BT = torch.rand(12, 20, generator=generator) < 0.5
    tasks_B = torch.arange(12) % 3
    result_BT = normalise_per_task(values_BT, mask_BT, tasks_B)
    for task in range(3):
        tokens = result_BT[tasks_B == task][mask_BT[tasks_B == task]]
        assert float(tokens.mean()) == pytest.approx(0, abs=1e-6) and float(tokens.std()) == pytest.approx(1, abs=1e-5)
    alone_BT = normalise_per_task(values_BT[tasks_B == 1], mask_BT[tasks_B == 1], ["x"] * 4)
    assert torch.equal(result_BT[tasks_B == 1], alone_BT)


def test_leave_one_out_and_mean_only_become_one():
    generator = torch.Generator().manual_seed(1)
    rewards, groups = torch.rand(16, generator=generator, dtype=torch.float64), torch.arange(16) // 4
    mask_BT = torch.rand(16, 9, generator=generator) < 0.6
    results = [normalise_per_task(group_advantages(rewards, groups, kind)[:, None], mask_BT, groups % 2)
               for kind in ("rloo", "mean_only")]
    assert torch.allclose(*results, atol=1e-5) and results[0].abs().max() > 1


@pytest.mark.parametrize("values, mask, expected", [
    ([[3.0, 9.0]], [[1, 0]], [[0.0, 0.0]]),                     # one token: no std
    ([[3.0, 3.0]], [[1, 1]], [[0.0, 0.0]]),                     # all equal
    ([[0.1] * 3], [[1, 1, 1]], [[0.0] * 3]),                    # all equal, with a mean that rounds to another number
    ([[3.0, 5.0]], [[0, 0]], [[0.0, 0.0]]),                     # no token
    ([[1.0, NAN, 3.0]], [[1, 0, 1]], [[-.7071063, 0.0, .7071063]])])
@pytest.mark.filterwarnings("error")
def test_degenerate_tasks(values, mask, expected):
    result_T = normalise_per_task(torch.tensor(values, dtype=torch.float64), mask, [0])[0]
    close(result_T, expected[0])
    assert [value == 0 for value in result_T.tolist()] == [value == 0 for value in expected[0]]


@RUNS
@given(st.lists(st.floats(-10, 10) | st.just(NAN), min_size=1, max_size=12), st.sampled_from(["grpo", "mean_only", "rloo"]),
       st.randoms(use_true_random=False))
def test_group_properties(rewards, kind, random):
    groups = [random.randrange(3) for _ in rewards]
    result = group_advantages(torch.tensor(rewards, dtype=torch.float64), groups, kind)
    assert torch.isfinite(result).all()
    for group in set(groups):
        assert sum(float(value) for value, one in zip(result, groups) if one == group) == pytest.approx(0, abs=1e-6)
    order = list(range(len(rewards)))
    random.shuffle(order)
    shuffled = group_advantages(torch.tensor([rewards[row] for row in order], dtype=torch.float64),
                                [groups[row] for row in order], kind)
    assert torch.allclose(shuffled, result[order], atol=1e-9)
