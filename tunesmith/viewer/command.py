"""The commands `tunesmith view` and `tunesmith show`; rollouts of a step in the terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.rule import Rule
from rich.text import Text

from tunesmith.errors import StorageError
from tunesmith.viewer.answers.steps import describe_rollout, describe_step
from tunesmith.viewer.export import export_report
from tunesmith.viewer.reading.rollout_index import NO_FAILURE
from tunesmith.viewer.reading.run import Run, open_runs
from tunesmith.viewer.server import serve


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


STYLES = {"system": "dim", "user": "cyan", "tool": "magenta", "assistant": "green", "prompt": "dim"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which rollouts to print."""

    task: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    is_failed: bool = False
    limit: int = 10


def choose_run(runs: Sequence[Run]) -> Run:
    """The first run with rollouts: the folder of a pipeline or demo also has fine-tuning runs without rollouts."""
    return next((run for run in runs if run.rollouts.list_steps()), runs[0])


def print_step(run: Run, step: int | None, wanted: Wanted, *, console: Console | None = None) -> None:
    """Print the rollouts of a step, the newest by default; StorageError if the run has none."""
    steps = run.rollouts.list_steps()
    if not steps:
        raise StorageError(f"{run.root} has no rollouts")
    if step is not None and step not in steps:
        raise StorageError(f"{run.root} has no rollouts of step {step}; it has steps {steps[0]} to {steps[-1]}")
    console = console or Console(highlight=False)
    number = steps[-1] if step is None else step
    groups = {group["group"]: group for group in describe_step(run, number)["groups"]}
    rows = run.index.find_step(number)
    rewards = rows["reward"][rows["failure"] == NO_FAILURE]
    mean = f"{rewards.mean():.4g}" if len(rewards) else "none"
    num_failures = int((rows["failure"] != NO_FAILURE).sum())
    console.print(Rule(f"{clean(run.name)}  step {number}"))
    console.print(f"{len(groups)} groups, {len(rows)} rollouts, mean reward {mean}, {num_failures} failed")
    found = list(find_rollouts(rows, groups, wanted))
    for group, index in found[: wanted.limit]:
        console.print(format_rollout(describe_rollout(run, number, group, index)))
    if len(found) > wanted.limit:
        console.print(f"{len(found) - wanted.limit} more match: raise --limit")
    if not found:
        console.print("no rollout of this step matches")


def find_rollouts(rows: Any, groups: dict[int, dict[str, Any]], wanted: Wanted) -> Iterator[tuple[int, int]]:
    """Group and rollout of each match."""
    for row in rows:
        group, reward = groups[int(row["group"])], float(row["reward"])
        has_failed = row["failure"] != NO_FAILURE
        if wanted.task is not None and wanted.task not in group["task_id"]:
            continue
        if wanted.is_failed and not has_failed:
            continue
        if wanted.min_reward is not None and not reward >= wanted.min_reward:
            continue
        if wanted.max_reward is not None and not reward <= wanted.max_reward:
            continue
        yield int(row["group"]), int(row["run"])


def format_rollout(rollout: dict[str, Any]) -> Panel:
    """One rollout as a panel."""
    lines: list[Text | Rule] = []
    for number, conversation in enumerate(rollout["conversations"]):
        if number:
            lines.append(Rule(f"branch {number + 1}", style="dim"))
        for message in conversation["messages"]:
            lines += format_message(message)
    if not rollout["conversations"] and rollout["response"]:
        lines.append(Text(clean(rollout["response"])))
    failure = rollout["failure"]
    if failure is not None:
        where = f" ({failure['line']})" if failure["line"] else ""
        lines.append(Text(clean(f"failed in {failure['where']}: {failure['message']}{where}"), style="bold red"))
        if failure["traceback"]:
            lines.append(Text(clean(failure["traceback"].rstrip()), style="red"))
    reward = "failed" if rollout["reward"] is None else f"reward {rollout['reward']:.4g}"
    advantage = "not trained" if rollout["advantage"] is None else f"advantage {rollout['advantage']:+.4g}"
    title = f"{rollout['task_id']}  group {rollout['group']} rollout {rollout['run']}  {reward}  {advantage}"
    counts = f"{rollout['num_turns']} turns, {rollout['num_tokens']} tokens, {rollout['duration_s']:.1f} s"
    return Panel(Group(*lines), title=Text(clean(title)), subtitle=counts, title_align="left", subtitle_align="right")


def format_message(message: dict[str, Any]) -> list[Text | Rule]:
    style = STYLES.get(message["role"], "")
    lines: list[Text | Rule] = [Text(clean(message["role"]), style=f"bold {style}")]
    if message.get("reasoning"):
        lines.append(Text(clean(message["reasoning"]), style="italic dim"))
    if message["content"].strip():
        lines.append(Text(clean(message["content"].strip("\n")), style="dim" if style == "dim" else ""))
    lines += [
        Text(clean(f"-> {call['name']}({call['arguments']})"), style="yellow")
        for call in message.get("tool_calls") or ()
    ]
    return lines


def clean(text: str) -> str:
    """The text without characters that control a terminal: a model may have written such."""
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) not in {"Cc", "Cf", "Cs"} else "\ufffd" for char in text
    )
