"""Sampling with vLLM: token ids in, token ids out, for evaluating a checkpoint at speed. The only module that imports vllm.

Tried with vLLM 0.32. The weights are those of the folder or hub id; this generator takes no new ones (`sync`).
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from eppo.generate.protocol import FRESH, Completion, Request

HINT = "vLLM is not installed; pip install -e '.[gpu]' (Linux with an NVIDIA GPU) brings it; without one use backend transformers"


class VLLMGenerator:
    """A vLLM engine behind the generator protocol. Threads may share it: vLLM batches whatever is being asked.

    Args:
        path: a model's folder or hub id.
        dtype: of the weights.
        version: the policy version of these weights.
        engine: further arguments of vLLM's engine, such as tensor_parallel_size, gpu_memory_utilization, max_model_len.

    Raises:
        ImportError: vLLM is not installed; says how to install it.
    """

    def __init__(self, path: str, *, dtype: str = "bfloat16", version: int = 0, **engine: Any) -> None:
        try:
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise ImportError(f"{HINT} ({error})") from error
        self.path, self.version = path, version
        self._sessions: dict[str, list[int]] = {}
        self._count, self._lock = 0, threading.Lock()
        # Processed log-probabilities are those at the sampling temperature; no sampling defaults of the model's own (top-p and such).
        settings = {"model": path, "dtype": dtype, "logprobs_mode": "processed_logprobs", "generation_config": "vllm",
                    "enable_prefix_caching": True} | engine
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

        async def start() -> Any:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))

        self._engine = asyncio.run_coroutine_threadsafe(start(), self._loop).result()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample one turn per request; blocks until all are done."""

        async def all_of_them() -> list[Completion]:
            return await asyncio.gather(*map(self._one, requests))

        return asyncio.run_coroutine_threadsafe(all_of_them(), self._loop).result()

    async def _one(self, request: Request) -> Completion:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if request.pool != FRESH:
            raise ValueError(f"unknown pool {request.pool!r}; this generator has one: {FRESH}")
        ids = self._sessions.setdefault(request.session, [])
        ids.extend(request.new_ids)
        with self._lock:
            self._count += 1
            name = f"{request.session}#{self._count}"
        params = SamplingParams(temperature=request.temperature, max_tokens=request.max_tokens, seed=request.seed, logprobs=0,
                                stop_token_ids=list(request.stop_ids), ignore_eos=True, detokenize=False,
                                output_kind=RequestOutputKind.FINAL_ONLY)
        final = None
        async for output in self._engine.generate({"prompt_token_ids": list(ids)}, params, name):
            final = output
        answer = final.outputs[0]
        sampled = list(answer.token_ids)
        logp = [step[token].logprob for token, step in zip(sampled, answer.logprobs)]
        ids.extend(sampled)
        stopped = bool(sampled) and sampled[-1] in request.stop_ids
        return Completion(sampled, logp, "stop" if stopped else "length", self.version, FRESH)

    def end(self, session: str) -> None:
        """Forget a session; vLLM drops its cache when it needs the room."""
        self._sessions.pop(session, None)

    def sync(self, module: nn.Module, version: int, pool: str = FRESH) -> None:
        raise RuntimeError("this generator serves the weights that it was started with; start another one for other weights")

    def fingerprint(self, pool: str = FRESH) -> str:
        """Hex digest of the folder's weight files; of a hub id, the id and the revision that is cached."""
        digest, files = hashlib.sha256(), sorted(Path(self.path).glob("*.safetensors"))
        for file in files:
            with open(file, "rb") as opened:
                while block := opened.read(1 << 24):
                    digest.update(block)
        if not files:
            from huggingface_hub import try_to_load_from_cache

            digest.update(f"{self.path}@{try_to_load_from_cache(self.path, 'config.json')}".encode())
        return digest.hexdigest()[:16]

    def close(self) -> None:
        """End the engine; safe to call twice."""
        if self._engine is None:
            return

        async def stop() -> None:                           # in its own loop, where the engine's reader can be cancelled first
            self._engine.shutdown()

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result()
        self._engine = None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._sessions.clear()
