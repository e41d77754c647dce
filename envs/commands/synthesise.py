"""Ask a model for new training instances and keep those that prove themselves (see `envs.synthesis`).

    python -m envs synthesise --task os --endpoint http://127.0.0.1:8000/v1 --count 200 --out data/os_synthetic

Writes a `datasets` folder (`envs.instances.load_instances` reads it) and beside it OUT.json: what was kept, what was dropped
and why.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import httpx

from envs.base import EnvFault, Message
from envs.instances import save_instances
from envs.synthesis import FORMS, Synthesis

KEY_VARIABLE = "OPENAI_API_KEY"
IDLE_ROUNDS = 20                                             # in a row without a kept proposal: the model has nothing more


class Endpoint:
    """A chat-completions endpoint. EnvFault where it does not answer as one."""

    def __init__(self, url: str, model: str | None, temperature: float) -> None:
        key = os.environ.get(KEY_VARIABLE)
        self._client = httpx.Client(base_url=url.rstrip("/") + "/", timeout=300.0, trust_env=False,
                                    headers={"Authorization": f"Bearer {key}"} if key else {})
        self._settings = {"temperature": temperature}
        self._settings["model"] = model or self._json("GET", "models")["data"][0]["id"]

    def ask(self, messages: list[Message]) -> str:
        """The text of the answer."""
        answer = self._json("POST", "chat/completions", json=self._settings | {"messages": messages})
        try:
            return answer["choices"][0]["message"]["content"] or ""
        except (KeyError, IndexError, TypeError) as error:
            raise EnvFault(f"the endpoint's answer is no chat completion: {str(answer)[:200]}") from error

    def _json(self, method: str, path: str, **request: object) -> dict:
        try:
            response = self._client.request(method, path, **request)
            response.raise_for_status()
            return response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise EnvFault(f"the endpoint {self._client.base_url}{path} failed: {error}") from error


def main(arguments: list[str]) -> int:
    """0 if as many instances as asked for were kept, else 1 (what was kept is written all the same)."""
    parser = argparse.ArgumentParser(prog="python -m envs synthesise", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True, choices=sorted(FORMS))
    parser.add_argument("--endpoint", required=True, help="URL of an OpenAI-compatible server, with /v1")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--count", type=int, default=100, help="instances to keep (default 100)")
    parser.add_argument("--per-request", type=int, default=4, help="proposals to ask for at once (default 4)")
    parser.add_argument("--max-requests", type=int, default=1000)
    parser.add_argument("--size", default="small", choices=("small", "full"), help="of the examples, and of the graph for kg")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="of the choice of examples")
    parser.add_argument("--out", required=True, type=Path, help="folder to write; must not exist")
    parser.add_argument("--avoid", type=Path, help="JSON file with a list of questions of a test set, or of records that have "
                                                   "one")
    options = parser.parse_args(arguments)
    if options.out.exists():
        raise ValueError(f"--out {options.out} exists; name a new folder")
    endpoint = Endpoint(options.endpoint, options.model, options.temperature)
    synthesis = Synthesis(options.task, endpoint.ask, size=options.size, seed=options.seed,
                          test_questions=read_questions(options.avoid) if options.avoid else ())
    idle = 0
    try:
        while len(synthesis.kept) < options.count and synthesis.requests < options.max_requests and idle < IDLE_ROUNDS:
            before = len(synthesis.kept)
            synthesis.round(min(options.per_request, options.count - before))
            idle = 0 if len(synthesis.kept) > before else idle + 1
            print(f"{synthesis.requests} requests: {len(synthesis.kept)} kept, {sum(synthesis.dropped.values())} dropped",
                  flush=True)
    finally:
        synthesis.close()
        report = {"task": options.task, "requests": synthesis.requests, "kept": len(synthesis.kept),
                  "dropped": dict(sorted(synthesis.dropped.items()))}
        if synthesis.kept:
            save_instances(synthesis.kept, options.out)
        options.out.with_name(options.out.name + ".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(report, indent=1))
    return int(len(synthesis.kept) < options.count)


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
    found = [row if isinstance(row, str) else row.get("question", row.get("description")) for row in rows]
    if not found or not all(isinstance(question, str) for question in found):
        raise ValueError(f"--avoid {file}: not a list of questions, nor of records with a question or description")
    return found
