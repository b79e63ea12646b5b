"""A call sees nothing of the calls before it: not in memory, in files, in the folder itself, or in the kernel."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
import socket
import subprocess
import sys

import pytest

from sandboxes import KINDS, build_tool, run_as_ordinary_user, run_code
from tunesmith.config import PythonToolSection
from tunesmith.tools.python.tool import PythonTool

LEAVE_TRACES = """
import sys
class Trace:
    def __getattr__(self, name): return "KRAM"[::-1] + name[::-1] + "ECART"[::-1]
trace = Trace()
# MARKedocECART
print(trace.tuodts)
print(trace.rredts, file=sys.stderr)
with open(trace.emanelif, "w") as file: file.write(trace.tnetnocelif)
raise ValueError(trace.rredts)
"""
"""Each text is "MARK", the name of the trace, and "TRACE". No text is written out but the one in the comment."""

WALK = """
import sys
def walk(frame):
    while frame is not None:
        yield from (str(value) for place in (frame.f_locals, frame.f_globals) for value in place.values())
        yield from (str(vars(value)) for value in frame.f_locals.values() if hasattr(value, "__dict__"))
        frame = frame.f_back
print("MARK" "edoc" in "".join(text[:100_000] for text in walk(sys._getframe())))
"""

SCAN = """
import ctypes, gc, os, re
{before}
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
reader, writer = os.pipe()

def read_page(page):
    return os.read(reader, 4096) if libc.write(writer, ctypes.c_void_p(page << 12), 4096) > 0 else b""

places = [id(each) for each in gc.get_objects()] + [id(each) for each in vars(os)]
places += [libc.malloc(size) for size in (8, 100, 1000, 10_000, 100_000, 1_000_000)]
places += [ctypes.c_void_p.in_dll(libc, name).value for name in ("environ", "stdout", "stderr")]
pages = set()
for start in {{place >> 12 for place in places}}:
    for first, step in ((start, -1), (start + 1, 1)):
        while first not in pages and read_page(first):
            pages.add(first)
            first += step
pattern = re.compile(b"MARK(?:)([a-z ]{{3,20}})(?:)TRACE")
found, last = set(), b""
for page in sorted(pages):
    data = read_page(page)
    found.update(match.group(1).decode() for match in pattern.finditer(last[-50:] + data))
    last = data
print(len(pages) > 1000, sorted(found))
"""
"""Looks for traces in all mapped pages around known objects; the text it looks for stands nowhere in its own code."""

SCAN_FILE = """
import re
{before}
found = set()
pattern = re.compile(b"MARK(?:)([a-z ]{{3,20}})(?:)TRACE")
size = 0
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
    for line in maps.read().splitlines():
        places, rights = line.split()[:2]
        if rights[0] != "r" or "[v" in line: continue
        start, end = (int(place, 16) for place in places.split("-"))
        memory.seek(start)
        data = memory.read(end - start)
        size += len(data)
        found.update(match.group(1).decode() for match in pattern.finditer(data))
