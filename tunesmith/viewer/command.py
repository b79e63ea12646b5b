"""The commands `tunesmith view` and `tunesmith show`; rollouts of a step in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.rule import Rule
from rich.text import Text

from tunesmith.errors import StorageError
from tunesmith.storage import clean_terminal
from tunesmith.viewer.answers.search import Filters, select
from tunesmith.viewer.answers.steps import describe_rollout
from tunesmith.viewer.answers.table import Answers
from tunesmith.viewer.export import export_report
from tunesmith.viewer.reading.rollout_index import NO_FAILURE
from tunesmith.viewer.reading.run import Run, open_runs
from tunesmith.viewer.server import serve


def view(
    *, runs: Sequence[str], port: int, no_browser: bool = False, export: str | None = None, max_mb: float
) -> str | None:
    """Serve the runs, also those that start later, until it is interrupted, or write them to the file `export`;
    StorageError if a path has no run."""
    opened = open_runs(runs)
    if export is not None:
        return str(export_report(opened, export, max_bytes=max_mb * 2**20))
    shown = ", ".join(run.name for run in opened)
    serve(
        Answers(opened, paths=runs),
        port=port,
        has_browser=not no_browser,
        announce=lambda url: print(f"{shown}: {url} (Ctrl-C ends it)", flush=True),
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
    """Print rollouts of a step, of the first run that has any: a folder of a pipeline or demo also has fine-tunings."""
    runs = open_runs([run])
    chosen = next((each for each in runs if each.rollouts.list_steps()), runs[0])
    status = "failed" if is_failed else ""
    filters = Filters(task=task or "", min_reward=min_reward, max_reward=max_reward, status=status)
    print_step(chosen, step, filters, limit=limit)


STYLES = {"system": "dim", "user": "cyan", "tool": "magenta", "assistant": "green", "prompt": "dim"}


def print_step(run: Run, step: int | None, wanted: Filters, *, limit: int, console: Console | None = None) -> None:
    """Print the rollouts of a step, the newest by default; StorageError if the run has none."""
    steps = run.rollouts.list_steps()
    if not steps:
        raise StorageError(f"{run.root} has no rollouts")
    if step is not None and step not in steps:
        raise StorageError(f"{run.root} has no rollouts of step {step}; it has steps {steps[0]} to {steps[-1]}")
    console = console or Console(highlight=False)
    number = steps[-1] if step is None else step
    rows = run.index.find_step(number)
    rewards = rows["reward"][rows["failure"] == NO_FAILURE]
    mean = f"{rewards.mean():.4g}" if len(rewards) else "none"
    num_failures = int((rows["failure"] != NO_FAILURE).sum())
    console.print(Rule(f"{clean_terminal(run.name)}  step {number}"))
    num_groups = len(set(rows["group"].tolist()))
    console.print(f"{num_groups} groups, {len(rows)} rollouts, mean reward {mean}, {num_failures} failed")
    found = rows[select(run, rows, wanted)]
    for row in found[:limit]:
        console.print(format_rollout(describe_rollout(run, number, int(row["group"]), int(row["run"]))))
    if len(found) > limit:
        console.print(f"{len(found) - limit} more match: raise --limit")
    if not len(found):
        console.print("no rollout of this step matches")


def format_rollout(rollout: dict[str, Any]) -> Panel:
    lines: list[Text | Rule] = []
    for number, conversation in enumerate(rollout["conversations"]):
        if number:
            lines.append(Rule(f"branch {number + 1}", style="dim"))
        for message in conversation["messages"]:
            lines += format_message(message)
    if not rollout["conversations"] and rollout["response"]:
        lines.append(show_text(rollout["response"]))
    failure = rollout["failure"]
    if failure is not None:
        where = f" ({failure['line']})" if failure["line"] else ""
        lines.append(show_text(f"failed in {failure['where']}: {failure['message']}{where}", "bold red"))
        if failure["traceback"]:
            lines.append(show_text(failure["traceback"].rstrip(), "red"))
    reward = "failed" if rollout["reward"] is None else f"reward {rollout['reward']:.4g}"
    advantage = "not trained" if rollout["advantage"] is None else f"advantage {rollout['advantage']:+.4g}"
    title = f"{rollout['task_id']}  group {rollout['group']} rollout {rollout['run']}  {reward}  {advantage}"
    counts = f"{rollout['num_turns']} turns, {rollout['num_tokens']} tokens, {rollout['duration_s']:.1f} s"
    return Panel(Group(*lines), title=show_text(title), subtitle=counts, title_align="left", subtitle_align="right")


def format_message(message: dict[str, Any]) -> list[Text | Rule]:
    style = STYLES.get(message["role"], "")
    lines: list[Text | Rule] = [show_text(message["role"], f"bold {style}")]
    if message.get("reasoning"):
        lines.append(show_text(message["reasoning"], "italic dim"))
    if message["content"].strip():
        lines.append(show_text(message["content"].strip("\n"), "dim" if style == "dim" else ""))
    calls = message.get("tool_calls") or ()
    return [*lines, *(show_text(f"-> {call['name']}({call['arguments']})", "yellow") for call in calls)]


def show_text(text: str, style: str = "") -> Text:
    return Text(clean_terminal(text), style=style)
