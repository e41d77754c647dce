"""One bubblewrap sandbox per episode; every command is a fresh process that enters it. Model text runs nowhere else.

    with Sandbox(init="mkdir /root/box && echo plum > /root/box/kiwi") as sandbox:
        sandbox.run("cd box; cat kiwi").text                 # "plum\n"; working directory and exported variables persist
        sandbox.check("test -f /root/box/kiwi").code         # 0: a clean shell that model text cannot have prepared

Inside: own user, process, network, mount, ipc and host-name namespaces; /usr of the host read-only, everything else small empty
tmpfs; a system-call filter, no capabilities, no new privileges; limits on processes, memory, CPU and wall time, file size and
output. Sandboxes are started and entered by one small process (`spawner`), whose end, however it comes, ends them all.
Works as root (then as an unprivileged user id) and as an ordinary user; needs Linux 5.14, bash and user namespaces.
"""

from __future__ import annotations

import functools
import marshal
import os
import re
import select
import socket
import sys
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from envs.base import EnvFault
from envs.os_env.server import CHECK_ENVIRONMENT, ENVIRONMENT, START_S, Limits, current_server, end_sandbox

MAX_SCRIPT_BYTES = 100_000                                   # below the kernel's limit for one argument
MAX_STATE_BYTES = 32_000                                     # working directory and exported variables between commands
KEPT_PIPES = 8                                               # of background processes, per sandbox
SAVE = 'trap \'{ printf "%s\\0" "$PWD"; export -p; } >&200 2>/dev/null\' EXIT\n'


