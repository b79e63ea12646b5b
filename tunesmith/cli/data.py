"""The commands `tunesmith prepare` and `tunesmith pass-rate`, which write rows of training data."""

from __future__ import annotations

from typing import Annotated

import typer

from tunesmith.cli.options import ConfigPath, Debug, Judge, Overrides, Workflow
from tunesmith.runs.process import run_guarded


def prepare_data(
    config: Annotated[str | None, typer.Argument(help="Preparation file (YAML). Keys: docs/prepare.md.")] = None,
    out: Annotated[str, typer.Option(help="New output folder.")] = "data/prepared",
    data: Annotated[str | None, typer.Option(help="Training questions: folder, file or Hugging Face data set.")] = None,
    data_name: Annotated[str | None, typer.Option(help="Configuration of --data; main for openai/gsm8k.")] = None,
    eval_data: Annotated[str | None, typer.Option(help="Held-out questions: data set (split test) or file.")] = None,
    eval_name: Annotated[str | None, typer.Option(help="Configuration of --eval-data.")] = None,
    style: Annotated[str | None, typer.Option(help="Which calculations become tool calls: all or last.")] = None,
    paraphrase: Annotated[
        str | None, typer.Option(metavar="BASE_URL/MODEL", help="Add paraphrased questions written by this model.")
    ] = None,
    pass_rate: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]MODEL", help="Add a column with the pass rate of this model. Repeatable."),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Rollouts per question for pass rates.")] = None,
    max_rows: Annotated[int | None, typer.Option(help="Read only the first N rows, for a quick test.")] = None,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Convert questions with worked solutions, such as GSM8K, to conversations of an agent with a calculator."""

    def work() -> None:
        from tunesmith import run_files

        settings = run_files.load_prepare_file(
            config, overrides or [], data=data, data_name=data_name, eval_data=eval_data, eval_name=eval_name,
            style=style, paraphrase=paraphrase, pass_rate=pass_rate or [], samples=samples, max_rows=max_rows,
        )  # fmt: skip
        run_files.check_and_announce("prepare", settings, f"loading libraries and {settings.data.path}")
        from tunesmith import api
        from tunesmith.commands.prepare.run import format_summary

        typer.echo(format_summary(api.prepare(settings, out=out)))

    run_guarded(work, is_debug=debug)


def measure_pass_rate(
    config: ConfigPath,
    field: Annotated[str, typer.Option(help="Name of the new field, e.g. qwen3_0.6b_pass_rate.")],
    out: Annotated[str, typer.Option(help="JSON lines file to write.")],
    runs: Annotated[int, typer.Option(min=1, help="Rollouts per task.")] = 8,
    tool_key: Annotated[
        list[str] | None,
        typer.Option(help="Metric that counts tool calls; also writes the numbers of each rollout. Repeatable."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model folder or hub id; default: model.path.")] = None,
    workflow: Workflow = None,
    judge: Judge = None,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Write the training tasks with the pass rate of the model, the prior of difficulty_based task selectors."""

    def work() -> None:
        from tunesmith import run_files

        chosen = run_files.collect_overrides(overrides, workflow=workflow, judge=judge)
        chosen += [] if model is None else [f"model.path={model}"]
        settings = run_files.load_run_file(config, chosen)
        run_files.check_and_announce("pass-rate", settings, f"{config} is valid, loading libraries")
        from tunesmith import api

        result = api.measure_pass_rates(settings, field=field, num_runs=runs, out=out, tool_keys=tool_key or [])
        typer.echo(f"{result.path}: {result.num_rows} rows, {result.num_unscored} dropped without a scored rollout")

    run_guarded(work, is_debug=debug)
