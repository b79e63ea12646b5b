"""The commands `tunesmith sft` and `tunesmith prefer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tunesmith.cli.options import Debug, Overrides
from tunesmith.runs.process import run_guarded

if TYPE_CHECKING:
    from tunesmith.commands.sft.train import OfflineResult


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


def print_training_result(result: OfflineResult, label: str) -> None:
    """Print steps, losses and the output folder of `sft` or `prefer`."""
    typer.echo(f"{result.num_steps} steps on {result.num_rows} rows, loss {result.loss:.4f}")
    if result.eval_loss is not None:
        typer.echo(f"evaluation loss {result.eval_loss:.4f} at step {result.best_step}; its weights are kept")
    typer.echo(f"{label}: {result.folder}")
