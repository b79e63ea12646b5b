"""The environment that an install line of README.md makes: its packages and those that they need, no others.

Nothing is installed or fetched. The packages are those of the environment that runs the tests, linked into another one,
so a program that imports a package which the line does not install fails there as it fails for the reader.
"""

from __future__ import annotations

import shlex
import sys
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

from markdown_pages import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

BEFORE = ("torch", "pip")
"""What README.md has the reader install before, and what a new environment has."""


def read_extras(line: str) -> set[str]:
    """The extras in `pip install -e '.[one,two]'`."""
    words = shlex.split(line)
    assert words[:3] == ["pip", "install", "-e"] and len(words) == 4, f"not an install line of a checkout: {line}"
    return Requirement(words[3].replace(".", "tunesmith", 1)).extras


def list_requirements(extras: set[str]) -> list[Requirement]:
    """What the checkout requires."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(each for name in extras for each in project["optional-dependencies"][name])]
    return list(map(Requirement, lines))


def find_packages(requirements: list[Requirement]) -> dict[str, metadata.Distribution]:
    """The distributions of the requirements and of all that they require."""
    found: dict[str, metadata.Distribution] = {}
    waiting, seen = list(requirements), set[tuple[str, str]]()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name not in found:
            found[name] = metadata.distribution(name)
        for extra in {"", *requirement.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                lines = map(Requirement, found[name].requires or ())
                waiting += [each for each in lines if each.marker is None or each.marker.evaluate({"extra": extra})]
    return found


def link_files(distribution: metadata.Distribution, site: Path) -> None:
    """Link the folders and files of a distribution; of a namespace, which others share, what is below it."""
    root = Path(str(distribution.locate_file("")))
    for file in distribution.files or ():
        if file.parts[0] in ("..", "__pycache__"):
            continue
        for depth in range(1, len(file.parts) + 1):
            place = Path(*file.parts[:depth])
            if depth == len(file.parts) or (root / place / "__init__.py").exists() or place.suffix == ".dist-info":
                break
        if not (site / place).exists() and (root / place).exists():
            (site / place).parent.mkdir(parents=True, exist_ok=True)
            (site / place).symlink_to(root / place)


def make_environment(folder: Path, install_line: str) -> Path:
    """Make the environment; returns its interpreter."""
    venv.create(folder, symlinks=True)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    requirements = [*map(Requirement, BEFORE), *list_requirements(read_extras(install_line))]
    for distribution in find_packages(requirements).values():
        link_files(distribution, site)
    (site / "checkout.pth").write_text(f"{ROOT}\n")
    return folder / "bin" / "python"


def write_wheel(folder: Path, name: str, version: str, files: dict[str, Path]) -> None:
    """A wheel that stands for the one of an index: the files, by their path in it."""
    info = f"{name}-{version}.dist-info"
    texts = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{each},,\n" for each in (*texts, *files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**texts, f"{info}/RECORD": record}.items():
            wheel.writestr(path, text)
        for path, file in files.items():
            wheel.write(file, path)
