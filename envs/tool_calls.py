"""The one parser of assistant turns, used by training and evaluation alike; it never raises on model text.

Hermes form (Qwen2.5):  free text <tool_call>{"name": "execute_sql", "arguments": {"query": "SELECT 1"}}</tool_call>

What happens to each kind of input (the tests hold this table to its word):

| input | outcome |
|---|---|
| text after the closing brace, one closing brace too many, a ```json fence inside the tag | repaired: as the clean form |
| single quotes, True False None, trailing commas, a raw newline in a string, a backslash that escapes nothing | repaired |
| two objects in one tag | two calls, in order |
| `arguments` as JSON text | decoded once; text that decodes to anything but an object is an error |
| no `arguments`, `null`, missing required argument, wrong type | error that names the argument |
| no `name`, empty name, empty tag, not JSON | error |
| unknown tool | error that lists the known tools |
| argument not in the schema | error that names it |
| call inside <think>…</think>, or after a <think> that never closes | not a call; the turn counts as having none |
| missing </tool_call> | accepted if the object is complete and the turn was not cut off by a limit |
| the tags inside a string of a call's JSON | part of the string |
| more than 64 calls, more than 100,000 characters | the rest is not read |
| lone surrogates | replaced by "?": what comes out can be encoded |

Values follow the schema: integer "5" and 5.0 become 5, boolean "True" becomes True, strings stay as they are ("02134"); numbers
and booleans given for a string become their JSON text. Of an OpenAI-style message only `tool_calls` are calls, whatever its
content says.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

_THINK = re.compile(r"<think>.*?(?:</think>|\Z)", re.S)
_OPEN = re.compile(r"<think>|<tool_call>")
_CLOSE = re.compile(r"</tool_call>|(?=<tool_call>)")
_FENCE = re.compile(r"\s*(?:```(?:json)?)?\s*")
_LOOSE = re.compile(r""" "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' | ,(?=\s*[}\]]) | \b(?:True|False|None)\b """, re.S | re.X)
_ESCAPE = re.compile(r"""\\.|\"""", re.S)
_DECODER = json.JSONDecoder(strict=False)
_MAX_CHARS, _MAX_CALLS = 100_000, 64                        # what lies beyond is not read: bounded work on model text


@dataclass(slots=True)
class ToolCall:
    """One call. `arguments` fit the tool's schema when `error` is None; `raw` are the arguments as the model wrote them."""

    name: str
    arguments: dict[str, Any]
    error: str | None = None
    raw: Any = None
    id: str | None = None


@dataclass(slots=True)
class ParsedTurn:
    """A turn taken apart: `calls` in order, `content` without the calls and the thinking, `error` of the first bad call."""

    calls: list[ToolCall] = field(default_factory=list)
    content: str = ""
    error: str | None = None


def parse_turn(turn: str | dict[str, Any], tools: list[dict[str, Any]], finish_reason: str = "stop") -> ParsedTurn:
    """Take an assistant turn apart.

    Args:
        turn: text, or an OpenAI-style message with `content` and `tool_calls`.
        tools: OpenAI-format tool list.
        finish_reason: "length" means that the text was cut off: an unclosed call at its end is then not executed.
    """
    if isinstance(turn, dict):
        return _parse_message(turn, tools)
    text, calls, content, at = str(turn)[:_MAX_CHARS], [], [], 0
    while len(calls) < _MAX_CALLS and (match := _OPEN.search(text, at)):
        content.append(text[at:match.start()])
        if match.group() == "<think>":
            at = _THINK.match(text, match.start()).end()
            continue
        body, at, closed = _cut_tag(text, match.end())
        if not closed and at == len(text) and finish_reason == "length":
            calls.append(ToolCall("", {}, "the call was cut off by the token limit"))
        else:
            calls.extend(_read_tag(body, tools))
    content.append(text[at:])
    return ParsedTurn(calls, _encodable("".join(content).strip()), next((call.error for call in calls if call.error), None))


def _cut_tag(text: str, start: int) -> tuple[str, int, bool]:
    """The body of the tag that opens before `start`, where the text goes on, and whether the tag was closed."""
    _, length = _read_object(text[(begin := _FENCE.match(text, start).end()):])
    close = _CLOSE.search(text, begin + length)              # after the first object: its strings may hold the tags
    if close is None:
        return text[start:], len(text), False
    return text[start:close.start()], close.end(), bool(close.group())


