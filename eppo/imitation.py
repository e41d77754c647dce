"""Imitation: a small model learns to act by imitating noisy expert episodes, until RL has something to improve.

Demonstrations are played by each environment's own expert, whose turns are replaced by plausible mistakes with a task's
`noise` probability; the expert recovers. The model imitates the mistakes too: what it then samples succeeds sometimes, which is
where group-relative RL learns from. Token layout is that of rollouts, to the bit (`eppo.chat`).
"""

from __future__ import annotations

import math
import random
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Iterator, Mapping, Sequence

import torch
from torch import nn

from envs.tool_calls import render_turn
from eppo.chat import ChatFormat
from eppo.gradient_worker import Example, GradientWorker, part_gradients, two_parts


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A noisy expert episode as text: opening messages, then (assistant text, messages that answered it) per turn."""

    task: str
    opening: list[dict[str, Any]]
    turns: list[tuple[str, list[dict[str, Any]]]]
    success: bool


def demonstrate(env: Any, index: int, noise: float, rng: random.Random, max_turns: int | None = None) -> Demonstration:
    """Play instance `index` with an expert whose turns are mistakes with probability `noise`."""
    opening, turns, result = env.reset(index, seed=0), [], None
    for _ in range(max_turns or env.max_turns):
        text = render_turn(env.mistake(rng) if rng.random() < noise else env.expert())
        result = env.step(text)
        turns.append((text, [{key: message[key] for key in ("role", "content")} for message in result.messages]))
        if result.done:
            break
    return Demonstration(env.task, [dict(message) for message in opening], turns, result.reward == 1.0)


def encode(demo: Demonstration, chat: ChatFormat, tools: Sequence[dict[str, Any]]) -> Example:
    """Ids and mask of a demonstration; the mask is 1 on assistant turns with their end token, as in a sampled trajectory."""
    ids = chat.opening_ids(demo.opening, tools)
    mask = [0] * len(ids)
    for number, (text, messages) in enumerate(demo.turns):
        turn = chat.turn_ids(text)
        ids, mask = ids + turn, mask + [1] * len(turn)
        if number + 1 < len(demo.turns):
            more = chat.continuation_ids(messages, ended=True)
            ids, mask = ids + more, mask + [0] * len(more)
    return ids, mask


def imitation_batches(encoded: Mapping[str, Sequence[Example]], share: Mapping[str, float], size: int,
                      seed: int) -> Iterator[list[Example]]:
    """Endless batches of `size` episodes; a task's expected part is proportional to its `share`, its episodes come epoch by epoch."""
    rng = random.Random(f"imitation/{seed}")
    tasks = list(encoded)
    queues: dict[str, list] = {task: [] for task in tasks}
    while True:
        batch = []
        for task in rng.choices(tasks, weights=[share[task] for task in tasks], k=size):
            if not queues[task]:
                queues[task] = rng.sample(list(encoded[task]), len(encoded[task]))
            batch.append(queues[task].pop())
        yield batch


def imitate(model: nn.Module, batches: Iterator[list[Example]], *, updates: int, lr: float, warmup: int = 30,
            processes: int = 1) -> Iterator[tuple[int, float, int]]:
    """AdamW on the mean negative log-likelihood of assistant tokens; linear warm-up, then linear decay to a tenth.

    Yields (update, loss in nats per token, tokens seen) after every update.

    Args:
        processes: with 2, a `GradientWorker` computes a part of every batch on another core; the result is the same to the bit.
    """
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(
        (step + 1) / warmup, 1.0 - 0.9 * max(0, step - warmup) / max(1, updates - warmup)))
    tokens = 0
    with _worker(model) if processes > 1 else nullcontext() as worker:
        for update in range(updates):
            batch = next(batches)
            count = sum(sum(mask) for _, mask in batch)
            here, there = two_parts(batch)
            handed_over = worker is not None and worker.start(there, count)
            loss, gradients = part_gradients(model, here, count)
            other_loss, others = (worker.result() if handed_over else None) or part_gradients(model, there, count)
            loss += other_loss
            if not math.isfinite(loss):
                raise FloatingPointError(f"warm start: the loss is {loss} at update {update}; lower warm_start.lr")
            for parameter, gradient, other in zip(parameters, gradients, others):
                parameter.grad = gradient.add_(other)
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            tokens += sum(len(ids) for ids, _ in batch)
            yield update + 1, loss, tokens


def _worker(model: nn.Module) -> AbstractContextManager[GradientWorker | None]:
    try:
        return GradientWorker(model)
    except (OSError, RuntimeError) as error:
        warnings.warn(f"the warm start goes on in one process: {error}", stacklevel=3)
        return nullcontext()