print(size > 5_000_000, sorted(found))
"""


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def tool(kind):
    tool = build_tool(kind)
    yield tool
    tool.close()


def leave_traces(tool):
    """Run a call that leaves each kind of trace it can."""
    result = run_code(tool, LEAVE_TRACES)
    assert result.stdout == "MARKstdoutTRACE\n" and "MARKstderrTRACE" in result.stderr


def test_a_walk_over_the_frames_finds_nothing_of_the_call_before(tool):
    run_code(tool, LEAVE_TRACES)
    assert run_code(tool, WALK).text == "False"


def test_a_scan_of_the_memory_finds_nothing_of_the_calls_before(tool):
    for _ in range(3):
        leave_traces(tool)
        assert run_code(tool, SCAN.format(before="")).text == "True []"


def test_a_scan_of_the_memory_finds_what_is_there(tool):
    own = SCAN.format(before='kept = "".join(["MARK", "kept", "TRACE"])')
    assert run_code(tool, own).text == "True ['kept']"


def test_a_scan_of_the_whole_memory_finds_nothing_of_the_calls_before(monkeypatch):
    """Without isolation a program can read all of its memory; the processes are the same."""
    monkeypatch.setenv("PATH", "/nowhere")
    tool = PythonTool(PythonToolSection(isolation="bubblewrap", unsafe=True, num_workers=1, wall_s=60))
    for _ in range(3):
        leave_traces(tool)
        assert run_code(tool, SCAN_FILE.format(before="")).text == "True []"
    own = SCAN_FILE.format(before='kept = "".join(["MARK", "kept", "TRACE"])')
    assert run_code(tool, own).text == "True ['kept']"
    tool.close()


def test_calls_start_with_the_same_files_arguments_and_environment(tool):
    state = (
        "import os, resource, signal, sys, threading\n"
        "files = []\n"
        "for fd in range(64):\n"
        "  try: files.append((fd, oct(os.fstat(fd).st_mode), os.get_blocking(fd), os.get_inheritable(fd)))\n"
        "  except OSError: pass\n"
        "print(files, sys.argv, sys.orig_argv, dict(os.environ), os.getcwd(), os.umask(0), threading.active_count())\n"
        "print([signal.getsignal(n) for n in (2, 10, 13, 15, 17, 24)], signal.pthread_sigmask(0, []))\n"
        "print([resource.getrlimit(n) for n in range(16)], signal.getitimer(0), sorted(sys.modules))"
    )
    before = run_code(tool, state)
    assert before.outcome == "ok"
    run_code(
        tool,
        "import os, resource, signal, sys, xml.dom, gc\n"
        "os.umask(0o77); os.environ['A'] = '1'; sys.argv.append('x'); os.set_blocking(1, False)\n"
        "os.set_blocking(0, False); os.mkdir('a'); os.chdir('a'); os.dup2(1, 20); signal.signal(15, signal.SIG_IGN)\n"
        "signal.setitimer(0, 100); signal.pthread_sigmask(0, [10]); gc.disable()\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))",
    )
    assert run_code(tool, state).text == before.text


LOOK_AT_FOLDER = (
    "import os\n"
    "at = os.stat('.')\n"
    "print(oct(at.st_mode), at.st_uid, at.st_gid, at.st_nlink, at.st_size, at.st_mtime_ns, at.st_atime_ns,"
    " os.listxattr('.'), os.listdir('.'))"
)
CHANGE_FOLDER = """
import ctypes, fcntl, os
def attempt(function, *arguments):
    try: function(*arguments)
    except OSError: pass
for name in range(300):
    open("a" * 200 + str(name), "w").close()
    if name % 2: os.remove("a" * 200 + str(name))
os.mkdir("folder")
attempt(os.setxattr, ".", "user.note", b"1")
attempt(os.setxattr, ".", "system.posix_acl_default", bytes.fromhex("02000000" + "0100070000000000"))
attempt(os.chmod, ".", 0o1751)
try: os.utime(".", ns=(123456789, 987654321))
except OSError: pass
folder = os.open(".", os.O_RDONLY)
for request in (0x40086602, 0x401c5820):
    attempt(fcntl.ioctl, folder, request, b"\\x40" + bytes(27))
