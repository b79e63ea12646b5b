"""The `tunesmith` command.

Each command first reads and checks its file with light modules (`run_files`), then says what it begins, and only then
imports what it runs: torch and its like take seconds, which neither `--help` nor a misspelt key should wait for.

Errors go to stderr as one sentence and end the command with a non-zero status; `--debug` adds the traceback.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunesmith.pipeline.session.process import exit_despite_threads, run_guarded

if TYPE_CHECKING:
    from tunesmith.pipeline.sft.train import OfflineResult

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
Debug = Annotated[bool, typer.Option("--debug", help="Print the traceback of an error, and of each failed rollout.")]


def show_training(result: OfflineResult, label: str) -> None:
    """What a fine-tuning leaves, in lines."""
    typer.echo(f"{result.num_steps} steps on {result.num_rows} rows, loss {result.loss:.4f}")
    if result.eval_loss is not None:
        typer.echo(f"evaluation loss {result.eval_loss:.4f} at step {result.best_step}, whose weights were kept")
    typer.echo(f"{label}: {result.folder}")


@app.command()
def tune(
    config: ConfigPath,
    workflow: Workflow = None,
    judge: Judge = None,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint of this run.")] = False,
    resume_from: Annotated[
        int | None, typer.Option(min=0, metavar="STEP", help="Go on from this step, 0 anew; later ones are set aside.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Train a model inside an agent as a run file says."""

    def work() -> None:
        from tunesmith import run_files

        chosen = run_files.collect_overrides(overrides, workflow=workflow, judge=judge)
        chosen += ["continue_from_checkpoint=true"] if resume or resume_from is not None else []
        chosen += [] if resume_from is None else [f"resume_from_step={resume_from}"]
        settings = run_files.load_run_file(config, chosen)
        run_files.check_and_announce("tune", settings, f"{config} is valid, loading libraries")
        from tunesmith.api import run_config

        result = run_config(settings)
        typer.echo(f"run folder: {result.folder}")
        if result.checkpoint is not None:
            typer.echo(f"{'trained' if result.has_learned else 'unchanged'} model: {result.checkpoint}")

    run_guarded(work, is_debug=debug)


@app.command("prepare")
def prepare_data(
    config: Annotated[str | None, typer.Argument(help="Preparation file (YAML); every key: docs/prepare.md.")] = None,
    out: Annotated[str, typer.Option(help="New folder to write.")] = "data/prepared",
    data: Annotated[str | None, typer.Option(help="Training questions: folder, file or hub id.")] = None,
    data_name: Annotated[str | None, typer.Option(help="Its configuration; main for openai/gsm8k.")] = None,
    eval_data: Annotated[str | None, typer.Option(help="Held-out questions; its test split, or a file.")] = None,
    eval_name: Annotated[str | None, typer.Option(help="Its configuration.")] = None,
    style: Annotated[str | None, typer.Option(help="Calculations that become tool calls: all or last.")] = None,
    paraphrase: Annotated[
        str | None, typer.Option(metavar="BASE_URL/MODEL", help="Add questions in other words by this model.")
    ] = None,
    pass_rate: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]MODEL", help="Add a column with this model's pass rate; may repeat."),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Runs of each question for pass rates.")] = None,
    max_rows: Annotated[int | None, typer.Option(help="Only the first so many rows, for a try.")] = None,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Turn questions with worked solutions, such as GSM8K, into conversations of an agent with a calculator."""

    def work() -> None:
        from tunesmith import run_files

        settings = run_files.load_prepare_file(
            config, overrides or [], data=data, data_name=data_name, eval_data=eval_data, eval_name=eval_name,
            style=style, paraphrase=paraphrase, pass_rate=pass_rate or [], samples=samples, max_rows=max_rows,
        )  # fmt: skip
        run_files.check_and_announce("prepare", settings, f"loading libraries and {settings.data.path}")
        from tunesmith.pipeline.prepare.run import format_summary, run_prepare

        report = run_prepare(settings, out_dir=Path(out))
        typer.echo(format_summary(report))

    run_guarded(work, is_debug=debug)


@app.command("sft")
def finetune(
    config: Annotated[str, typer.Argument(help="Fine-tuning file (YAML); keys: config --options --stage sft.")],
    out: Annotated[str, typer.Option(help="Folder of the result; an unfinished one there is gone on with.")],
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Fine-tune a model, or a LoRA or QLoRA adapter on it, on conversations."""

    def work() -> None:
        from tunesmith import run_files

        settings = run_files.load_sft_file(config, overrides or [])
        run_files.check_and_announce("sft", settings, f"{config} is valid, loading libraries")
        from tunesmith.pipeline.sft.train import run_sft

        show_training(run_sft(settings, out_dir=Path(out)), "fine-tuned model")

    run_guarded(work, is_debug=debug)


