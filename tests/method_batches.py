"""Batches, steps and tiny runs for tests of methods."""

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import toy_env
from models import tiny_model, tiny_tokenizer

from eppo.algorithms import ALGORITHMS, AgentRL, Forward, get_algorithm
from eppo.batching import to_batch
from eppo.config import load_recipe
from eppo.controls import Schedule
from eppo.learner import Learner, mean_metrics
from eppo.measure import task_stats
from eppo.records import read_run
from eppo.trainer import train
from eppo.types import Batch, TaskStats, Trajectory, Turn

TASKS = ("db", "kg", "os")
NAN = math.nan
SCHEDULED = ("c1_per_task", "c4_yoked")
NAMES = tuple(ALGORITHMS)
# The published shares and ranges of Clip-Cov and KL-Cov choose next to nothing from a batch this small.
CHOOSING = {"clip_cov": {"frac": 0.1, "cov_low": 0.01}, "kl_cov": {"frac": 0.1}}
RECORDED = Schedule("recorded", 9, ({"db": .15, "kg": .22, "os": .26}, {"db": .3, "kg": .2, "os": .17}) * 8)
STEPS = ({"db": 1.0, "kg": 0.5, "os": 2.0}, {"db": 0.6, "kg": 0.5, "os": 2.4}, {"db": 0.4, "kg": 0.6, "os": 2.0})
MODEL = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=8)),
                        device=torch.device("cpu"))


