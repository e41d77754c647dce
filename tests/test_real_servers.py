"""Real OpenAI-compatible servers on this machine, and vLLM as a generator, against the same weights sampled here.

`transformers serve` needs the packages of transformers[serving]; vLLM is tried where it is installed, also as a CPU build. A policy that
has learnt two toy tasks plays them greedily: the episodes must be the same, whoever renders the dialogue and samples the tokens.
"""

import os
import random
import socket
import subprocess
import sys
import time

import httpx
import pytest
import torch
import toy_env
from models import tiny_tokenizer

import envs
from eppo.chat import ChatFormat
from eppo.imitation import demonstrate, encode
from eppo.policy import build_micro_model
from eval.agentbench import evaluate
from eval.policies import open_policy

pytestmark = pytest.mark.extended
LIMITS = {"size": "micro", "max_tokens": 200, "max_turn_tokens": 40}
COLUMNS = ["task", "instance", "success", "status", "turns", "tokens", "sampled_tokens", "invalid_calls"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder whose policy has imitated the toy tasks' experts for a few seconds."""
    chat, rng = ChatFormat(tiny_tokenizer()), random.Random(0)
    model = build_micro_model(len(tiny_tokenizer()), hidden=64, layers=2, heads=2, kv_heads=1, mlp=128)     # heads of 32, as vLLM wants
    episodes = []
    for task in toy_env.TOY_TASKS:
        with envs.make(task, split="train") as env:
            episodes += [encode(demonstrate(env, index, 0.05, rng), chat, env.tools) for index in range(40)]
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        batch = rng.sample(episodes, 16)
        width = max(len(ids) for ids, _ in batch)
        ids_BT = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in batch])
        mask_BT = torch.tensor([mask + [0] * (width - len(mask)) for _, mask in batch]).bool()
        logits = model(ids_BT, attention_mask=torch.ones_like(ids_BT)).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits[mask_BT[:, 1:]], ids_BT[:, 1:][mask_BT[:, 1:]])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.generation_config.eos_token_id = tiny_tokenizer().eos_token_id               # where servers look for the end of a turn
    path = tmp_path_factory.mktemp("policy")
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def here(folder):
    with open_policy(folder) as policy:
        rows = evaluate(policy.generator, toy_env.TOY_TASKS, (0,), tokenizer=policy.chat, temperature=0.0, **LIMITS)
    assert 0.2 < rows["success"].mean()                     # it has learnt something
    return rows[COLUMNS]


def serve(command, log):
    """Start a server and wait until it answers; returns the process and its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", *command, "--host", "127.0.0.1", "--port", str(port)], env=environment,
                               stdout=log, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 240
    while True:
        try:
            httpx.get(f"http://127.0.0.1:{port}/health").raise_for_status()
            return process, f"http://127.0.0.1:{port}/v1"
        except httpx.HTTPError:
            assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.3)


def played_by(command, folder, tmp_path, **settings):
    with open(tmp_path / "server.log", "w") as log:
        process, url = serve(command, log)
        try:
            with open_policy(folder, endpoint=url, **settings) as policy:
                return evaluate(policy.generator, toy_env.TOY_TASKS, (0,), temperature=0.0, concurrency=4, policy=policy.about, **LIMITS)
        finally:
            process.terminate()
            process.wait(30)


def test_transformers_serve_plays_the_same_episodes(folder, here, tmp_path):
    for package in ("fastapi", "openai"):
        pytest.importorskip(package, reason="transformers[serving] is not installed")
    command = ["transformers.cli.transformers", "serve", str(folder), "--device", "cpu", "--dtype", "float32"]
    rows = played_by(command, folder, tmp_path, token_limit="max_tokens", body={"tool_choice": None}, calls="text")
    assert rows[COLUMNS].to_dict("records") == here.to_dict("records")
    assert (rows["prompt_tokens"] > 0).all() and rows["attempts"].equals(rows["turns"])


def test_vllms_server_plays_the_same_episodes(folder, here, tmp_path):
    pytest.importorskip("vllm", reason="vllm is not installed")
    command = ["vllm.entrypoints.openai.api_server", "--model", str(folder), "--dtype", "float32", "--enforce-eager",
               "--kv-cache-memory-bytes", str(2**28), "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    rows = played_by(command, folder, tmp_path)
    assert rows[COLUMNS].to_dict("records") == here.to_dict("records")


def test_vllm_samples_what_transformers_samples(folder, here):
    pytest.importorskip("vllm", reason="vllm is not installed")
    settings = {"enforce_eager": True, "kv_cache_memory_bytes": 2**28}
    with open_policy(folder, backend="vllm", dtype="float32", **settings) as policy:
        rows = evaluate(policy.generator, toy_env.TOY_TASKS, (0,), tokenizer=policy.chat, temperature=0.0, **LIMITS)
        assert rows[COLUMNS].to_dict("records") == here.to_dict("records")
        first, again = (evaluate(policy.generator, toy_env.TOY_TASKS, (0, 1), tokenizer=policy.chat, temperature=1.0, concurrency=at_once,
                                 **LIMITS) for at_once in (1, 16))
    assert first[COLUMNS].to_dict("records") == again[COLUMNS].to_dict("records")       # noise goes by (seed, task, instance, turn)
    halves = [part[COLUMNS[2:]].to_dict("records") for _, part in first.groupby("seed")]
    assert halves[0] != halves[1]
