"""Train one run without a notebook, the way a launcher of several processes needs it: `python -m eppo --recipe micro`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from typing import Any

from eppo import distributed
from eppo.config import load_recipe
from eppo.trainer import train


def main(arguments: list[str]) -> int:
    """Exit: 0 fine, 2 bad input, 130 stopped."""
    parser = argparse.ArgumentParser(prog="python -m eppo", description=__doc__)
    parser.add_argument("--recipe", default="micro", help="name in notebooks/recipes, or a path ending in .yaml")
    parser.add_argument("-p", dest="changes", nargs="+", action="append", default=[], metavar=("KEY", "VALUE"),
                        help="a recipe key, dotted, and its value; several values make a list")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)           # how launchers stop: the run is checkpointed
    try:
        changes = {key: _value(values) for key, *values in options.changes}
        for record in train(load_recipe(options.recipe, **changes), resume=options.resume):
            if distributed.rank() == 0:
                shown = {key: value for key, value in record.metrics.items() if key in ("val/success", "loss/policy", "perf/step_s")}
                print(f"step {record.step}" + "".join(f", {key} {value:.3g}" for key, value in shown.items()), flush=True)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _value(texts: list[str]) -> Any:
    """JSON where it is that, else text."""
    def one(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    return one(texts[0]) if len(texts) == 1 else [one(text) for text in texts]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
