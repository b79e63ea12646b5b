"""The `tunesmith` command.

Each command reads and validates its config file with light modules (`run_files`), prints its first line, and only then
imports the libraries it needs. Importing torch takes seconds; `--help` and errors in a config file do not wait for it.

Errors go to stderr as one sentence and end the command with a non-zero exit status; `--debug` adds the traceback.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunesmith.convert_command import convert
from tunesmith.pipeline.diagnosis.command import doctor
from tunesmith.pipeline.search.command import search_app
from tunesmith.pipeline.session.process import exit_despite_threads, run_guarded
from tunesmith.viewer_commands import show, view

if TYPE_CHECKING:
    from tunesmith.pipeline.sft.train import OfflineResult

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
app.command("doctor")(doctor)
app.command("convert")(convert)
app.command("view")(view)
app.command("show")(show)

ConfigPath = Annotated[str, typer.Argument(help="Run file (YAML). List its keys with: tunesmith config --options.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a key of the file, e.g. --set section.key=3. Repeatable."
    ),
]
Workflow = Annotated[
    str | None, typer.Option(help="Workflow (the agent), as module:function or file.py:function. Overrides the file.")
]
Judge = Annotated[
    str | None, typer.Option(help="Judge, in the same form. Without a judge the workflow returns the reward.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Print tracebacks of errors and of failed rollouts.")]


def print_training_result(result: OfflineResult, label: str) -> None:
    """Print steps, losses and the output folder of `sft` or `prefer`."""
    typer.echo(f"{result.num_steps} steps on {result.num_rows} rows, loss {result.loss:.4f}")
    if result.eval_loss is not None:
        typer.echo(f"evaluation loss {result.eval_loss:.4f} at step {result.best_step}; its weights are kept")
    typer.echo(f"{label}: {result.folder}")


@app.command()
def tune(
    config: ConfigPath,
    workflow: Workflow = None,
    judge: Judge = None,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the last checkpoint of this run.")] = False,
    resume_from: Annotated[
        int | None,
        typer.Option(min=0, metavar="STEP", help="Resume from this step, 0: start over. Moves later steps aside."),
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Train on this many GPUs of this host.")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Train on this many processes, also on CPUs.")] = None,
    debug: Debug = False,
) -> None:
    """Train the model inside an agent with reinforcement learning, as configured in a run file."""

    def work() -> None:
        from tunesmith import run_files

        chosen = run_files.collect_overrides(overrides, workflow=workflow, judge=judge)
        chosen += run_files.collect_resuming(resume=resume, step=resume_from)
        chosen += run_files.collect_ranks(gpus=gpus, ranks=ranks)
        settings = run_files.load_run_file(config, chosen)
        run_files.check_and_announce("tune", settings, f"{config} is valid, loading libraries")
        if run_files.is_launcher(settings):
            from tunesmith.pipeline.session.launch import launch_tuning

            launch_tuning(settings, config, chosen, has_gpus=gpus is not None, is_debug=debug)
            return
        from tunesmith import api

        result = api.tune(settings)
        if not run_files.is_first_rank():
            return
        typer.echo(f"run folder: {result.folder}")
        if result.checkpoint is not None:
            typer.echo(f"{'trained' if result.has_learned else 'unchanged'} model: {result.checkpoint}")
        if result.best_checkpoint is not None:
            typer.echo(f"best model: {result.best_checkpoint}")

    run_guarded(work, is_debug=debug)


@app.command("prepare")
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
        from tunesmith.pipeline.prepare.run import format_summary

        typer.echo(format_summary(api.prepare(settings, out=out)))

    run_guarded(work, is_debug=debug)


@app.command("sft")
def finetune(
    config: Annotated[str, typer.Argument(help="Fine-tuning file (YAML). Keys: config --options --stage sft.")],
    out: Annotated[str, typer.Option(help="Output folder; an unfinished run in it is resumed.")],
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Fine-tune a model on conversations: all weights, or a LoRA or QLoRA adapter."""

    def work() -> None:
        from tunesmith import run_files

        settings = run_files.load_sft_file(config, overrides or [])
        run_files.check_and_announce("sft", settings, f"{config} is valid, loading libraries")
        from tunesmith import api

        print_training_result(api.sft(settings, out=out), "fine-tuned model")

    run_guarded(work, is_debug=debug)


