"""Models as lm-eval calls them: one that is watched (a seed for every request, what was cut), and two that check the scoring.

    lm_eval.simple_evaluate(Watched(lm, seed=0), tasks=["gsm8k"])      # .marks: (task, item) -> what happened to its request
    lm_eval.simple_evaluate(Canary(perfect=True), tasks=["gsm8k"])     # must score 1.0; Canary(perfect=False) answers nothing: 0
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import replace
from typing import Any, TextIO

import torch

from eval.transfer_tasks import STOCK

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM, CacheHook
    from lm_eval.api.registry import register_model
    from lm_eval.models.api_models import TemplateAPI
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import normalize_gen_kwargs
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("the transfer benchmarks need lm-eval: pip install -e '.[eval]'") from error

ANSWERS = {task: stock.answer for stock in STOCK.values() for task in stock.subtasks or (stock.name,)}
UNKNOWN = {"truncated": None, "prompt_cut": None, "prompt_tokens": None, "seed": None}


def request_seed(seed: int, repeat: int, prompt: str) -> int:
    """Seed of one request, in 0..2**31 - 1: a function of the run's seed, the repeat and the item's prompt."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{repeat}/{prompt}".encode()).digest()[:4]) >> 1


class Watched(LM):
    """`inner`, an LM of lm-eval, with a seed for every sampled request and a note of what was cut.

    lm-eval's own seeds reach no request that is sampled: its APIs get a constant, its engines draw from whatever state there is. Here
    a request's noise depends on (seed, repeat, prompt) alone. A transformers model therefore samples one request at a time; vLLM
    and APIs take the seed with the request. Greedy requests pass unchanged, in batches.

    `marks`: (task, item) -> truncated (ended by the limit of new tokens), prompt_cut (did not fit the context and lost its beginning),
    prompt_tokens, seed; None where the model does not tell. A model with a `think_end_token` that ends inside its thoughts has given
    no answer: its text is replaced by "". `progress`: where the model's progress bar goes; None: stderr as it is.

    Raises:
        ValueError: a prompt that begins with two BOS tokens, or a context that is too short for the new tokens alone.
    """

    def __init__(self, inner: LM, seed: int = 0, repeat: int = 0, progress: TextIO | None = None) -> None:
        super().__init__()
        self.inner, self.seed, self.repeat, self.progress = inner, seed, repeat, progress
        self._rank, self._world_size = inner.rank, inner.world_size
        self.marks: dict[tuple[str, int], dict[str, Any]] = {}
        self._pending: deque[dict[str, Any]] = deque()      # rows of the batch that came last, in order
        self._ends: dict[Any, dict[str, Any]] = {}          # prompt -> how its text ended

    def __getattr__(self, name: str) -> Any:                # whatever LM itself has not
        return getattr(self.inner, name)

    @property
    def tokenizer_name(self) -> str:
        return self.inner.tokenizer_name

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.inner.chat_template(chat_template)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> Any:
        return self.inner.apply_chat_template(chat_history, add_generation_prompt)

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        return self.inner.loglikelihood(requests)

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        return self.inner.loglikelihood_rolling(requests)

    # ---- generation
    def generate_until(self, requests: list[Instance]) -> list[str]:
        sampled = bool(requests) and _is_sampled(requests[0].args[1])
        seeds = [request_seed(self.seed, self.repeat, _text(request.args[0])) if sampled else None for request in requests]
        for request, seed in zip(requests, seeds):
            self.marks[request.task_name, request.doc_id] = UNKNOWN | self._measure(request) | {"seed": seed}
        self._ends.clear()
        with self._watching(), redirect_stderr(self.progress or sys.stderr):
            if not sampled or isinstance(self.inner, TemplateAPI):
                texts = self.inner.generate_until(requests)
            elif isinstance(self.inner, HFLM):
                texts = [self._one(request, seed) for request, seed in zip(requests, seeds)]
            else:
                texts = self.inner.generate_until([replace(request, arguments=(request.args[0], request.args[1] | {"seed": seed}))
                                                   for request, seed in zip(requests, seeds)])
        return [self._finish(request, text) for request, text in zip(requests, texts, strict=True)]

    def _one(self, request: Instance, seed: int) -> str:
        torch.manual_seed(seed)
        return self.inner.generate_until([request], disable_tqdm=True)[0]

    def _measure(self, request: Instance) -> dict[str, Any]:
        """Length of the prompt, and whether it fits, where the model has a tokenizer of its own."""
        if getattr(self.inner, "tokenizer", None) is None or not isinstance(request.args[0], str):
            return {}
        new = normalize_gen_kwargs(request.args[1], self.inner.max_gen_toks)["max_gen_toks"]
        room = self.inner.max_length - new
        if room < 1:
            raise ValueError(f"{request.task_name} generates up to {new} tokens, but the model's context is {self.inner.max_length}: "
                             "pass a smaller max_new_tokens")
        tokens = len(self.inner.tok_encode(request.args[0]))
        return {"prompt_tokens": tokens, "prompt_cut": tokens > room}

    def _finish(self, request: Instance, text: str) -> str:
        end = self._ends.get(request.args[0], {})
        self.marks[request.task_name, request.doc_id]["truncated"] = end.get("truncated")
        return "" if end.get("unfinished_thought") else text

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Batches tell how each text ended (`_model_generate`, `parse_generations`), the cache hook whose text it was."""
        with ExitStack() as stack:
            if isinstance(self.inner, TemplateAPI):
                stack.enter_context(_replaced(self.inner, "parse_generations", self._parse))
                stack.enter_context(_replaced(self.inner, "_create_payload", self._payload))
            elif hasattr(self.inner, "_model_generate"):
                stack.enter_context(_replaced(self.inner, "_model_generate", self._generate))
            before = self.inner.cache_hook
            self.inner.set_cache_hook(_Ends(self, before))
            stack.callback(self.inner.set_cache_hook, before)
            yield

    def _generate(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        batch = original(*args, **kwargs)
        if torch.is_tensor(batch):
            batch, ends = _end_rows(self.inner, batch, **kwargs)
        else:
            ends = [_vllm_end(self.inner, one) for one in batch]
        self._pending = deque(ends)
        return batch

    def _parse(self, original: Callable, outputs: Any, **kwargs: Any) -> Any:
        answers = outputs if isinstance(outputs, list) else [outputs]
        self._pending = deque({"truncated": choice["finish_reason"] == "length" if choice.get("finish_reason") else None}
                              for answer in answers for choice in answer["choices"])
        return original(outputs=outputs, **kwargs)

    def _payload(self, original: Callable, messages: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        payload = original(messages, *args, **kwargs)
        if payload.get("temperature"):
            payload["seed"] = request_seed(self.seed, self.repeat, json.dumps(messages, ensure_ascii=False))
        return payload


class _Ends(CacheHook):
    """lm-eval tells the cache hook of every text as it comes, with its prompt; a cache that was there before still hears of it."""

    def __init__(self, watched: Watched, before: CacheHook) -> None:
        super().__init__(None)
        self.watched, self.before = watched, before

    def add_partial(self, attr: str, req: Any, res: Any) -> None:
        if self.watched._pending:
            self.watched._ends[req[0]] = self.watched._pending.popleft()
        self.before.add_partial(attr, req, res)


def _end_rows(lm: HFLM, batch: torch.Tensor, *, context: torch.Tensor, attention_mask: torch.Tensor, stop: Sequence[str],
              **_: Any) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """Rows of transformers' output that end where their text ends, and how: with an end token or stop string, or at the limit.

    A row may run on behind its end while others of its batch are not done: behind an end token that the model's generation settings
    do not name, and behind a stop string. lm-eval drops special tokens before it looks for these strings, so that what follows a special
    one would count as part of the answer.
    """
    tokenizer, ids = lm.tokenizer, lm.model.generation_config.eos_token_id
    for prompt, mask in zip(context, attention_mask):
        if tokenizer.bos_token_id is not None and prompt[mask.bool()][:2].tolist() == [tokenizer.bos_token_id] * 2:
            raise ValueError("a prompt begins with two BOS tokens, the template's and the tokenizer's: add_bos_token=False in model_args")
    last = {lm.eot_token_id, *(ids if isinstance(ids, list) else [ids])} - {None}
    last |= {token for token, text in zip(tokenizer.all_special_ids, tokenizer.all_special_tokens) if text in stop}
    batch, ends = batch.clone(), []
    for row in batch[:, context.shape[1]:]:
        tokens = row.tolist()
        end = next((place for place, token in enumerate(tokens) if token in last), None)
        if end is not None:
            row[end + 1:] = tokenizer.pad_token_id          # special: not part of the text
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        ends.append({"truncated": end is None and not any(part and part in text for part in stop),
                     "unfinished_thought": _unfinished(lm, text, tokens)})
    return batch, ends


def _vllm_end(lm: LM, output: Any) -> dict[str, Any]:
    one = output.outputs[0]
    return {"truncated": one.finish_reason == "length", "unfinished_thought": _unfinished(lm, one.text, one.token_ids)}


def _unfinished(lm: LM, text: str, ids: Sequence[int]) -> bool:
    end = getattr(lm, "think_end_token", None)
    return end is not None and (end not in ids if isinstance(end, int) else end not in text)


def _is_sampled(kwargs: dict[str, Any]) -> bool:
    normal = normalize_gen_kwargs(kwargs)
    return bool(normal["do_sample"] and normal.get("temperature"))


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else prompt.prompt     # a chat as JSON


@contextmanager
def _replaced(lm: LM, name: str, function: Callable) -> Iterator[None]:
    """`lm.name` replaced, on this object alone, by a function that gets the original first."""
    original, own = getattr(lm, name), vars(lm).get(name)
    setattr(lm, name, lambda *args, **kwargs: function(original, *args, **kwargs))
    try:
        yield
    finally:
        delattr(lm, name)
        if own is not None:
            setattr(lm, name, own)


@register_model("canary")
class Canary(LM):
    """Answers every item of the transfer tasks perfectly, or nothing: what scores neither 1.0 nor 0 is a fault of the scoring."""

    def __init__(self, perfect: bool = True, **_: Any) -> None:
        super().__init__()
        self.perfect = perfect

    def generate_until(self, requests: list[Instance]) -> list[str]:
        return [ANSWERS[request.task_name](request.doc) if self.perfect else "" for request in requests]

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise NotImplementedError("the canary checks tasks that generate")

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        raise NotImplementedError("the canary checks tasks that generate")

    @property
    def tokenizer_name(self) -> str:
        return "canary"

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return "\n".join(f"{message['role']}: {message['content']}" for message in chat_history)
