"""The `tunesmith` command. Each command imports what it needs when it runs, so `--help` stays fast.

Errors go to stderr as one sentence and end the command with a non-zero status; `--debug` adds the traceback.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from tunesmith.errors import TunesmithError

app = typer.Typer(
    name="tunesmith",
    help="Train the model inside any LLM agent by reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(name="model", help="Prepare models.", no_args_is_help=True)
app.add_typer(model_app)

ConfigPath = Annotated[str, typer.Argument(help="Run file (YAML); every key: tunesmith config --options.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, as in --set algorithm.group_size=4."),
]
Workflow = Annotated[
    str | None, typer.Option(help="The agent: module:function or file.py:function; overrides the file.")
]
Judge = Annotated[
    str | None, typer.Option(help="The judge, in the same form; without one the workflow gives the reward.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")]


def run_guarded(work: Callable[[], None], *, is_debug: bool) -> None:
    """Turn expected errors into one sentence on stderr and exit status 1."""
    try:
        work()
    except (TunesmithError, ValueError, OSError, ImportError) as error:
        if is_debug:
            raise
        typer.echo(f"tunesmith: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from None


@app.command()
def tune(
    config: ConfigPath,
    workflow: Workflow = None,
    judge: Judge = None,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint of this run.")] = False,
    debug: Debug = False,
) -> None:
    """Train a model inside an agent as a run file says."""

    def work() -> None:
        from tunesmith.api import run_config_file

        chosen = _collect_overrides(overrides, workflow=workflow, judge=judge)
        result = run_config_file(config, overrides=chosen + (["continue_from_checkpoint=true"] if resume else []))
        typer.echo(f"run folder: {result.folder}")
        if result.checkpoint is not None:
            typer.echo(f"trained model: {result.checkpoint}")

    run_guarded(work, is_debug=debug)


@app.command("eval")
def evaluate(
    config: ConfigPath,
    model: Annotated[list[str] | None, typer.Option(help="Model folder or hub id to evaluate; may repeat.")] = None,
    workflow: Workflow = None,
    judge: Judge = None,
    overrides: Overrides = None,
    out: Annotated[str | None, typer.Option(help="Write results and every task's outcome to this JSON file.")] = None,
    debug: Debug = False,
) -> None:
    """Try the held-out tasks of a run file on one or several models, side by side."""

    def work() -> None:
        from tunesmith.api import evaluate_config_file

        chosen = _collect_overrides(overrides, workflow=workflow, judge=judge)
        evaluate_config_file(config, overrides=chosen, model_paths=model or [], out=out)

    run_guarded(work, is_debug=debug)


@app.command("pass-rate")
def measure_pass_rate(
    config: ConfigPath,
    field: Annotated[str, typer.Option(help="Name of the new field, as in qwen3_0.6b_pass_rate.")],
    out: Annotated[str, typer.Option(help="The jsonl file to write.")],
    runs: Annotated[int, typer.Option(min=1, help="Runs of each task.")] = 8,
    model: Annotated[str | None, typer.Option(help="Model folder or hub id to try; default the run file's.")] = None,
    workflow: Workflow = None,
    judge: Judge = None,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Try every training task and write its pass rate beside it: what difficulty_based selectors start from."""

    def work() -> None:
        from tunesmith.api import measure_config_file

        chosen = _collect_overrides(overrides, workflow=workflow, judge=judge)
        chosen += [] if model is None else [f"model.path={model}"]
        result = measure_config_file(config, overrides=chosen, field=field, num_runs=runs, out=out)
        typer.echo(f"{result.path}: {result.num_rows} rows, {result.num_unscored} without a scored run left out")

    run_guarded(work, is_debug=debug)


@app.command("config")
def show_config(
    config: Annotated[str | None, typer.Argument(help="Run file (YAML) to resolve.")] = None,
    overrides: Overrides = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of run files.")] = False,
    options: Annotated[
        bool, typer.Option("--options", help="List every key: type, default, when to change it.")
    ] = False,
    algorithms: Annotated[bool, typer.Option("--algorithms", help="List the algorithms and their arguments.")] = False,
    debug: Debug = False,
) -> None:
    """Print the resolved configuration of a run file, the schema, or the list of keys."""

    def work() -> None:
        from tunesmith.pipeline.load_config import config_schema, describe_options, dump_config

        if schema:
            typer.echo(json.dumps(config_schema(), indent=2))
        elif options:
            for option in describe_options():
                typer.echo(f"{option.key}: {option.type} = {option.default}\n    {option.description}")
        elif algorithms:
            from tunesmith.algorithms.table import describe_algorithms

            typer.echo(describe_algorithms())
        else:
            from tunesmith.api import load_run_file

            typer.echo(dump_config(load_run_file(config, overrides or [])), nl=False)

    run_guarded(work, is_debug=debug)


@model_app.command("prepare")
def prepare_model(
    name: Annotated[str, typer.Argument(help="smollm2-135m-instruct or pocket.")],
    out: Annotated[str | None, typer.Option(help="Folder to write; default models/NAME.")] = None,
    debug: Debug = False,
) -> None:
    """Make a Hugging Face model folder without a network: from an installed package, or built from scratch."""

    def work() -> None:
        from tunesmith.model.prepare import prepare_model as prepare

        typer.echo(prepare(name, out or f"models/{name}"))

    run_guarded(work, is_debug=debug)


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="Fixes tasks, the model's first weights and every sampled token.")] = 0,
    out: Annotated[str, typer.Option(help="Folder of the demo's models, data and run.")] = "checkpoints/demo",
    debug: Debug = False,
) -> None:
    """Fine-tune a pocket model, train it by RL in a ReAct agent with a calculator, and compare: minutes on a CPU."""

    def work() -> None:
        from tunesmith.api import run_demo

        typer.echo(json.dumps(run_demo(seed=seed, out=out)))

    run_guarded(work, is_debug=debug)


def _collect_overrides(overrides: list[str] | None, *, workflow: str | None, judge: str | None) -> list[str]:
    named = [f"{key}={value}" for key, value in (("workflow", workflow), ("judge", judge)) if value is not None]
    return [*(overrides or []), *named]


def main() -> None:
    sys.path.insert(
        0, ""
    )  # a workflow named as module:function is looked up from the current folder, as with python -m
    app()


if __name__ == "__main__":
    main()