@app.command("prefer")
def learn_preferences(
    config: Annotated[str, typer.Argument(help="Preference file (YAML). Keys: config --options --stage prefer.")],
    out: Annotated[str, typer.Option(help="Output folder; an unfinished run in it is resumed.")],
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Train a model on preferences: pairs of completions (DPO, ORPO, SimPO), or completions with a label (KTO)."""

    def work() -> None:
        from tunesmith import run_files

        settings = run_files.load_preference_file(config, overrides or [])
        run_files.check_and_announce("prefer", settings, f"{config} is valid, loading libraries")
        from tunesmith import api

        print_training_result(api.prefer(settings, out=out), "trained model")

    run_guarded(work, is_debug=debug)


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
        from tunesmith.pipeline.stages.plan import StageSelection, load_pipeline, plan_stages

        selection = StageSelection(only=only, start_from=start_from, is_rerun=again)
        settings = load_pipeline(config, overrides or [])
        names = ", ".join(stage.name for stage in selection.select(plan_stages(settings)))
        if not check:
            typer.echo(f"run: {config} is valid, loading libraries for {names}", err=True)
        from tunesmith import api
        from tunesmith.pipeline.stages.run import check_pipeline

        if check:
            for name, state in check_pipeline(settings, selection=selection).items():
                typer.echo(f"{name}: {state}")
            return
        result = api.run_pipeline(settings, only=only, start_from=start_from, is_rerun=again)
        typer.echo(result.report.read_text(encoding="utf-8"))
        typer.echo(f"report: {result.report}")

    run_guarded(work, is_debug=debug)


@app.command("pass-rate")
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


@model_app.command("prepare")
def prepare_model(
    name: Annotated[str, typer.Argument(help="Model: smollm2-135m-instruct, pocket or pocket-gguf.")],
    out: Annotated[str | None, typer.Option(help="Output folder; default: models/NAME.")] = None,
    debug: Debug = False,
) -> None:
    """Write a Hugging Face model folder without the hub: from an installed package, or with random weights."""

    def work() -> None:
        from tunesmith.model.prepare import prepare_model as prepare

        typer.echo(prepare(name, out or f"models/{name}"))

    run_guarded(work, is_debug=debug)


@app.command("export")
def export_model(
    model: Annotated[str, typer.Argument(help="Folder of a model, adapter or run (its last checkpoint), or hub id.")],
    out: Annotated[str, typer.Option(help="New output folder.")],
    formats: Annotated[
        list[str] | None, typer.Option("--format", help="Format: hf (default), adapter or gguf. Repeatable.")
    ] = None,
    gguf_types: Annotated[
        list[str] | None, typer.Option("--gguf-type", help="GGUF type: f32, f16 (default), q8_0 or q4_k_m. Repeatable.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Model name, for the model card and the GGUF files.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override an export setting, e.g. --set license=mit."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Export a model as a Hugging Face folder, PEFT adapter or GGUF files, and verify each against the source."""

    def work() -> None:
        from tunesmith import run_files

        given = {"path": model, "formats": formats, "gguf_types": gguf_types, "name": name}
        settings = run_files.load_export_settings(given, overrides or [])
        run_files.check_and_announce("export", settings, f"loading libraries and {model}")
        from tunesmith import api

        report = api.export(settings, out=out)
        typer.echo(f"exported {report.name}, {report.num_parameters} parameters: {report.folder}")
        for place, figures in report.checks.items():
            typer.echo(f"  {place}: " + ", ".join(f"{key}={value:.4g}" for key, value in figures.items()))
        if settings.has_verification and report.gguf and not any(place.startswith("gguf/") for place in report.checks):
            typer.echo("  gguf: not verified, because llama-cpp-python is not installed")

    run_guarded(work, is_debug=debug)


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="Seed of the tasks, the initial weights and all sampled tokens.")] = 0,
    out: Annotated[str, typer.Option(help="Parent folder of the demo's output folder.")] = "checkpoints/demo",
    debug: Debug = False,
) -> None:
    """Fine-tune a tiny model, train it by RL in a ReAct agent with a calculator, and compare: minutes on a CPU."""

    def work() -> None:
        typer.echo("demo: loading libraries", err=True)
        from tunesmith.compat.chat_models import build_agentscope_chat_model
        from tunesmith.pipeline.demo.run import run_demo

        typer.echo(json.dumps(run_demo(seed=seed, out=Path(out), build_model=build_agentscope_chat_model)))

    run_guarded(work, is_debug=debug)


def main() -> None:
    # Import workflows given as module:function from the current folder, as python -m does.
    sys.path.insert(0, "")
    try:
        app()
    except SystemExit as ending:
        exit_despite_threads(ending)
        raise


if __name__ == "__main__":
    main()
