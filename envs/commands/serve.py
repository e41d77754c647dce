"""`python -m envs serve`: the environments behind AgentRL's controller API, for its evaluation client, trainer and workers.

    python -m envs serve --tasks os db --size small --split test
    agentrl-eval -c http://127.0.0.1:5020/api/ -u http://MODEL/v1 --chat-completions os-std dbbench-std

A task is served under AgentRL's name for it: os-std (test), os-dev, os-env_train (train), and so on. AgentRL's own workers join by
HTTP (python -m agentrl.worker --controller http://127.0.0.1:5020/api ...); its gRPC transport is not spoken.
"""

from __future__ import annotations

import argparse
import functools
import ipaddress
import os

import envs
from envs.base import EnvFault

NAMES = {"alfworld": "alfworld", "db": "dbbench", "kg": "kg", "os": "os", "webshop": "webshop"}
SUFFIXES = {"test": "std", "dev": "dev", "train": "env_train"}
TOKEN_VARIABLE = "EPPO_SERVE_TOKEN"


def served_name(task: str, split: str) -> str:
    """AgentRL's name of a task and split, such as dbbench-std."""
    return f"{NAMES.get(task, task)}-{SUFFIXES[split]}"


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(prog="python -m envs serve", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(envs.TASKS), metavar="TASK", help="default: all five")
    parser.add_argument("--splits", nargs="+", default=["test"], choices=sorted(SUFFIXES), help="default: test")
    parser.add_argument("--source", default="generated", choices=("generated", "official"))
    parser.add_argument("--size", default="small", help="of generated instances: micro, small (default), full")
    parser.add_argument("--rules", default="agentbench", choices=("agentbench", "strict"), help="default: agentbench")
    parser.add_argument("--path", help="folder of the official files; default: EPPO_DATA")
    parser.add_argument("--capacity", type=int, default=64, help="samples of a task at a time (default 64)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; any but loopback needs a token")
    parser.add_argument("--port", type=int, default=5020)
    parser.add_argument("--token-file", help=f"file whose first line is the token; default: the variable {TOKEN_VARIABLE}")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Serve until interrupted; the exit status.

    Raises:
        ValueError: unknown task, or another address than loopback without a token. EnvFault: an environment cannot run here, or
        the extra `serve` is not installed.
    """
    options = parse(arguments)
    token = read_token(options.token_file)
    if token is None and not is_loopback(options.host):
        raise ValueError(f"--host {options.host} can be reached from elsewhere and needs a token: set {TOKEN_VARIABLE}, "
                         "or give --token-file")
    if options.capacity < 1:
        raise ValueError(f"--capacity must be at least 1, not {options.capacity}")
    try:
        import uvicorn

        from envs.serving.app import make_app
        from envs.serving.workers import LocalWorker
    except ImportError as error:
        raise EnvFault(f"serve needs uvicorn and starlette (pip install -e .): {error}") from error
    workers = []
    for task in options.tasks:
        for split in options.splits:
            settings = {"source": options.source, "split": split, "rules": options.rules, "path": options.path}
            if options.source == "generated":
                settings["size"] = options.size
            make = functools.partial(envs.make, task, **settings)
            worker = LocalWorker(served_name(task, split), make, options.capacity)
            print(f"{worker.name}: {len(worker.indices)} samples, {options.capacity} at a time", flush=True)
            workers.append(worker)
    print(f"listening on http://{options.host}:{options.port}/api", flush=True)
    uvicorn.run(make_app(workers, token=token), host=options.host, port=options.port, log_level="warning")
    return 0


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_token(file: str | None) -> str | None:
    """The token, from a file or the environment; None if there is none.

    Raises:
        ValueError: the file is empty.
    """
    if file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    with open(file, encoding="utf-8") as lines:
        token = lines.readline().strip()
    if not token:
        raise ValueError(f"--token-file {file}: its first line is empty")
    return token
