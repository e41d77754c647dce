"""`python -m envs COMMAND`: what can be done with the environments from a shell. Each command has its own `--help`.

`--plugin FILE` before the command, once or more, imports a .py file or a module that registers an environment of one's own.
"""

from __future__ import annotations

import sys
from importlib import import_module

from envs.base import EnvFault, check_name
from eppo.interrupts import exit_code, starting
from eppo.plugins import absolute_plugins, load_plugins

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
        with starting():
            plugins, arguments = _plugins(arguments)
            check_name("command", arguments[0] if arguments else "", sorted(COMMANDS))
            load_plugins(absolute_plugins(plugins))
            command = import_module(f"envs.commands.{arguments[0]}")
        return command.main(arguments[1:])
    except (ValueError, EnvFault, OSError) as error:         # OSError: a file that is not there, a port that is taken
        print(error, file=sys.stderr)
        return 2


def _plugins(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The values of the leading `--plugin`s, and what follows."""
    names: list[str] = []
    while arguments[:1] == ["--plugin"]:
        if len(arguments) == 1:
            raise ValueError("--plugin needs a value: the path of a .py file or the name of a module")
        names, arguments = [*names, arguments[1]], arguments[2:]
    return names, arguments


if __name__ == "__main__":
    sys.exit(exit_code(main))
