"""Checks every framework in a virtual environment of its own: `python tests/frameworks/run.py FOLDER`.

The environments are made in FOLDER once and share the packages of the interpreter that runs this script, after their
own. The outcomes are written to `results/frameworks.json`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from environments import FRAMEWORKS, Framework

HERE = Path(__file__).parent
OUTCOMES = HERE.parents[1] / "results" / "frameworks.json"
TIMEOUT_S = 600


def make_environment(framework: Framework, folder: Path) -> Path:
    """The environment's interpreter; creates it unless it has been."""
    root = folder / framework.environment
    python = root / "bin" / "python"
    done = root / "packages.json"
    if not done.exists():
        venv.create(root, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *framework.packages], check=True)
        (site,) = root.glob("lib/python*/site-packages")
        (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
        done.write_text(json.dumps(framework.packages))
    return python


def check(index: int, framework: Framework, folder: Path) -> dict:
    """The outcome that the check prints."""
    python = make_environment(framework, folder)
    done = subprocess.run(
        [python, HERE / "check_framework.py", str(index)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("OUTCOME ")]
    if not lines:
        return {"name": framework.name, "ok": False, "error": done.stderr[-2000:]}
    outcome = json.loads(lines[-1].removeprefix("OUTCOME "))
    return {key: outcome.get(key) for key in KEYS} | {"error": outcome.get("error")}


KEYS = ("name", "packages", "version", "ok", "turns", "branches", "sampled_tokens", "trained_tokens")


def main() -> int:
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = [check(index, framework, folder) for index, framework in enumerate(FRAMEWORKS)]
    OUTCOMES.write_text(json.dumps(outcomes, indent=1) + "\n")
    for outcome in outcomes:
        print(f"{'ok' if outcome['ok'] else 'FAILED':7} {outcome['name']}: {outcome.get('error') or ''}".rstrip(" :"))
    return 0 if all(outcome["ok"] for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
