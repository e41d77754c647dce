"""Train one run without a notebook, the way a launcher of several processes needs it: `python -m eppo --recipe micro`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from typing import Any

from eppo.config import load_recipe
from eppo.interrupts import exit_code, starting

SHOWN = ("val/success", "loss/policy", "perf/step_s")       # of a step's record, on its line


def main(arguments: list[str]) -> int:
    """Exit: 0 fine, 2 bad input. SIGTERM, with which launchers stop, is taken as Ctrl-C: the run is checkpointed."""
    parser = argparse.ArgumentParser(prog="python -m eppo", description=__doc__)
    parser.add_argument("--recipe", default="micro", help="name in notebooks/recipes, or a path ending in .yaml")
    parser.add_argument("-p", dest="changes", nargs="+", action="append", default=[], metavar=("KEY", "VALUE"),
                        help="a recipe key, dotted, and its value; several values make a list")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    options = parser.parse_args(arguments)
    try:
        with starting():
            config = load_recipe(options.recipe, **{key: _value(key, values) for key, *values in options.changes})
            from envs.base import EnvFault
            from eppo import distributed
            from eppo.records import read_run
            from eppo.trainer import train
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for record in train(config, resume=options.resume):
            if distributed.rank() == 0:
                shown = "".join(f", {key} {record.metrics[key]:.3g}" for key in SHOWN if key in record.metrics)
                print(f"step {record.step}{shown}", flush=True)
        if distributed.rank() == 0:
            for warning in read_run(config.run_dir()).info["warnings"]:
                print(f"warning: {warning}", file=sys.stderr)
    except distributed.FirstFailed:                         # process 0 says it
        return 2
    except (ValueError, EnvFault) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _value(key: str, texts: list[str]) -> Any:
    """JSON where it is that, else text; several are a list."""
    def one(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    if not texts:
        raise ValueError(f"-p {key} needs a value")
    return one(texts[0]) if len(texts) == 1 else [one(text) for text in texts]


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
