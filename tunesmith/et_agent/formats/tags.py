"""Text of one assistant turn with tags, as ET-Agent writes trajectories, parsed into a transcript.

`<think>..</think>`, `<search>query</search>`, `<python>code</python>`, `<result>..</result>` and `<answer>..</answer>`.
A `<result>` counts as the environment's only directly after a call; anywhere else the model wrote it, and it stays part
of a thought. The text of the segments is the given text without trailing space, so nothing is lost. Token counts are
unknown and 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tunesmith.environments.transcript import ANSWER_CLOSE, ANSWER_OPEN, Finish, Segment, Transcript
from tunesmith.tools.tool import FailureKind

TOOL_ARGUMENTS: Mapping[str, str] = {"search": "query", "python": "code"}
"""The tools of the original, and the argument that the text of the tag is."""
RESULT = re.compile(r"\s*<result>(.*?)</result>", re.DOTALL)
TIMEOUT = re.compile(r"execution timeout|timed out|TimeoutError", re.IGNORECASE)
ERROR = re.compile(
    r"\ATraceback \(most recent call last\)|^\w*(?:Error|Exception)\b.*\Z|\AError:|\ALocal search failed"
    r"|\Ainvalid query|\ATool\(\w+\) returned empty output",
    re.MULTILINE,
)


def parse_trajectory(question: str, text: str, *, arguments: Mapping[str, str] = TOOL_ARGUMENTS) -> Transcript:
    """The transcript of a trajectory's text; `arguments` maps the tags of tools to the argument that they hold."""
    written = text.rstrip()
    call = re.compile(rf"<({'|'.join(map(re.escape, arguments))})>(.*?)</\1>", re.DOTALL)
    segments: list[Segment] = []
    start = position = 0
    while (found := call.search(written, position)) is not None:
        result = RESULT.match(written, found.end())
        position = found.end()
        if result is None and found.end() < len(written):
            continue  # a call that the environment never ran is text of the model
        if found.start() > start:
            segments.append(Segment(kind="thought", text=written[start : found.start()]))
        call_id = f"call{sum(each.kind == 'call' for each in segments) + 1}"
        segments.append(_read_call(found, arguments, call_id))
        if result is not None:
            segments.append(_read_result(found[1], result, call_id))
            position = result.end()
        start = position
    segments += _read_rest(written[start:])
    finish: Finish = "answered" if segments and segments[-1].kind == "answer" else "no_answer"
    return Transcript(question=question, segments=tuple(segments), finish=finish, protocol="tags")


def _read_call(found: re.Match[str], arguments: Mapping[str, str], call_id: str) -> Segment:
    body = found[2].strip("\n")
    given = {arguments[found[1]]: body if "\n" in body else body.strip()} if body.strip() else None
    return Segment(kind="call", text=found[0], tool=found[1], arguments=given, call_id=call_id)


def _read_result(tool: str, found: re.Match[str], call_id: str) -> Segment:
    inner = found[1].strip()
    failure = find_failure(inner)
    return Segment(
        kind="result", text=found[0], tool=tool, result=inner, ok=not failure, failure=failure, call_id=call_id
    )


def _read_rest(text: str) -> list[Segment]:
    """The text after the last result: a thought, and the answer if the text ends with it."""
    start = text.rfind(ANSWER_OPEN)
    if start < 0 or not text.endswith(ANSWER_CLOSE):
        return [Segment(kind="thought", text=text)] if text else []
    thought = [Segment(kind="thought", text=text[:start])] if start else []
    return [*thought, Segment(kind="answer", text=text[start:])]


def find_failure(result: str) -> FailureKind:
    """Whether a result reports a failed call: `timeout`, `error`, or empty for a success.

    An empty result is a failure, as in the original. Its other rule, any text with the word "error", would count
    documents about errors; here the text must begin as the messages of the original's tools do, or end in the line of
    an exception.
    """
    if not result or ERROR.search(result):
        return "timeout" if TIMEOUT.search(result) else "error"
    return "timeout" if len(result) < 200 and TIMEOUT.search(result) else ""
