"""The table of commands: what entries name exists and fits, and a new command or stage is an entry and its module."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import textwrap

import pytest

from tunesmith.cli import collect_changes
from tunesmith.commands.settings import load_settings
from tunesmith.commands.table import COMMANDS, STAGES, Command, find_command, import_named
from tunesmith.config import RunConfig
from tunesmith.errors import ConfigError
from tunesmith.runs.load_config import describe_options

REFERENCES = (
    "run",
    "config",
    "load",
    "plan",
    "stage_config",
    "stage",
    "check",
    "mutable_keys",
    "figures",
    "report",
)
SHARED = {"config", "overrides", "gpus", "ranks", "as_json"}
"""Options that the command line itself reads."""


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_everything_that_an_entry_names_exists(command: Command):
    named = [getattr(command, name) for name in REFERENCES] + list(command.takes)
    named += [option.read for option in command.options]
    for reference in named:
        assert reference is None or import_named(reference) is not None


@pytest.mark.parametrize("command", [each for each in COMMANDS if each.run], ids=lambda command: command.name)
def test_the_options_of_a_command_are_arguments_of_its_function(command: Command):
    arguments = {option.name for option in command.options if option.key is None}
    arguments -= SHARED if command.config else {"as_json"}
    settings = [object()] if command.config else []
    inspect.signature(import_named(str(command.run))).bind(*settings, **dict.fromkeys(arguments))


@pytest.mark.parametrize("command", [each for each in COMMANDS if each.config], ids=lambda command: command.name)
def test_keys_of_options_are_knobs(command: Command):
    kind = import_named(command.takes[0] if command.takes else str(command.config))
    knobs = [f"{option.key}." for option in describe_options(kind)]
    for key in [f"{option.key}." for option in command.options if option.key is not None]:
        assert any(knob.startswith(key) for knob in knobs), key


@pytest.mark.parametrize("command", STAGES.values(), ids=lambda command: command.name)
def test_a_stage_has_the_knobs_of_its_command_and_its_kind(command: Command):
    stage = import_named(str(command.stage_config))
    assert stage.model_fields["kind"].default == command.kind
    assert command.config is None or issubclass(stage, import_named(command.config))


def test_the_text_of_an_option_stays_text():
    command = find_command("export")
    options = {option.name: option for option in command.options}
    given = {"model": "7", "name": "1e3", "formats": ["hf", "gguf"]}
    settings = load_settings(command, None, collect_changes(options, given))
    assert (settings.path, settings.name, settings.formats) == ("7", "1e3", ("hf", "gguf"))


def test_an_option_overrides_the_same_key_of_set():
    command = find_command("export")
    options = {option.name: option for option in command.options}
    changes = ["path=a", "name=set", *collect_changes(options, {"name": "option"})]
    assert load_settings(command, None, changes).name == "option"


MODULE = """
from typing import Literal

from tunesmith.commands.stage import StageResult
from tunesmith.config import Section

class ShuffleSection(Section):
    times: int = 1
    '''How often.'''

class ShuffleStage(ShuffleSection):
    kind: Literal["shuffle"] = "shuffle"
    '''Kind of the stage.'''

def run_command(settings, *, out):
    return f"shuffled {settings.times} times into {out}"

def check_stage(settings):
    if settings.times > 9:
        raise ValueError(f"times={settings.times} is too often")

def run_stage(settings, *, out_dir, choose_model):
    out_dir.mkdir(parents=True)
    (out_dir / "rows.json").write_text("[]")
    return StageResult(figures={"times": settings.times})
"""
ENTRY = """
import json
import sys
from pathlib import Path
from tunesmith.commands import table

entry = table.Command(
    name="shuffle",
    help="Shuffle rows.",
    options=(
        table.replace(table.RUN_FILE, help="File (YAML)."),
        table.Option("out", "Folder.", default=table.REQUIRED),
        table.Option("times", "How often.", type=int, key="times"),
        table.OVERRIDES,
    ),
    config="shuffle:ShuffleSection",
    run="shuffle:run_command",
    first_line="shuffling {settings.times} times",
    kind="shuffle",
    stage_config="shuffle:ShuffleStage",
    stage="shuffle:run_stage",
    check="shuffle:check_stage",
    output="rows.json",
)
table.COMMANDS = (*table.COMMANDS, entry)
table.STAGES["shuffle"] = entry

from typer.testing import CliRunner
from tunesmith.cli import app

answers = []
for arguments in json.loads(sys.argv[1]):
    if arguments[0] == "remove":
        Path(arguments[1]).unlink()
        continue
    result = CliRunner().invoke(app, arguments)
    answers.append([result.exit_code, result.output, "torch" in sys.modules])
print(json.dumps(answers))
"""


def test_a_new_command_and_stage_are_an_entry_and_a_module(tmp_path):
    (tmp_path / "shuffle.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "shuffle.yaml").write_text("times: 2\n")
    stage = {"mix": {"kind": "shuffle", "times": 4}}
    (tmp_path / "pipeline.yaml").write_text(json.dumps({"folder": "out", "stages": stage}))

    pipeline = ["run", "pipeline.yaml"]
    lines = [
        ["--help"],
        ["shuffle", "shuffle.yaml", "--out", "x", "--times", "3"],
        ["config", "--options", "--stage", "shuffle"],
        ["shuffle", "shuffle.yaml", "--out", "x", "--set", "tims=3"],
        [*pipeline, "--set", "stages.mix.times=10"],
        pipeline,
        pipeline,
        ["remove", "out/mix/rows.json"],
        pipeline,
    ]
    done = subprocess.run(
        [sys.executable, "-c", ENTRY, json.dumps(lines)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    status, texts, has_torch = zip(*json.loads(done.stdout), strict=True)
    assert status == (0, 0, 0, 1, 1, 0, 0, 1) and not has_torch[0]
    assert "Shuffle rows." in texts[0]
    assert texts[1] == "shuffle: shuffling 3 times\nshuffled 3 times into x\n"
    assert "times: int = 1\n    How often." in texts[2]
    assert "tims is not a known key: did you mean 'times'?" in texts[3]
    assert "stages.mix: times=10 is too often" in texts[4]
    assert "- times: 4" in texts[5] and "already done" in texts[6]
    assert "stage 'mix' is done, but its output is incomplete" in texts[7] and "rows.json" in texts[7]


def test_entries_have_distinct_names_and_kinds():
    assert len({command.name for command in COMMANDS}) == len(COMMANDS)
    assert len(STAGES) == sum(command.kind is not None for command in COMMANDS)


def test_a_variable_overrides_files_and_programs_below_explicit_overrides(monkeypatch):
    config = RunConfig(model={"path": "model"}, train_dataset={"path": "data"}, total_steps=20)
    monkeypatch.setenv("TUNESMITH_SET", "total_steps=1  trainer.learning_rate=1e-4 'name=two words'")
    settings = load_settings(find_command("tune"), config, ["total_steps=3"])
    assert (settings.total_steps, settings.trainer.learning_rate, settings.name) == (3, 1e-4, "two words")
    monkeypatch.setenv("TUNESMITH_SET", "total_step=1")
    with pytest.raises(ConfigError, match="total_step is not a known key: did you mean 'total_steps'"):
        load_settings(find_command("tune"), config)