@app.command("prefer")
def learn_preferences(
    config: Annotated[str, typer.Argument(help="Preference file (YAML); keys: config --options --stage prefer.")],
    out: Annotated[str, typer.Option(help="Folder of the result; an unfinished one there is gone on with.")],
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Train a model on preferences: pairs (DPO), or completions judged one by one (KTO)."""

    def work() -> None:
        from tunesmith import run_files

        settings = run_files.load_preference_file(config, overrides or [])
        run_files.check_and_announce("prefer", settings, f"{config} is valid, loading libraries")
        from tunesmith.pipeline.sft.preference import run_preference

        show_training(run_preference(settings, out_dir=Path(out)), "trained model")

    run_guarded(work, is_debug=debug)


@app.command("eval")
def evaluate(
    config: ConfigPath,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="[LABEL=]PATH", help="Model folder, hub id or run folder to evaluate; may repeat."),
    ] = None,
    workflow: Workflow = None,
    judge: Judge = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Runs of each task; above 1, pass@k is told.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Fixes every token that is sampled.")] = None,
    overrides: Overrides = None,
    out: Annotated[
        str | None,
        typer.Option(help="Write comparison.json, with every task's runs, and comparison.md here."),
    ] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw comparison.png too; needs the extra plot.")] = False,
    debug: Debug = False,
) -> None:
    """Try models side by side on the held-out tasks of a run file, with intervals and paired tests."""

    def work() -> None:
        from tunesmith import run_files

        options = {"evaluation.num_samples": samples, "evaluation.temperature": temperature, "seed": seed}
        chosen = run_files.collect_overrides(overrides, workflow=workflow, judge=judge)
        chosen += [f"{key}={value}" for key, value in options.items() if value is not None]
        models = run_files.collect_models(model or [])
        settings = run_files.load_eval_file(config, chosen)
        run_files.check_and_announce("eval", settings, f"{config} is valid, loading libraries", has_models=False)
        from tunesmith.api import evaluate_config
        from tunesmith.pipeline.eval.comparison_table import format_comparison

        comparison = evaluate_config(settings, models=models, out=out, has_plot=plot)
        typer.echo(format_comparison(comparison))

    run_guarded(work, is_debug=debug)


@app.command("run")
def run_pipeline(
    config: Annotated[str, typer.Argument(help="Pipeline file (YAML); see docs/pipeline.md.")],
    only: Annotated[str | None, typer.Option(help="Run this stage alone.")] = None,
    start_from: Annotated[str | None, typer.Option("--from", help="Run this stage and those after it.")] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Make the stages anew even where they are done; old ones are set aside.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Check everything, say what would run, and stop.")] = False,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Prepare, fine-tune, train, evaluate and export as a pipeline file says; what is done is skipped."""

    def work() -> None:
        from tunesmith.pipeline.stages.plan import Choice, load_pipeline, plan_stages

        choice = Choice(only=only, start_from=start_from, is_again=again)
        settings = load_pipeline(config, overrides or [])
        names = ", ".join(stage.name for stage in choice.pick(plan_stages(settings)))
        if not check:
            typer.echo(f"run: {config} is valid, loading libraries for {names}", err=True)
        from tunesmith.api import run_pipeline_config
        from tunesmith.pipeline.stages.run import check_pipeline

        if check:
            for name, state in check_pipeline(settings, choice=choice).items():
                typer.echo(f"{name}: {state}")
            return
        report = run_pipeline_config(settings, choice=choice)
        typer.echo(report.read_text(encoding="utf-8"))
        typer.echo(f"report: {report}")

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
        from tunesmith import run_files

        chosen = run_files.collect_overrides(overrides, workflow=workflow, judge=judge)
        chosen += [] if model is None else [f"model.path={model}"]
        settings = run_files.load_run_file(config, chosen)
        run_files.check_and_announce("pass-rate", settings, f"{config} is valid, loading libraries")
        from tunesmith.api import measure_config

        result = measure_config(settings, field=field, num_runs=runs, out=out)
        typer.echo(f"{result.path}: {result.num_rows} rows, {result.num_unscored} without a scored run left out")

    run_guarded(work, is_debug=debug)


@app.command("config")
def show_config(
    config: Annotated[str | None, typer.Argument(help="Run file (YAML) to resolve.")] = None,
    overrides: Overrides = None,
    stage: Annotated[str, typer.Option(help="Whose file: tune, prepare, sft, prefer, eval, export or run.")] = "tune",
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of run files.")] = False,
    options: Annotated[
        bool, typer.Option("--options", help="List every key: type, default, when to change it.")
    ] = False,
    algorithms: Annotated[bool, typer.Option("--algorithms", help="List the algorithms and their arguments.")] = False,
    debug: Debug = False,
) -> None:
    """Print the resolved configuration of a run file, the schema, or the list of keys."""

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
    name: Annotated[str, typer.Argument(help="smollm2-135m-instruct, pocket or pocket-gguf.")],
    out: Annotated[str | None, typer.Option(help="Folder to write; default models/NAME.")] = None,
    debug: Debug = False,
) -> None:
    """Make a Hugging Face model folder without a network: from an installed package, or built from scratch."""

    def work() -> None:
        from tunesmith.model.prepare import prepare_model as prepare

        typer.echo(prepare(name, out or f"models/{name}"))

    run_guarded(work, is_debug=debug)


