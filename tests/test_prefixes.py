"""Shared prefixes: the same states, scores, gradients and records as every row by itself, for fewer tokens."""

import copy
import random

import numpy as np
import pytest
import torch
import toy_env
from hypothesis import given, settings, strategies as st
from models import tiny_model

from eppo.algorithms import get_algorithm
from eppo.batching import microbatches, to_batch
from eppo.config import load_recipe
from eppo.learner import Learner
from eppo.measure import task_stats
from eppo.policy import token_scores
from eppo.prefixes import can_share, common, pack, pack_size, shared_states, trees
from eppo.types import Trajectory, Turn

V, WIDTH = 300, 32


def family(seed, rows=9, prompt=30):
    """Rows of two prompts; some go on alike for a while, two are equal, one is empty."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(1, V) for _ in range(prompt)] for _ in range(2)]
    made = [prompts[rng.random() < 0.4] + [rng.randrange(1, V) for _ in range(rng.randrange(1, 25))] for _ in range(rows - 3)]
    made += [list(made[0]), made[1][:prompt + 1] + [rng.randrange(1, V) for _ in range(12)], []]
    rng.shuffle(made)
    return made


def padded(rows, extra=0):
    length = max(map(len, rows)) + extra
    return torch.tensor([row + [0] * (length - len(row)) for row in rows]), torch.tensor([len(row) for row in rows])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("seed", range(4))
def test_states_are_those_of_every_row_by_itself(seed, attention):
    model = tiny_model(vocab=V).double()
    model.set_attn_implementation(attention)
    rows = family(seed)
    ids_BT, length_B = padded(rows, extra=seed)
    with torch.no_grad():
        states, packed = shared_states(model, ids_BT, length_B)
        for number, row in enumerate(rows):
            if row:
                alone = model.base_model(input_ids=torch.tensor([row])).last_hidden_state[0]
                found = states[packed.row_B[number], packed.place_BT[number, :len(row)]]
                assert (alone - found).abs().max() < (1e-12 if attention == "sdpa" else 2e-6)    # eager softmax is float32 always
    assert packed.ids_RN.numel() < sum(map(len, rows))


@pytest.mark.parametrize("seed", range(3))
def test_scores_and_gradients_are_those_of_every_row_by_itself(seed):
    ids_BT, length_B = padded(family(seed))
    rng = torch.Generator().manual_seed(seed)
    mask_BT = (torch.rand(ids_BT.shape, generator=rng) < 0.5) & (torch.arange(ids_BT.shape[1]) < length_B[:, None])
    mask_BT[:, 0] = False
    weights_BT, found = torch.randn(ids_BT.shape, generator=rng), []
    for share in (False, True):
        model = tiny_model(vocab=V)
        scores = token_scores(model, ids_BT, mask_BT, 0.7, entropy_grad=True, share=share)
        (scores.logp_BT * weights_BT + scores.entropy_BT * weights_BT.flip(0)).sum().backward()
        found.append((scores.logp_BT.detach(), scores.entropy_BT.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])))
    for apart, shared in zip(*found):
        assert apart.abs().max() > 0.1
        assert (apart - shared).abs().max() < 2e-5 * apart.abs().max()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 3), max_size=12), min_size=1, max_size=9), st.integers(1, 64))
def test_packs_hold_every_row_once_and_every_place_its_ancestors(rows, width):
    ids_BT, length_B = padded(rows, extra=1)
    packs = trees([np.array(row) for row in rows], width)
    assert sorted(row for members in packs for row, _ in members) == list(range(len(rows)))
    packed = pack(ids_BT, length_B, width)
    for number, row in enumerate(rows):
        r, places = packed.row_B[number], packed.place_BT[number, :len(row)]
        assert packed.ids_RN[r, places].tolist() == row
        assert packed.positions_RN[r, places].tolist() == list(range(len(row)))
        for t in range(len(row)):
            assert packed.seen_RNN[r, places[t]].nonzero()[:, 0].tolist() == sorted(places[:t + 1].tolist())
    assert bool(packed.seen_RNN.diagonal(dim1=1, dim2=2).all())


def test_equal_rows_cost_one_and_strangers_stay_apart():
    a, b = np.arange(1, 60), np.arange(101, 160)
    assert [len(members) for members in trees([a, b, a, a, b], WIDTH)] == [3, 2]
    assert [pack_size([a, b, a], members) for members in trees([a, b, a], WIDTH)] == [59, 59]
    assert common(a, b) == 0 and common(a, a[:7]) == 7


def test_a_pack_ends_where_attention_would_cost_more_than_sharing_saves():
    rng = np.random.default_rng(0)
    rows = [np.concatenate([np.arange(50), rng.integers(50, 10**6, 400)]) for _ in range(20)]
    assert [len(trees(rows, width)) for width in (8, 8192, 8192**2)] == [20, 3, 1]
    assert [len(pack) for pack in trees(rows, 8192**2, limit=1300)] == [3] * 6 + [2]      # 450 + 2 x 400 tokens


def test_windows_and_attention_without_masks_are_not_shared():
    model = tiny_model(vocab=V)
    assert can_share(model)
    other = copy.deepcopy(model)
    other.config.layer_types = ["full_attention", "sliding_attention"]
    assert not can_share(other)
    model.config._attn_implementation = "flash_attention_2"
    assert not can_share(model)


def groups(seed=0):
    """Trajectories of four prompts in two tasks, four to a group, two turns each."""
    rng, made = random.Random(seed), []
    for n in range(16):
        task, prompt = toy_env.GAMBLES[n // 8], random.Random(n // 4)
        ids = [prompt.randrange(V) for _ in range(40)]
        start = len(ids)
        ids += [rng.randrange(3) for _ in range(rng.randrange(2, 9))]
        mask = [0] * start + [1] * (len(ids) - start)
        made.append(Trajectory(ids, mask, [-rng.random() * 3 * bit for bit in mask], [0 if bit else -1 for bit in mask],
                               [Turn(start, len(ids))], reward=float(rng.random() < 0.5), env_reward=0.0, score=None, success=False,
                               status="completed", task=task, instance_id=f"i{n // 4}", group_id=f"{task}/{n // 4}", seed=n))
    return made


def update_of(method, budget, share):
    """Metrics, gradient and number of tokens computed of one update."""
    config = load_recipe("micro", method=method, tasks=list(toy_env.GAMBLES),
                         **{"optim.micro_batch_tokens": budget, "optim.share_prefixes": share})
    model, fed, captured = tiny_model(vocab=V), [], {}
    forward = model.base_model.forward
    model.base_model.forward = lambda *a, **k: fed.append(k["input_ids"].numel()) or forward(*a, **k)
    learner = Learner(model, get_algorithm(method), config)
    batch = to_batch(groups(), toy_env.GAMBLES)
    learner.score(batch)
    batch.advantages_BT = learner.algorithm.advantages(batch)
    eps = learner.algorithm.pace(task_stats(batch, {}))
    learner._step = lambda: captured.setdefault("g", torch.cat([p.grad.flatten() for p in model.parameters()])).norm().item()
    return learner.update(batch, eps), captured["g"], sum(fed)


@pytest.mark.parametrize("method", ["grpo", "eppo", "pcgrad", "entropy_bonus", "seal"])
@pytest.mark.parametrize("budget", [10**6, 120])
def test_an_update_is_the_same_with_and_without_sharing(method, budget):
    (metrics, gradient, fed), (shared_metrics, shared_gradient, shared_fed) = (update_of(method, budget, share) for share in (False, True))
    assert gradient.abs().max() > 1e-4
    assert (gradient - shared_gradient).abs().max() < 2e-5 * gradient.abs().max()
    for key, value in metrics.items():
        assert shared_metrics[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    assert shared_fed < 0.6 * fed or method == "seal"       # seal reads hidden states: its rows are not shared


def test_micro_batches_of_packs_keep_the_budget_and_hold_every_row_once():
    batch = to_batch(groups(), toy_env.GAMBLES)
    apart, shared = (list(microbatches(batch, 200, width)) for width in (None, 64))
    assert sorted(row for rows in shared for row in rows) == list(range(16)) and len(shared) < len(apart)
    tokens = [np.array(trajectory.ids_T) for trajectory in batch.trajectories]
    for rows in shared:
        packs = trees([tokens[row] for row in rows], 64)
        sizes = [pack_size([tokens[row] for row in rows], members) for members in packs]
        assert len(rows) == 1 or max(sizes) * len(packs) <= 200
