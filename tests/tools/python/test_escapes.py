"""Hostile code is contained under each kind of isolation, and the tool answers the next call."""

from __future__ import annotations

import errno
import os
import pickle
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandboxes import KINDS, build_tool, run_code
from tunesmith.tools.python.folder import measure_folder

SECRET = "correct horse battery staple"


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def shared_tool(kind):
    tool = build_tool(kind)
    yield tool
    tool.close()


@pytest.fixture
def tool(shared_tool):
    """The tool, which must work after the test too."""
    yield shared_tool
    assert_works(shared_tool)


@pytest.fixture
def build(kind):
    """Builds a tool with limits of its own, which must work after the test too."""
    tools = []

    def build_one(**settings):
        tools.append(build_tool(kind, **settings))
        return tools[-1]

    yield build_one
    for each in tools:
        assert_works(each)
        each.close()


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret.txt"
    path.write_text(SECRET)
    return path


def assert_works(tool):
    for _ in range(20):
        result = run_code(tool, "import os\nprint(os.listdir('.'))\n6 * 7")
        if result.outcome != "timeout":  # a stall of the machine, where the tool has a short limit
            break
    assert (result.outcome, result.text) == ("ok", "[]\n42")


def test_a_fork_bomb_cannot_fork(tool):
    result = run_code(tool, "import os\nwhile True: os.fork()")
    assert result.outcome == "error"
    assert "PermissionError" in result.text


@pytest.mark.parametrize("call", ["os.posix_spawn('/bin/true', ['true'], {})", "subprocess.run(['/bin/true'])"])
def test_programs_cannot_be_started(tool, call):
    assert run_code(tool, f"import os, subprocess\n{call}").outcome == "error"


def test_a_fork_bomb_ends_at_the_number_of_processes():
    tool = build_tool("bubblewrap", max_processes=8, wall_s=1)
    code = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    assert run_code(tool, code).outcome == "timeout"
    assert_works(tool)
    counted = run_code(tool, "import os, time\nn = 0\ntry:\n  while True:\n    if os.fork() == 0: time.sleep(100)\n"
                             "    n += 1\nexcept OSError: print(n)")  # fmt: skip
    assert 7 <= int(counted.text) <= 7 + tool.settings.max_threads
    assert_works(tool)
    tool.close()


def test_background_processes_end_with_the_call():
    tool = build_tool("bubblewrap", max_processes=4)
    code = "import os, time\nif os.fork() == 0 and (os.setsid(), os.fork())[1] == 0: time.sleep(.05) or open('x', 'w')"
    assert run_code(tool, code).outcome == "ok"
    assert run_code(tool, "import os, time\ntime.sleep(.3)\nos.listdir('.')").text == "[]"
    tool.close()


@pytest.mark.parametrize(
    "code",
    [
        "x = [0] * 10**10",
        "x = []\nwhile True: x.append(bytes(10**6))",
        "import mmap\nx = [mmap.mmap(-1, 2**28) for _ in range(100)]",
        "x = 'a'\nwhile True: x += x",
        "import threading\nthreading.stack_size(2**29)\nt = threading.Thread(target=print)\nt.start()",
    ],
)
def test_a_memory_bomb_ends_at_the_memory_limit(tool, code):
    result = run_code(tool, code)
    assert result.outcome in ("memory", "error")
    assert any(name in result.text for name in ("MemoryError", "Cannot allocate memory", "can't start new thread"))


def test_code_cannot_outlive_its_worker(tool):
    """PR_SET_PDEATHSIG is the signal that ends it with a worker that is killed."""
    assert run_code(tool, "import ctypes\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)").text == "-1"
    assert run_code(tool, "import ctypes\nctypes.CDLL(None).prctl(15, b'name', 0, 0, 0)").text == "0"


def test_a_real_time_signal_is_an_observation(tool):
    """`timer_create` sends one where code may not send signals."""
    code = (
        "import ctypes, time\nlibc, timer = ctypes.CDLL(None), ctypes.c_void_p()\n"
        "event = (ctypes.c_int * 16)(0, 0, 40)\ntime_left = (ctypes.c_long * 4)(0, 0, 0, 1000)\n"
        "libc.timer_create(1, event, ctypes.byref(timer))\nlibc.timer_settime(timer, 0, time_left, None)\n"
        "time.sleep(50)"
    )
    result = run_code(tool, code)
    assert (result.outcome, result.text) == ("error", "Error: the process was killed by signal 40.")