os.listdir(".")
"""


def assert_folder_carries_nothing(look, change):
    before = look()
    change()
    assert look() == before
    assert before.startswith("0o4") and before.endswith("[] []")


def test_the_temporary_folder_itself_carries_nothing(tool):
    assert_folder_carries_nothing(lambda: run_code(tool, LOOK_AT_FOLDER).text, lambda: run_code(tool, CHANGE_FOLDER))


@pytest.mark.parametrize("kind_of_user", KINDS)
def test_a_call_of_an_ordinary_user_sees_nothing_of_the_calls_before(kind_of_user):
    codes = [LOOK_AT_FOLDER, LEAVE_TRACES, WALK, SCAN.format(before=""), CHANGE_FOLDER, LOOK_AT_FOLDER]
    first, _, walk, scan, _, last = (result.text for result in run_as_ordinary_user(kind_of_user, codes))
    assert (walk, scan) == ("False", "True []")
    assert first == last


def test_a_program_without_isolation_leaves_nothing_in_its_folder(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    tool = PythonTool(PythonToolSection(isolation="bubblewrap", unsafe=True, num_workers=1, wall_s=60))
    assert_folder_carries_nothing(lambda: run_code(tool, LOOK_AT_FOLDER).text, lambda: run_code(tool, CHANGE_FOLDER))
    tool.close()


CALL = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nprint(libc.{call}, ctypes.get_errno())"


@pytest.fixture
def system_v():
    """System V memory, semaphores and messages of this machine, which every user may change."""
    libc = ctypes.CDLL(None, use_errno=True)
    memory, semaphore, queue = libc.shmget(0, 4096, 0o1666), libc.semget(0, 1, 0o1666), libc.msgget(0, 0o1666)
    assert min(memory, semaphore, queue) >= 0
    yield memory, semaphore, queue
    assert libc.shmctl(memory, 0, None) == libc.semctl(semaphore, 0, 0) == libc.msgctl(queue, 0, None) == 0


def test_system_v_objects_of_the_machine_are_out_of_reach(tool, system_v):
    memory, semaphore, queue = system_v
    for call in (
        f"shmat({memory}, None, 0)", f"shmctl({memory}, 0, None)", "shmdt(None)", "shmget(0, 4096, 0o1666)",
        f"semop({semaphore}, b'\\0\\0\\1\\0\\0\\0', 1)", f"semctl({semaphore}, 0, 0)", f"semctl({semaphore}, 0, 12)",
        f"semtimedop({semaphore}, b'\\0\\0\\1\\0\\0\\0', 1, None)", "semget(0, 1, 0o1666)",
        f"msgsnd({queue}, bytes(7) + b'\\1text', 4, 0o4000)", f"msgrcv({queue}, bytes(99), 9, 0, 0o4000)",
        f"msgctl({queue}, 0, None)", "msgget(0, 0o1666)",
    ):  # fmt: skip
        assert run_code(tool, CALL.format(call=call)).text == "-1 1", call


def test_message_queues_of_the_machine_are_out_of_reach(tool):
    for call in ("mq_open(b'/name', 0)", "mq_unlink(b'/name')", "mq_getattr(0, bytes(64))"):
        assert run_code(tool, CALL.format(call=call)).text in ("-1 1", "-1 13"), call


def test_pairs_of_sockets_reach_no_other_socket(tool, tmp_path):
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as path,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as name,
    ):
        path.bind(str(tmp_path / "socket"))
        (tmp_path / "socket").chmod(0o777)
        name.bind(f"\0tunesmith-{os.getpid()}")
        addresses = (str(tmp_path / "socket"), f"\0tunesmith-{os.getpid()}")
        for family, address in itertools.product(("SOCK_DGRAM", "SOCK_SEQPACKET", "SOCK_STREAM"), addresses):
            pair = f"import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.{family})\n"
            for send in ("sendto(b'text', {!r})", "connect({!r})", "sendmsg([b'text'], [], 0, {!r})"):
                code = f"{pair}a.{send.format(address)}\na.send(b'text')"
                assert run_code(tool, code).outcome == "error", (family, send)
        for server in (path, name):
            server.settimeout(0)
            with pytest.raises(BlockingIOError):
                server.recv(100)
    for call in ("bind(b'\\0name')", "listen()", "accept()"):
        code = f"import socket\na, b = socket.socketpair()\na.{call}"
        assert "PermissionError" in run_code(tool, code).text
    assert run_code(tool, "import socket\na, b = socket.socketpair()\na.send(b'text')\nb.recv(9)").text == "b'text'"


def test_code_has_no_capabilities(tool):
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None)\nsets = (ctypes.c_uint32 * 6)()\n"
        "header = (ctypes.c_uint32 * 2)(0x20080522, 0)\nprint(libc.capget(header, sets), list(sets))"
    )
    assert run_code(tool, code).text == "0 [0, 0, 0, 0, 0, 0]"


@pytest.mark.parametrize(
    "request_number", [0x40086602, 0x401C5820, 0xC0045877, 0xC0045878, 0xC0185879, 0x5412, 0x541C, 0x8902]
)
def test_requests_to_devices_and_file_systems_are_denied(tool, request_number):
    """Flags of a file, freezing and trimming a file system, typing on a terminal, signals of a socket."""
    code = f"import fcntl, os\nfile = os.open('.', os.O_RDONLY)\nfcntl.ioctl(file, {request_number}, bytes(28))"
    assert "PermissionError" in run_code(tool, code).text


def test_locks_leases_and_watches_of_shared_files_are_denied(tool):
    """The files of the interpreter are the same in all sandboxes, and so are their locks."""
    opened = "import fcntl, inspect, os\nfile = os.open(os.__file__, os.O_RDONLY)\n"
    for call in (
        "fcntl.flock(file, fcntl.LOCK_SH)", "fcntl.fcntl(file, 1024, 0)", "fcntl.fcntl(file, 1026, 1)",
        "fcntl.fcntl(file, 1036, bytes(8))", "fcntl.fcntl(file, 5, bytes(32))", "fcntl.fcntl(file, 37, bytes(32))",
    ):  # fmt: skip
        assert "PermissionError" in run_code(tool, opened + call).text, call
    assert run_code(tool, CALL.format(call="inotify_init()")).text == "-1 1"
    database = "import sqlite3\nwith sqlite3.connect('a.db') as db: db.execute('create table t (x)')\n"
    assert run_code(tool, database + "db.execute('insert into t values (5)').rowcount").text == "1"


def run_session(tool, *codes):
    async def run():
        async with tool.session() as session:
            return [await session(code) for code in codes]

    return asyncio.run(run())


@pytest.mark.parametrize("written", ["b'0'", "b'000'", "b'0' * 17", "b'r'", "bytes(16) + b'0'"])
def test_code_of_a_session_does_not_answer_its_next_calls(tool, written):
    forged, error, value, last = run_session(
        tool, f"import os\nos.write(4, {written})\nx = 1", "1 / 0", "6 * 7", "print(5)"
    )
    assert forged.outcome == "error" and forged.is_state_lost
    assert "wrote to the pipe" in forged.text
    assert error.outcome == "error" and "ZeroDivisionError" in error.text
    assert (value.outcome, value.text, last.text) == ("ok", "42", "5")


def test_a_thread_of_a_session_does_not_answer_its_next_calls(kind, tool):
    if "error" in run_code(tool, "import threading\nthreading.Thread(target=print).start()").outcome:
        pytest.skip("no threads in this sandbox")
    forge = (
        "import os, threading, time\n"
        "def forge():\n  while True:\n    time.sleep(.05)\n    os.write(4, b'0')\n"
        "threading.Thread(target=forge, daemon=True).start()"
    )
    _, slept, value = run_session(tool, forge, "import time\ntime.sleep(1)\n1 / 0", "6 * 7")
    assert slept.outcome == "error" and slept.is_state_lost
    assert (value.outcome, value.text) == ("ok", "42")


def test_a_session_whose_code_was_read_by_its_thread_gives_no_result_of_it(tool):
    """What is lost with the state is reported, and the next call works."""
    if "error" in run_code(tool, "import threading\nthreading.Thread(target=print).start()").outcome:
        pytest.skip("no threads in this sandbox")
    eat = (
        "import os, threading\n"
        "def eat():\n  while True:\n    if os.read(3, 100_000): os.write(4, b'0')\n"
        "[threading.Thread(target=eat, daemon=True).start() for _ in range(8)]"
    )
    quick = build_tool("bubblewrap", wall_s=2)
    _, eaten, value = run_session(quick, eat, "print('eaten')\n1 / 0", "6 * 7")
    assert eaten.outcome != "ok"
    assert not eaten.is_state_lost or value.text == "42"
    quick.close()


@pytest.mark.parametrize(
    "start",
    [
        "import threading\nthreading.Thread(target=run, daemon=True).start()",
        "import os\nif os.fork() == 0:\n  os.setsid()\n  os.fork() == 0 and run()\n  os._exit(0)",
    ],
)
def test_code_of_a_session_rests_between_calls(start):
    tool = build_tool("bubblewrap", max_processes=4)
    count = (
        "import time\ndef run():\n  n = 0\n  while True:\n    n += 1\n    time.sleep(.01)\n"
        f"    with open('n', 'r+') as file: file.write(str(n))\nopen('n', 'w').write('0')\n{start}"
    )

    async def run():
        async with tool.session() as session:
            await session(count)
            before = int((await session("time.sleep(.5)\nprint(open('n').read())")).text)
            await asyncio.sleep(1)
            return before, int((await session("print(open('n').read())")).text)

    before, after = asyncio.run(run())
    assert 0 < before <= after < before + 30
    tool.close()


def test_code_of_a_session_cannot_switch_off_its_cpu_limit(kind):
    code = (
        "import resource, signal\nsignal.signal(24, signal.SIG_IGN)\nresource.setrlimit(0, (-1, -1))\nwhile True: pass"
    )
    tool = build_tool(kind, cpu_s=1, wall_s=60)
    results = run_session(tool, "x = 5", code, "6 * 7")
    assert (results[1].outcome, results[1].is_state_lost) == ("timeout", True)
    assert "more than 1 s of CPU time" in results[1].text
    assert results[2].text == "42"
    tool.close()


@pytest.mark.parametrize("kind_of_size", KINDS)
def test_sizes_are_in_mebibytes(kind_of_size):
    """200 MiB are 209,715,200 bytes of address space, 1 MiB is 1,048,576 bytes of a file."""
    limited = build_tool(kind_of_size, memory_mb=200, max_file_mb=1, tmp_mb=2)
    assert run_code(limited, "import resource\nresource.getrlimit(resource.RLIMIT_AS)").text == "(209715200, 209715200)"
    write = "with open('a', 'wb', 0) as file: print(file.write(bytes({})), file.write(b'x'))"
    assert run_code(limited, write.format(1_048_575)).text == "1048575 1"
    assert "File too large" in run_code(limited, write.format(1_048_576)).text
    if kind_of_size == "bubblewrap":
        found = "import os\nat = os.statvfs('.')\nat.f_blocks * at.f_frsize"
        assert run_code(limited, found).text == "2097152"
    limited.close()


def test_the_tool_ends_where_files_run_out():
    code = (
        "import asyncio, resource\n"
        "from tunesmith.config import PythonToolSection\n"
        "from tunesmith.tools.python.tool import PythonTool\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "asyncio.run(PythonTool(PythonToolSection(num_workers=16)).start())\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert "SandboxError" in ended.stderr and "ulimit -n" in ended.stderr
