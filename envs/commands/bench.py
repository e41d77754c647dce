"""Measure environments: seconds to make one, resets and steps per second, memory, and growth over create-reset-close cycles.

Every row is measured in a process of its own. Steps are the expert's; time spent in the expert is not counted. Memory is
resident memory of the process and its children in MB, after one episode of every kind; growth is what the cycles add after the
first 30.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import envs
from envs.base import RULES, EnvFault
from envs.commands.markdown import table

# engines to measure beside the default one, where they can run; a server is named by its URL: db --engine mysql://...
ENGINES = {"alfworld": ("textworld",), "db": (), "kg": ("fb15k237",), "os": ("bubblewrap-root",), "webshop": ()}
NO_MICRO = ("textworld", "fb15k237")                        # engines without instances of size micro
COLUMNS = ("task", "engine", "source", "size", "make_s", "resets_per_s", "steps_per_s", "memory_mb", "growth_mb", "cycles",
           "note")
WARM_CYCLES = 30


def main(arguments: list[str]) -> int:
    """0 if every row could be measured or its engine or files are absent, 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m envs bench", description=__doc__)
    parser.add_argument("tasks", nargs="*", help=f"default: {', '.join(envs.TASKS)}")
    parser.add_argument("--source", action="append", help="generated or official; default: all of the task")
    parser.add_argument("--size", action="append", help="of generated instances; default: all of the task")
    parser.add_argument("--engine", action="append", help="backend; default: the task's own and those that can run here")
    parser.add_argument("--rules", default="strict", choices=RULES)
    parser.add_argument("--path", help="folder of the official files; default: the variable EPPO_DATA")
    parser.add_argument("--seconds", type=float, default=5.0, help="time for each of resets and steps (default 5)")
    parser.add_argument("--cycles", type=int, default=300, help="create-reset-close cycles (default 300)")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not Path("/proc/self/statm").exists():
        raise EnvFault("bench reads memory from /proc, which this system has not")
    if options.case:
        print(json.dumps(measure(json.loads(options.case), options.seconds, options.cycles)))
        return 0
    rows, failed = [], 0
    for task in options.tasks or envs.TASKS:
        for case in cases(task, options):
            row = _measure_apart(case, options)
            failed += row.get("note", "").startswith("failed")
            rows.append(row)
            print(f"{len(rows)}: {row}", file=sys.stderr, flush=True)
    print(table(rows, COLUMNS))
    return int(failed > 0)


def cases(task: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The settings to measure: every engine that can run here, in every source and size."""
    cls = envs.env_class(task)
    engines = options.engine or [None, *(engine for engine in ENGINES.get(task, ()) if envs.available(task, engine)[0])]
    found = []
    for engine in engines:
        for source in options.source or cls.sources:
            sizes = ("",) if source == "official" else options.size or cls.sizes
            found += [{"task": task, "source": source, "size": size, "backend": engine, "rules": options.rules,
                       "path": options.path and str(Path(options.path).resolve())} for size in sizes
                      if size != "micro" or engine not in NO_MICRO]
    return found


def _measure_apart(case: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    row = {"task": case["task"], "engine": case["backend"] or "own", "source": case["source"], "size": case["size"] or None}
    own = [] if case["task"] in envs.TASKS else ["--plugin", sys.modules[envs.env_class(case["task"]).__module__].__file__]
    command = [sys.executable, "-m", "envs", *own, "bench", "--case", json.dumps(case), "--seconds", str(options.seconds),
               "--cycles", str(options.cycles)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(envs.__file__).parent.parent,
                          env=os.environ | ({"EPPO_DATA": str(Path(os.environ["EPPO_DATA"]).resolve())}
                                            if os.environ.get("EPPO_DATA") else {}))
    if done.returncode:
        return row | {"note": "failed: " + (done.stderr.strip().splitlines() or ["no message"])[-1][:200]}
    return row | json.loads(done.stdout.splitlines()[-1])


# ---- one case, in its own process -----------------------------------------------------------------------------------------
def measure(case: dict[str, Any], seconds: float, cycles: int) -> dict[str, Any]:
    """The figures of one case; {"note": reason} where its files or its engine are absent."""
    settings = {name: value for name, value in case.items() if name != "task" and value}
    start = time.perf_counter()
    try:
        env = _make(case["task"], settings)
    except EnvFault as fault:
        return {"note": str(fault)}
    figures: dict[str, Any] = {"make_s": time.perf_counter() - start}
    count = len(env.instances)
    for index in {instance.kind: index for index, instance in enumerate(env.instances)}.values():
        _play(env, index)
    figures["memory_mb"] = memory_mb()
    resets, spent = 0, 0.0
    while spent < seconds:
        start = time.perf_counter()
        env.reset(resets % count)
        spent += time.perf_counter() - start
        resets += 1
    figures["resets_per_s"] = resets / spent
    steps, spent, index = 0, 0.0, 0
    while spent < seconds:
        played, took = _play(env, index % count)
        steps, spent, index = steps + played, spent + took, index + 1
    env.close()
    return figures | {"steps_per_s": steps / spent, "growth_mb": growth_mb(case["task"], settings, cycles), "cycles": cycles}


def _make(task: str, settings: dict[str, Any]) -> envs.Env:
    """Split train, or the first that has usable instances: not every official set is complete."""
    faults = []
    for split in ("train", "dev", "test") if settings["source"] == "official" else ("train",):
        try:
            return envs.make(task, split=split, **settings)
        except (EnvFault, ValueError) as fault:
            faults.append(str(fault))
    raise EnvFault("; ".join(dict.fromkeys(faults)))


def _play(env: envs.Env, index: int) -> tuple[int, float]:
    """An expert episode: (steps, seconds spent in them)."""
    env.reset(index)
    steps, spent, result = 0, 0.0, None
    while result is None or not result.done:
        turn = env.expert()
        start = time.perf_counter()
        result = env.step(turn)
        spent += time.perf_counter() - start
        steps += 1
    return steps, spent


def growth_mb(task: str, settings: dict[str, Any], cycles: int) -> float:
    """MB that `cycles` environments, each made, reset, played one turn and closed, add after the first `WARM_CYCLES`."""
    before = 0.0
    for cycle in range(WARM_CYCLES + cycles):
        env = _make(task, settings)
        env.reset(cycle % len(env.instances))
        env.step(env.expert())
        env.close()
        if cycle == WARM_CYCLES - 1:
            before = _settled_mb()
    return _settled_mb() - before


def _settled_mb() -> float:
    """The least of ten readings within half a second: processes that are just ending do not count as growth."""
    readings = []
    for _ in range(10):
        readings.append(memory_mb())
        time.sleep(0.05)
    return min(readings)


def memory_mb() -> float:
    """Resident memory of this process and its descendants, in MB."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):      # it ended meanwhile
            continue
        parents.setdefault(parent, []).append(int(stat.parent.name))
    pages, todo = 0, [os.getpid()]
    while todo:
        process = todo.pop()
        todo += parents.get(process, ())
        try:
            pages += int(Path(f"/proc/{process}/statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return pages * os.sysconf("SC_PAGESIZE") / 2 ** 20
