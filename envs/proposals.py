"""What `envs.synthesis` asks a model for, how its answers are read, and how alike two questions are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from envs.base import Message

FORMS = {
    "os": '{"question": what the user asks, with one short exact answer; "init": a POSIX shell script, run as root in an empty '
          'Linux system without network, that prepares every file the question speaks of; "solution": a bash script that '
          'prints exactly the answer}. The answer must not depend on the time, on random numbers or on files '
          'that init does not make.',
    "db": '{"question": what the user asks, or the change that is asked for; "table": {"name", "columns": [[name, "TEXT"], '
          '...], "rows": [[text, ...], ...]} with 8 to 20 rows; "sql": one MySQL statement on that table that gives one column '
          'with the answer, or makes the change}. The data must determine the answer.',
    "kg": '{"question": what the user asks; "entities": {name: id} of the entities that the question names; "actions": the '
          'calls that lead to the answer, in order: get_relations(X), get_neighbors(X,relation), intersection(#i,#j), '
          'get_attributes(#i), argmax(#i,attribute), argmin(#i,attribute), count(#i)}. X is an id, or #i for the i-th set made '
          'so far.'}


def request_messages(task: str, examples: Sequence[dict[str, Any]], count: int, hints: str = "") -> list[Message]:
    """The chat that asks for `count` new proposals."""
    shown = "\n".join(json.dumps(example, ensure_ascii=False) for example in examples)
    return [{"role": "system", "content": "You write exercises for an agent. Answer with JSON lines only: one object a line."},
            {"role": "user", "content": f"Each exercise is an object of this form:\n{FORMS[task]}\n\nExamples:\n{shown}\n"
                                        f"{hints}\nWrite {count} new exercises, each of another kind than the examples and "
                                        "than the others."}]


def read_proposals(text: str) -> Iterator[dict[str, Any] | None]:
    """The objects of an answer (JSON lines, or a list, also in a fence); None for each line that is none."""
    text = re.sub(r"^```\w*$", "", text.strip(), flags=re.M).strip()
    try:
        values = json.loads(text)
        yield from (value if isinstance(value, dict) else None for value in (values if isinstance(values, list) else [values]))
        return
    except (ValueError, RecursionError):
        pass
    for line in filter(str.strip, text.splitlines()):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        yield value if isinstance(value, dict) else None


def rouge_l(left: str, right: str) -> float:
    """F-measure of the longest common subsequence of two texts' words, in [0, 1]."""
    left, right = (re.findall(r"\w+", text.lower()) for text in (left, right))
    row = [0] * (len(right) + 1)
    for word in left:
        above = 0
        for position, other in enumerate(right, start=1):
            above, row[position] = row[position], above + 1 if word == other else max(row[position], row[position - 1])
    return 2 * row[-1] / (len(left) + len(right)) if row[-1] else 0.0
