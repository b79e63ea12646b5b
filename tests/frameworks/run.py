"""Checks every framework in a virtual environment of its own: `python tests/frameworks/run.py FOLDER [NAME ...]`.

The environments are made in FOLDER by uv, two at a time, again whenever their pinned packages change, and also import
the packages of the interpreter that runs this script, after their own. After each framework its outcome is written to
`results/endpoint/frameworks.json` and to the tables of `docs/frameworks.md`, so an interrupted run keeps what it has
checked. With NAMEs, only the frameworks are checked whose names contain one of them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import outcome_table

from environments import FRAMEWORKS, Framework

HERE = Path(__file__).parent
TIMEOUT_S = 1800
NUM_BUILDERS = 2
UV = "uv==0.13.9"
KEYS = (
    "version", "ok", "turns", "branches", "sampled_tokens", "call_tokens", "merged_tokens", "features", "error",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A virtual environment, and what it took to make it."""

    python: Path
    build_s: float
    num_mib: int


def install_uv(folder: Path) -> Path:
    """The program uv of an environment in the folder."""
    root = folder / "uv"
    uv, done = root / "bin" / "uv", root / "installed.txt"
    if not done.exists() or done.read_text() != UV:
        venv.create(root, with_pip=True, clear=True)
        subprocess.run([root / "bin" / "python", "-m", "pip", "install", "-q", UV], check=True)
        done.write_text(UV)
    return uv


def make_environment(framework: Framework, folder: Path, uv: Path) -> Environment:
    """The environment of a framework; creates it unless it has these packages."""
    root = folder / framework.environment
    python = root / "bin" / "python"
    done = root / "packages.json"
    packages = sorted(framework.packages)
    if not done.exists() or json.loads(done.read_text())["packages"] != packages:
        started_at = time.monotonic()
        shutil.rmtree(root, ignore_errors=True)
        subprocess.run([uv, "venv", "-q", "--python", sys.executable, root], check=True)
        subprocess.run([uv, "pip", "install", "-q", "--python", python, *framework.packages], check=True)
        (site,) = root.glob("lib/python*/site-packages")
        (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
        num_bytes = sum(path.lstat().st_size for path in root.rglob("*"))
        built = {"build_s": round(time.monotonic() - started_at), "num_mib": num_bytes >> 20}
        done.write_text(json.dumps({"packages": packages} | built))
    built = json.loads(done.read_text())
    return Environment(python=python, build_s=built["build_s"], num_mib=built["num_mib"])


def start_builds(chosen: Sequence[Framework], folder: Path) -> dict[str, Future[Environment]]:
    """The environments by name, while threads make them."""
    builders, uv = ThreadPoolExecutor(NUM_BUILDERS), install_uv(folder)
    environments = {framework.environment: framework for framework in chosen}
    return {name: builders.submit(make_environment, framework, folder, uv) for name, framework in environments.items()}


def check(index: int, framework: Framework, build: Future[Environment], folder: Path) -> dict:
    """The outcome that the check prints."""
    outcome = {"name": framework.name, "packages": list(framework.packages)} | dict.fromkeys(KEYS) | {"ok": False}
    try:
        environment = build.result()
    except subprocess.CalledProcessError as error:
        return outcome | {"error": f"the packages cannot be installed: {error}"}
    outcome |= {"build_s": environment.build_s, "environment_mib": environment.num_mib}
    started_at = time.monotonic()
    try:
        done = subprocess.run(
            [environment.python, HERE / "check_framework.py", str(index)],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return outcome | {"error": f"not done after {TIMEOUT_S} s"}
    outcome["check_s"] = round(time.monotonic() - started_at)
    lines = [line for line in done.stdout.splitlines() if line.startswith("OUTCOME ")]
    if not lines:
        return outcome | {"error": done.stderr[-2000:]}
    printed = json.loads(lines[-1].removeprefix("OUTCOME "))
    return outcome | {key: printed.get(key) for key in KEYS}


def record(outcome: dict) -> None:
    """Write the outcome in place of the framework's last one, and the tables of the page."""
    path = outcome_table.OUTCOMES
    recorded = {each["name"]: each for each in json.loads(path.read_text())} if path.exists() else {}
    recorded[outcome["name"]] = outcome
    outcomes = [recorded[framework.name] for framework in FRAMEWORKS if framework.name in recorded]
    outcome_table.write_outcomes(outcomes)


def find_failures(outcome: dict) -> list[str]:
    """What failed: the recipe, and features."""
    features = outcome["features"] or {}
    failures = [] if outcome["ok"] else [outcome["error"] or "no reason"]
    return failures + [f"{name}: {each['error']}" for name, each in features.items() if each.get("ok") is False]


def main() -> int:
    folder, names = Path(sys.argv[1]).resolve(), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [each for each in FRAMEWORKS if not names or any(name in each.name for name in names)]
    builds = start_builds(chosen, folder)
    num_failed = 0
    for framework in chosen:
        outcome = check(FRAMEWORKS.index(framework), framework, builds[framework.environment], folder)
        record(outcome)
        failures = find_failures(outcome)
        num_failed += bool(failures)
        print(f"{'FAILED' if failures else 'ok':7} {framework.name} {'; '.join(failures)}".rstrip(), flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
