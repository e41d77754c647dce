"""`python -m envs COMMAND`: what can be done with the environments from a shell. Each command has its own `--help`."""

from __future__ import annotations

import sys
from importlib import import_module

from envs.base import EnvFault, check_name

# name -> what it does; the module is envs.commands.<name>
COMMANDS = {"bench": "resets and steps per second, memory, and growth over many episodes, as a table",
            "check": "hold environments to their contract; play the oracle on every instance",
            "fetch": "official files: what is there, what is missing, and download it",
            "serve": "offer the environments to AgentRL's clients and workers (controller API)",
            "synthesise": "ask a model for new instances and keep those that prove themselves"}


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__.split(":")[0] + "\n" + "\n".join(f"  {name:<11} {text}" for name, text in sorted(COMMANDS.items())))
        return 0
    try:
        check_name("command", arguments[0], sorted(COMMANDS))
        return import_module(f"envs.commands.{arguments[0]}").main(arguments[1:])
    except (ValueError, EnvFault) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
