"""Fork server of the sandboxes: a small single-threaded process, run as a script on an empty environment.

Why a process of its own: a sandbox dies with the *thread* that started it, and environments run in threads that end; only a
single-threaded process can enter a user namespace; and a forked child of this one is far cheaper than nsenter, setpriv and
prlimit in a row. It holds no state: each datagram on the control socket (file descriptor 0) is one request (marshal, from the
same interpreter) with its file descriptors, each is served by a fork, and the end of the socket (the owner is gone, however it
went) ends this process and with it every sandbox. It imports nothing of the project.

    {"op": "start", "argv", "files": {descriptor: text}}             fds: log pipe
    {"op": "run", "argv", "env", "cwd", "limits", "wall_s", "memory_bytes", "state", "alone", "uid", "capabilities", "inodes"}
                                                                     fds: pidfd of PID 1, output pipe, state pipe, standard
                                                                     input (not always), reply socket

The child that serves a command watches what it must not take: memory, sockets, time. Where the command leaves processes behind,
it goes on watching them after its answer, until the owner closes the reply socket, at the next command or the sandbox's end.
"""

import ctypes
import fcntl
import gc
import marshal
import os
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import time

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
USER_NAMESPACE = 0x10000000
NAMESPACES = 0x7C020000 | 0x2000000 * os.path.exists("/proc/self/ns/cgroup")  # mount, uts, ipc, user, pid, net; cgroup
TICK_S = 0.05                                                # how often memory, sockets and running processes are looked at
MAX_SOCKETS = 512                                            # of a sandbox; the kernel keeps up to 0.4 MB for each
REMOUNT = 32 | 2 | 4                                         # MS_REMOUNT, MS_NOSUID, MS_NODEV
GONE_S = 2.0                                                 # for killed processes to leave
PAGE = resource.getpagesize()
STATE_IN, STATE_OUT = 3, 200                                 # where a command finds its last and leaves its next shell state
MAX_FDS = 1024
MAX_REQUEST = 1 << 18                                        # a script and a shell state at their limits, with room to spare


class Filter(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("code", ctypes.c_void_p)]


def check(result, what):
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def prctl(option, value, *rest):
    check(LIBC.prctl(option, ctypes.c_ulong(value) if isinstance(value, int) else value, *(rest or (0, 0, 0))),
          f"prctl {option}")