@app.command("export")
def export_model(
    model: Annotated[str, typer.Argument(help="Model or adapter folder, run folder (its last checkpoint) or hub id.")],
    out: Annotated[str, typer.Option(help="New folder to write.")],
    formats: Annotated[
        list[str] | None, typer.Option("--format", help="hf (default), adapter or gguf; may repeat.")
    ] = None,
    gguf_types: Annotated[
        list[str] | None, typer.Option("--gguf-type", help="f32, f16 (default), q8_0 or q4_k_m; may repeat.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name in the card and of the GGUF files.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any key of the export section, as in --set license=mit."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a trained model as a Hugging Face folder, PEFT adapter or GGUF files, and compare them with the source."""

    def work() -> None:
        from tunesmith import run_files

        given = {"path": model, "formats": formats, "gguf_types": gguf_types, "name": name}
        settings = run_files.load_export_settings(given, overrides or [])
        run_files.check_and_announce("export", settings, f"loading libraries and {model}")
        from tunesmith.pipeline.export.run import run_export

        report = run_export(settings, out_dir=Path(out))
        typer.echo(f"exported {report.name}, {report.num_parameters} parameters: {report.folder}")
        for place, figures in report.checks.items():
            typer.echo(f"  {place}: " + ", ".join(f"{key}={value:.4g}" for key, value in figures.items()))
        if settings.has_verification and report.gguf and not any(place.startswith("gguf/") for place in report.checks):
            typer.echo("  gguf: not compared, for llama-cpp-python is not installed")

    run_guarded(work, is_debug=debug)


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="Fixes tasks, the model's first weights and every sampled token.")] = 0,
    out: Annotated[str, typer.Option(help="Folder of the demo's models, data and run.")] = "checkpoints/demo",
    debug: Debug = False,
) -> None:
    """Fine-tune a pocket model, train it by RL in a ReAct agent with a calculator, and compare: minutes on a CPU."""

    def work() -> None:
        typer.echo("demo: loading libraries", err=True)
        from tunesmith.api import build_agentscope_chat_model
        from tunesmith.pipeline.demo.run import run_demo

        typer.echo(json.dumps(run_demo(seed=seed, out=Path(out), build_model=build_agentscope_chat_model)))

    run_guarded(work, is_debug=debug)


def main() -> None:
    # A workflow named as module:function is looked up from the current folder, as with python -m.
    sys.path.insert(0, "")
    try:
        app()
    except SystemExit as ending:
        exit_despite_threads(ending)
        raise


if __name__ == "__main__":
    main()
