"""Ask a model for new training instances and keep those that prove themselves (see `envs.synthesis`).

    python -m envs synthesise --task os --endpoint http://127.0.0.1:8000/v1 --count 200 --out data/os_synthetic

Writes a `datasets` folder (`envs.instances.load_instances` reads it) and beside it OUT.json: what was kept, what was dropped
and why. Every answer is noted in OUT.progress.jsonl as soon as it is judged: the same command goes on where it was ended.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from envs.base import EnvFault, Message
from envs.instances import save_instances
from envs.proposals import FORMS
from envs.synthesis import Dropped, Synthesis

KEY_VARIABLE = "OPENAI_API_KEY"
IDLE_ROUNDS = 20                                             # in a row without a kept proposal: the model has nothing more
MAX_ANSWER_BYTES = 4 << 20
RETRY_S = (1.0, 3.0, 9.0)                                    # waits after an answer that may be another the next time
TRANSIENT = (408, 429, 500, 502, 503, 504)


class Endpoint:
    """A chat-completions endpoint. EnvFault where it does not answer as one, Dropped where its answer does not end.

    Args:
        timeout_s: for one whole answer, in seconds.
    """

    def __init__(self, url: str, model: str | None, temperature: float, timeout_s: float) -> None:
        key = os.environ.get(KEY_VARIABLE)
        self._client = httpx.Client(base_url=url.rstrip("/") + "/", timeout=timeout_s, trust_env=False,
                                    headers={"Authorization": f"Bearer {key}"} if key else {})
        self._timeout_s, self._settings = timeout_s, {"temperature": temperature}
        self._settings["model"] = model or self._first_model()

    def _first_model(self) -> str:
        listed = self._json("GET", "models")
        try:
            return listed["data"][0]["id"]
        except (KeyError, IndexError, TypeError) as error:
            raise EnvFault(f"the endpoint lists no model; name one with --model: {str(listed)[:200]}") from error

    def ask(self, messages: list[Message]) -> str:
        """The text of the answer."""
        answer = self._json("POST", "chat/completions", json=self._settings | {"messages": messages})
        try:
            text = answer["choices"][0]["message"]["content"] or ""
        except (KeyError, IndexError, TypeError) as error:
            raise EnvFault(f"the endpoint's answer is no chat completion: {str(answer)[:200]}") from error
        if not isinstance(text, str):
            raise EnvFault(f"the endpoint's answer is no chat completion: its content is no text: {str(text)[:200]}")
        return text

    def _json(self, method: str, path: str, **request: object) -> Any:
        for wait_s in (*RETRY_S, None):
            try:
                return json.loads(self._read(method, path, **request))
            except Dropped:
                raise
            except httpx.ReadTimeout as error:
                raise Dropped("the endpoint gave no whole answer in time") from error
            except (httpx.HTTPError, httpx.InvalidURL, ValueError, RecursionError) as error:
                lasting = isinstance(error, httpx.HTTPStatusError) and error.response.status_code not in TRANSIENT
                if wait_s is None or lasting or isinstance(error, httpx.InvalidURL):
                    words = " ".join(str(error).partition("\nFor more information")[0].split())
                    raise EnvFault(f"the endpoint {self._client.base_url}{path} failed: {words}") from error
                time.sleep(wait_s)

    def _read(self, method: str, path: str, **request: object) -> bytes:
        data, deadline = bytearray(), time.monotonic() + self._timeout_s
        with self._client.stream(method, path, **request) as response:
            response.raise_for_status()
            for piece in response.iter_bytes():
                data += piece
                if len(data) > MAX_ANSWER_BYTES:
                    raise Dropped("the endpoint's answer does not end")
                if time.monotonic() > deadline:              # one that trickles in meets no time limit of a single read
                    raise Dropped("the endpoint gave no whole answer in time")
        return bytes(data)


class Progress:
    """What has been judged, one line a request, so that a killed command loses one answer at most.

    Raises:
        ValueError: the file is of a command with other settings.
    """

    def __init__(self, file: Path, settings: dict[str, Any]) -> None:
        self.file, self._settings, self._dropped = file, settings, Counter()

    def restore(self, synthesis: Synthesis) -> None:
        """Bring `synthesis` to where the file ends; start the file where there is none."""
        text = self.file.read_text(encoding="utf-8") if self.file.exists() else ""
        whole = text[:text.rfind("\n") + 1]                  # a killed process may have left half a line
        rows = [json.loads(line) for line in whole.splitlines()]
        if rows and rows[0] != self._settings:
            raise ValueError(f"{self.file} is of another command ({json.dumps(rows[0])}); remove it, or give its settings")
        self.file.write_text(whole if rows else json.dumps(self._settings) + "\n", encoding="utf-8")
        for row in rows[1:]:
            for data in row["kept"]:
                synthesis.add(data)
            synthesis.dropped.update(row["dropped"])
        synthesis.requests, self._dropped = max(0, len(rows) - 1), Counter(synthesis.dropped)

    def note(self, synthesis: Synthesis, before: int) -> None:
        """Add what the last request brought; `before` it, so many were kept."""
        row = {"kept": [item.data for item in synthesis.kept[before:]], "dropped": dict(synthesis.dropped - self._dropped)}
        with self.file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")
            lines.flush()
            os.fsync(lines.fileno())
        self._dropped = Counter(synthesis.dropped)


def main(arguments: list[str]) -> int:
    """0 if as many instances as asked for were kept, 1 if not, 130 if interrupted (what was kept is written all the same)."""
    options = parse(arguments)
    progress = Progress(options.out.with_name(options.out.name + ".progress.jsonl"), {
        "task": options.task, "size": options.size, "seed": options.seed})
    if options.out.exists() and not progress.file.exists():
        raise ValueError(f"--out {options.out} exists; name a new folder")
    avoided = read_questions(options.avoid) if options.avoid else ()
    endpoint = Endpoint(options.endpoint, options.model, options.temperature, options.timeout)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    synthesis = Synthesis(options.task, endpoint.ask, size=options.size, seed=options.seed, test_questions=avoided,
                          limit=options.count)
    idle, interrupted = 0, False
    try:
        progress.restore(synthesis)
        if synthesis.requests:
            print(f"going on after {synthesis.requests} requests", flush=True)
        while len(synthesis.kept) < options.count and synthesis.requests < options.max_requests and idle < IDLE_ROUNDS:
            before = len(synthesis.kept)
            synthesis.round(min(options.per_request, options.count - before))
            progress.note(synthesis, before)
            idle = 0 if len(synthesis.kept) > before else idle + 1
            print(f"{synthesis.requests} requests: {len(synthesis.kept)} kept, {sum(synthesis.dropped.values())} dropped",
                  flush=True)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        synthesis.close()
        if synthesis.requests:
            write(options, synthesis)
    if len(synthesis.kept) >= options.count:
        progress.file.unlink()
        return 0
    print(f"fewer than {options.count} were kept; the same command goes on (its notes: {progress.file})")
    return 130 if interrupted else 1


def write(options: argparse.Namespace, synthesis: Synthesis) -> None:
    """The folder of instances, and the report."""
    report = {"task": options.task, "requests": synthesis.requests, "kept": len(synthesis.kept),
              "dropped": dict(sorted(synthesis.dropped.items()))}
    if synthesis.kept:
        shutil.rmtree(options.out, ignore_errors=True)       # of the same command, ended earlier
        save_instances(synthesis.kept, options.out)
    options.out.with_name(options.out.name + ".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options of the command.

    Raises:
        ValueError: a number out of its range.
    """
    parser = argparse.ArgumentParser(prog="python -m envs synthesise", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True, choices=sorted(FORMS))
    parser.add_argument("--endpoint", required=True, help="URL of an OpenAI-compatible server, with /v1")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--count", type=int, default=100, help="instances to keep (default 100)")
    parser.add_argument("--per-request", type=int, default=4, help="proposals to ask for at once (default 4)")
    parser.add_argument("--max-requests", type=int, default=1000)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one answer (default 300)")
    parser.add_argument("--size", default="small", choices=("small", "full"), help="of the examples, and of the graph for kg")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="of the choice of examples")
    parser.add_argument("--out", required=True, type=Path, help="folder to write; must not exist")
    parser.add_argument("--avoid", type=Path, help="JSON file with a list of questions of a test set, or of records that have "
                                                   "one")
    options = parser.parse_args(arguments)
    for name in ("count", "per_request", "max_requests", "timeout"):
        if not getattr(options, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, not {getattr(options, name)}")
    return options


def read_questions(file: Path) -> list[str]:
    """The questions of a JSON or JSON-lines file: texts, or the "question" or "description" of its records.

    Raises:
        ValueError: it holds none.
    """
    text = file.read_text(encoding="utf-8")
    try:
        rows = json.loads(text)
    except ValueError:
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    found = [row if isinstance(row, str) else row.get("question", row.get("description")) if isinstance(row, dict) else None
             for row in (rows if isinstance(rows, list) else [])]
    if not found or not all(isinstance(question, str) for question in found):
        raise ValueError(f"--avoid {file}: not a list of questions, nor of records with a question or description")
    return found