def place(fds):
    """Move descriptors {target: source} to their numbers and close every other one from 3 on."""
    high = {target: os.dup2(source, MAX_FDS // 2 + target) for target, source in fds.items()}
    for target, source in high.items():
        os.dup2(source, target)
    first = 3
    for target in sorted(target for target in fds if target >= 3):
        os.closerange(first, target)
        first = target + 1
    os.closerange(first, MAX_FDS)


def default_signals():
    """Undo what we and python ignore: an ignored signal would stay so in every program that follows."""
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)


def small_file(text):
    """A descriptor to read `text` from. No pipe: those of a user shrink when another of his processes has many, and fill up."""
    fd = os.memfd_create("file", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, text)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def start(request, fds, filter_code):
    """Become bwrap. Descriptors 1 to 4: the log; 5: the filter; the others: small files."""
    placed = {0: os.open("/dev/null", os.O_RDONLY), 1: fds[0], 2: fds[0], 3: fds[0], 4: fds[0]}
    for target, text in {**request["files"], 5: filter_code}.items():
        placed[target] = small_file(text)
    place(placed)
    default_signals()
    os.execve(request["argv"][0], request["argv"], {})


def enter(pidfd, uid):
    prctl(PR_SET_DUMPABLE, 0)                                # nobody inside may look through /proc at this copy of python
    check(LIBC.setns(pidfd, NAMESPACES if uid is None else NAMESPACES & ~USER_NAMESPACE), "setns")


def confine(request, filter_struct):
    """Limits, few or no capabilities, no new privileges, the filter: everything that the command is to inherit."""
    kept = request["capabilities"]
    for name, value in request["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    for capability in range(64):
        if not kept >> capability & 1 and LIBC.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break                                            # past the last capability of this kernel
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if request["uid"] is not None:
        os.setgroups([])
        os.setresgid(*[request["uid"]] * 3)
        os.setresuid(*[request["uid"]] * 3)
    check(LIBC.capset(struct.pack("<Ii", 0x20080522, 0), struct.pack("<6I", kept, kept, 0, 0, 0, 0)), "capset")
    prctl(PR_SET_SECCOMP, 2, ctypes.byref(filter_struct), 0, 0)


def command(request, fds, filter_struct):
    """Become the command (already in the sandbox's process namespace)."""
    os.setsid()
    state = small_file(request["state"])
    if request["uid"] is not None:                           # or a program could not open its own /dev/stdout
        for fd in (state, fds[1], fds[2]):
            os.fchown(fd, request["uid"], request["uid"])
    stdin = fds[3] if len(fds) > 4 else os.open("/dev/null", os.O_RDONLY)
    place({0: stdin, 1: fds[1], 2: fds[1], STATE_IN: state, STATE_OUT: fds[2]})
    os.umask(0o022)
    default_signals()
    try:
        os.chdir(request["cwd"])
    except OSError:
        os.chdir("/")
    confine(request, filter_struct)
    os.execve("/bin/bash", request["argv"], request["env"])


def usage():
    """Resident bytes of all processes of the sandbox whose /proc this is, how many there are beside PID 1, how many run now."""
    total, others, running = 0, 0, 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:                                  # it ended between the two calls
                continue
            total += int(fields[21]) * PAGE if len(fields) > 21 else 0
            others += name != "1"
            running += fields[:1] == [b"R"]
    return total, others, running


def sockets():
    """How many sockets there are in the sandbox's network, also those that no process has open any more."""
    with open("/proc/1/net/sockstat", "rb") as file:
        return int(file.readline().split()[-1])


def bound_inodes(tmpfs, most):
    """Files cost the kernel memory even when they are empty; bubblewrap can only bound their size."""
    for path in tmpfs:
        world = os.statvfs(path)
        most = max(most, world.f_files - world.f_ffree)      # the script that prepares the world may have made more
        check(LIBC.mount(b"none", path.encode(), b"tmpfs", REMOUNT, f"nr_inodes={most}".encode()), f"mount {path}")


def kill_all(wait_s):
    """SIGKILL to every process of the entered namespace but PID 1, which the kernel protects; wait until they are gone."""
    child = os.fork()
    if child == 0:
        deadline = time.monotonic() + wait_s
        try:
            os.kill(-1, signal.SIGKILL)
            while time.monotonic() < deadline:
                time.sleep(0.001)
                os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass                                             # PID 1 is alone
        os._exit(0)
    os.waitpid(child, 0)


def kill_group(child):
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:                               # so young that it leads no group yet
        os.kill(child, signal.SIGKILL)


def attend(child, reply, request):
    """Wait for the command's end, or end it; why: exit, timeout, output, memory."""
    poller = select.poll()
    poller.register(os.pidfd_open(child), select.POLLIN)
    poller.register(reply, select.POLLIN)                    # the host closes its side when the output is too long
    deadline = time.monotonic() + request["wall_s"]
    while True:
        ready = [fd for fd, _ in poller.poll(TICK_S * 1000)]
        if ready and reply.fileno() not in ready:
            return "exit"
        why = "output" if ready else "timeout" if time.monotonic() > deadline else "memory" if takes_too_much(request) else None
        if why:
            kill_group(child)
            if why == "memory":
                kill_all(0)                                  # the command itself is still to be reaped
            return why


def takes_too_much(request):
    return usage()[0] > request["memory_bytes"] or sockets() > MAX_SOCKETS


def watch_the_rest(first, reply, request):
    """Bound what the command left behind, until it or the sandbox ends or the next command comes and watches it, too."""
    poller = select.poll()
    poller.register(first, select.POLLIN)
    poller.register(reply, 0)                                # hang-up only
    busy_s = 2 * request["limits"]["RLIMIT_CPU"]             # with at least one process running, whichever
    while not poller.poll(TICK_S * 1000):
        _, others, running = usage()
        busy_s -= TICK_S * (running > 0)
        if others and (busy_s < 0 or takes_too_much(request)):
            kill_all(GONE_S)
        elif not others:
            return


def run(request, fds, filter_struct):
    """Enter the sandbox, run the command in a child, answer {"code", "why", "left"}: how many processes it leaves behind."""
    reply = socket.socket(fileno=fds[-1])
    try:
        enter(fds[0], request["uid"])
        bound_inodes(*request["inodes"])
        if request["alone"]:
            kill_all(GONE_S)
        child = os.fork()
        if child == 0:
            try:
                command(request, fds, filter_struct)
            finally:
                os.write(2, f"cannot execute: {sys.exc_info()[1]}\n".encode())
                os._exit(126)
        for fd in fds[1:-1]:
            os.close(fd)
        why = attend(child, reply, request)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        left = usage()[1]
        reply.send(marshal.dumps({"code": code if code >= 0 else 128 - code, "why": why, "left": left}))
    except OSError as error:
        reply.send(marshal.dumps({"error": str(error)}))
        return
    if left:
        watch_the_rest(fds[0], reply, request)


def serve(control, filter_code):
    code = ctypes.create_string_buffer(filter_code, len(filter_code))
    filter_struct = Filter(len(filter_code) // 8, ctypes.addressof(code))
    parent = os.getpid()
    while True:
        data, fds, _, _ = socket.recv_fds(control, MAX_REQUEST, 8)
        if not data:
            return
        if os.fork() == 0:
            try:
                prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != parent:
                    os._exit(1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                request = marshal.loads(data)
                if request["op"] == "start":
                    start(request, fds, filter_code)
                else:
                    run(request, fds, filter_struct)
            except BaseException as error:                   # a forked server must not return into the loop
                os.write(2, f"sandbox spawner: {error!r}\n".encode())
            finally:
                os._exit(0)
        for fd in fds:
            os.close(fd)


def main():
    control = socket.socket(fileno=0)
    hello = marshal.loads(control.recv(MAX_REQUEST))
    filter_code = control.recv(MAX_REQUEST)
    if hello["uid"] is not None:                             # process limits do not bind the kernel's uid 0
        os.setgroups([])
        os.setresgid(hello["uid"], hello["uid"], hello["uid"])
        os.setresuid(hello["uid"], hello["uid"], hello["uid"])
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_FDS, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)             # Ctrl-C is the owner's business; it may want to close in order
    gc.disable()
    gc.freeze()
    try:
        serve(control, filter_code)
    finally:
        if hello["scratch"]:
            shutil.rmtree(hello["scratch"], ignore_errors=True)


main()
