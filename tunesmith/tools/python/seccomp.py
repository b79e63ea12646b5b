"""The system-call filter of the Python sandbox, as a classic BPF program for the kernel's seccomp.

This is the one list of what is denied; a denied call fails with EPERM. The filter denies sockets, objects and locks
that sandboxes would share, tracing, namespaces, mounts, kernel administration, scheduling (which reaches the worker),
memory outside of the limits and, depending on the limits, processes and threads. Where no namespace hides other
processes and files (`is_only_barrier`), it also denies signals, `exec`, and changes to files that Landlock does not
cover. Of calls that do many things (`fcntl`, `ioctl`, `prctl`), the filter lists what is allowed.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterator

LOAD_WORD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, DENY, NOT_IMPLEMENTED, KILL_PROCESS = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x80000000
NUMBER_OFFSET, ARCHITECTURE_OFFSET, FIRST_ARGUMENT_OFFSET = 0, 4, 16
AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_CALLS = 0x40000000
CLONE_THREAD = 0x00010000
CLONE_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""

ALWAYS = {
    # Sockets; `socketpair` is below.
    "socket": (41, 198), "bind": (49, 200), "connect": (42, 203), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242),
    # Objects of the machine without a path: System V memory, semaphores and messages, and POSIX queues.
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "shmdt": (67, 197), "semget": (64, 190),
    "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189),
    "msgrcv": (70, 188), "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181),
    "mq_timedsend": (242, 182), "mq_timedreceive": (243, 183), "mq_notify": (244, 184), "mq_getsetattr": (245, 185),
    # Locks and watches of files that all sandboxes share.
    "flock": (73, 32), "inotify_init": (253, None), "inotify_init1": (294, 26), "fanotify_init": (300, 262),
    "cachestat": (451, 451),
    # Tracing.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "kcmp": (312, 272), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424),
    # Namespaces and mounts.
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467), "statmount": (457, 457), "listmount": (458, 458), "listns": (470, 470),
    # Memory outside of the address space limit, and interfaces past this filter.
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "bpf": (321, 280), "perf_event_open": (298, 241),
    "io_setup": (206, 0),
    # Scheduling.
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "migrate_pages": (256, 238), "move_pages": (279, 239),
    # Administration of the kernel, its keys and its file systems.
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "syslog": (103, 116), "acct": (163, 89),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "sethostname": (170, 161), "setdomainname": (171, 162),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "clock_settime": (227, 112),
    "clock_adjtime": (305, 266), "settimeofday": (164, 170), "adjtimex": (159, 171), "iopl": (172, None),
    "ioperm": (173, None), "vhangup": (153, 58), "personality": (135, 92), "file_setattr": (469, 469),
    "lsm_set_self_attr": (460, 460),
}  # fmt: skip
"""Denied system calls: their numbers on x86_64 and aarch64, None where there is no such call."""
WITHOUT_PROCESSES = {"fork": (57, None), "vfork": (58, None)}
"""Denied where code may not start processes; `clone` is checked by its flags."""
WITHOUT_NAMESPACES = {
    "execve": (59, 221), "execveat": (322, 281), "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "setsid": (112, 157), "setpgid": (109, 154),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "removexattrat": (466, 466), "truncate": (76, 45), "mknod": (133, None),
    "mknodat": (259, 33),
}  # fmt: skip
"""Denied where processes and files of the machine are in sight, besides."""
ALLOWED_ARGUMENTS: dict[str, tuple[tuple[int, int], dict[int, tuple[int, ...]]]] = {
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_SETLK, F_SETLKW (of sqlite), F_DUPFD_QUERY, F_DUPFD_CLOEXEC,
    # F_SETPIPE_SZ, F_GETPIPE_SZ. Others set leases, hints and owners that get signals, or read others' locks.
    "fcntl": ((72, 25), {1: (0, 1, 2, 3, 4, 6, 7, 1027, 1030, 1031, 1032)}),
    # TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, FICLONE. Others reach terminals, devices,
    # file systems and the flags of files.
    "ioctl": ((16, 29), {1: (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x40049409)}),
    # AF_UNIX and SOCK_STREAM, with SOCK_NONBLOCK and SOCK_CLOEXEC: a connected stream cannot be sent elsewhere.
    "socketpair": ((53, 199), {0: (1,), 1: (0x1, 0x801, 0x80001, 0x80801)}),
    # The caller's own limits.
    "prlimit64": ((302, 261), {0: (0,)}),
    # PR_SET_NAME, PR_GET_NAME, PR_SET_VMA. PR_SET_PDEATHSIG would let code outlive its worker.
    "prctl": ((157, 167), {0: (15, 16, 0x53564D41)}),
}
"""Numbers of system calls, and the values that an argument may have, by its index."""
CLONE, CLONE3 = (56, 220), (435, 435)


def build_filter(
    *, can_fork: bool, can_start_threads: bool, is_only_barrier: bool, machine: str | None = None
) -> bytes | None:
    """The BPF program for this machine, or None on an architecture without a table of system calls."""
    machine = machine or platform.machine()
    if machine not in AUDIT_ARCHITECTURES:
        return None
    column = list(AUDIT_ARCHITECTURES).index(machine)
    calls: dict[str, tuple[int, int | None]] = dict(ALWAYS)
    calls |= {} if can_fork else WITHOUT_PROCESSES
    calls |= WITHOUT_NAMESPACES if is_only_barrier else {}
    instructions = [
        _encode(LOAD_WORD, ARCHITECTURE_OFFSET),
        _encode(JUMP_EQUAL, AUDIT_ARCHITECTURES[machine], if_true=1),
        _encode(RETURN, KILL_PROCESS),
        _encode(LOAD_WORD, NUMBER_OFFSET),
    ]
    if machine == "x86_64":
        instructions += [_encode(JUMP_AT_LEAST, X32_CALLS, if_false=1), _encode(RETURN, DENY)]
    for numbers in calls.values():
        if numbers[column] is not None:
            instructions += _match_call(numbers[column], [_encode(RETURN, DENY)])
    # Its flags are behind a pointer, which a filter cannot read; the C library falls back to `clone`.
    instructions += _match_call(CLONE3[column], [_encode(RETURN, NOT_IMPLEMENTED)])
    instructions += _match_call(
        CLONE[column], list(_check_clone(can_fork=can_fork, can_start_threads=can_start_threads))
    )
    for numbers, allowed in ALLOWED_ARGUMENTS.values():
        instructions += _match_call(numbers[column], list(_check_arguments(allowed)))
    return b"".join([*instructions, _encode(RETURN, ALLOW)])


def _match_call(number: int | None, body: list[bytes]) -> list[bytes]:
    """Instructions for one system call, whose number is loaded; the body returns."""
    return [_encode(JUMP_EQUAL, number, if_false=len(body)), *body]


def _check_clone(*, can_fork: bool, can_start_threads: bool) -> Iterator[bytes]:
    yield _load_argument(0)
    yield _encode(JUMP_ANY_BIT, CLONE_NAMESPACES, if_false=1)
    yield _encode(RETURN, DENY)
    yield _encode(JUMP_ANY_BIT, CLONE_THREAD, if_false=1)
    yield _encode(RETURN, ALLOW if can_start_threads else DENY)
    yield _encode(RETURN, ALLOW if can_fork else DENY)


def _check_arguments(allowed: dict[int, tuple[int, ...]]) -> Iterator[bytes]:
    for index, values in allowed.items():
        yield _load_argument(index)
        for left in range(len(values), 0, -1):
            # Past the other values and the refusal.
            yield _encode(JUMP_EQUAL, values[-left], if_true=left)
        yield _encode(RETURN, DENY)
    yield _encode(RETURN, ALLOW)


def _load_argument(index: int) -> bytes:
    """Load the lower half of an argument, which is all that the kernel reads of an integer."""
    return _encode(LOAD_WORD, FIRST_ARGUMENT_OFFSET + 8 * index)


def _encode(code: int, value: int | None, *, if_true: int = 0, if_false: int = 0) -> bytes:
    """One `struct sock_filter`; the jumps count the instructions that are skipped."""
    return struct.pack("=HBBI", code, if_true, if_false, value)
