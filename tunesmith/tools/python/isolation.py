"""How a worker is started: under bubblewrap, under seccomp with Landlock, or, on demand, without isolation.

bubblewrap gives a worker namespaces of its own: no network, process 1 of its own process table, and a file system that
holds the interpreter read-only and a temporary folder in memory. Without it, seccomp denies sockets, processes,
signals and changes of files, and Landlock denies to read others than the interpreter's; both need no privileges. As
root, a worker runs under an unused user id, for which the kernel enforces the number of processes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.config.tools import PythonToolSection
from tunesmith.errors import ConfigError
from tunesmith.tools.python.seccomp import build_filter

SYSTEM_PATHS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo", "/nix/store")
SANDBOX_MODULES = ("worker", "child", "folder")
REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledFiles:
    """Files that a sandbox shows."""

    interpreter: str
    readable: tuple[str, ...]
    """Folders and files with the same path in the sandbox: interpreter, standard library, shared libraries."""
    importable: Mapping[str, str]
    """Path below the import folder of the sandbox -> file or folder here."""
    preload: tuple[str, ...]
    """Modules that a worker imports at its start."""


@functools.cache
def find_installed_files(packages: tuple[str, ...]) -> InstalledFiles:
    """The running interpreter without its site-packages, and the named distributions with their requirements."""
    interpreter = Path(sys._base_executable).resolve()  # type: ignore[attr-defined]
    libraries = [str(Path(sys.base_prefix) / name) for name in ("lib", "lib64")]
    readable = dict.fromkeys([str(interpreter), *libraries, *SYSTEM_PATHS])
    here = Path(__file__).parent
    importable = {f"tunesmith/tools/python/{name}.py": str(here / f"{name}.py") for name in SANDBOX_MODULES}
    preload: list[str] = []
    for name in packages:
        preload += _list_modules(_find_distribution(name, packages))
    for distribution in _add_requirements(packages):
        importable |= _list_entries(distribution)
    return InstalledFiles(
        interpreter=str(interpreter),
        readable=tuple(path for path in readable if Path(path).exists()),
        importable=importable,
        preload=tuple(preload),
    )


def is_readable_by_others(path: str) -> bool:
    """Whether users without rights of their own reach the path."""
    resolved = Path(path).resolve()
    return all(folder.stat().st_mode & 0o001 for folder in resolved.parents) and bool(resolved.stat().st_mode & 0o004)


def _find_distribution(name: str, wanted: Iterable[str]) -> importlib.metadata.Distribution:
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"packages={list(wanted)}: {name!r} is not installed; pip install {name}") from error
    if not _list_entries(found):
        raise ConfigError(
            f"packages={list(wanted)}: {name!r} is installed in editable mode, which has no files to show"
        )
    return found


def _add_requirements(names: Iterable[str]) -> list[importlib.metadata.Distribution]:
    """The distributions and, recursively, what they require without extras."""
    found: dict[str, importlib.metadata.Distribution] = {}
    left = list(names)
    while left:
        name = left.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in found:
            continue
        found[key] = _find_distribution(name, names)
        for requirement in found[key].requires or ():
            text, _, marker = requirement.partition(";")
            if "extra" not in marker and (match := REQUIREMENT.match(text)):
                # one of another platform, whose marker is not evaluated, is not installed
                with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                    importlib.metadata.distribution(match.group())
                    left.append(match.group())
    return list(found.values())


def _list_entries(distribution: importlib.metadata.Distribution) -> dict[str, str]:
    """Top-level files and folders of a distribution, without scripts and caches."""
    names = {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}
    return {
        name: str(distribution.locate_file(name))
        for name in sorted(names)
        if not name.endswith(".pth") and not name.startswith("__editable__") and not name.endswith(".dist-info")
    }


def _list_modules(distribution: importlib.metadata.Distribution) -> list[str]:
    """Importable top-level names."""
    entries = _list_entries(distribution)
    return [
        name.removesuffix(".py")
        for name, path in entries.items()
        if name.endswith(".py") or (Path(path) / "__init__.py").exists()
    ]


IMPORT_FOLDER = "/packages"
WORKER = ("-s", "-S", "-P", "-B", "-m", "tunesmith.tools.python.worker")
START = ("/bin/sh", "-c", 'echo 1000 2>/dev/null >/proc/self/oom_score_adj; exec "$@"', "sh")
"""Makes a worker the first process that the kernel ends when memory runs out."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
FIRST_USER_ID = 1_900_000_000
NOBODY = 65534
NUM_USER_IDS = 100_000_000
ADVICE = (
    "install bubblewrap 0.7 or newer (apt-get install bubblewrap), or use Linux 5.13 or newer with Landlock, or set "
    "unsafe=True to run code without isolation"
)

_worker_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """The command line of a worker, its environment, and the frame that configures it."""

    command: tuple[str, ...]
    environment: dict[str, str]
    configuration: dict[str, Any]
    """Its `folder` is one on the file system of the machine, which is removed with the worker, and whose size nothing
    else limits; None if the worker has a file system of its own, which is limited."""


def list_isolations(settings: PythonToolSection) -> list[str]:
    """Kinds of isolation to try, in order of preference."""
    kinds = ["bubblewrap", "bubblewrap-userns", "seccomp"]
    if settings.isolation != "auto":
        kinds = [kind for kind in kinds if kind.startswith(settings.isolation)]
    if os.geteuid() != 0:
        kinds = [kind for kind in kinds if kind != "bubblewrap"]
    return [*kinds, "none"] if settings.unsafe else kinds


