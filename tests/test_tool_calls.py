"""The parser of assistant turns, held to the table in `envs/tool_calls.py`."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.base import assistant_call, function_tool
from envs.tool_calls import ToolCall, parse_turn, render_turn

TOOLS = [function_tool("bash", "Run.", cmd="script"), function_tool("execute_sql", "Query.", query="SQL"),
         function_tool("count", "Count.", number={"type": "integer"}), function_tool("switch", "Switch.",
                                                                                     on={"type": "boolean"}),
         function_tool("weigh", "Weigh.", mass={"type": "number"}),
         function_tool("commit", "Answer.", answers={"type": "array", "items": {"type": "string"}})]
CLEAN = '{"name": "bash", "arguments": {"cmd": "ls"}}'


def tagged(body):
    return f"<tool_call>{body}</tool_call>"


def only(turn, **settings):
    parsed = parse_turn(turn, TOOLS, **settings)
    assert len(parsed.calls) == 1
    return parsed.calls[0]


def good(turn, **settings):
    call = only(turn, **settings)
    assert call.error is None
    return call.name, call.arguments


@pytest.mark.parametrize("body", [
    CLEAN, f"\n{CLEAN}\n", CLEAN + " done", CLEAN + "}", CLEAN + "\n}}", f"```json\n{CLEAN}\n```", f"```\n{CLEAN}```",
    "{'name': 'bash', 'arguments': {'cmd': 'ls'}}", '{"name":"bash","arguments":{"cmd":"ls",},}',
    json.dumps({"name": "bash", "arguments": '{"cmd": "ls"}'})])
def test_repaired_forms_give_the_clean_call(body):
    assert good(tagged(body)) == ("bash", {"cmd": "ls"})


@pytest.mark.parametrize("body, cmd", [
    ('{"name": "bash", "arguments": {"cmd": "a\nb"}}', "a\nb"),
    (r'{"name": "bash", "arguments": {"cmd": "grep \.txt f"}}', r"grep \.txt f"),
    (r'{"name": "bash", "arguments": {"cmd": "echo \'x\'"}}', "echo 'x'"),
    (r"""{'name': 'bash', 'arguments': {'cmd': 'say "it\'s" \\"now\\" \n'}}""", 'say "it\'s" \\"now\\" \n'),
    ('{"name": "bash", "arguments": {"cmd": "a,}b,]"},}', "a,}b,]"),
    ('{"name": "bash", "arguments": {"cmd": "True, None", }}', "True, None"),
    ("{'name': 'bash', 'arguments': {'cmd': True}}", "true"),
    ('{"name": "bash", "arguments": {"cmd": "echo </tool_call> <tool_call> <think>"}}',
     "echo </tool_call> <tool_call> <think>")])
def test_strings_survive_repair(body, cmd):
    assert good(tagged(body)) == ("bash", {"cmd": cmd})


def test_two_objects_in_one_tag_are_two_calls_in_order():
    calls = parse_turn(tagged(CLEAN + '\n{"name": "count", "arguments": {"number": 2}}'), TOOLS).calls
    assert calls == [ToolCall("bash", {"cmd": "ls"}, None, {"cmd": "ls"}), ToolCall("count", {"number": 2}, None,
                                                                                    {"number": 2})]


def test_two_tags_are_two_calls_and_the_text_around_them_is_content():
    parsed = parse_turn(f"first {tagged(CLEAN)} then {tagged(CLEAN)} end", TOOLS)
    assert [call.arguments for call in parsed.calls] == [{"cmd": "ls"}] * 2
    assert (parsed.content, parsed.error) == ("first  then  end", None)


@pytest.mark.parametrize("body, error", [
    ('{"name": "execute_sql"}', "execute_sql: missing argument 'query'"),
    ('{"name": "execute_sql", "arguments": null}', "execute_sql: missing argument 'query'"),
    ('{"name": "execute_sql", "arguments": {}}', "execute_sql: missing argument 'query'"),
    ('{"name": "execute_sql", "arguments": {"query": null}}', "execute_sql: missing argument 'query'"),
    ('{"name": "execute_sql", "arguments": {"query": ["SELECT 1"]}}', "execute_sql: argument 'query' must be a string"),
    ('{"name": "execute_sql", "arguments": {"query": "SELECT 1", "limit": 3}}',
     "execute_sql: unknown argument 'limit'; the arguments are: query"),
    ('{"name": "exec_sql", "arguments": {"query": "SELECT 1"}}',
     "unknown tool 'exec_sql'; the tools are: bash, execute_sql, count, switch, weigh, commit"),
    ('{"name": "", "arguments": {}}', "the tool call has no name"),
    ('{"name": 3, "arguments": {}}', "the tool call has no name"),
    ('{"arguments": {"cmd": "ls"}}', "the tool call has no name"),
    ("", "empty tool call"), (" \n", "empty tool call"), ("```json\n```", "empty tool call"),
    ("ls -la", "the tool call is not a JSON object with name and arguments"),
    ("[1, 2]", "the tool call is not a JSON object with name and arguments"),
    ('{"name": "bash", "arguments": {"cmd": "ls"', "the tool call is not a JSON object with name and arguments"),
    ('{"name": "bash", "arguments": "[1]"}', "arguments must be a JSON object"),
    ('{"name": "bash", "arguments": "5"}', "arguments must be a JSON object"),
    ('{"name": "bash", "arguments": "ls"}', "arguments is text that is not a JSON object"),
    ('{"name": "bash", "arguments": [1]}', "arguments must be a JSON object"),
    ('{"name": "count", "arguments": {"number": "abc"}}', "count: argument 'number' must be an integer"),
    ('{"name": "count", "arguments": {"number": 5.5}}', "count: argument 'number' must be an integer"),
    ('{"name": "count", "arguments": {"number": true}}', "count: argument 'number' must be an integer"),
    ('{"name": "count", "arguments": {"number": "inf"}}', "count: argument 'number' must be an integer"),
    ('{"name": "weigh", "arguments": {"mass": NaN}}', "weigh: argument 'mass' must be a number"),
    ('{"name": "switch", "arguments": {"on": "perhaps"}}', "switch: argument 'on' must be true or false"),
    ('{"name": "commit", "arguments": {"answers": "plum"}}', "commit: argument 'answers' must be a list"),
    ('{"name": "commit", "arguments": {"answers": [["plum"]]}}', "commit: argument 'answers' must be a list of a string")])
def test_errors_say_what_is_wrong(body, error):
    parsed = parse_turn(tagged(body), TOOLS)
    assert [call.error for call in parsed.calls] == [error]
    assert parsed.error == error


@pytest.mark.parametrize("tool, key, value, expected", [
    ("count", "number", "5", 5), ("count", "number", 5.0, 5), ("count", "number", "5.0", 5), ("count", "number", -3, -3),
    ("count", "number", "12345678901234567891", 12345678901234567891), ("switch", "on", "True", True),
    ("switch", "on", False, False),
    ("weigh", "mass", "2.5", 2.5), ("weigh", "mass", 2, 2), ("bash", "cmd", "02134", "02134"), ("bash", "cmd", "1e5", "1e5"),
    ("bash", "cmd", 7, "7"),
    ("bash", "cmd", True, "true"), ("bash", "cmd", "", ""), ("commit", "answers", ["a", 2], ["a", "2"]),
    ("commit", "answers", '["a"]', ["a"]),
    ("commit", "answers", [], [])])
def test_values_follow_the_schema(tool, key, value, expected):
    name, arguments = good(tagged(json.dumps({"name": tool, "arguments": {key: value}})))
    assert (name, arguments) == (tool, {key: expected})
    assert type(arguments[key]) is type(expected)


@pytest.mark.parametrize("turn, content", [
    (f"<think>I could run {tagged(CLEAN)} but no</think>All done.", "All done."),
    (f"<think>I could run {tagged(CLEAN)}", ""),
    (f"Well. <think>{tagged(CLEAN)}</think>", "Well."),
    ("", ""), ("just text", "just text")])
def test_no_call(turn, content):
    parsed = parse_turn(turn, TOOLS)
    assert (parsed.calls, parsed.content, parsed.error) == ([], content, None)


def test_a_call_after_the_thinking_counts():
    assert good(f"<think>hm {tagged('{}')}</think>\n{tagged(CLEAN)}") == ("bash", {"cmd": "ls"})


def test_an_unclosed_call_counts_unless_the_turn_was_cut_off():
    assert good("<tool_call>" + CLEAN) == ("bash", {"cmd": "ls"})
    assert only("<tool_call>" + CLEAN, finish_reason="length").error == "the call was cut off by the token limit"
    assert good(tagged(CLEAN) + " and so", finish_reason="length") == ("bash", {"cmd": "ls"})
    calls = parse_turn("<tool_call>" + CLEAN + tagged(CLEAN), TOOLS, finish_reason="length").calls
    assert [call.error for call in calls] == [None, None]


def test_a_message_dict_reads_like_its_text():
    message = assistant_call("bash", cmd="ls")
    message["tool_calls"][0]["id"] = "call-7"
    assert good(message) == good(tagged(CLEAN))
    assert only(message).id == "call-7"
    message["tool_calls"][0]["function"]["arguments"] = '{"cmd": "ls"}'
    assert good(message) == ("bash", {"cmd": "ls"})
    assert parse_turn({"role": "assistant", "content": tagged(CLEAN)}, TOOLS).calls == []


@pytest.mark.parametrize("calls", [3, "x", {"a": 1}, [None], [3], [{}], [{"function": None}],
                                   [{"function": {"name": ["bash"], "arguments": {}}}],
                                   [[CLEAN]], [{"function": {"name": "bash", "arguments": {"cmd": {"a": 1}}}}]])
def test_strange_messages_are_errors_or_no_call(calls):
    parsed = parse_turn({"role": "assistant", "content": 5, "tool_calls": calls}, TOOLS)
    assert all(call.error for call in parsed.calls)
    assert len(parsed.calls) == (len(calls) if isinstance(calls, list) else 0)


def test_string_and_dict_arguments_render_to_the_same_text_with_one_encoding():
    by_dict = assistant_call("execute_sql", query='SELECT "a" FROM t')
    by_text = assistant_call("execute_sql")
    by_text["tool_calls"][0]["function"]["arguments"] = json.dumps({"query": 'SELECT "a" FROM t'})
    assert render_turn(by_dict) == render_turn(by_text)
    call = '{"name": "execute_sql", "arguments": {"query": "SELECT \\"a\\" FROM t"}}'
    assert render_turn(by_dict) == f"<tool_call>\n{call}\n</tool_call>"


PIECES = st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "</think>", "{", "}", "[", "]", '"', "'", "\\", ",", ":",
                          "\n", " ", "```json",
                          '{"name": "bash"', '"arguments": ', '"cmd"', "null", "1e999", "a"])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(PIECES | st.characters(exclude_categories=["Cs"]), max_size=12).map("".join), min_size=1, max_size=3))
def test_what_is_rendered_reads_back_as_the_same_calls(texts):
    message = {"role": "assistant", "content": "", "tool_calls": [assistant_call("bash", cmd=text)["tool_calls"][0]
                                                                  for text in texts]}
    parsed = parse_turn(render_turn(message), TOOLS)
    assert [(call.name, call.arguments, call.error) for call in parsed.calls] == [("bash", {"cmd": text}, None)
                                                                                  for text in texts]


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES | st.just("\ud800"), max_size=40).map("".join))
def test_no_text_raises_and_what_comes_out_can_be_encoded(text):
    parsed = parse_turn(text, TOOLS)
    json.dumps([[call.name, call.arguments, call.error] for call in parsed.calls], ensure_ascii=False).encode()
    parsed.content.encode()


@pytest.mark.parametrize("text", ["<tool_call>" + "{" * 90_000, "<tool_call>{'" * 9_000, "<think>" * 15_000,
                                  "<tool_call>" * 9_000, tagged(CLEAN) * 3_000,
                                  tagged('{"name": "bash", "arguments": {"cmd": ' + "[" * 40_000 + "]" * 40_000 + "}}"),
                                  tagged('{"name": "count", "arguments": {"number": ' + "9" * 50_000 + "}}"),
                                  "<tool_call>" + '"' * 90_000 + "'" * 9_000])
def test_huge_and_deep_text_is_read_in_bounded_time(text):
    begin = time.process_time()
    parsed = parse_turn(text, TOOLS)
    assert time.process_time() - begin < 3.0
    assert len(parsed.calls) <= 64
