"""Command lines that do not parse are answered with what to write instead."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tunesmith.cli import app

WRITE_SET = "tunesmith: a key of the file is changed with --set: write --set "
TYPOS = [
    (["tune", "run.yaml", "algorithm.lr=1e-5"], f"{WRITE_SET}algorithm.lr=1e-5"),
    (["tune", "algorithm.lr=1e-5", "run.yaml"], f"{WRITE_SET}algorithm.lr=1e-5"),
    (["tune", "algorithm.lr=1e-5"], f"{WRITE_SET}algorithm.lr=1e-5"),
    (["prepare", "--data", "x", "seed=3"], f"{WRITE_SET}seed=3"),
    (["tune", "run.yaml", "--resume", "seed=3", "a.b=[1, 2]"], f"{WRITE_SET}seed=3 --set 'a.b=[1, 2]'"),
    (["tune", "run.yaml", "--set", "a.b=1", "c.d=2"], f"{WRITE_SET}c.d=2"),
    (["tune", "run.yaml", "--set", "a.b", "3"], "tunesmith: --set takes KEY=VALUE without a space: write --set a.b=3"),
    (["tune", "run.yaml", "--a.b=3"], "tunesmith: a.b is a key of the file, not an option: write --set a.b=3"),
    (["tune", "run.yaml", "--a.b", "3"], "tunesmith: a.b is a key of the file, not an option: write --set a.b=3"),
    (["eval", "run.yaml", "--model", "a=x", "b=y"],
     "tunesmith: --model takes one value and may be repeated: write --model b=y"),
    (["view", "--export", "x.html", "--a.b"], "No such option: --a.b"),
    (["doctor", "run", "other"], "tunesmith: unexpected argument 'other': tunesmith doctor takes RUN and options"),
    (["tume", "run.yaml"], "tunesmith: there is no command 'tume': did you mean 'tune'? tunesmith has tune, serve, "),
    (["model", "prep"], "tunesmith: there is no command 'prep': did you mean 'prepare'? tunesmith model has prepare"),
    (["run.yaml", "--resume"],
     "tunesmith: 'run.yaml' is not a command: to train as the file says, write tunesmith tune run.yaml --resume"),
    (["--debug", "tune", "run.yaml"],
     "tunesmith: options follow the command: write tunesmith tune run.yaml --debug"),
    (["--set", "a.b=1", "tune", "run.yaml"],
     "tunesmith: options follow the command: write tunesmith tune run.yaml --set a.b=1"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), TYPOS)
def test_a_wrong_command_line_is_answered_with_what_to_write(arguments, message):
    result = CliRunner().invoke(app, arguments, prog_name="tunesmith")
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.stderr.splitlines()) == 1 or not message.startswith("tunesmith: ")


@pytest.mark.parametrize("command", ["tune", "serve", "sft", "prefer", "prepare", "pass-rate", "eval", "run", "check"])
def test_every_command_with_overrides_names_the_option(command):
    given = {"sft": ["--out", "x"], "prefer": ["--out", "x"], "pass-rate": ["--out", "x", "--field", "y"]}
    arguments = [command, *given.get(command, []), "run.yaml", "section.key=3"]
    assert f"{WRITE_SET}section.key=3\n" in CliRunner().invoke(app, arguments).output


def test_a_folder_in_place_of_a_file_is_answered_with_the_file_in_it(tmp_path):
    (tmp_path / "run.yaml").write_text("")
    result = CliRunner().invoke(app, ["tune", str(tmp_path)])
    assert f"{tmp_path}: it is a folder; it holds {tmp_path}/run.yaml" in result.output
    (tmp_path / "config.yaml").write_text("")
    result = CliRunner().invoke(app, ["tune", str(tmp_path)])
    assert f"its file is {tmp_path}/config.yaml, which resumes a run with --resume" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run.yaml", "--options"], "a file has no effect with --options"),
        (["--schema", "--set", "seed=3"], "--set has no effect with --schema"),
        (["--options", "--algorithms"], "--algorithms has no effect with --options"),
    ],
)
def test_config_refuses_what_it_would_ignore(arguments, message):
    result = CliRunner().invoke(app, ["config", *arguments])
    assert result.exit_code == 1
    assert message in result.output