def test_memory_outside_the_address_space_is_denied(tool):
    result = run_code(tool, "import os\nos.memfd_create('x')")
    assert result.outcome == "error" and "PermissionError" in result.text


def test_endless_threads(tool):
    code = (
        "import threading, time\nthreading.stack_size(32768)\n"
        "while True: threading.Thread(target=time.sleep, args=(100,), daemon=True).start()"
    )
    result = run_code(tool, code)
    assert result.outcome == "error" and "can't start new thread" in result.text


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("text", ["x\\n", "x" * 1000])
def test_endless_output(tool, stream, text):
    result = run_code(tool, f"import sys\nwhile True: sys.{stream}.write('{text}')")
    assert result.outcome == "output_limit"
    assert len(result.text) <= tool.settings.max_result_chars
    assert len(getattr(result, stream)) == tool.settings.max_output_bytes


def test_home_and_files_of_the_user_cannot_be_read(tool, secret):
    for path in (secret, Path.home() / ".bashrc", Path(__file__), "/etc/passwd", "/etc/shadow"):
        result = run_code(tool, f"open({str(path)!r}).read()")
        assert result.outcome == "error", path
        assert SECRET not in result.text
    for folder in (secret.parent, Path(__file__).parent):
        assert run_code(tool, f"import os\nos.listdir({str(folder)!r})").outcome == "error"


def test_files_of_the_user_cannot_be_changed(tool, secret):
    path, folder = str(secret), str(secret.parent)
    for change in (
        f"open({path!r}, 'w')",
        f"open({path!r}, 'a')",
        f"os.truncate({path!r}, 0)",
        f"os.unlink({path!r})",
        f"os.rename({path!r}, 'mine')",
        f"os.link({path!r}, 'mine')",
        f"os.chmod({path!r}, 0)",
        f"os.utime({path!r}, (0, 0))",
        f"os.mkdir({folder!r} + '/new')",
        f"os.symlink('x', {folder!r} + '/new')",
        f"os.mkfifo({folder!r} + '/new')",
    ):
        assert run_code(tool, f"import os\n{change}").outcome == "error", change
    for place in ("/", "/usr", "/usr/lib", "/dev", "/packages", "/etc", "/dev/shm/..", sys.base_prefix + "/lib"):
        assert run_code(tool, f"open({place!r} + '/new', 'w')").outcome == "error", place
    assert secret.read_text() == SECRET
    assert list(secret.parent.iterdir()) == [secret]


def test_the_environment_is_not_inherited(kind, monkeypatch):
    monkeypatch.setenv("API_KEY", SECRET)
    tool = build_tool(kind)
    result = run_code(tool, "import os\nprint(dict(os.environ))")
    assert "PYTHONHASHSEED" in result.text
    assert "API_KEY" not in result.text and SECRET not in result.text
    tool.close()


def test_other_processes_are_out_of_sight(tool):
    for path in (f"/proc/{os.getpid()}/environ", f"/proc/{os.getppid()}/cmdline", "/proc/1/environ", "/proc/1/mem"):
        assert run_code(tool, f"open({path!r}, 'rb').read()").outcome == "error", path
    assert run_code(tool, "import os\nos.listdir('/proc')").outcome == "error"


def test_sockets_do_not_connect(tool, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "socket"))
        unix.listen()
        for family, address in (
            ("AF_INET", tcp.getsockname()), ("AF_UNIX", str(tmp_path / "socket")), ("AF_INET", ("1.1.1.1", 53)),
            ("AF_INET6", ("::1", 1)), ("AF_UNIX", "\0abstract"),
        ):  # fmt: skip
            result = run_code(tool, f"import socket\nsocket.socket(socket.{family}).connect({address!r})")
            assert result.outcome == "error" and "PermissionError" in result.text
        for server in (tcp, unix):
            server.settimeout(0)
            with pytest.raises(BlockingIOError):
                server.accept()


def test_signals_reach_no_other_process(tool):
    with subprocess.Popen(["sleep", "100"]) as victim:
        targets = [victim.pid, os.getpid(), os.getppid(), 1, -victim.pid]
        for target in targets:
            code = f"import os, signal\nfor n in (9, 15, 2, 19):\n  try: os.kill({target}, n)\n  except OSError: pass"
            assert run_code(tool, code).outcome == "ok"
        run_code(tool, "import os\nos.kill(-1, 9)")
        run_code(tool, "import os\nos.kill(os.getppid(), 9)\nos.killpg(0, 9)")
        assert victim.poll() is None
        victim.kill()


