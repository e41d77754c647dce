"""One training trajectory, however its steps are cut: for every method, several optimiser steps of the learner with other
micro-batches, another order of rows, and padding of any length. In float64, so that only the order of sums is left."""

import random

import pytest
import torch
from method_batches import NAMES, episodes, learner_of, take_steps

BATCHES = [episodes(seed, groups=1) for seed in range(2)]
PER_BATCH = ("seal/auc", "seal/accuracy", "seal/cosine_gap")    # of a micro-batch, averaged: diagnostics, not part of the step


def shuffled(rows):
    order = list(range(len(rows)))
    random.Random(0).shuffle(order)
    return [rows[index] for index in order]


@pytest.mark.parametrize("name", NAMES)
def test_the_same_trajectory(name):
    records, weights = take_steps(learner_of(name), BATCHES)
    start = torch.cat([value.detach().flatten() for value in learner_of(name).parameters])
    moved = (weights - start).norm()
    assert moved > 1e-2
    for micro, batches, padding in ((1, BATCHES, 0), (90, [shuffled(rows) for rows in BATCHES], 77)):
        others, ends = take_steps(learner_of(name, micro), batches, padding=padding)
        assert (ends - weights).norm() < 1e-6 * moved, micro
        for one, other in zip(records, others):
            assert set(one) - set(PER_BATCH) == set(other) - set(PER_BATCH), micro
            for key in set(one) - set(PER_BATCH):
                assert other[key] == pytest.approx(one[key], rel=1e-5, abs=1e-8, nan_ok=True), (micro, key)


@pytest.mark.parametrize("name", ["seal", "clip_cov", "kl_cov", "epo_hinge"])
def test_the_steps_do_what_the_method_says(name):
    """The trajectories above are not those of grpo: the part that could depend on the batch's shape is at work."""
    settings = {"epo_hinge": dict(max_ratio=0.5, smooth=50.0)}.get(name, {})
    changed = {"seal": dict(coef=0.0), "clip_cov": dict(cov_low=1e3, cov_high=2e3), "kl_cov": dict(cov_coef=0.0),
               "epo_hinge": dict(penalty=0.0)}[name]
    ends = [take_steps(learner_of(name, **settings | one), BATCHES)[1] for one in ({}, changed)]
    assert (ends[0] - ends[1]).norm() > 1e-3
