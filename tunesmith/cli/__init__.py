"""The `tunesmith` command.

Each command reads and validates its config file with light modules (`run_files`), prints its first line, and only then
imports the libraries it needs. Importing torch takes seconds; `--help` and errors in a config file do not wait for it.

Errors go to stderr as one sentence and end the command with a non-zero exit status; `--debug` adds the traceback.
`--help` lists the commands in the order in which they are registered.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from tunesmith.cli.check import check
from tunesmith.cli.convert import convert
from tunesmith.cli.data import measure_pass_rate, prepare_data
from tunesmith.cli.doctor import doctor
from tunesmith.cli.export import export_model
from tunesmith.cli.model import prepare_model
from tunesmith.cli.offline import finetune, learn_preferences
from tunesmith.cli.options import ConfigPath, Debug, Gpus, Judge, NumRanks, Overrides, Resume, Workflow
from tunesmith.cli.search import search_app
from tunesmith.cli.serve import serve
from tunesmith.cli.usage import name_corrections
from tunesmith.cli.viewer import show, view
from tunesmith.runs.process import exit_despite_threads, run_guarded

app = typer.Typer(
    name="tunesmith",
    help="Train the model inside any LLM agent with reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(name="model", help="Prepare models.", no_args_is_help=True)
app.add_typer(model_app)
app.add_typer(search_app)


@app.command()
def tune(
    config: ConfigPath,
    workflow: Workflow = None,
    judge: Judge = None,
    overrides: Overrides = None,
    resume: Resume = False,
    resume_from: Annotated[
        int | None,
        typer.Option(min=0, metavar="STEP", help="Resume from this step, 0: start over. Moves later steps aside."),
    ] = None,
    gpus: Gpus = None,
    ranks: NumRanks = None,
    debug: Debug = False,
) -> None:
    """Train the model inside an agent with reinforcement learning, as configured in a run file."""

    def work() -> None:
        from tunesmith import run_files
        from tunesmith.cli.training import start_run

        chosen = run_files.collect_overrides(overrides, workflow=workflow, judge=judge)
        chosen += run_files.collect_resuming(resume=resume, step=resume_from)
        chosen += run_files.collect_ranks(gpus=gpus, ranks=ranks)
        settings = run_files.load_run_file(config, chosen)
        if gpus is not None and settings.cluster.launcher == "ray":
            raise ValueError(f"--gpus {gpus} counts GPUs of this host: with cluster.launcher=ray use --ranks {gpus}")
        start_run("tune", settings, config, chosen, has_gpus=gpus is not None, is_debug=debug)

    run_guarded(work, is_debug=debug)


app.command("serve")(serve)
app.command("sft")(finetune)
app.command("prefer")(learn_preferences)
app.command("prepare")(prepare_data)
app.command("pass-rate")(measure_pass_rate)


@app.command("eval")
def evaluate(
    config: ConfigPath,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="[LABEL=]PATH", help="Model folder, hub id or run folder to evaluate. Repeatable."),
    ] = None,
    workflow: Workflow = None,
    judge: Judge = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Rollouts per task; above 1, pass@k is reported.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of all sampled tokens.")] = None,
    overrides: Overrides = None,
    out: Annotated[
        str | None,
        typer.Option(help="Folder for comparison.json (with every rollout) and comparison.md."),
    ] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Also draw comparison.png; needs the extra `plot`.")] = False,
    suite: Annotated[str | None, typer.Option(help="Measures instead of a judge: tir, for agents with tools.")] = None,
    debug: Debug = False,
) -> None:
    """Compare models on the held-out tasks of a run file, with confidence intervals and paired tests."""

    def work() -> None:
        from tunesmith import run_files

        options = {"evaluation.num_samples": samples, "evaluation.temperature": temperature, "seed": seed}
        chosen = run_files.collect_overrides(overrides, workflow=workflow, judge=judge)
        chosen += [f"{key}={value}" for key, value in options.items() if value is not None]
        models = run_files.collect_models(model or [])
        settings = run_files.load_eval_file(config, chosen)
        run_files.check_and_announce("eval", settings, f"{config} is valid, loading libraries", has_models=False)
        from tunesmith import api

        typer.echo(api.evaluate(settings, models=models, out=out, has_plot=plot, suite=suite))

    run_guarded(work, is_debug=debug)


@app.command("run")
def run_pipeline(
    config: Annotated[str, typer.Argument(help="Pipeline file (YAML). Keys: docs/pipeline.md.")],
    only: Annotated[str | None, typer.Option(help="Run only this stage.")] = None,
    start_from: Annotated[str | None, typer.Option("--from", help="Run this stage and all later ones.")] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Rerun stages that are done; old outputs are moved aside.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Validate everything, list what would run, and stop.")] = False,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Run the stages of a pipeline file (prepare, sft, prefer, rl, eval, export); stages that are done are skipped."""

    def work() -> None:
        from tunesmith.commands.run.plan import StageSelection, load_pipeline, plan_stages

        selection = StageSelection(only=only, start_from=start_from, is_rerun=again)
        settings = load_pipeline(config, overrides or [])
        names = ", ".join(stage.name for stage in selection.select(plan_stages(settings)))
        if not check:
            typer.echo(f"run: {config} is valid, loading libraries for {names}", err=True)
        from tunesmith import api
        from tunesmith.commands.run.run import check_pipeline

        if check:
            for name, state in check_pipeline(settings, selection=selection).items():
                typer.echo(f"{name}: {state}")
            return
        result = api.run_pipeline(settings, only=only, start_from=start_from, is_rerun=again)
        typer.echo(result.report.read_text(encoding="utf-8"))
        typer.echo(f"report: {result.report}")

    run_guarded(work, is_debug=debug)


