"""AgentBench's OS files (THUDM/AgentBench, data/os_interaction) as instances, and how their checks are run.

`<path>/os` holds either train.json, dev.json and scripts/, or a copy of data/os_interaction as it is. A record's check is a
chain: reference commands (`None` in the file), the public compare scripts (by name; `checkers` has them) and scripts of the
set, each called with the answer and all earlier outputs. `data` of an instance: question, init and start (scripts or ""), steps
(the reference commands), and `match` {answer or regex, strip} or `chain` [{"do": "reference"} | {"do": "compare", "kind"} |
{"do": "script", "argv"}].
"""

from __future__ import annotations

import functools
import json
import os
import re
from pathlib import Path
from typing import Any

from envs.base import EnvFault
from envs.instances import Instance
from envs.os_env import checkers
from envs.os_env.sandbox import Output, Sandbox

FILES = {"train": ("train.json", "data/train_0317/training.json"), "dev": ("dev.json", "data/dev.json"),
         "test": ("data/[1-7]/*.json",)}
SCRIPTS = {"train": "train_0317", "dev": "dev"}             # below scripts/; a test file uses the folder of its own name
COMPARE = {"integer-match": "integer", "string-match": "string", "size-match": "size", "containing": "containing", "in": "in"}
INTERPRETERS = {"bash": ["bash", "--noprofile", "--norc", "-c"], "python": ["python3", "-c"]}
COMPILERS = {"c": "gcc -x c", "c++": "g++ -x c++", "cpp": "g++ -x c++"}


def load(path: str | None, split: str) -> tuple[tuple[Instance, ...], tuple[tuple[str, str], ...]]:
    """The usable records of a split, and (id, reason) of the others.

    Raises:
        ValueError: no folder was named, or it lacks the file.
    """
    folder = path or os.environ.get("EPPO_DATA")
    if not folder:
        raise ValueError("os: source 'official' needs the folder of the benchmark files: pass path= or set EPPO_DATA")
    root = Path(folder) / "os"
    files = next((found for pattern in FILES[split] if (found := sorted(root.glob(pattern), key=_order))), None)
    if not files:
        raise ValueError(f"os: {root / FILES[split][0]} does not exist; it belongs to data/os_interaction of THUDM/AgentBench")
    return _read(root, tuple((file, file.stat().st_mtime_ns) for file in files), split)


def _order(file: Path) -> tuple[Any, ...]:
    return tuple(int(piece) if piece.isdigit() else piece for piece in re.split(r"(\d+)", str(file)))


@functools.lru_cache(maxsize=4)
def _read(root: Path, files: tuple[tuple[Path, int], ...], split: str) -> tuple[tuple[Instance, ...], tuple[tuple[str, str],
                                                                                                            ...]]:
    instances, skipped = [], []
    for file, _ in files:
        records = json.loads(file.read_text(encoding="utf-8"))
        scripts = root / "scripts" / SCRIPTS.get(split, file.parent.name)
        for record in records if isinstance(records, list) else [records]:
            name = f"os-official-{split}-{len(instances) + len(skipped)}"
            try:
                kind, data = convert(record, scripts)
            except ValueError as error:
                skipped.append((name, str(error)))
            else:
                instances.append(Instance(name, "os", kind, data))
    return tuple(instances), tuple(skipped)


def convert(record: Any, scripts: Path) -> tuple[str, dict[str, Any]]:
    """(kind, data) of a record.

    Raises:
        ValueError: why the record cannot be used.
    """
    if not isinstance(record, dict) or not isinstance(record.get("description"), str) or not record["description"].strip():
        raise ValueError("no description")
    create = record.get("create") if isinstance(record.get("create"), dict) else {}
    evaluation = record.get("evaluation")
    if not isinstance(evaluation, dict):
        raise ValueError("no evaluation")
    start = record.get("start")
    if start is not None and not isinstance(start, str):
        raise ValueError("start is not a script")
    example = evaluation.get("example")
    data = {"question": record["description"], "start": start or "", "steps": [],
            "init": "\n".join(_shell(entry, scripts) for entry in _list(create.get("init")))}
    if example is not None:
        data["steps"] = ["\n".join(_shell(entry, scripts) for entry in _list(example))]
    if "match" in evaluation:
        match = evaluation["match"]
        return "match", data | {"match": {"answer": match, "strip": True} if isinstance(match, str) else match}
    chain = [_link(entry, scripts) for entry in (evaluation["check"] if isinstance(evaluation.get("check"), list) else
                                                 [evaluation.get("check")] if evaluation.get("check") else [])]
    if not chain:
        raise ValueError("neither match nor check")
    if any(link["do"] == "reference" for link in chain) and not data["steps"]:
        raise ValueError("the check runs a reference command, but there is none")
    kind = next((link["kind"] for link in chain if link["do"] == "compare"), "state")
    return kind, data | {"chain": chain}