def build_plan(kind: str, settings: PythonToolSection) -> LaunchPlan:
    """How to start a worker; `ConfigError` if this kind of isolation is not to be had on this machine."""
    files = find_installed_files(settings.packages)
    if kind.startswith("bubblewrap"):
        return _plan_bubblewrap(settings, files, has_user_namespace=kind != "bubblewrap")
    return _plan_plain(settings, files, is_isolated=kind == "seccomp")


def _find_bubblewrap() -> str:
    if sys.platform != "linux":
        raise ConfigError(f"bubblewrap needs Linux, not {sys.platform}")
    program = shutil.which("bwrap")
    if program is None:
        raise ConfigError("bubblewrap is not installed (apt-get install bubblewrap)")
    if not _has_size_option(program):
        raise ConfigError("bubblewrap is older than 0.7, which cannot limit the size of a temporary folder")
    return program


@functools.cache
def _has_size_option(program: str) -> bool:
    listed = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=60, check=False)
    return "--size" in listed.stdout + listed.stderr


def _plan_bubblewrap(settings: PythonToolSection, files: InstalledFiles, *, has_user_namespace: bool) -> LaunchPlan:
    program = _find_bubblewrap()
    uid = None if has_user_namespace else _choose_user_id()
    mounts = dict.fromkeys(files.readable)
    imports = {f"{IMPORT_FOLDER}/{name}": path for name, path in files.importable.items()}
    shown = [*mounts, *imports, *DEVICES]
    folders = dict.fromkeys(str(folder) for path in shown for folder in reversed(Path(path).parents))
    arguments = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if has_user_namespace:
        arguments += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    arguments.append("--as-pid-1")
    # bubblewrap creates the folders of a mount with mode 0700 where others cannot read the source or its folder.
    for folder in list(folders)[1:]:
        arguments += ["--dir", folder]
    for path in mounts:
        arguments += ["--ro-bind", path, path]
    for target, path in imports.items():
        arguments += ["--ro-bind", path, target]
    for device in DEVICES:
        arguments += ["--dev-bind", device, device]
    arguments += ["--symlink", "/tmp", "/dev/shm"]
    arguments += ["--perms", "1777", "--size", str(settings.tmp_mb << 20), "--tmpfs", "/tmp"]
    arguments += ["--remount-ro", "/", "--chdir", "/tmp", "--"]
    configuration = _configure(settings, files) | {
        "uid": uid,
        "tmp": "/tmp",
        "filter": _build_filter(settings),
        "max_tasks": 1 + settings.max_processes + settings.max_threads,
    }
    return LaunchPlan(
        command=(*START, program, *arguments, files.interpreter, *WORKER),
        environment=ENVIRONMENT | {"PYTHONPATH": IMPORT_FOLDER},
        configuration=configuration,
    )


def _plan_plain(settings: PythonToolSection, files: InstalledFiles, *, is_isolated: bool) -> LaunchPlan:
    """A worker among the processes of the user, with seccomp and Landlock or without isolation."""
    if is_isolated and sys.platform != "linux":
        raise ConfigError(f"seccomp needs Linux, not {sys.platform}")
    if is_isolated and settings.max_processes > 1:
        raise ConfigError(f"max_processes={settings.max_processes} needs bubblewrap; seccomp allows one process")
    paths = [*files.readable, *files.importable.values()]
    has_own_user = is_isolated and os.geteuid() == 0 and all(is_readable_by_others(path) for path in paths)
    uid = _choose_user_id() if has_own_user else None
    system_filter = None
    if is_isolated:
        # Without a user id of its own, the kernel counts all threads of the user, or as root none.
        system_filter = _build_filter(settings, is_only_barrier=True, can_start_threads=uid is not None)
        if system_filter is None:
            raise ConfigError("seccomp is supported on x86_64 and aarch64 only")
    folder = Path(tempfile.mkdtemp(prefix="tunesmith-python-"))
    temporary, imports = folder / "tmp", folder / "packages"
    temporary.mkdir()
    for name, path in files.importable.items():
        link = imports / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    if uid is not None:
        folder.chmod(0o755)
        os.chown(temporary, uid, uid)
    configuration = _configure(settings, files) | {
        "uid": uid,
        "tmp": str(temporary),
        "folder": str(folder),
        "filter": system_filter,
        "readable": [*paths, str(imports), *DEVICES] if is_isolated else None,
        "max_tasks": 2 + settings.max_threads if uid is not None else None,
    }
    return LaunchPlan(
        command=(*START, files.interpreter, *WORKER),
        environment=ENVIRONMENT | {"PYTHONPATH": str(imports), "HOME": str(temporary), "TMPDIR": str(temporary)},
        configuration=configuration,
    )


def _build_filter(
    settings: PythonToolSection, *, is_only_barrier: bool = False, can_start_threads: bool = True
) -> str | None:
    program = build_filter(
        can_fork=settings.max_processes > 1,
        can_start_threads=can_start_threads and settings.max_threads > 0,
        is_only_barrier=is_only_barrier,
    )
    return None if program is None else program.hex()


def _configure(settings: PythonToolSection, files: InstalledFiles) -> dict[str, Any]:
    limits = settings.model_dump(include={"cpu_s", "memory_mb", "max_file_mb", "max_open_files"})
    return limits | {"preload": files.preload, "readable": None, "folder": None}


def _choose_user_id() -> int:
    """An unused user id for each worker, because the kernel counts processes by user; nobody where ids are mapped."""
    mapped = Path("/proc/self/uid_map").read_text().split()
    if int(mapped[0]) > 0 or int(mapped[2]) < FIRST_USER_ID + NUM_USER_IDS:
        return NOBODY
    return FIRST_USER_ID + (os.getpid() * 1000 + next(_worker_numbers)) % NUM_USER_IDS
