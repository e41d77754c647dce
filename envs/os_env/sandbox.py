"""One bubblewrap sandbox per episode; every command is a fresh process that enters it. Model text runs nowhere else.

    with Sandbox(init="mkdir /root/box && echo plum > /root/box/kiwi") as sandbox:
        sandbox.run("cd box; cat kiwi").text                 # "plum\n"; working directory and exported variables persist
        sandbox.check("test -f /root/box/kiwi").code         # 0: a clean shell that model text cannot have prepared

Inside: own user, process, network, mount, ipc and host-name namespaces; /usr of the host read-only, everything else small empty
tmpfs; a system-call filter, no capabilities, no new privileges; limits on processes, memory, sockets, CPU and wall time, file
size, files and output, also of what a command leaves running. Sandboxes are started and entered by one small process (`spawner`),
whose end, however it comes, ends them all.
Works as root (then as an unprivileged user id) and as an ordinary user; needs Linux 5.14, bash and user namespaces.

Where there are no user namespaces: bubblewrap as real root ("bubblewrap-root"), then Docker, if chosen (`docker`), else refusal.
sandlock (Landlock and a seccomp supervisor, no namespaces; PyPI, 0.9.0 tried) is not among them. With the dynamic loader copied
into its root and /usr mounted it does give a private /root, but what an episode must have, it has not: a process left in the
background ends with its command; there is no /proc; `max_disk` binds one folder, and over the whole root is not kept (5 MB
written and committed under a cap of 2 MB); a memfd of 300 MB passes a cap of 128 MB; walking /usr/lib takes 6.9 s, here 0.9 s.
Tasks would be unsolvable there, or limits void, without a sign of it in the record.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from envs.base import EnvFault
from envs.os_env.server import (CHECK_ENVIRONMENT, ENVIRONMENT, MODES, MOUNTED, START_S, WRITABLE, Limits, current_server,
                                end_sandbox, read_only_usr)

MAX_SCRIPT_BYTES = 100_000                                   # below the kernel's limit for one argument
MAX_STATE_BYTES = 32_000                                     # working directory and exported variables between commands
COPY_S = 10.0
READ_ALL = 1 << 1 | 1 << 2                                   # CAP_DAC_OVERRIDE, _READ_SEARCH: what its owner may not read
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


class CopyFailed(RuntimeError):
    """What model text left behind cannot be copied: too much, or too strange. Not a fault of the machinery."""


class Sandbox:
    """A running sandbox. One thread at a time.

    Args:
        init: POSIX shell script that prepares the world, run inside before the first command, within the same limits: an
            instance may come from a model (`envs.synthesis`).
        limits: caps, and how much of a root file system there is.
        mode: one of `server.MODES`; see `probe`.

    Raises:
        EnvFault: it cannot be started; the message says why.
    """

    def __init__(self, init: str = "", limits: Limits | None = None, mode: str = MODES[0]) -> None:
        limits = limits or Limits()
        if mode != MODES[0]:                                 # a whole file system of one's own needs a user namespace
            limits = replace(limits, whole_root=False, capabilities=0)
        self.limits = limits
        self._server = current_server(mode)
        self._cwd, self._exports = "/root", b""
        self._kept: list[int] = []                           # read ends of pipes that background processes still hold
        self._watch: list[socket.socket] = []                # to the process that watches those; closed, it leaves
        self._pidfd, self._uid = self._server.start(limits)
        self._finalizer = weakref.finalize(self, end_sandbox, self._pidfd, self._kept, self._watch, os.getpid())
        if init:
            self._prepare(init)

    def _prepare(self, init: str) -> None:
        try:
            output = self.execute(["sh", "-c"], init, wall_s=START_S)
            if output.code or output.why != "exit":
                reason = f"failed with code {output.code}" if output.why == "exit" else f"was ended ({output.why})"
                raise EnvFault(f"sandbox: the script that prepares the world {reason}: {output.text.strip()[-400:]}")
        except BaseException:
            self.close()
            raise

    def run(self, script: str, wall_s: float | None = None) -> Output:
        """Run a bash script of the model as a new process in the persistent world; never raises on what the script does."""
        script = script.replace("\0", "")
        if len(script.encode()) > MAX_SCRIPT_BYTES:
            return Output(f"bash: script longer than {MAX_SCRIPT_BYTES} bytes\n".encode(), 126)
        prepare = b"unset BASH_ENV; exec 3<&-; { " + self._exports + b"\n:; } 2>/dev/null\n" + SAVE.encode()
        request = self._request(["bash", "--noprofile", "--norc", "-c", script], self._cwd, wall_s, prepare=prepare,
                                environment=ENVIRONMENT | {"BASH_ENV": "/dev/fd/3"})
        output, state = self._enter(request)
        cwd, separator, exports = state.partition(b"\0")
        if separator and len(state) < MAX_STATE_BYTES:
            self._cwd, self._exports = os.fsdecode(cwd), exports
        return output

    def check(self, script: str, *arguments: str, alone: bool = False, wall_s: float | None = None) -> Output:
        """Run a script of ours: clean environment and search path, no start-up files, working directory /root.

        `alone`: first end everything that commands left running, so that nothing of theirs runs beside the script.
        """
        return self.execute(["bash", "--noprofile", "--norc", "-c", script, "check"], *arguments, alone=alone, wall_s=wall_s)

    def execute(self, argv: list[str], *arguments: str, alone: bool = False, wall_s: float | None = None) -> Output:
        """As `check`, with any command of /usr or its sub-folders; its arguments lose their NUL bytes. Code 126: they are too long."""
        words = [*argv, *(argument.replace("\0", "") for argument in arguments)]
        if sum(len(word.encode(errors="replace")) for word in words) > MAX_SCRIPT_BYTES:
            return Output(f"bash: arguments longer than {MAX_SCRIPT_BYTES} bytes\n".encode(), 126)
        if words[0] != "bash":
            words = ["bash", "-c", 'exec "$@"', "check", *words]
        return self._enter(self._request(words, "/root", wall_s, alone=alone))[0]

    def copy(self) -> "Sandbox":
        """A new sandbox with the files of this one, whose processes are ended first.

        Raises:
            CopyFailed: what was left behind does not fit the limits or cannot be copied in time.
        """
        mounted = MOUNTED + tuple(read_only_usr() if self.limits.whole_root else ())
        places = ["."] if self.limits.whole_root else [name[1:] for name in WRITABLE] + ["tmp"]
        root = "." if self.limits.whole_root else ""
        excluded = " ".join(f"--exclude={root}{name if root else name[1:]}" for name in mounted)
        # not the mount points themselves where they belong to somebody else
        names = f"find {' '.join(places)} -mindepth 1 -maxdepth 1 -print0" if root or self._uid else \
            f"printf '%s\\0' {' '.join(places)}"
        pack = (f"{names} | "
                f"exec tar --anchored {excluded} --one-file-system --null -T - -cSf - 2>/dev/null")
        twin = Sandbox(limits=self.limits, mode=self._server.mode)
        source, sink = os.pipe2(os.O_CLOEXEC)
        nothing, nothing_end = os.pipe2(os.O_CLOEXEC)
        try:
            request = self._request(["bash", "-c", pack], "/", COPY_S, alone=True)
            request["capabilities"] = 0 if self._uid else READ_ALL
            packing = self._server.send(request, [self._pidfd, sink, nothing_end])
            os.close(sink)
            unpack = ["bash", "-c", "exec tar --no-same-owner --delay-directory-restore -xpSf -"]
            unpacking = twin._request(unpack, "/", COPY_S) | {"capabilities": request["capabilities"]}
            output, _ = twin._enter(unpacking, stdin=source)
            with packing:
                answer = marshal.loads(packing.recv(1 << 16) or marshal.dumps({"error": "its server process has ended"}))
        except BaseException:
            twin.close()
            raise
        finally:
            for fd in (source, nothing, nothing_end):
                os.close(fd)
        if "error" in answer:
            twin.close()
            raise EnvFault(f"sandbox: {answer['error']}")
        if output.code or output.why != "exit" or answer["why"] != "exit":
            twin.close()
            raise CopyFailed(f"the state cannot be copied: {output.text.strip()[-200:] or answer['why']}")
        return twin

    def close(self) -> None:
        """End the sandbox with all its processes and files; safe to call twice."""
        self._finalizer()

    def _request(self, argv: list[str], cwd: str, wall_s: float | None, *, environment: dict[str, str] = CHECK_ENVIRONMENT,
                 prepare: bytes = b"", alone: bool = False) -> dict[str, Any]:
        limits = self.limits
        return {"op": "run", "argv": argv, "env": environment, "cwd": cwd, "state": prepare, "alone": alone,
                "wall_s": limits.wall_s if wall_s is None else wall_s, "memory_bytes": limits.memory_bytes, "uid": self._uid,
                "capabilities": 0 if self._uid else limits.capabilities, "inodes": (limits.tmpfs, limits.inodes),
                "limits": {"RLIMIT_NPROC": limits.processes, "RLIMIT_AS": limits.address_bytes, "RLIMIT_CPU": limits.cpu_s,
                           "RLIMIT_FSIZE": limits.file_bytes, "RLIMIT_NOFILE": limits.open_files,
                           "RLIMIT_CORE": 1}}                # not 0: with 0, a crash still starts the host's crash handler

    def _enter(self, request: dict[str, Any], stdin: int | None = None) -> tuple[Output, bytes]:
        cap = self.limits.output_bytes
        output, output_end = os.pipe2(os.O_CLOEXEC)
        state, state_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)  # an environment larger than a pipe is lost, not waited for
        os.set_blocking(output, False)
        held = False
        self._dismiss()
        try:
            try:
                reply = self._server.send(request, [self._pidfd, output_end, state_end, *([] if stdin is None else [stdin])])
            finally:
                os.close(output_end)
                os.close(state_end)
            try:
                data, answer = _collect(output, reply, cap, request["wall_s"] + START_S)
            except BaseException:
                reply.close()
                raise
            self._watch.append(reply)
            if not answer.get("left"):
                self._dismiss()
            data, held = _drain(output, data, cap)
            saved, _ = _drain(state, b"", MAX_STATE_BYTES)
        finally:
            os.close(state)
            self._keep(output) if held else os.close(output)
        if "error" in answer:
            raise EnvFault(f"sandbox: {answer['error']}")
        return Output(data, answer["code"], answer["why"]), saved

    def _dismiss(self) -> None:
        while self._watch:
            self._watch.pop().close()

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


@functools.lru_cache(maxsize=len(MODES) + 1)
def probe(mode: str | None = None) -> tuple[str | None, str]:
    """The mode in which sandboxes work here (tried once, in the order of `MODES`, or only `mode`), or None, and why not.

    "bubblewrap" needs user namespaces; "bubblewrap-root" needs to be root with CAP_SYS_ADMIN, gives every sandbox a user id of
    its own, and is what remains where user namespaces are switched off.
    """
    if sys.platform != "linux":
        return None, f"the shell sandbox needs Linux, this is {sys.platform}"
    release = tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])
    if release < (5, 14):
        return None, f"the shell sandbox needs Linux 5.14 (process limits per user namespace), this is {os.uname().release}"
    reasons = []
    for candidate in MODES if mode is None else (mode,):
        if candidate == "bubblewrap-root" and os.geteuid() != 0:
            reasons.append("bubblewrap-root: needs root")
            continue
        try:
            with Sandbox(mode=candidate) as sandbox:
                output = sandbox.check('[ "$(id -un)" = root ] && [ ! -e "$1" ]', str(Path(__file__).resolve()))
        except (EnvFault, OSError) as fault:
            reasons.append(f"{candidate}: {fault}")
        else:
            if output.code == 0:
                return candidate, ""
            reasons.append(f"{candidate}: the sandbox is not what it should be: {output.text.strip() or output}")
    return None, ("; ".join(reasons) + ". User namespaces may be switched off (container without them, sysctl, AppArmor); "
                  "where Docker runs, backend='docker' is the other choice")