def render_turn(message: dict[str, Any]) -> str:
    """The Hermes text of an assistant message: what `parse_turn` reads back as the same calls."""
    parts = [message["content"]] if message.get("content") else []
    for call in message.get("tool_calls") or []:
        arguments = call["function"]["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        body = json.dumps({"name": call["function"]["name"], "arguments": arguments}, ensure_ascii=False)
        if "<tool_call>" in body or "</tool_call>" in body:  # so that every reader of the tags, not only ours, reads it back
            body = body.replace("<", "\\u003c")
        parts.append(f"<tool_call>\n{body}\n</tool_call>")
    return "\n".join(parts)


def _parse_message(message: dict[str, Any], tools: list[dict[str, Any]]) -> ParsedTurn:
    content = message.get("content")
    entries = message.get("tool_calls")
    parsed = ParsedTurn(content=_encodable(_THINK.sub("", content).strip()) if isinstance(content, str) else "")
    for entry in entries if isinstance(entries, list) else []:
        function = entry.get("function") if isinstance(entry, dict) else None
        call = _read_call(function if isinstance(function, dict) else entry, tools)
        call.id = entry.get("id") if isinstance(entry, dict) and isinstance(entry.get("id"), str) else None
        parsed.calls.append(call)
    parsed.error = next((call.error for call in parsed.calls if call.error), None)
    return parsed


def _read_tag(body: str, tools: list[dict[str, Any]]) -> list[ToolCall]:
    body = re.sub(r"\A\s*```(?:json)?|```\s*\Z", "", body.strip()).strip()
    if not body:
        return [ToolCall("", {}, "empty tool call")]
    objects, rest = [], body
    while rest.startswith("{") or not objects:
        value, end = _read_object(rest)
        if value is None:
            if not objects:
                return [ToolCall("", {}, "the tool call is not a JSON object with name and arguments")]
            break
        objects.append(value)
        rest = rest[end:].lstrip(" \t\r\n,;")
    return [_read_call(value, tools) for value in objects]


def _read_object(text: str) -> tuple[dict[str, Any] | None, int]:
    """The object at the start of `text` and where it ends; what `_repair` can mend is mended. (None, 0) if there is none."""
    try:
        value, end = _DECODER.raw_decode(text)
        return (value, end) if isinstance(value, dict) else (None, 0)
    except (ValueError, RecursionError):
        end = _closing_brace(text) if text.startswith("{") else None
    if end is None:
        return None, 0
    try:
        value = _DECODER.decode(_LOOSE.sub(_repair, text[:end]))
    except (ValueError, RecursionError):
        return None, 0
    return (value, end) if isinstance(value, dict) else (None, 0)


def _repair(match: re.Match[str]) -> str:
    """One loose piece of JSON made strict: a string, a trailing comma, or one of Python's constants."""
    piece = match.group()
    if piece[0] not in "\"'":
        return {",": "", "True": "true", "False": "false", "None": "null"}[piece]
    return '"' + _ESCAPE.sub(_repair_escape, piece[1:-1]) + '"'


def _repair_escape(match: re.Match[str]) -> str:
    """One escape, or a bare double quote, of a string that is to become a JSON string."""
    piece = match.group()
    return {'"': '\\"', "\\'": "'"}.get(piece) or (piece if piece[1] in '"\\/bfnrtu' else "\\" + piece)


def _closing_brace(text: str) -> int | None:
    depth, quote, skip = 0, "", False
    for position, char in enumerate(text):
        if skip:
            skip = False
        elif quote:
            skip = char == "\\"
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return position + 1
    return None


def _encodable(value: Any) -> Any:
    """`value` with lone surrogates replaced, in strings however deep."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(entry) for key, entry in value.items()}
    return [_encodable(entry) for entry in value] if isinstance(value, list) else value


def _read_call(value: Any, tools: list[dict[str, Any]]) -> ToolCall:
    try:
        value = _encodable(value)
    except RecursionError:
        return ToolCall("", {}, "the tool call is nested too deeply")
    if not isinstance(value, dict):
        return ToolCall("", {}, "the tool call is not a JSON object with name and arguments")
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name:
        return ToolCall("", {}, "the tool call has no name", arguments)
    if isinstance(arguments, str):
        try:
            arguments = _encodable(_DECODER.decode(arguments))
        except (ValueError, RecursionError):
            return ToolCall(name, {}, "arguments is text that is not a JSON object", value.get("arguments"))
    known = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    if name not in known:
        return ToolCall(name, {}, f"unknown tool {name[:60]!r}; the tools are: {', '.join(known)}", arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, "arguments must be a JSON object", arguments)
    return _fit(name, arguments, known[name])


def _fit(name: str, arguments: dict[str, Any], schema: dict[str, Any]) -> ToolCall:
    properties, fitted = schema.get("properties", {}), {}
    for key in schema.get("required", []):
        if arguments.get(key) is None:
            return ToolCall(name, {}, f"{name}: missing argument {key!r}", arguments)
    for key, value in arguments.items():
        if key not in properties:
            return ToolCall(name, {}, f"{name}: unknown argument {str(key)[:60]!r}; the arguments are: {', '.join(properties)}",
                            arguments)
        if value is None:
            continue
        fitted[key], wanted = _convert(value, properties[key])
        if wanted:
            return ToolCall(name, {}, f"{name}: argument {key!r} must be {wanted}", arguments)
    return ToolCall(name, fitted, None, arguments)


def _convert(value: Any, schema: dict[str, Any]) -> tuple[Any, str | None]:
    """The value in the schema's type, and what was wanted if it does not fit."""
    kind = schema.get("type", "string")
    if kind == "string":
        return (value, None) if isinstance(value, str) else \
            (json.dumps(value, ensure_ascii=False), None) if isinstance(value, (int, float, bool)) else (value, "a string")
    if kind == "boolean":
        lowered = str(value).lower()
        return (lowered == "true", None) if lowered in ("true", "false") else (value, "true or false")
    if kind in ("integer", "number"):
        number = _number(value)
        if number is None or (kind == "integer" and number != int(number)):
            return value, "an integer" if kind == "integer" else "a number"
        return (int(number) if kind == "integer" else number), None
    if kind == "array":
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                return value, "a list"
        if not isinstance(value, list):
            return value, "a list"
        items = [_convert(item, schema.get("items", {})) for item in value]
        return [item for item, _ in items], next((f"a list of {wanted}" for _, wanted in items if wanted), None)
    return (value, None) if isinstance(value, dict) else (value, "an object")


def _number(value: Any) -> int | float | None:
    """A finite number, exact where it is an integer; None if `value` is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if isinstance(value, int):
        return value
    try:
        return int(value) if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]+\s*", value) else \
            number if math.isfinite(number := float(value)) else None
    except (ValueError, OverflowError):
        return None