def make_batch(seed=0, groups=2, size=4, tasks=TASKS, drift=0.4, rewards=None, turns=2):
    """`groups` groups of `size` rollouts per task of two turns, float64; the policy has moved by about `drift` nats."""
    generator = torch.Generator().manual_seed(seed)
    count, length = len(tasks) * groups * size, 14

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    group_ids_B = torch.arange(count) // size
    rewards_B = torch.tensor(rewards, dtype=torch.float64) if rewards else (normal(count) > 0).double()
    mask_BT, trajectories = torch.zeros(count, length, dtype=torch.bool), []
    for row in range(count):
        spans, position = [], 2
        for number in range(turns):
            stop = position + int(torch.randint(1, 4, (1,), generator=generator))
            spans.append(Turn(position, stop, f"page {int(torch.randint(2, (1,), generator=generator))}" if number else "start",
                              float(rewards_B[row]) if number == turns - 1 else 0.0))
            mask_BT[row, position:stop] = True
            position = stop + 2
        trajectories.append(Trajectory([0] * (position - 2), mask_BT[row, :position - 2].int().tolist(), [], [], spans,
                                       float(rewards_B[row]),
                                       float(rewards_B[row]), None, bool(rewards_B[row] == 1), "completed",
                                       tasks[row // (groups * size)], f"i{group_ids_B[row]}", f"g{group_ids_B[row]}", row))
    sampler_BT = -2 * normal(count, length).abs() * mask_BT
    return Batch(tasks, torch.zeros(count, length, dtype=torch.long), mask_BT, sampler_BT, group_ids_B // groups, group_ids_B,
                 rewards_B,
                 trajectories, policy_logp_BT=(sampler_BT + drift * normal(count, length)) * mask_BT,
                 ref_logp_BT=(sampler_BT - 0.1) * mask_BT, entropy_BT=normal(count, length).abs() * mask_BT)


def stats(entropies, tokens=10, **fields):
    return {task: TaskStats(value * tokens, value**2 * tokens, tokens, **fields) for task, value in entropies.items()}


def begun(name, **settings):
    """The method as a run would begin it; an arm that replays a schedule gets RECORDED."""
    if name in SCHEDULED:
        method = get_algorithm(name, **{"schedule_from": "recorded"} | settings)
        method.schedules = (RECORDED,)
        return method
    method = get_algorithm(name, **CHOOSING.get(name, {}) | settings)
    method.begin(MODEL, TASKS, 3, 0)
    if getattr(method, "head", None) is not None:
        method.head.double()
    return method


def forward_of(batch, seed=1):
    """What the training pass would give, with gradients."""
    generator = torch.Generator().manual_seed(seed)
    hidden_BTD = torch.randn(*batch.mask_BT.shape, 8, generator=generator, dtype=torch.float64)
    return [value.clone().requires_grad_() for value in (batch.policy_logp_BT, batch.entropy_BT, hidden_BTD)]


def parts_of(method, batch):
    """The method's step on a batch up to the loss: pacing, advantages, bounds, denominator."""
    for step in STEPS:
        batch = replace(batch, advantages_BT=method.advantages(batch))
        eps = method.pace(stats({task: value for task, value in step.items() if task in batch.tasks}))
    lo_BT, hi_BT = method.bounds(batch, eps, batch.policy_logp_BT if "policy_pass" in method.needs else None)
    return batch, lo_BT, hi_BT, method.denominator(batch.mask_BT)


def step_loss(method, part, tensors, lo_BT, hi_BT, count):
    terms = [method.token_loss(tensors[0], part, lo_BT, hi_BT), *method.extra(Forward(*tensors), part).values()]
    return sum(method.reduce(term, part.mask_BT, count) for term in terms)


def loss_and_gradients(method, batch, micro=None, rows=None):
    """One optimiser step's loss and its gradients on log-probabilities, entropies and hidden states, as the learner forms
    them."""
    batch, lo_BT, hi_BT, count = parts_of(method, batch)
    tensors, total = forward_of(batch), 0.0
    rows = list(range(len(batch.mask_BT))) if rows is None else rows
    for start in range(0, len(rows), micro or len(rows)):
        picked = rows[start:start + (micro or len(rows))]
        part = batch.select(picked)
        width = part.mask_BT.shape[1]
        loss = step_loss(method, part, [one[picked, :width] for one in tensors], lo_BT[picked, :width], hi_BT[picked, :width],
                         count)
        loss.backward()
        total += float(loss.detach())
    return total, [torch.zeros_like(one) if one.grad is None else one.grad for one in tensors]


def same(one, other, tolerance=1e-10):
    pairs = zip(one[1], other[1])
    return one[0] == pytest.approx(other[0], abs=tolerance) and all(torch.allclose(a, b, atol=tolerance) for a, b in pairs)


def common(name, **settings):
    """The method on grpo's pipeline, so that only its own part differs."""
    return begun(name, **{"kl_coef": 0.0, "task_norm": False, "dual_clip": 3.0} | settings)


# ---- steps of a learner on episodes that nobody played ------------------------------------------------------------------
def episodes(seed=0, groups=2, size=4, tasks=("toy_coin", "toy_dice")):
    """Episodes of random tokens, two turns each, `groups` of `size` a task; some rewards differ within every group."""
    rng, made = random.Random(seed), []
    for task in tasks:
        for number in range(groups * size):
            start, first, gap, second = rng.randrange(3, 8), rng.randrange(2, 12), rng.randrange(1, 5), rng.randrange(2, 9)
            mask = [0] * start + [1] * first + [0] * gap + [1] * second
            turns = [Turn(start, start + first, "start"), Turn(len(mask) - second, len(mask), f"page {rng.randrange(2)}")]
            reward = float(number % size == 0 or rng.random() < 0.4) * float(number % size != 1)
            made.append(Trajectory([rng.randrange(300) for _ in mask], mask, [-rng.random() * 6 * bit for bit in mask],
                                   [0 if bit else -1 for bit in mask], turns, reward, reward, None, reward == 1.0, "completed", task,
                                   f"i{number // size}", f"{task}/{seed}/{number // size}", rng.randrange(2**40)))
    return made


def learner_of(name, micro_batch_tokens=10**6, **settings):
    """A learner in float64 on a tiny model."""
    config = load_recipe("micro", tasks=["toy_coin", "toy_dice"], **{"optim.micro_batch_tokens": micro_batch_tokens, "optim.lr": 1e-3})
    method = get_algorithm(name, **{"schedule_from": "recorded"} if name in SCHEDULED else {}, **CHOOSING.get(name, {}) | settings)
    if name in SCHEDULED:
        method.begin = lambda *run: AgentRL.begin(method, *run)
        method.schedules = (replace(RECORDED, eps=tuple({"toy_coin": one["db"], "toy_dice": one["os"]} for one in RECORDED.eps)),)
    learner = Learner(tiny_model(scale=1.5).double(), method, config)
    if getattr(method, "head", None) is not None:
        method.head.double()
    return learner


def take_steps(learner, batches, epochs=2, padding=0):
    """Optimiser steps on rollout batches as the trainer takes them; the metrics of each rollout batch and the final weights."""
    clipped, records = {}, []
    for rows in batches:
        batch = to_batch(rows, learner.config.tasks)
        if padding:
            wide = {name: torch.nn.functional.pad(getattr(batch, name), (0, padding)) for name in ("ids_BT", "mask_BT", "sampler_logp_BT")}
            batch = replace(batch, **wide)
        learner.score(batch)
        batch.advantages_BT = learner.algorithm.advantages(batch)
        eps = learner.algorithm.pace(task_stats(batch, clipped))
        updates = [learner.update(batch, eps) for _ in range(epochs)]
        metrics = mean_metrics(updates) | learner.algorithm.metrics()
        clipped = {task: (metrics[f"task/{task}/clip_high_frac"], metrics[f"task/{task}/clip_low_frac"]) for task in learner.config.tasks}
        records.append(metrics)
    return records, torch.cat([value.detach().flatten().double() for value in learner.parameters])


# ---- runs ---------------------------------------------------------------------------------------------------------------
TINY = {"steps": 3, "rollout.prompts_per_task": 1, "rollout.group_size": 5, "rollout.max_tokens": 96,
        "rollout.max_turn_tokens": 12,
        "rollout.lag": 0, "optim.minibatches": 1, "optim.epochs": 2, "optim.lr": 3e-3, "validation.instances": 0,
        "validate_every": 0,
        "checkpoint_every": 3, "trajectories": "none", "threads": 1}


def start_folder(tmp_path_factory):
    """A model folder that smoke runs train from."""
    folder = tmp_path_factory.mktemp("start")
    tiny_model(scale=1.5).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def smoke_run(start, out, name, seed=0, **changes):
    """Three steps of ten episodes on toy tasks; the record. `changes`: the method's settings, and keys of the recipe."""
    settings = {key if "." in key or key in TINY else f"algorithm.{key}": value for key, value in changes.items()}
    list(train(load_recipe("micro", method=name, tasks=list(toy_env.GAMBLES), seed=seed, out=str(out),
                           **{"model.path": str(start), **TINY, **settings})))
    return read_run(out)
