"""Messages to tokens, once, for warm start, training and evaluation: what is trained is exactly what was sampled and seen.

A sampled turn is never rendered or tokenised again. What the template puts after it (the end of the assistant message, the
observation, the next generation prompt) is found by rendering a stand-in conversation and cutting off its known beginning, then
tokenised on its own and masked.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, Sequence

Message = dict[str, Any]
_ASKED, _SAID = {"role": "user", "content": "Hi."}, "A reply."
CUT_MARK = " [cut]"
REMEMBERED = 256                                            # texts: a group's episodes open alike, and often go on alike


class ChatFormat:
    """How one tokenizer's chat template lays out a dialogue.

    Attributes:
        stop_ids: ids that end a sampled turn.

    Raises:
        ValueError: the template rewrites history (turn n + 1's prompt would not begin with what turn n saw), so that it cannot be
            trained on token by token.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._opening, self._continuation = lru_cache(REMEMBERED)(self._opening_ids), lru_cache(REMEMBERED)(self._continuation_ids)
        said = self._render([_ASKED, {"role": "assistant", "content": _SAID}])
        prompt = self._render([_ASKED], add_generation_prompt=True)
        if not said.startswith(prompt) or _SAID not in said[len(prompt):]:
            raise ValueError("the chat template does not continue its own generation prompt; it cannot be trained on turn by turn")
        self._said = said
        self.turn_end = said[said.rindex(_SAID) + len(_SAID):]
        end_ids = self._encode(self.turn_end)
        if not end_ids:
            raise ValueError("the chat template has no end-of-turn token after an assistant message")
        self.end_id = end_ids[0]
        eos = tokenizer.eos_token_id
        self.stop_ids = tuple(dict.fromkeys([self.end_id] + ([eos] if eos is not None else [])))
        self._after_end = end_ids[1:]
        self.continuation_ids([{"role": "user", "content": "More."}], ended=True)

    def _render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None,
                add_generation_prompt: bool = False) -> str:
        return self.tokenizer.apply_chat_template(list(messages), tools=list(tools) if tools else None, tokenize=False,
                                                  add_generation_prompt=add_generation_prompt)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def opening_ids(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """Ids of the opening messages and of the first generation prompt."""
        texts = _as_json(messages), _as_json(tools)
        return self._open(messages, tools) if None in texts else list(self._opening(*texts))

    def _opening_ids(self, messages: str, tools: str) -> list[int]:
        return self._open(json.loads(messages), json.loads(tools))

    def _open(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        return self._encode(self._render(messages, tools, add_generation_prompt=True))

    def continuation_ids(self, messages: Sequence[Message], ended: bool) -> list[int]:
        """Ids between two sampled turns: the rest of the first turn's end, `messages`, the next generation prompt.

        Args:
            ended: whether the sampled turn ended with a stop token (else the whole end of turn is added).
        """
        text = _as_json(messages)
        return self._continue(messages, ended) if text is None else list(self._continuation(text, ended))

    def _continuation_ids(self, messages: str, ended: bool) -> list[int]:
        return self._continue(json.loads(messages), ended)

    def _continue(self, messages: Sequence[Message], ended: bool) -> list[int]:
        whole = self._render([_ASKED, {"role": "assistant", "content": _SAID}, *messages], add_generation_prompt=True)
        if not whole.startswith(self._said):
            raise ValueError("the chat template rewrites earlier turns when messages follow; it cannot be trained on token by token. "
                             "Use a template that only appends (for reasoning models: one that keeps <think> text in history)")
        end = self._after_end if ended else [self.end_id, *self._after_end]
        return [*end, *self._encode(whole[len(self._said):])]

    def fitting_continuation(self, messages: Sequence[Message], ended: bool, room: int) -> tuple[list[int] | None, int]:
        """`continuation_ids` cut to at most `room` tokens by shortening the longest contents, and how many characters went.

        Returns (None, 0) when not even empty contents fit. A cut content ends with a mark.
        """
        ids, messages, cut = self.continuation_ids(messages, ended), [dict(message) for message in messages], 0
        while len(ids) > room:
            longest = max(messages, key=lambda message: len(message["content"]), default=None)
            text = longest["content"].removesuffix(CUT_MARK) if longest else ""
            if not text:
                return None, 0
            keep = max(0, min(len(text) - 1, int(len(text) * room / len(ids)) - len(CUT_MARK)))
            cut += len(text) - keep
            longest["content"] = text[:keep] + CUT_MARK if keep else ""
            ids = self.continuation_ids(messages, ended)
        return ids, cut

    def turn_ids(self, text: str) -> list[int]:
        """Ids of an assistant turn that was written, not sampled (demonstrations), with its end token."""
        return [*self._encode(text), self.end_id]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a sampled turn, without the end token."""
        ids = list(ids[:-1]) if ids and ids[-1] in self.stop_ids else list(ids)
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _as_json(content: Sequence[Any]) -> str | None:
    """`content` as JSON, by which it can be remembered; None where it would come back as something else."""
    try:
        text = json.dumps(list(content))
        return text if json.loads(text) == list(content) else None
    except (TypeError, ValueError):
        return None
