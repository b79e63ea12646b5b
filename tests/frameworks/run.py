"""Checks every framework in a virtual environment of its own: `python tests/frameworks/run.py FOLDER [NAME ...]`.

The environments are made in FOLDER, again whenever their pinned packages change, and also import the packages of the
interpreter that runs this script, after their own. The outcomes are written to `results/frameworks.json` and to the
table of `docs/frameworks.md`; with NAMEs, those of the frameworks whose names contain one of them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import outcome_table

from environments import FRAMEWORKS, Framework

HERE = Path(__file__).parent
TIMEOUT_S = 600
KEYS = ("version", "ok", "turns", "branches", "sampled_tokens", "trained_tokens", "error")


def make_environment(framework: Framework, folder: Path) -> Path:
    """The environment's interpreter; creates it unless it has these packages."""
    root = folder / framework.environment
    python = root / "bin" / "python"
    done = root / "packages.json"
    packages = json.dumps(sorted(framework.packages))
    if not done.exists() or done.read_text() != packages:
        shutil.rmtree(root, ignore_errors=True)
        venv.create(root, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *framework.packages], check=True)
        (site,) = root.glob("lib/python*/site-packages")
        (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
        done.write_text(packages)
    return python


def check(index: int, framework: Framework, folder: Path) -> dict:
    """The outcome that the check prints."""
    outcome = {"name": framework.name, "packages": list(framework.packages)} | dict.fromkeys(KEYS) | {"ok": False}
    try:
        python = make_environment(framework, folder)
    except subprocess.CalledProcessError as error:
        return outcome | {"error": f"the packages cannot be installed: {error}"}
    try:
        done = subprocess.run(
            [python, HERE / "check_framework.py", str(index)],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return outcome | {"error": f"not done after {TIMEOUT_S} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("OUTCOME ")]
    if not lines:
        return outcome | {"error": done.stderr[-2000:]}
    printed = json.loads(lines[-1].removeprefix("OUTCOME "))
    return outcome | {key: printed.get(key) for key in KEYS}


def main() -> int:
    folder, names = Path(sys.argv[1]).resolve(), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    recorded = {each["name"]: each for each in json.loads(outcome_table.OUTCOMES.read_text())}
    for index, framework in enumerate(FRAMEWORKS):
        if names and not any(name in framework.name for name in names):
            continue
        outcome = recorded[framework.name] = check(index, framework, folder)
        text = f"{'ok' if outcome['ok'] else 'FAILED':7} {outcome['name']}: {outcome['error'] or ''}"
        print(text.rstrip(" :"), flush=True)
    outcomes = [recorded[framework.name] for framework in FRAMEWORKS if framework.name in recorded]
    outcome_table.OUTCOMES.write_text(json.dumps(outcomes, indent=1) + "\n")
    outcome_table.main()
    return 0 if all(outcome["ok"] for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
