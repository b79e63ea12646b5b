"""Loading workflows and judges by module or file."""

from __future__ import annotations

import sys

import pytest

from tunesmith.errors import ConfigError
from tunesmith.runs.load_function import load_function


def test_a_function_loads_from_a_file_that_imports_a_neighbor(tmp_path):
    (tmp_path / "neighbor_of_flow.py").write_text("VALUE = 7\n")
    (tmp_path / "flow.py").write_text("from neighbor_of_flow import VALUE\ndef run():\n    return VALUE\n")
    assert load_function(f"{tmp_path}/flow.py:run", knob="workflow")() == 7


def test_a_function_loads_from_a_module():
    assert load_function("json:dumps", knob="judge")([1]) == "[1]"


def test_the_calculator_agent_has_a_stable_name():
    assert (
        load_function("tunesmith.pipeline.math_agent:calculator_agent", knob="workflow").__name__ == "calculator_agent"
    )


def test_without_a_clone_the_error_says_where_functions_of_recipes_are(monkeypatch):
    for name in [each for each in sys.modules if each.startswith("recipes.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "recipes", None)  # an import of it fails as if it were not there
    with pytest.raises(ConfigError, match="^function: .*recipes.world") as caught:
        load_function("recipes.world:generate", knob="function")
    assert "run in the root of a clone of Tunesmith's repository" in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("flow", "module:function"),
        ("nowhere.py:run", "no file 'nowhere.py'"),
        ("no_such_module:run", "no module 'no_such_module'"),
        ("json:no_such_function", "no function 'no_such_function'$"),
        ("json:dump_s", "no function 'dump_s'; did you mean 'dumps'"),
    ],
)
def test_a_missing_module_file_or_function_is_named(spec, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_function(spec, knob="workflow")
    assert "workflow" in str(caught.value)


def test_a_file_named_several_times_runs_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flow_and_judge.py").write_text(
        "import pathlib\n"
        "with open('log.txt', 'a') as log: log.write('run ')\n"
        "class Answer: pass\n"
        "def solve(): return Answer()\n"
        "def judge(answer): return isinstance(answer, Answer)\n"
    )
    (tmp_path / "beside_the_flow.py").write_text("from flow_and_judge import Answer\ndef make(): return Answer()\n")
    judge = load_function("flow_and_judge.py:judge", knob="judge")
    solve = load_function(f"{tmp_path}/flow_and_judge.py:solve", knob="workflow")
    make = load_function("beside_the_flow.py:make", knob="workflow")
    assert judge(solve()) and judge(make())
    assert (tmp_path / "log.txt").read_text() == "run "


def test_a_file_that_another_imported_by_name_does_not_run_again(tmp_path):
    (tmp_path / "imported_first.py").write_text(
        "class Answer: pass\ndef judge(answer): return isinstance(answer, Answer)\n"
    )
    (tmp_path / "importing_it.py").write_text("from imported_first import Answer\ndef solve(): return Answer()\n")
    solve = load_function(f"{tmp_path}/importing_it.py:solve", knob="workflow")
    assert load_function(f"{tmp_path}/imported_first.py:judge", knob="judge")(solve())


def test_a_changed_file_runs_again(tmp_path):
    path = tmp_path / "changing_flow.py"
    path.write_text("def run(): return 1\n")
    assert load_function(f"{path}:run", knob="workflow")() == 1
    path.write_text("def run(): return 'another'\n")
    assert load_function(f"{path}:run", knob="workflow")() == "another"


def test_files_with_the_same_name_in_two_folders_are_two_modules(tmp_path):
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "same_name.py").write_text(f"def run(): return {number}\n")
    first, second = (load_function(f"{tmp_path}/{number}/same_name.py:run", knob="workflow") for number in (1, 2))
    assert (first(), second()) == (1, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def run(:\n    pass\n", r"broken.py, line 1: SyntaxError: "),
        ("import json\njson.loads('{')\n", r"broken.py, line 2: JSONDecodeError: "),
        ("import no_such_package\n", r"broken.py, line 1: ModuleNotFoundError: No module named 'no_such_package'"),
        ("raise SystemExit\n", r"broken.py, line 1: SystemExit"),
    ],
)
def test_an_import_error_is_one_sentence_with_file_and_line(text, message, tmp_path):
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(ConfigError, match=f"workflow: .* cannot be imported: .*{message}"):
        load_function(f"{tmp_path}/broken.py:run", knob="workflow")
