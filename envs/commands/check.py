"""Hold environments to their contract (`envs.check.check_env`), or play the oracle on every instance of a split."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import envs
from envs.base import RULES, SPLITS, EnvFault, Status
from envs.check import CheckFailed, check_env
from envs.commands.markdown import table

COLUMNS = ("task", "size", "split", "kind", "instances", "episodes", "mean_chars", "max_chars", "mean_turns", "max_turns",
           "noisy_solved")


def main(arguments: list[str]) -> int:
    """0 if every task keeps the contract, or if the oracle has reward 1 on every instance; 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m envs check", description=__doc__)
    parser.add_argument("tasks", nargs="*", help=f"default: {', '.join(envs.TASKS)}")
    parser.add_argument("--source", default="generated", help="generated (default) or official")
    parser.add_argument("--size", action="append", help="of generated instances; default: all of the task")
    parser.add_argument("--split", action="append", choices=SPLITS, help="default: all")
    parser.add_argument("--rules", default="strict", choices=RULES)
    parser.add_argument("--backend")
    parser.add_argument("--path", help="folder of the official files; default: the variable EPPO_DATA")
    parser.add_argument("--sample", type=int, default=6, help="episodes per size and split (default 6)")
    parser.add_argument("--oracle", action="store_true", help="play the oracle on every instance instead, and list exceptions")
    options = parser.parse_args(arguments)
    settings = {"source": options.source, "rules": options.rules, "backend": options.backend, "path": options.path}
    bad = 0
    for task in options.tasks or envs.TASKS:
        try:
            if options.oracle:
                bad += _oracles(task, options, settings)
            else:
                rows = check_env(task, sizes=tuple(options.size) if options.size else None,
                                 splits=tuple(options.split or SPLITS), sample=options.sample, **settings)
                print(table([{"task": task} | row for row in rows], COLUMNS) + "\n")
        except (CheckFailed, EnvFault, ValueError) as error:
            bad += 1
            print(f"{task}: {error}", file=sys.stderr)
    return int(bad > 0)


def _oracles(task: str, options: argparse.Namespace, settings: dict[str, Any]) -> int:
    """Play the oracle through every size and split; the number of instances without reward 1."""
    sizes = (None,) if options.source == "official" else options.size or envs.env_class(task).sizes
    return sum(_play_all(task, settings | {"split": split} | ({"size": size} if size else {}))
               for size in sizes for split in options.split or SPLITS)


def _play_all(task: str, settings: dict[str, Any]) -> int:
    where = " ".join(str(settings[name]) for name in ("source", "size", "split", "rules") if settings.get(name))
    try:
        env = envs.make(task, **settings)
    except EnvFault as fault:
        print(f"{task} {where}: {fault}")
        return 0
    with env:
        causes: dict[str, str] = env.unwinnable() if hasattr(env, "unwinnable") else {}
        short = []
        for index, instance in enumerate(env.instances):
            env.reset(index)
            result = None
            for turn in env.oracle(index):
                result = env.step(turn)
            if result is None or result.reward != 1.0 or result.status != Status.COMPLETED:
                short.append((instance.id, result and result.reward, causes.get(instance.id) or str(result and result.info)))
        skipped = getattr(env, "skipped", ())
        print(f"{task} {where}: reward 1 on {len(env.instances) - len(short)} of {len(env.instances)}; {len(skipped)} records "
              "cannot be used")
        for name, reward, cause in short:
            print(f"  {name}: {reward}: {cause}")
    return len(short)
