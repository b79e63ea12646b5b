"""Errors that need no model, and the first line of a run, come before torch and other slow imports."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAM = textwrap.dedent(
    """
    import sys
    from tunesmith.cli import app
    try:
        app(sys.argv[1:])
    except SystemExit as ending:
        heavy = {"torch", "transformers", "datasets", "openai", "agentscope", "math_verify"} & sys.modules.keys()
        print("heavy:", sorted(heavy))
        raise
    """
)
MANY = textwrap.dedent(
    """
    import contextlib, io, json, sys
    from tunesmith.cli import app
    for line in sys.stdin:
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
            app(json.loads(line))
            said.write("no error")
        heavy = {"torch", "transformers", "datasets", "openai", "agentscope", "math_verify"} & sys.modules.keys()
        print(json.dumps([said.getvalue(), sorted(heavy)]))
    """
)
"""Runs commands one after another; what one has imported, the next ones have too."""
WITHOUT_TORCH = f"import sys\nsys.modules['torch'] = None\n{MANY}"
"""The import of torch, which takes seconds, is an error that the command reports."""
RUN = "model: {path: ./model}\ntrain_dataset: {path: ./tasks.jsonl}\nworkflow: flow.py:solve\n"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )


def run_many(folder: Path, program: str, commands: list[list[str]]) -> list[list]:
    """What each command says, and the slow libraries that are imported after it."""
    lines = "".join(f"{json.dumps(arguments)}\n" for arguments in commands)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, input=lines, capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def write_folder(folder: Path) -> Path:
    (folder / "run.yaml").write_text(RUN)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "tasks.jsonl").write_text('{"question": "1+1"}\n')
    (folder / "flow.py").write_text("async def solve(task, model):\n    pass\n")
    return folder


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path)


ERRORS = [
    (["tune", "rum.yaml"], "config file rum.yaml does not exist"),
    (["sft", "rum.yaml", "--out", "x"], "config file rum.yaml does not exist"),
    (["tune", "run.yaml", "--set", "trainer.learning_rat=1"], "did you mean 'learning_rate'"),
    (["tune", "run.yaml", "--set", "trainer.learning_rate=-1"], "trainer.learning_rate must be greater than 0"),
    (["tune", "run.yaml", "--epochs", "3"], "No such option"),
    (["tune", "run.yaml", "--set", "rollout.stale_cache=keep"], "stale_cache=keep has no effect with"),
    (["tune", "run.yaml", "--ranks", "64"], "is smaller than cluster.num_workers=64"),
    (["serve", "run.yaml", "--ranks", "2", "--set", "serve.mode=online"], "serve.mode=online with 2 ranks"),
    (["tune", "run.yaml", "--set", "model.path=./modle"], "model.path='./modle': there is no such folder"),
    (["tune", "run.yaml", "--set", "train_dataset.path=task.jsonl"], "train_dataset.path='task.jsonl' does not exist"),
    (["tune", "run.yaml", "--set", "auxiliary_models.big.path=./no"], "auxiliary_models.big.path='./no': there is no"),
    (["tune", "run.yaml", "--workflow", "flwo.py:solve"], "workflow: no file 'flwo.py'"),
    (["eval", "run.yaml", "--set", "eval_datasets.test.path=./none"], "eval_datasets.test.path='./none' does not"),
    (["doctor", "./none"], "none is not the folder of a run: there is no such folder"),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_many(write_folder(tmp_path_factory.mktemp("errors")), MANY, [arguments for arguments, _ in ERRORS])


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_errors_that_need_no_model_import_no_slow_library(answers, number):
    said, heavy = answers[number]
    assert ERRORS[number][1] in said and not said.endswith("no error")
    assert not heavy


def test_what_agents_and_configs_import_needs_no_slow_library():
    program = """
import sys
from tunesmith import (
    AlgorithmConfig, DatasetConfig, EvalConfig, ExportSection, JudgeOutput, JudgeType, MetricTable, PipelineConfig,
    PreferenceConfig, PrepareSection, PromptTuneConfig, RunConfig, SftConfig, TaskSelectorConfig, TinkerConfig,
    TunerModelConfig, WorkflowOutput, WorkflowType, avg_time_judge, avg_token_consumption_judge, check_judge_function,
    check_workflow_function, evaluate, export, measure_pass_rates, prefer, prepare, replayable, run_pipeline, serve,
    sft, tune,
)
heavy = {"torch", "transformers", "datasets", "openai", "pandas", "numpy", "pyarrow"} & sys.modules.keys()
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_syntax_error_of_the_workflow_is_one_sentence_with_its_line(folder):
    (folder / "flow.py").write_text("async def solve(task, model):\n    return (\n")
    result = run(folder, "tune", "run.yaml")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "flow.py, line 2: SyntaxError: '(' was never closed" in result.stderr
    assert "heavy: []" in result.stdout


def test_the_first_line_of_a_command_comes_before_slow_imports_unless_progress_is_not_shown(folder):
    commands = [["tune", "run.yaml"], ["check", "flow.py:solve"]]
    commands.append(["tune", "run.yaml", "--set", "monitor.has_progress=false"])
    tuned, checked, silent = ([*said.splitlines()] for said, _ in run_many(folder, WITHOUT_TORCH, commands))
    assert tuned[0] == "tune: run.yaml is valid, loading libraries"
    assert checked[0] == "check: loading libraries for flow.py:solve"
    assert all("import of torch halted" in lines[-1] for lines in (tuned, checked, silent))
    assert len(tuned) == 2 and len(silent) == 1


INTERRUPTED = """
import os, signal, sys
place = sys.argv.pop(1)

def interrupt(frame, event, argument):
    if event == "call" and place in (frame.f_globals.get("__name__"), frame.f_code.co_name):
        sys.setprofile(None)
        os.kill(os.getpid(), signal.SIGINT)

sys.setprofile(interrupt)
import runpy
runpy.run_module("tunesmith", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(("place", "status"), [("tunesmith.cli", -signal.SIGINT), ("get_command", 130)])
def test_an_interrupt_while_the_command_line_is_imported_or_parsed_prints_no_traceback(place, status):
    command = [sys.executable, "-c", INTERRUPTED, place, "config"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")
