"""The system-call filter of the sandbox, as classic BPF (seccomp mode 2): what model text has no business calling.

Denied: new namespaces and mounts, kernel interfaces with a record of privilege bugs, other processes' memory, memory that no
limit of ours bounds (memfd, shared anonymous mappings, pages given to a pipe, System V and POSIX message memory), what all users
of the machine share (kernel AIO), and sockets other than unix, TCP and UDP in the (empty) network namespace: AF_VSOCK, for one,
reaches the host of a virtual machine whatever the network namespace, and a socket of a rare protocol loads its kernel module.
The core file limit stays: lowered to 0, a crash would start the host's crash handler; no process sets the limits of another.
Numbers: the kernel's
`arch/x86/entry/syscalls/syscall_64.tbl` and `include/uapi/asm-generic/unistd.h`.
"""

from __future__ import annotations

import errno
import platform
import struct

ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}       # AUDIT_ARCH_*
# name: (x86_64, aarch64); None where the architecture has no such call
DENIED = {
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "syslog": (103, 116), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "swapon": (167, 224), "swapoff": (168, 225),
    "reboot": (169, 142),
    "acct": (163, 89), "quotactl": (179, 60), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266), "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None),
    "fanotify_init": (300, 262),
    "lookup_dcookie": (212, 18), "nfsservctl": (180, 42), "vhangup": (153, 58), "personality": (135, 92), "mbind": (237, 235),
    "set_mempolicy": (238, 237), "migrate_pages": (256, 238), "move_pages": (279, 239), "sethostname": (170, 161),
    "setdomainname": (171, 162), "vmsplice": (278, 75), "io_setup": (206, 0), "quotactl_fd": (443, 443),
    "open_tree_attr": (467, 467)}
CLONE, CLONE3, SOCKET, SOCKETPAIR, IOCTL = (56, 220), (435, 435), (41, 198), (53, 199), (16, 29)
NEW_NAMESPACES = 0x7E020080                                  # CLONE_NEWNS|CGROUP|UTS|IPC|USER|PID|NET and CLONE_NEWTIME
UNIX, INET, INET6 = 1, 2, 10
TYPES, PROTOCOLS = (1, 2), (0, 6, 17)                        # of inet and inet6: stream, datagram; the default, TCP, UDP
MMAP, SETRLIMIT, PRLIMIT = (9, 222), (160, 164), (302, 261)
SHARED_ANONYMOUS, CORE = 0x21, 4                             # MAP_SHARED|MAP_ANONYMOUS, RLIMIT_CORE
TERMINAL_INPUT = (0x5412, 0x541C)                            # TIOCSTI, TIOCLINUX: type into a terminal

_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _ARG0, _ARG1, _ARG2, _ARG3 = 0, 4, 16, 24, 32, 40        # offsets in struct seccomp_data (little-endian low words)


def _errno(code: int) -> int:
    return 0x00050000 | code


def program(machine: str | None = None) -> bytes:
    """The filter as an array of `struct sock_filter`.

    Raises:
        OSError: no table for this machine.
    """
    machine = machine or platform.machine()
    if machine not in ARCHES:
        raise OSError(f"no system-call table for {machine}; known: {', '.join(ARCHES)}")
    column = list(ARCHES).index(machine)
    code = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, ARCHES[machine]), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NR)]
    if machine == "x86_64":                                  # the x32 numbers would go past the table
        code += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL)]
    for numbers in DENIED.values():
        if numbers[column] is not None:
            code += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _errno(errno.EPERM))]
    # libc falls back to clone when clone3, whose flags lie in memory that a filter cannot read, does not exist
    code += [(_EQUAL, 0, 1, CLONE3[column]), (_RETURN, 0, 0, _errno(errno.ENOSYS))]
    code += [(_EQUAL, 0, 3, CLONE[column]), (_LOAD, 0, 0, _ARG0), (_ANY_BIT, 0, 1, NEW_NAMESPACES),
             (_RETURN, 0, 0, _errno(errno.EPERM)),
             (_LOAD, 0, 0, _NR)]
    for call in (SOCKET, SOCKETPAIR):
        code += _block(call[column], _socket_rule())
    deny = (_RETURN, 0, 0, _errno(errno.EPERM))
    code += _block(MMAP[column], [(_LOAD, 0, 0, _ARG3), (_AND, 0, 0, SHARED_ANONYMOUS), (_EQUAL, 0, 1, SHARED_ANONYMOUS), deny])
    code += _block(SETRLIMIT[column], [(_LOAD, 0, 0, _ARG0), (_EQUAL, 0, 1, CORE), deny])
    code += _block(PRLIMIT[column], [                        # a new value is given, for another process or for core files
        (_LOAD, 0, 0, _ARG2), (_EQUAL, 0, 2, 0), (_LOAD, 0, 0, _ARG2 + 4), (_EQUAL, 5, 0, 0),
        (_LOAD, 0, 0, _ARG0), (_EQUAL, 0, 2, 0), (_LOAD, 0, 0, _ARG1), (_EQUAL, 0, 1, CORE), deny])
    code += [(_EQUAL, 0, 4, IOCTL[column]), (_LOAD, 0, 0, _ARG1), (_EQUAL, 1, 0, TERMINAL_INPUT[0]),
             (_EQUAL, 0, 1, TERMINAL_INPUT[1]),
             (_RETURN, 0, 0, _errno(errno.EPERM)), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def _block(number: int, rule: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """`rule` for one call; it is over where it falls off its end, and the call's number is loaded again."""
    return [(_EQUAL, 0, len(rule) + 1, number), *rule, (_LOAD, 0, 0, _NR)]


def _socket_rule() -> list[tuple[int, int, int, int]]:
    """Any unix socket; of inet and inet6 the types and protocols above."""
    unsupported = (_RETURN, 0, 0, _errno(errno.EPROTONOSUPPORT))
    protocol = [(_LOAD, 0, 0, _ARG2), *((_EQUAL, len(PROTOCOLS) - at, 0, value) for at, value in enumerate(PROTOCOLS)), unsupported]
    kind = [(_LOAD, 0, 0, _ARG1), (_AND, 0, 0, 0xF), *((_EQUAL, len(TYPES) - at, 0, value) for at, value in enumerate(TYPES)),
            unsupported]
    rest = kind + protocol
    return [(_LOAD, 0, 0, _ARG0), (_EQUAL, 3 + len(rest), 0, UNIX), (_EQUAL, 2, 0, INET), (_EQUAL, 1, 0, INET6),
            (_RETURN, 0, 0, _errno(errno.EAFNOSUPPORT)), *rest]
