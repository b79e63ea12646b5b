"""Runs the tests that need DSPy in an environment of their own: `python tests/frameworks/run_prompt_tuning.py FOLDER`.

The environment is made in FOLDER and also imports the packages of the interpreter that runs this script.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from run import install_uv, make_environment

from environments import Framework

ROOT = Path(__file__).parents[2]
TESTS = ("tests/commands/tune_prompt", "tests/recipes/test_agentscope_tuner_recipe.py")
DSPY = Framework(
    name="DSPy, MIPROv2",
    environment="prompt",
    recipe="",
    features="",
    packages=("dspy[optuna]==3.4.1", "optuna==5.0.0"),
)


def main() -> int:
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    environment = make_environment(DSPY, folder, install_uv(folder))
    return subprocess.run([environment.python, "-m", "pytest", "-q", *TESTS], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
