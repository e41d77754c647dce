"""The one parser of assistant turns, used by training and evaluation alike; it never raises on model text.

Hermes form (Qwen2.5):  free text <tool_call>{"name": "execute_sql", "arguments": {"query": "SELECT 1"}}</tool_call>

What happens to each kind of input (the tests hold this table to its word):

| input | outcome |
|---|---|
| text after the closing brace, one closing brace too many, a ```json fence inside the tag, single quotes, trailing commas | repaired: same call as the clean form |
| two objects in one tag | two calls, in order |
| `arguments` as JSON text | decoded once; text that decodes to anything but an object is an error |
| no `arguments`, `null`, missing required argument, wrong type | error that names the argument |
| no `name`, empty name, empty tag, not JSON | error |
| unknown tool | error that lists the known tools |
| argument not in the schema | error that names it |
| call inside <think>…</think>, or after a <think> that never closes | not a call; the turn counts as having none |
| missing </tool_call> | accepted if the object is complete and the turn was not cut off by a limit |

Values follow the schema: integer "5" and 5.0 become 5, boolean "True" becomes True, strings stay as they are ("02134").
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass, field
from typing import Any

_THINK = re.compile(r"<think>.*?(?:</think>|\Z)", re.S)
_TAG = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.S)
_MAX_CHARS = 100_000                                        # a longer turn is cut before parsing: bounded work on model text


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
    text = _THINK.sub("", str(turn)[:_MAX_CHARS])
    parsed = ParsedTurn(content=_TAG.sub("", text).strip())
    for match in _TAG.finditer(text):
        if finish_reason == "length" and not match.group(0).endswith("</tool_call>"):
            parsed.calls.append(ToolCall("", {}, "the call was cut off by the token limit"))
            continue
        parsed.calls.extend(_read_tag(match.group(1), tools))
    parsed.error = next((call.error for call in parsed.calls if call.error), None)
    return parsed


def render_turn(message: dict[str, Any]) -> str:
    """The Hermes text of an assistant message: what `parse_turn` reads back as the same calls."""
    parts = [message["content"]] if message.get("content") else []
    for call in message.get("tool_calls") or []:
        arguments = call["function"]["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        body = json.dumps({"name": call["function"]["name"], "arguments": arguments}, ensure_ascii=False)
        parts.append(f"<tool_call>\n{body}\n</tool_call>")
    return "\n".join(parts)


def _parse_message(message: dict[str, Any], tools: list[dict[str, Any]]) -> ParsedTurn:
    content = message.get("content")
    parsed = ParsedTurn(content=_THINK.sub("", content).strip() if isinstance(content, str) else "")
    for entry in message.get("tool_calls") or []:
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
    """The object at the start of `text` and where it ends; single quotes and trailing commas are repaired."""
    try:
        value, end = json.JSONDecoder(strict=False).raw_decode(text)
        return (value, end) if isinstance(value, dict) else (None, 0)
    except (ValueError, RecursionError):
        end = _closing_brace(text)
    if end is None:
        return None, 0
    chunk = text[:end]
    for candidate in (re.sub(r",(\s*[}\]])", r"\1", chunk), chunk):
        for read in (json.loads, ast.literal_eval):
            try:
                value = read(candidate)
            except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
                continue
            if isinstance(value, dict):
                return value, end
    return None, 0


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


def _read_call(value: Any, tools: list[dict[str, Any]]) -> ToolCall:
    if not isinstance(value, dict):
        return ToolCall("", {}, "the tool call is not a JSON object with name and arguments")
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name:
        return ToolCall("", {}, "the tool call has no name", arguments)
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return ToolCall(name, {}, "arguments is text that is not a JSON object", value.get("arguments"))
    known = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    if name not in known:
        return ToolCall(name, {}, f"unknown tool {name!r}; the tools are: {', '.join(known)}", arguments)
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
            return ToolCall(name, {}, f"{name}: unknown argument {key!r}; the arguments are: {', '.join(properties)}", arguments)
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
        try:
            number = float(value) if not isinstance(value, bool) else None
            if number is not None and (kind == "number" or number == int(number)):
                return (int(number) if kind == "integer" else number), None
        except (ValueError, OverflowError, TypeError):
            pass
        return value, "an integer" if kind == "integer" else "a number"
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
