"""Where a run's policy comes from: a model folder or hub id as it is, or `micro`, trained here by imitation and cached.

The cache folder (results/cache/warm_start/<key>) is an ordinary Hugging Face model folder with a warm_start.json beside it. Its
key hashes every setting and every source file that shapes the result, so a stale start can never be picked up.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import nn

import envs
from eppo.chat import ChatFormat
from eppo.config import ROOT, RunConfig
from eppo.generate import TransformersGenerator, stable_seed
from eppo.imitation import Demonstration, demonstrate, encode, imitate, imitation_batches
from eppo.policy import build_micro_model, load_policy, train_micro_tokenizer
from eppo.rollouts import EnvPool, Job, RolloutLimits, run_jobs

CACHE = ROOT / "results" / "cache" / "warm_start"
CHECK_EPISODES = 32                                         # per task and check
CHECKS, FIRST_CHECK = 12, 8                                 # checks of the loss; from which on success is sampled too
ENOUGH = 0.45                                               # mean success over tasks at which imitation stops early
Report = Callable[[str], None]


def start_policy(config: RunConfig, report: Report = lambda line: None) -> tuple[nn.Module, Any, str]:
    """Model, tokenizer and the hex digest of the start weights."""
    path = str(warm_start(config, report)) if config.model.path == "micro" else config.model.path
    device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    model, tokenizer = load_policy(path, config.model.dtype, device)
    return model, tokenizer, weights_digest(model)


def weights_digest(model: nn.Module) -> str:
    """Hex digest over names and bytes of all weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def cache_key(config: RunConfig) -> str:
    """Hash of the settings, library versions and source files that a warm start depends on."""
    import tokenizers
    import transformers

    settings = config.to_dict()
    del settings["env"]["extra"]                            # no warm start learns from these
    digest = hashlib.sha256(json.dumps({"warm_start": settings["warm_start"], "env": settings["env"],
                                        "tasks": config.tasks, "max_tokens": config.rollout.max_tokens,
                                        "max_turn_tokens": config.rollout.max_turn_tokens, "versions": [
                                            torch.__version__, tokenizers.__version__, transformers.__version__]},
                                       sort_keys=True).encode())
    sources = sorted(path for path in (ROOT / "envs").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    sources += (ROOT / "eppo" / name for name in ("chat.py", "gradient_worker.py", "imitation.py", "policy.py", "warm_start.py"))
    for path in sources:
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    for task in config.tasks:                               # an environment of the user's own lies elsewhere, or in a notebook's cell
        module = sys.modules[envs.env_class(task).__module__]
        path = Path(getattr(module, "__file__", None) or ROOT)
        if path.is_file() and ROOT / "envs" not in path.parents:
            digest.update(task.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def warm_start(config: RunConfig, report: Report = lambda line: None) -> Path:
    """The folder of the warm-started micro model of this configuration, trained now if it is not cached.

    Raises:
        ValueError: a task never succeeds when `max_tokens_seen` is used up; names it.
    """
    folder = CACHE / cache_key(config)
    if (folder / "warm_start.json").exists():
        report(f"warm start: cached in {folder}")
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=CACHE))
    try:
        info = _make(config, scratch, report)
        (scratch / "warm_start.json").write_text(json.dumps(info, indent=1, sort_keys=True) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _make(config: RunConfig, folder: Path, report: Report) -> dict[str, Any]:
    settings, started = config.warm_start, time.perf_counter()
    demos, tools = collect(config)
    played_s = time.perf_counter() - started
    texts = [text for demo in demos for text in _texts(demo)]
    tokenizer = train_micro_tokenizer(texts, [tool for kit in tools.values() for tool in kit], settings.vocab)
    chat = ChatFormat(tokenizer)
    encoded: dict[str, list] = {task: [] for task in config.tasks}
    for demo in demos:
        encoded[demo.task].append(encode(demo, chat, tools[demo.task]))
    lengths = {task: sum(len(ids) for ids, _ in rows) / len(rows) for task, rows in encoded.items()}
    expert = {task: sum(d.success for d in demos if d.task == task) / len(rows) for task, rows in encoded.items()}
    report(f"warm start: {len(demos)} expert episodes in {played_s:.0f} s; tokens an episode "
           + ", ".join(f"{task} {length:.0f}" for task, length in lengths.items()))
    model = build_micro_model(len(tokenizer), hidden=settings.hidden, layers=settings.layers, heads=settings.heads,
                              kv_heads=settings.kv_heads, mlp=settings.mlp, max_tokens=config.rollout.max_tokens, seed=settings.seed)
    history = list(_train(config, model, chat, encoded, report))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    last = history[-1]
    return {"success": last["success"], "tokens_seen": last["tokens"], "loss": last["loss"], "history": history,
            "tokens_per_episode": lengths, "max_tokens_per_episode": {t: max(len(i) for i, _ in rows) for t, rows in encoded.items()},
            "expert_success": expert, "parameters": sum(p.numel() for p in model.parameters()), "vocab": len(tokenizer),
            "settings": config.to_dict()["warm_start"],
            "perf": {"demonstrations_s": played_s, "total_s": time.perf_counter() - started}}


def _texts(demo: Demonstration) -> Iterator[str]:
    for message in demo.opening:
        yield message["content"]
    for text, messages in demo.turns:
        yield text
        yield from (message["content"] for message in messages)


def collect(config: RunConfig) -> tuple[list[Demonstration], dict[str, list[dict[str, Any]]]]:
    """The demonstrations of every task, over its first training instances, and each task's tools."""
    import random

    settings = config.warm_start
    noise = settings.noise if isinstance(settings.noise, float) else None

    def play(task: str) -> tuple[list[Demonstration], list[dict[str, Any]]]:
        rate = noise if noise is not None else settings.noise[task]
        with make_env(config, task, "train") as env:
            try:
                return [demonstrate(env, number % len(env.instances), rate, random.Random(f"{settings.seed}/{task}/{number}"))
                        for number in range(settings.episodes)], env.tools
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                raise envs.EnvFault(f"warm start: an expert's episode of {task} failed at {place.filename}:{place.lineno}: "
                                    f"{type(error).__name__}: {error}; `python -m envs check {task}` says more") from error

    with ThreadPoolExecutor(len(config.tasks)) as threads:
        played = dict(zip(config.tasks, threads.map(play, config.tasks)))
    return [demo for demos, _ in played.values() for demo in demos], {task: tools for task, (_, tools) in played.items()}


def make_env(config: RunConfig, task: str, split: str, *, extra: bool = False) -> envs.Env:
    """An environment of the run, with the further training instances that the configuration names if `extra`."""
    env = config.env
    more = {"extra": env.extra[task]} if extra and task in env.extra else {}
    return envs.make(task, source=env.source, size=env.size, split=split, rules=env.rules, path=env.path, **more)


def _train(config: RunConfig, model: nn.Module, chat: ChatFormat, encoded: dict[str, list], report: Report) -> Iterator[dict[str, Any]]:
    """Imitate until every task's sampled success reaches the target; yields the checks."""
    settings = config.warm_start
    share = {task: settings.share.get(task, 1.0) for task in config.tasks}
    mean_tokens = sum(share[task] * sum(len(ids) for ids, _ in rows) / len(rows) for task, rows in encoded.items()) / sum(share.values())
    updates = max(1, int(settings.max_tokens_seen / (mean_tokens * settings.batch_episodes)))
    batches = imitation_batches(encoded, share, settings.batch_episodes, settings.seed)
    pool = EnvPool(lambda task: make_env(config, task, "dev"))
    check_every, success = -(-updates // CHECKS), {}      # rounded up: the last check is that of the last update
    started = time.perf_counter()
    try:
        with closing(imitate(model, batches, updates=updates, lr=settings.lr, processes=min(2, len(os.sched_getaffinity(0))))) as imitation:
            for update, loss, tokens in imitation:
                if update % check_every and update != updates:
                    continue
                success = sampled_success(config, model, chat, pool) if update >= FIRST_CHECK * check_every else {}
                report(f"warm start: update {update}/{updates}, {tokens / 1e6:.2f} M tokens, {time.perf_counter() - started:.0f} s, "
                       f"loss {loss:.3f} nats" + "".join(f", {task} {value:.2f}" for task, value in success.items()))
                yield {"update": update, "tokens": tokens, "loss": loss, "success": success}
                inside = success and settings.target_low <= min(success.values()) and max(success.values()) <= settings.target_high
                if inside and sum(success.values()) / len(success) >= ENOUGH:
                    return
    finally:
        pool.close()
    off = ", ".join(f"{task} {value:.2f}" for task, value in success.items()
                    if not settings.target_low <= value <= settings.target_high)
    if off:
        report(f"warm start: warning: outside {settings.target_low} to {settings.target_high}: {off}; change warm_start.share or noise")
    if min(success.values()) == 0 and settings.target_low > 0:
        raise ValueError(f"warm start: after {tokens / 1e6:.1f} M tokens a task never succeeds, so RL could not learn from it ({off}); "
                         "raise its warm_start.share, lower its warm_start.noise, or raise warm_start.max_tokens_seen")


def sampled_success(config: RunConfig, model: nn.Module, chat: ChatFormat, pool: EnvPool,
                    episodes: int = CHECK_EPISODES) -> dict[str, float]:
    """Success rate of each task when sampling at the run's temperature on its first dev instances."""
    rollout = config.rollout
    limits = RolloutLimits(rollout.max_tokens, rollout.max_turn_tokens, rollout.max_turns, rollout.temperature)
    jobs = []
    for task in config.tasks:
        env = pool.take(task)
        pool.give_back(env)
        jobs += [Job(task, number % len(env.instances), f"check/{task}", stable_seed("check", task, number)) for number in range(episodes)]
    generator = TransformersGenerator(model, max_active=rollout.concurrency)
    trajectories = run_jobs(jobs, pool, generator, chat, limits, workers=rollout.workers, concurrency=rollout.concurrency)
    return {task: sum(t.success for t in trajectories if t.task == task) / episodes for task in config.tasks}
