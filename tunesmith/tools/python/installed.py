"""Parts of this Python installation that a sandbox may read: interpreter, standard library, chosen distributions."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tunesmith.errors import ConfigError

SYSTEM_PATHS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo", "/nix/store")
SANDBOX_MODULES = ("worker", "child", "snippet", "landlock", "folder")
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
            if "extra" not in marker and (match := REQUIREMENT.match(text)) and _is_installed(match.group()):
                left.append(match.group())
    return list(found.values())


def _is_installed(name: str) -> bool:
    """False for a requirement of another platform, whose marker is not evaluated."""
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


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