def test_files_send_no_signals_to_other_processes(tool):
    with subprocess.Popen(["sleep", "100"]) as victim:
        for change in (f"fcntl.fcntl(r, fcntl.F_SETOWN, {victim.pid})", "fcntl.fcntl(r, fcntl.F_SETSIG, 9)"):
            result = run_code(tool, f"import fcntl, os\nr, w = os.pipe()\n{change}")
            assert result.outcome == "error" and "PermissionError" in result.text
        assert victim.poll() is None
        victim.kill()


def test_limits_and_priorities_of_other_processes_stay(tool):
    with subprocess.Popen(["sleep", "100"]) as victim:
        for change in (
            f"resource.prlimit({victim.pid}, resource.RLIMIT_CPU, (0, 0))",
            f"os.setpriority(0, {victim.pid}, 19)",
        ):
            assert run_code(tool, f"import os, resource\n{change}").outcome == "error"
        assert os.getpriority(os.PRIO_PROCESS, victim.pid) == os.getpriority(os.PRIO_PROCESS, 0)
        victim.kill()
    for change in ("os.setpriority(0, os.getppid(), 19)", "os.setpriority(2, 0, 19)", "os.sched_setaffinity(1, {0})"):
        assert run_code(tool, f"import os\n{change}").outcome == "error"


@pytest.mark.parametrize(
    "call", ["ptrace(16, 1, 0, 0)", "unshare(0x10000000)", "mount(b'x', b'/tmp', b'tmpfs', 0, 0)", "chroot(b'/tmp')",
             "syscall(425, 8, 0)", "syscall(434, 1, 0)", "setuid(0) or libc.chroot(b'/')"],
)  # fmt: skip
def test_system_calls_of_an_escape_are_denied(tool, call):
    code = f"import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nr = libc.{call}\nprint(r, ctypes.get_errno())"
    assert run_code(tool, code).text in ("-1 1", "-1 13")


def test_limits_cannot_be_raised(tool):
    code = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))"
    assert run_code(tool, code).outcome == "error"


def test_symlinks_are_neither_followed_nor_left(tool, secret):
    folder = str(secret.parent)
    assert run_code(tool, f"import os\nos.symlink({folder!r}, 'link')\nos.listdir('link')").outcome == "error"
    assert_works(tool)
    read = run_code(tool, f"import os\nos.symlink({str(secret)!r}, 'link')\nopen('link').read()")
    assert read.outcome == "error" and SECRET not in read.text
    assert secret.read_text() == SECRET


def test_pickles_stay_text(tool, tmp_path):
    class Payload:
        def __reduce__(self):
            return (open, (str(tmp_path / "created"), "w"))

    payload = pickle.dumps(Payload(), protocol=0).decode()
    result = run_code(tool, f"import os\nprint({payload!r})\nos.write(1, {payload.encode()!r}) and None")
    assert result.outcome == "ok" and result.text == f"{payload}\n{payload}".strip()
    assert not (tmp_path / "created").exists()


def test_huge_integers(tool, build):
    assert run_code(build(wall_s=0.3), "x = 10 ** 10 ** 8").outcome == "timeout"
    assert "4300 digits" in run_code(tool, "print(10 ** 5000)").text
    assert run_code(tool, "1 << 10 ** 12").outcome == "memory"


def test_deep_recursion(tool):
    result = run_code(tool, "def f(): return f()\nf()")
    assert result.outcome == "error" and "RecursionError" in result.text
    deep = "import sys\nsys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**6): x = [x]\nrepr(x)"
    assert run_code(tool, deep).outcome in ("error", "memory")
    assert run_code(tool, "(" * 10_000).outcome in ("error", "memory")
    assert run_code(tool, "-" * 100_000 + "1").outcome in ("error", "memory")


@pytest.mark.parametrize(
    "code",
    [
        "import time\ntime.sleep(1000)",
        "while True: pass",
        "import signal\nfor n in {*range(1, 32)} - {9, 19}: signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        "while True:\n  try:\n    while True: pass\n  except BaseException: pass",
        "import os\nos.closerange(0, 100)\nwhile True: pass",
        "import os\ntry: os.kill(os.getpid(), 19)\nexcept OSError: pass\nwhile True: pass",
    ],
)
def test_code_past_the_wall_time_is_killed(build, code):
    tool = build(wall_s=0.3)
    result = run_code(tool, code)
    assert result.outcome == "timeout"
    assert "ran longer than 0.3 s" in result.text


