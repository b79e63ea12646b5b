"""The command `tunesmith export`."""

from __future__ import annotations

from typing import Annotated

import typer

from tunesmith.runs.process import run_guarded


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
    debug: Annotated[bool, typer.Option("--debug", help="Print tracebacks of errors.")] = False,
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
