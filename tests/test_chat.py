"""Messages to tokens: what turns see is a prefix of what later turns see; headers and separators carry no mask."""

import copy

import pytest
from models import tiny_tokenizer

from envs.base import assistant_call
from envs.tool_calls import render_turn
from eppo.chat import CUT_MARK, ChatFormat

OPENING = [{"role": "system", "content": "look then answer"}, {"role": "user", "content": "apple"}]
TOOL = [{"role": "tool", "content": "12"}]
QWEN_LIKE = """{%- for message in messages %}{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
STRIPS_THINKING = """{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and not loop.last %}{{ message.content[:3] }}{% else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def with_template(template):
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", [tiny_tokenizer().chat_template, QWEN_LIKE], ids=["micro", "qwen-like"])
def test_pieces_are_the_whole_conversation(template):
    tokenizer = with_template(template)
    chat = ChatFormat(tokenizer)
    said = render_turn(assistant_call("look", word="apple"))
    ids = chat.opening_ids(OPENING, []) + chat.turn_ids(said) + chat.continuation_ids(TOOL, ended=True)
    whole = tokenizer.apply_chat_template([*OPENING, {"role": "assistant", "content": said}, *TOOL], tokenize=False,
                                          add_generation_prompt=True)
    assert tokenizer.decode(ids) == whole


def test_a_message_with_tool_calls_renders_as_its_text():
    tokenizer = tiny_tokenizer()
    call = assistant_call("look", word="apple")
    as_dict, as_text = (tokenizer.apply_chat_template([*OPENING, message], tokenize=False) for message in
                        (call, {"role": "assistant", "content": render_turn(call)}))
    assert as_dict == as_text


def test_a_cut_turn_gets_the_end_that_it_lacks():
    chat = ChatFormat(tiny_tokenizer())
    ended, cut = (chat.continuation_ids(TOOL, ended=flag) for flag in (True, False))
    assert cut == [chat.end_id, *ended] and chat.stop_ids == (chat.end_id,)


def test_templates_that_rewrite_history_are_refused():
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        ChatFormat(with_template(STRIPS_THINKING))


def test_a_long_observation_is_cut_to_the_room_and_marked():
    chat = ChatFormat(tiny_tokenizer())
    long = [{"role": "tool", "content": "apple " * 5000}]
    ids, cut = chat.fitting_continuation(long, True, 60)
    assert len(ids) <= 60 and cut > 29_000
    assert CUT_MARK + "</tool_response>" in chat.tokenizer.decode(ids)
    assert chat.fitting_continuation(TOOL, True, 60) == (chat.continuation_ids(TOOL, True), 0)
    assert chat.fitting_continuation(long, True, 2) == (None, 0)


def test_decode_drops_only_the_end_token():
    chat = ChatFormat(tiny_tokenizer())
    assert chat.decode(chat.turn_ids("apple 12")) == "apple 12"
    assert chat.decode(chat.turn_ids("apple 12")[:-1]) == "apple 12"


@pytest.mark.parametrize("content", ["text", "\u00e9\u4e2d \U0001f600", ("a", "b"), 1.5, None, {1: "a", "1": "b"}, b"bytes"])
def test_what_is_remembered_is_what_is_rendered(content):
    chat = ChatFormat(tiny_tokenizer())
    messages = [{"role": "user", "content": content}]
    direct = chat._open(messages, [])
    assert chat.opening_ids(messages, []) == direct == chat.opening_ids(messages, [])
    assert chat.continuation_ids(messages, ended=True) == chat._continue(messages, True) == chat.continuation_ids(messages, ended=True)


def test_what_was_handed_out_may_be_changed():
    chat = ChatFormat(tiny_tokenizer())
    first = chat.opening_ids([{"role": "user", "content": "a"}], [])
    kept = list(first)
    first.append(1)
    assert chat.opening_ids([{"role": "user", "content": "a"}], []) == kept
