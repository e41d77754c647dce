"""Ctrl-C at the command line: one short line and exit code 130, whatever it meets. Only the standard library, so that it is imported
before anything slow."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERRUPTED = 130                                           # what a shell says of a process that SIGINT ended


@contextmanager
def starting() -> Iterator[None]:
    """Ctrl-C inside the block ends the process at once. For imports and checks of arguments, which leave nothing behind: a
    KeyboardInterrupt in the middle of an import can get lost there, or come out as another error."""
    before = signal.getsignal(signal.SIGINT)
    ours = threading.current_thread() is threading.main_thread() and before != signal.SIG_IGN     # ignored: a job in the background
    if ours:
        signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)


def _leave(*_: object) -> None:
    os.write(2, b"\ninterrupted while starting; nothing was begun\n")
    os._exit(INTERRUPTED)


def exit_code(main: Callable[[], int]) -> int:
    """What `main` returns; 130 and one line where Ctrl-C ended it."""
    try:
        return main()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
