"""The system-call filter, run on an interpreter of BPF written here, and its numbers against the kernel's headers."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from tunesmith.tools.python.seccomp import (
    ALLOWED_ARGUMENTS,
    ALWAYS,
    CLONE,
    CLONE3,
    WITHOUT_NAMESPACES,
    WITHOUT_PROCESSES,
    build_filter,
)

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x50001, 0x50026, 0x80000000
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


def decide(program, *, architecture, number, argument=0, second=0):
    """What the filter returns for a system call."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, argument, second, 0, 0, 0, 0)
    instructions = list(struct.iter_unpack("=HBBI", program))
    accumulator, position = 0, 0
    while True:
        code, if_true, if_false, value = instructions[position]
        position += 1
        match code:
            case 0x20:
                accumulator = struct.unpack_from("=I", data, value)[0]
            case 0x06:
                return value
            case 0x15 | 0x35 | 0x45:
                is_true = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[
                    code
                ]
                position += if_true if is_true else if_false


@pytest.fixture(params=list(ARCHITECTURES))
def machine(request):
    return request.param


@pytest.mark.parametrize("can_fork", [True, False])
@pytest.mark.parametrize("can_start_threads", [True, False])
@pytest.mark.parametrize("is_only_barrier", [True, False])
def test_decisions(machine, can_fork, can_start_threads, is_only_barrier):
    column, architecture = ARCHITECTURES[machine]
    program = build_filter(
        can_fork=can_fork, can_start_threads=can_start_threads, is_only_barrier=is_only_barrier, machine=machine
    )
    denied = ALWAYS | (WITHOUT_NAMESPACES if is_only_barrier else {}) | ({} if can_fork else WITHOUT_PROCESSES)
    numbers = {each[column] for each in denied.values()}
    special = {CLONE[column], CLONE3[column], *(each[column] for each, _ in ALLOWED_ARGUMENTS.values())}
    for number in set(range(600)) - special:
        expected = EPERM if number in numbers else ALLOW
        assert decide(program, architecture=architecture, number=number) == expected, number

    def clone(flags):
        return decide(program, architecture=architecture, number=CLONE[column], argument=flags)

    assert clone(0x003D0F00) == (ALLOW if can_start_threads else EPERM)  # the flags of a thread
    assert clone(17) == (ALLOW if can_fork else EPERM)
    for namespace in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert clone(namespace | 17) == clone(namespace | 0x10000) == EPERM
    assert decide(program, architecture=architecture, number=CLONE3[column]) == ENOSYS

    def call(name, first, second=0):
        number = ALLOWED_ARGUMENTS[name][0][column]
        return decide(program, architecture=architecture, number=number, argument=first, second=second)

    for allowed in (
        [("prlimit64", 0)],
        [("prctl", option) for option in (15, 16, 0x53564D41)],
        [("fcntl", 3, command) for command in (0, 1, 2, 3, 4, 6, 7, 1027, 1030, 1031, 1032)],
        [("ioctl", 3, request) for request in (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)],
        [("socketpair", 1, kind) for kind in (1, 1 | 0o4000, 1 | 0o2000000, 1 | 0o2004000)],
    ):
        assert {call(*each) for each in allowed} == {ALLOW}
    for refused in (
        [("prlimit64", 1), ("prlimit64", 0xFFFFFFFF)],
        [("prctl", option) for option in (1, 4, 22, 36)],
        [("fcntl", 3, command) for command in (5, 8, 10, 15, 36, 37, 38, 1024, 1026, 1033, 1036, 1038)],
        [("ioctl", 3, request) for request in (0x5412, 0x541C, 0x8901, 0x8902, 0x40086602, 0x401C5820, 0xC0045877)],
        [("socketpair", 1, kind) for kind in (2, 3, 5, 2 | 0o2000000)] + [("socketpair", 30, 1), ("socketpair", 16, 1)],
    ):
        assert {call(*each) for each in refused} == {EPERM}


def test_foreign_architectures_and_the_x32_interface_are_refused():
    program = build_filter(can_fork=False, can_start_threads=True, is_only_barrier=False, machine="x86_64")
    assert decide(program, architecture=0x40000003, number=1) == KILL
    assert decide(program, architecture=0xC000003E, number=0x40000001) == EPERM


def test_other_architectures_have_no_filter():
    assert build_filter(can_fork=False, can_start_threads=True, is_only_barrier=True, machine="riscv64") is None


def test_numbers_are_those_of_the_kernel(machine):
    if not HEADERS[machine].exists():
        pytest.skip("no kernel headers (linux-libc-dev)")
    listed = {name: int(number) for name, number in re.findall(
        r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[machine].read_text()
    )}  # fmt: skip
    calls = ALWAYS | WITHOUT_NAMESPACES | WITHOUT_PROCESSES | {"clone": CLONE, "clone3": CLONE3}
    calls |= {name: numbers for name, (numbers, _) in ALLOWED_ARGUMENTS.items()}
    newest = max(number for name, number in listed.items() if name != "syscalls")
    for name, numbers in calls.items():
        number = numbers[ARCHITECTURES[machine][0]]
        if number is None or number <= newest:
            assert listed.get(name) == number, name
