"""The result of a call of the Python tool: outcome, output, and the text that the model reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tunesmith.config.tools import PythonToolSection

Outcome = Literal["ok", "error", "timeout", "memory", "output_limit"]

NO_OUTPUT = "(no output: print the values that you need)"
STATE_LOST = "The session was restarted: its variables are lost."


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonResult:
    """The result of a call. Every outcome is an observation for the model; trouble with the sandbox is an exception."""

    outcome: Outcome
    """ok; error: an exception, a non-zero exit status or a signal; timeout: wall or CPU time; memory: an uncaught
    MemoryError; output_limit."""
    text: str
    """What the model reads, at most `max_result_chars` characters."""
    stdout: str
    stderr: str
    is_state_lost: bool = False
    """Whether a session lost its variables with this call."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The end of a call, and the output of its code."""

    outcome: Outcome
    reason: str
    """Why the call ended, where the output does not say it."""
    stdout: str
    stderr: str
    is_state_lost: bool
    """Whether a session's process has ended."""
    is_worker_kept: bool
    """Whether the worker can run another call."""


def build_result(answer: Answer, settings: PythonToolSection) -> PythonResult:
    """The result from the answer of a worker."""
    notes = []
    if answer.outcome != "ok":
        notes += [answer.stderr.strip("\n"), describe_outcome(answer, settings)]
    if answer.is_state_lost:
        notes.append(STATE_LOST)
    notes_text = "\n".join(filter(None, notes))
    output = answer.stdout.strip("\n").rstrip()
    text = "\n".join(filter(None, [output, notes_text]))
    return PythonResult(
        outcome=answer.outcome,
        text=shorten_text(text or NO_OUTPUT, settings.max_result_chars),
        stdout=answer.stdout,
        stderr=answer.stderr,
        is_state_lost=answer.is_state_lost,
    )


def build_error(sentence: str) -> PythonResult:
    """The result of a call that cannot be run as code."""
    return PythonResult(outcome="error", text=f"Error: {sentence}", stdout="", stderr="")


def describe_outcome(answer: Answer, settings: PythonToolSection) -> str:
    """One sentence on a broken limit or an abnormal end; empty if the traceback says all."""
    match answer.outcome:
        case "timeout" if answer.reason == "cpu":
            return f"Timeout: the code used more than {settings.cpu_s} s of CPU time and was stopped."
        case "timeout":
            return f"Timeout: the code ran longer than {settings.wall_s:g} s and was stopped."
        case "memory":
            return f"The code needs more than the {settings.memory_mb} MiB of memory that it may use."
        case "output_limit":
            return f"The code printed more than {settings.max_output_bytes} bytes and was stopped."
    return f"Error: {answer.reason}." if answer.reason else ""


def shorten_text(text: str, limit: int) -> str:
    """Leave out the middle, so that the first output and the error at the end stay."""
    if len(text) <= limit:
        return text
    mark = f"\n... [{len(text)} characters, the middle is left out] ...\n"
    head = (limit - len(mark)) // 2
    return text[:head] + mark + text[len(text) - (limit - len(mark) - head) :]