def _list(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _code(entry: Any, scripts: Path) -> tuple[str, str]:
    """(language, text) of a script: a string, {"code"} or {"file"}."""
    if isinstance(entry, str):
        return "bash", entry
    if not isinstance(entry, dict) or not isinstance(entry.get("code", entry.get("file")), str):
        raise ValueError(f"not a script: {str(entry)[:60]}")
    language = entry.get("language", "bash")
    if language not in INTERPRETERS and language not in COMPILERS:
        raise ValueError(f"unknown language {language!r}")
    if "code" in entry:
        return language, entry["code"]
    file = (scripts / entry["file"]).resolve()
    if not file.is_relative_to(scripts.resolve()) or not file.is_file():
        raise ValueError(f"its script {entry['file']} is not in {scripts.parent.name}/{scripts.name}")
    return language, file.read_text(encoding="utf-8")


def _argv(entry: Any, scripts: Path) -> list[str]:
    language, text = _code(entry, scripts)
    if language in COMPILERS:
        build = f'printf %s "$0" | {COMPILERS[language]} -o /tmp/.program - && exec /tmp/.program "$@"'
        return [*INTERPRETERS["bash"], build, text]
    return [*INTERPRETERS[language], text] + (["check"] if language == "bash" else [])


def _shell(entry: Any, scripts: Path) -> str:
    """The script as bash text."""
    language, text = _code(entry, scripts)
    if language == "bash":
        return text
    import shlex
    return shlex.join(_argv(entry, scripts))


def _link(entry: Any, scripts: Path) -> dict[str, Any]:
    if entry is None:
        return {"do": "reference"}
    name = Path(entry.get("file", "")).stem if isinstance(entry, dict) else ""
    if name in COMPARE:
        return {"do": "compare", "kind": COMPARE[name]}
    return {"do": "script", "argv": _argv(entry, scripts)}


def right_by_match(match: dict[str, Any], answer: str) -> bool:
    """Whether `answer` fits a record's `match`: exact text, or a pattern found in it.

    Raises:
        EnvFault: the pattern cannot be read.
    """
    answer = answer.strip() if match.get("strip", True) else answer
    return answer == match["answer"] if "answer" in match else checkers.matches("regex", answer, match["regex"])


def run_reference(box: Sandbox, data: dict[str, Any]) -> Output:
    """What the record's reference command writes to its standard output in `box`."""
    return box.check("exec 2>/dev/null\n" + data["steps"][0])


def right_by_chain(data: dict[str, Any], answer: str, rules: str, gold: str, box: Sandbox) -> bool:
    """Whether an ended episode passes the record's chain.

    Args:
        gold: what the reference command said before the agent's first turn; counts under strict rules. To the letter of the
        public
            rules the command runs now, in the world that the agent left.
        box: where scripts run.
    """
    outputs: list[str] = []
    for link in data["chain"]:
        if link["do"] == "compare":
            if not checkers.matches(link["kind"], answer, outputs[0] if outputs else "", rules):
                return False
        elif link["do"] == "reference" and rules == "strict":
            outputs.append(gold)
        else:
            output = run_reference(box, data) if link["do"] == "reference" else \
                box.execute(["bash", "-c", 'exec "$@" 2>/dev/null', "check", *link["argv"]], answer, *outputs)
            if output.code != 0 or output.why != "exit":
                return False
            outputs.append(output.text)
    return True


def open_world(data: dict[str, Any], box: Sandbox) -> None:
    """Prepare the world of a record in `box`.

    Raises:
        EnvFault: the record's own script failed.
    """
    if data["init"].strip():
        output = box.check(data["init"], wall_s=30.0)
        if output.code or output.why != "exit":
            raise EnvFault(f"os: the script that prepares the world ended with {output.why} {output.code}: "
                           f"{output.text[-200:]}")