def test_code_past_the_cpu_time_is_killed(build):
    result = run_code(build(cpu_s=1), "import signal\nsignal.signal(24, signal.SIG_IGN)\nwhile True: pass")
    assert result.outcome == "timeout"
    assert result.text == "Timeout: the code used more than 1 s of CPU time and was stopped."


def test_open_files_are_limited(tool):
    result = run_code(tool, "files = [open('/dev/null') for _ in range(1000)]")
    assert result.outcome == "error" and "Too many open files" in result.text


def test_the_temporary_folder_is_limited(build):
    tool = build(max_file_mb=1, tmp_mb=4)
    assert "File too large" in run_code(tool, "open('x', 'w').write('x' * 2**21)").text
    result = run_code(tool, "for i in range(10**6): open(f'{i}', 'wb').write(bytes(2**20))")
    assert result.outcome == "error" and ("No space left" in result.text or "folder is full" in result.text)
    result = run_code(tool, "while True:\n  for i in range(10**6): open(f'{i}', 'w').close()")
    assert result.text == "Error: the temporary folder is full."


def test_the_temporary_folder_is_limited_deeper_than_a_path_is_long(build):
    tool = build(max_file_mb=1, tmp_mb=4, wall_s=10)
    descend = "for i in range(30):\n  os.mkdir('a' * 200)\n  os.chdir('a' * 200)"
    write = "for i in range(8): open(f'{i}', 'wb').write(bytes(2**20))"
    result = run_code(tool, f"import os, time\n{descend}\n{write}\ntime.sleep(60)")
    assert result.outcome == "error" and ("No space left" in result.text or "folder is full" in result.text)


def test_a_folder_that_cannot_be_looked_into_is_full(monkeypatch, tmp_path):
    limits = {"max_bytes": 1 << 20, "max_files": 10}
    (tmp_path / "a").mkdir()
    scan = os.scandir

    def refuse(number, name):
        def look(path):
            if Path(path).name == name:
                raise OSError(number, os.strerror(number))
            return scan(path)

        return look

    assert not measure_folder(str(tmp_path), **limits)
    for number, is_full in [(errno.EACCES, True), (errno.ENAMETOOLONG, True), (errno.EIO, True), (errno.ENOENT, False),
                            (errno.ENOTDIR, False), (errno.EMFILE, False)]:  # fmt: skip
        monkeypatch.setattr(os, "scandir", refuse(number, "a"))
        assert measure_folder(str(tmp_path), **limits) == is_full


def test_a_file_that_vanishes_hides_no_other(monkeypatch, tmp_path):
    for number in range(3):
        (tmp_path / str(number)).write_bytes(bytes(1 << 20))
    limits = {"max_bytes": 1 << 20, "max_files": 10}
    assert measure_folder(str(tmp_path), **limits)
    scan = os.scandir

    @contextmanager
    def look(path):
        """The entries, the first of which is deleted before it is measured."""
        with scan(path) as entries:
            found = list(entries)
            Path(found[0].path).unlink()
            yield iter(found)

    monkeypatch.setattr(os, "scandir", look)
    assert measure_folder(str(tmp_path), **limits)


@pytest.mark.parametrize(
    "code",
    [
        "import os\nfor i in range(1500): open(f'{i}', 'w')",
        "import os\nfor i in range(200):\n  os.mkdir('a' * 100)\n  os.chdir('a' * 100)",
        "import os\nfor i in range(1200):\n  os.mkdir('a')\n  os.chdir('a')",
        "import os\nos.umask(0)\nos.mkdir('a', 0o300)\nos.mkdir('a/b', 0o300)\nopen('a/b/c', 'w')\nos.mkdir('a/d', 0)",
        "import builtins, sys\nbuiltins.print = None\nsys.modules['os'] = None",
    ],
)
def test_nothing_is_left_for_the_next_call(tool, code):
    run_code(tool, code)
    assert_works(tool)


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.write(4, b'r' * 20)\nwhile True: pass",
        "import os\nos.write(4, b'x' * 10_000)",
        "import os\nos.closerange(0, 100)",
        "import os\nos.abort()",
        "import ctypes\nctypes.string_at(0)",
        "import sys\nsys.stdout = sys.stderr = None\nraise ValueError",
        "class E(Exception):\n  def __str__(self): raise E\nraise E",
        "import os\nos._exit(77)",
    ],
)
def test_broken_ends_are_results(tool, code):
    assert run_code(tool, code).outcome in ("ok", "error")
