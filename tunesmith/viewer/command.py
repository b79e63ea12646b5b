"""The commands `tunesmith view` and `tunesmith show`."""

from __future__ import annotations

from collections.abc import Sequence

from tunesmith.viewer.export import export_report
from tunesmith.viewer.reading.run import open_runs
from tunesmith.viewer.server import serve
from tunesmith.viewer.show import Wanted, choose_run, print_step


def view(
    *, runs: Sequence[str], port: int, no_browser: bool = False, export: str | None = None, max_mb: float
) -> str | None:
    """Serve the runs as a web page until it is interrupted, or write them to the file `export`."""
    opened = open_runs(runs)
    if export is not None:
        return str(export_report(opened, export, max_bytes=int(max_mb * 2**20)))
    names = ", ".join(run.name for run in opened)
    serve(
        opened,
        port=port,
        has_browser=not no_browser,
        announce=lambda url: print(f"{names}: {url} (Ctrl-C ends it)", flush=True),
    )
    return None


def show(
    *,
    run: str,
    step: int | None = None,
    task: str | None = None,
    min_reward: float | None = None,
    max_reward: float | None = None,
    is_failed: bool = False,
    limit: int,
) -> None:
    """Print rollouts of a step."""
    wanted = Wanted(task=task, min_reward=min_reward, max_reward=max_reward, is_failed=is_failed, limit=limit)
    print_step(choose_run(open_runs([run])), step, wanted)