@dataclass(frozen=True, slots=True)
class Output:
    """What a command wrote (output and error together), its exit code, and why it ended: exit, timeout, output, memory."""

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
        init: POSIX shell script of ours that prepares the world, run inside before the first command.

    Raises:
        EnvFault: it cannot be started; the message says why.
    """

    def __init__(self, init: str = "", limits: Limits | None = None) -> None:
        self.limits = limits = limits or Limits()
        self._server = current_server()
        self._cwd, self._exports = "/root", b""
        self._kept: list[int] = []                           # read ends of pipes that background processes still hold
        self._pidfd = self._server.start(init, limits)
        self._finalizer = weakref.finalize(self, end_sandbox, self._pidfd, self._kept, os.getpid())

    def run(self, script: str, wall_s: float | None = None) -> Output:
        """Run a bash script of the model as a new process in the persistent world; never raises on what the script does."""
        script = script.replace("\0", "")
        if len(script.encode()) > MAX_SCRIPT_BYTES:
            return Output(f"bash: script longer than {MAX_SCRIPT_BYTES} bytes\n".encode(), 126)
        prepare = b"unset BASH_ENV; exec 3<&-; { " + self._exports + b"\n:; } 2>/dev/null\n" + SAVE.encode()
        output, state = self._enter(["bash", "--noprofile", "--norc", "-c", script], ENVIRONMENT | {"BASH_ENV": "/dev/fd/3"},
                                    self._cwd, prepare, wall_s)
        cwd, separator, exports = state.partition(b"\0")
        if separator and len(state) < MAX_STATE_BYTES:
            self._cwd, self._exports = os.fsdecode(cwd), exports
        return output

    def check(self, script: str, *arguments: str, alone: bool = False, wall_s: float | None = None) -> Output:
        """Run a script of ours: clean environment and search path, no start-up files, working directory /root.

        `alone`: first end everything that commands left running, so that nothing of theirs runs beside the script.
        """
        argv = ["bash", "--noprofile", "--norc", "-c", script, "check", *arguments]
        return self._enter(argv, CHECK_ENVIRONMENT, "/root", b"", wall_s, alone)[0]

    def close(self) -> None:
        """End the sandbox with all its processes and files; safe to call twice."""
        self._finalizer()

    def _enter(self, argv: list[str], environment: dict[str, str], cwd: str, prepare: bytes, wall_s: float | None,
               alone: bool = False) -> tuple[Output, bytes]:
        limits = self.limits
        wall_s = limits.wall_s if wall_s is None else wall_s
        request = {"op": "run", "argv": argv, "env": environment, "cwd": cwd, "state": prepare, "alone": alone,
                   "wall_s": wall_s, "memory_bytes": limits.memory_bytes,
                   "limits": {"RLIMIT_NPROC": limits.processes, "RLIMIT_AS": limits.address_bytes, "RLIMIT_CPU": limits.cpu_s,
                              "RLIMIT_FSIZE": limits.file_bytes, "RLIMIT_NOFILE": limits.open_files, "RLIMIT_CORE": 0}}
        output, output_end = os.pipe2(os.O_CLOEXEC)
        state, state_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)  # an environment larger than a pipe is lost, not waited for
        os.set_blocking(output, False)
        held = False
        try:
            try:
                reply = self._server.send(request, [self._pidfd, output_end, state_end])
            finally:
                os.close(output_end)
                os.close(state_end)
            with reply:
                data, answer = _collect(output, reply, limits.output_bytes, wall_s + START_S)
            data, held = _drain(output, data, limits.output_bytes)
            saved, _ = _drain(state, b"", MAX_STATE_BYTES)
        finally:
            os.close(state)
            self._keep(output) if held else os.close(output)
        if "error" in answer:
            raise EnvFault(f"sandbox: {answer['error']}")
        return Output(data, answer["code"], answer["why"]), saved

    def _keep(self, pipe: int) -> None:
        """A background process holds the other end: closed, the pipe would kill it at its next output."""
        self._kept.append(pipe)
        if len(self._kept) > KEPT_PIPES:
            os.close(self._kept.pop(0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _drain(fd: int, data: bytes, cap: int) -> tuple[bytes, bool]:
    """`data` with what the pipe holds now, up to `cap` bytes; whether more may come."""
    while len(data) < cap:
        try:
            piece = os.read(fd, min(1 << 16, cap - len(data)))
        except BlockingIOError:
            return data, True
        if not piece:
            return data, False
        data += piece
    return data, False


def _collect(output: int, reply: socket.socket, cap: int, deadline_s: float) -> tuple[bytes, dict]:
    """Read until the command itself has ended, even if others still hold the pipe; at `cap` bytes have it ended."""
    data, deadline = b"", time.monotonic() + deadline_s
    poller = select.poll()
    poller.register(reply, select.POLLIN)
    poller.register(output, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poller.poll(max(0.0, deadline - time.monotonic()) * 1000)]
        if not ready:
            raise EnvFault(f"sandbox: no answer within {deadline_s:.0f} s")
        if output in ready:
            data, more = _drain(output, data, cap)
            if not more:
                poller.unregister(output)
                if len(data) >= cap:
                    reply.shutdown(socket.SHUT_WR)           # the sign for the server to end the command
        if reply.fileno() in ready:
            answer = reply.recv(1 << 16)
            if not answer:
                raise EnvFault("sandbox: its server process has ended")
            return data, marshal.loads(answer)


@functools.lru_cache(maxsize=1)
def probe() -> tuple[bool, str]:
    """Whether sandboxes work here, tried once, and if not, why."""
    if sys.platform != "linux":
        return False, f"the shell sandbox needs Linux, this is {sys.platform}"
    release = tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])
    if release < (5, 14):
        return False, f"the shell sandbox needs Linux 5.14 (process limits per user namespace), this is {os.uname().release}"
    try:
        with Sandbox() as sandbox:
            output = sandbox.check('[ "$(id -u)" = 0 ] && [ ! -e "$1" ]', str(Path(__file__).resolve()))
    except (EnvFault, OSError) as fault:
        return False, f"{fault}. User namespaces may be switched off (container without them, sysctl, AppArmor)"
    return (True, "") if output.code == 0 else (False, f"the sandbox is not what it should be: {output.text.strip() or output}")