app.command("check")(check)
app.command("doctor")(doctor)
app.command("view")(view)
app.command("show")(show)
app.command("export")(export_model)
app.command("convert")(convert)


@app.command("config")
def show_config(
    config: Annotated[str | None, typer.Argument(help="File (YAML) to resolve.")] = None,
    overrides: Overrides = None,
    stage: Annotated[str, typer.Option(help="Kind of file: tune, prepare, sft, prefer, eval, export or run.")] = "tune",
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of the file.")] = False,
    options: Annotated[
        bool, typer.Option("--options", help="List every key: type, default and when to change it.")
    ] = False,
    algorithms: Annotated[bool, typer.Option("--algorithms", help="List the algorithms and their arguments.")] = False,
    debug: Debug = False,
) -> None:
    """Print the resolved configuration of a file, its JSON schema, its keys, or the algorithms."""

    def work() -> None:
        from tunesmith import run_files

        kinds = {"--schema": schema, "--options": options, "--algorithms": algorithms}
        chosen = [name for name, is_chosen in kinds.items() if is_chosen]
        given = {"a file": config, "--set": overrides, **dict.fromkeys(chosen[1:], True)}
        if chosen and (ignored := [name for name, value in given.items() if value]):
            raise ValueError(f"{', '.join(ignored)} has no effect with {chosen[0]}: leave it out")
        if schema:
            typer.echo(run_files.format_schema(stage))
        elif options:
            typer.echo(run_files.format_options(stage))
        elif algorithms:
            from tunesmith.algorithms.algorithm import describe_algorithms

            typer.echo(describe_algorithms())
        else:
            typer.echo(run_files.format_config(stage, config, overrides or []), nl=False)

    run_guarded(work, is_debug=debug)


model_app.command("prepare")(prepare_model)


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="Seed of the tasks, the initial weights and all sampled tokens.")] = 0,
    out: Annotated[str, typer.Option(help="Parent folder of the demo's output folder.")] = "checkpoints/demo",
    debug: Debug = False,
) -> None:
    """Fine-tune a tiny model, train it by RL in a ReAct agent with a calculator, and compare: minutes on a CPU."""

    def work() -> None:
        typer.echo("demo: loading libraries", err=True)
        from tunesmith.commands.demo.run import run_demo
        from tunesmith.compat.chat_models import build_agentscope_chat_model

        typer.echo(json.dumps(run_demo(seed=seed, out=Path(out), build_model=build_agentscope_chat_model)))

    run_guarded(work, is_debug=debug)


name_corrections(app, model_app, search_app)


def main() -> None:
    # Import workflows given as module:function from the current folder, as python -m does.
    sys.path.insert(0, "")
    try:
        app()
    except SystemExit as ending:
        exit_despite_threads(ending)
        raise
    except KeyboardInterrupt:  # while the command line was parsed
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
