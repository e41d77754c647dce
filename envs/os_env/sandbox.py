"""One bubblewrap sandbox per episode; every command is a fresh process that enters it. Model text runs nowhere else.

    with Sandbox(init="mkdir /root/box && echo plum > /root/box/kiwi") as sandbox:
        sandbox.run("cd box; cat kiwi").text                 # "plum\n"; working directory and exported variables persist
        sandbox.check("test -f /root/box/kiwi")              # True: a clean shell that model text cannot have prepared

Inside: own user, process, network, mount, ipc and host-name namespaces; /usr of the host read-only, everything else small empty
tmpfs; a system-call filter, no capabilities, no new privileges; limits on processes, memory, CPU and wall time, file size and
output. Sandboxes are started and entered by one small server process (`spawner`), whose end, however it comes, ends them all.
Works as root (then as an unprivileged user id) and as an ordinary user; needs Linux 5.14, bash and user namespaces.
"""

from __future__ import annotations

import functools
import importlib.resources
import marshal
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

from envs.base import EnvFault
from envs.os_env import seccomp

START_S = 20.0                                               # a sandbox that has not started by then is an infrastructure fault
MAX_SCRIPT_BYTES = 100_000                                   # below the kernel's limit for one argument
MAX_STATE_BYTES = 32_000                                     # working directory and exported variables between commands
UNPRIVILEGED = 65534
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENVIRONMENT = {"PATH": PATH, "HOME": "/root", "USER": "root", "LOGNAME": "root", "SHELL": "/bin/bash", "LANG": "C.UTF-8", "TERM": "dumb"}
CHECK_ENVIRONMENT = ENVIRONMENT | {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
WRITABLE = ("/root", "/home", "/var", "/opt", "/srv", "/run", "/usr/local", "/etc")
FILES = {"/etc/passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
         "/etc/group": "root:x:0:\nusers:x:100:\nnogroup:x:65534:\n", "/etc/hosts": "127.0.0.1 localhost agent\n"}
SAVE = 'trap \'{ printf "%s\\0" "$PWD"; export -p; } >&200 2>/dev/null\' EXIT\n'


@dataclass(frozen=True, slots=True)
class Limits:
    """Caps of one sandbox. Sizes in bytes, times in seconds; `cpu_s`, `address_bytes` and `file_bytes` hold per process."""

    wall_s: float = 5.0
    cpu_s: int = 5
    processes: int = 64
    address_bytes: int = 512 << 20
    memory_bytes: int = 512 << 20                            # of all processes together, looked at while a command runs
    file_bytes: int = 64 << 20
    disk_bytes: int = 16 << 20                               # of each writable file system
    output_bytes: int = 1 << 20
    open_files: int = 256


@dataclass(frozen=True, slots=True)
class Output:
    """What a command wrote (standard output and error together), its exit code, and why it ended: exit, timeout, output, memory."""

    data: bytes
    code: int
    why: str = "exit"

    @property
    def text(self) -> str:
        """The output as text; bytes that are not UTF-8 become replacement characters."""
        return self.data.decode("utf-8", errors="replace")


class Sandbox:
    """A running sandbox. One thread at a time.

    Args:
        init: script of ours that prepares the world, run inside before the first command.

    Raises:
        EnvFault: it cannot be started; the message says why.
    """

    def __init__(self, init: str = "", limits: Limits = Limits()) -> None:
        self.limits = limits
        self._server = server()
        self._cwd, self._exports = "/root", b""
        self._kept: list[int] = []                           # read ends of pipes that background processes still hold
        self._pidfd = self._server.start(init, limits)
        self._finalizer = weakref.finalize(self, _end, self._pidfd, self._kept)

    def run(self, script: str, wall_s: float | None = None) -> Output:
        """Run a bash script of the model as a new process in the persistent world; never raises on what the script does."""
        script = script.replace("\0", "")
        if len(script.encode()) > MAX_SCRIPT_BYTES:
            return Output(f"bash: script longer than {MAX_SCRIPT_BYTES} bytes\n".encode(), 126)
        prepare = b"unset BASH_ENV; exec 3<&-; { " + self._exports + b"\n:; } 2>/dev/null\n" + SAVE.encode()
        output, state = self._enter(["/bin/bash", "--noprofile", "--norc", "-c", script], ENVIRONMENT | {"BASH_ENV": "/dev/fd/3"},
                                    self._cwd, prepare, wall_s)
        cwd, separator, exports = state.partition(b"\0")
        if separator and len(state) < MAX_STATE_BYTES:
            self._cwd, self._exports = os.fsdecode(cwd), exports
        return output

    def check(self, script: str, *arguments: str, wall_s: float | None = None) -> Output:
        """Run a script of ours: clean environment and search path, no start-up files, working directory /root."""
        return self._enter(["/bin/bash", "--noprofile", "--norc", "-c", script, "check", *arguments], CHECK_ENVIRONMENT, "/root", b"", wall_s)[0]

    def kill_processes(self) -> None:
        """End everything that commands left running."""
        self._server.ask({"op": "kill"}, [self._pidfd])

    def close(self) -> None:
        """End the sandbox with all its processes and files; safe to call twice."""
        self._finalizer()

    def _enter(self, argv: list[str], environment: dict[str, str], cwd: str, prepare: bytes, wall_s: float | None) -> tuple[Output, bytes]:
        limits = self.limits
        wall_s = limits.wall_s if wall_s is None else wall_s
        request = {"op": "run", "argv": argv, "env": environment, "cwd": cwd, "state": prepare, "wall_s": wall_s,
                   "memory_bytes": limits.memory_bytes,
                   "limits": {"RLIMIT_NPROC": limits.processes, "RLIMIT_AS": limits.address_bytes, "RLIMIT_FSIZE": limits.file_bytes,
                              "RLIMIT_CPU": limits.cpu_s, "RLIMIT_NOFILE": limits.open_files, "RLIMIT_CORE": 0}}
        output, output_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        state, state_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(output_end, True)
        try:
            reply = self._server.send(request, [self._pidfd, output_end], [state_end])
        finally:
            os.close(output_end)
            os.close(state_end)
        with reply:
            data, answer = _collect(output, reply, limits.output_bytes, wall_s + START_S)
        saved, _ = _drain(state, b"", MAX_STATE_BYTES)
        os.close(state)
        self._kept.append(output)                            # closing it would kill a background process at its next line of output
        if len(self._kept) > 16:
            os.close(self._kept.pop(0))
        if "error" in answer:
            raise EnvFault(f"sandbox: {answer['error']}")
        return Output(data, answer["code"], answer["why"]), saved

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _drain(fd: int, data: bytes, cap: int) -> tuple[bytes, bool]:
    """`data` and what the pipe holds now, up to `cap` bytes; whether the cap was reached."""
    while len(data) < cap:
        try:
            piece = os.read(fd, min(1 << 16, cap - len(data)))
        except BlockingIOError:
            break
        if not piece:
            break
        data += piece
    return data, len(data) >= cap


def _collect(output: int, reply: socket.socket, cap: int, deadline_s: float) -> tuple[bytes, dict]:
    """Read output until the command has ended, even if others still hold the pipe; at `cap` bytes have it ended."""
    data, full, deadline = b"", False, time.monotonic() + deadline_s
    poller = select.poll()
    poller.register(reply, select.POLLIN)
    poller.register(output, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poller.poll(max(0.0, deadline - time.monotonic()) * 1000)]
        if not ready:
            raise EnvFault(f"sandbox: no answer within {deadline_s:.0f} s")
        if output in ready:
            data, full = _drain(output, data, cap)
            if full or reply.fileno() not in ready:
                pass
            if full:
                reply.shutdown(socket.SHUT_WR)
                poller.unregister(output)
            elif not select.select([output], [], [], 0)[0] is False:
                pass
        if reply.fileno() in ready:
            answer = reply.recv(1 << 16)
            if not answer:
                raise EnvFault("sandbox: its server process has ended")
            return _drain(output, data, cap)[0], marshal.loads(answer)
