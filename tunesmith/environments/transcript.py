"""Transcripts: what happened in one rollout of an environment, recorded when it happened.

A `Transcript` is a list of `Segment`s: text that the model wrote, text that was forced on it, and results of tools.
Counts, lengths and the answer are derived from the segments, never parsed from the text. A transcript is JSON, a
judge's response (`build_replies`), and the prefix from which another rollout can be continued.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from tunesmith.chat.parsers.reply import THINK_CLOSE, THINK_OPEN
from tunesmith.errors import DataError
from tunesmith.judges.numeric import extract_boxed
from tunesmith.judges.squad import read_prediction
from tunesmith.judges.transcript import Reply, ToolCallRecord
from tunesmith.tasks.load import read_field
from tunesmith.tools.tool import FailureKind

Protocol = Literal["tags", "native"]
Kind = Literal["thought", "call", "result", "forced", "answer"]
"""thought: text of the model besides calls and answer; call: a tool call of the model; result: the environment's text
after a call; forced: text put in the model's mouth; answer: the model's final answer."""
Finish = Literal["answered", "no_answer", "call_limit", "length", "stopped"]
"""answered; no_answer: the model ended its turn without an answer; call_limit: it called a tool again after it was told
that the limit is reached; length: out of tokens or context; stopped: at one of the caller's stop strings."""
RESULT_OPEN, RESULT_CLOSE = "\n<result>\n", "\n</result>\n"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A piece of a rollout. In the protocol `tags`, the texts of all segments are the assistant's turn."""

    kind: Kind
    text: str
    """The exact text; of native calls, the JSON arguments."""
    tool: str = ""
    """The tool's name, of calls and results."""
    arguments: Mapping[str, Any] | None = None
    """The arguments of a call; None if they could not be read."""
    result: str = ""
    """The text of a result without tags."""
    ok: bool = True
    """Whether the call of a result succeeded."""
    failure: FailureKind = ""
    """Why the call of a result failed."""
    ms: float = 0.0
    """Wall time of the call of a result."""
    tokens: int = 0
    """Sampled tokens of the model call that ended with this segment; 0 for earlier segments of the same model call,
    and for text that was not sampled."""
    call_id: str = ""
    """Of calls and results: the id that joins them; of tag calls, their number in the rollout."""
    is_reasoning: bool = False
    """A native thought is reasoning, rather than content next to a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """The segments of one rollout, and why it ended."""

    question: str
    segments: tuple[Segment, ...] = ()
    finish: Finish | None = None
    """None while the rollout is running."""
    protocol: Protocol = "tags"

    @property
    def calls(self) -> tuple[Segment, ...]:
        """Results of the calls that were run, failed ones included and refused ones (over a limit) not."""
        return tuple(each for each in self.segments if each.kind == "result" and each.failure != "call_limit")

    @property
    def pairs(self) -> tuple[tuple[Segment, Segment], ...]:
        """Calls and their results."""
        found = self._match_results().items()
        return tuple((self.segments[place], result) for place, result in found if result is not None)

    @property
    def open_calls(self) -> tuple[Segment, ...]:
        """Calls that have no result yet."""
        return tuple(self.segments[place] for place, result in self._match_results().items() if result is None)

    @property
    def open_text(self) -> str:
        """The text since the last result."""
        texts: list[str] = []
        for segment in self.segments:
            texts = [] if segment.kind == "result" else [*texts, segment.text]
        return "".join(texts)

    @property
    def tool_counts(self) -> dict[str, int]:
        """Calls that were run, by tool."""
        return dict(Counter(each.tool for each in self.calls))

    @property
    def failed_calls(self) -> int:
        return sum(not each.ok for each in self.calls)

    @property
    def refused_calls(self) -> int:
        """Calls that were not run, because they are over a limit."""
        return sum(each.kind == "result" and each.failure == "call_limit" for each in self.segments)

    @property
    def reasoning_tokens(self) -> int:
        """All sampled tokens: everything that the model wrote, and no results."""
        return sum(each.tokens for each in self.segments)

    @property
    def answer(self) -> str:
        r"""The final answer: inside of `<answer>` the last `\boxed{}`, else what is stated; empty without an answer."""
        return read_prediction(self.answer_text)

    @property
    def answer_text(self) -> str:
        """The text of the last answer, in the protocol `tags` with its opening tag; empty without an answer."""
        places = [place for place, each in enumerate(self.segments) if each.kind == "answer"]
        return self._read_answer(places[-1]) if places else ""

    @property
    def text(self) -> str:
        """Everything in order; in the protocol `tags`, exactly the assistant's turn."""
        return "".join(map(self._format, self.segments))

    def get_text_content(self) -> str:
        """The text; named as in AgentScope's messages."""
        return self.text

    def _format(self, segment: Segment) -> str:
        if self.protocol == "tags":
            return segment.text
        match segment.kind:
            case "thought" if segment.is_reasoning:
                return f"{THINK_OPEN}\n{segment.text}\n{THINK_CLOSE}\n"
            case "call":
                return f"<{segment.tool}>{segment.text}</{segment.tool}>\n"
            case "result":
                return f"<result>\n{segment.text}\n</result>\n"
        return f"{segment.text}\n"

    def append(self, *segments: Segment) -> Transcript:
        return replace(self, segments=(*self.segments, *segments))

    def cut(self, num_segments: int) -> Transcript:
        """The first segments, to be continued."""
        return replace(self, segments=self.segments[:num_segments], finish=None)

    def drop_open_calls(self) -> Transcript:
        """Without the calls that have no result."""
        results = self._match_results()
        kept = tuple(each for place, each in enumerate(self.segments) if results.get(place, each) is not None)
        return replace(self, segments=kept)

    def force(self, text: str) -> Transcript:
        """With text put in the model's mouth, to be continued, in place of calls that were not run; it is never
        trained."""
        return replace(self.drop_open_calls().append(Segment(kind="forced", text=text)), finish=None)

    def build_replies(self) -> tuple[Reply, ...]:
        """One reply per model call, for judges."""
        replies: list[Reply] = []
        texts: list[str] = []

        def end_reply(**fields: Any) -> None:
            replies.append(Reply(reasoning="".join(texts).strip(), **fields))
            texts.clear()

        results = self._match_results()
        for position, segment in enumerate(self.segments):
            match segment.kind:
                case "call":
                    found, written = results[position], segment.text
                    if segment.arguments is not None:
                        written = json.dumps(segment.arguments, ensure_ascii=False)
                    result = None if found is None else found.result
                    end_reply(calls=(ToolCallRecord(name=segment.tool, arguments=written, result=result),))
                case "answer":
                    end_reply(content=self._read_answer(position))
                case "thought" | "forced":
                    texts.append(segment.text)
        if texts:
            end_reply()
        return tuple(replies)

    def _read_answer(self, position: int) -> str:
        """The text of an answer, in the protocol `tags` from its opening tag on, which may have been forced."""
        if self.protocol == "native":
            return self.segments[position].text
        _, opening, answer = self.cut(position + 1).open_text.rpartition(ANSWER_OPEN)
        return f"{opening}{answer}" if opening else self.segments[position].text

    def _match_results(self) -> dict[int, Segment | None]:
        """The result of each call, by the call's place; None without one. Servers may give several calls one id, whose
        results are then in the order of the calls."""
        found: dict[int, Segment | None] = {}
        for place, segment in enumerate(self.segments):
            if segment.kind == "call":
                found[place] = None
            elif segment.kind == "result":
                waiting = [at for at, result in found.items() if result is None]
                calls = [at for at in waiting if self.segments[at].call_id == segment.call_id]
                found.update(dict.fromkeys(calls[:1], segment))
        return found

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Transcript:
        """The inverse of `to_json`."""
        fields = dict(values)
        segments = tuple(Segment(**each) for each in fields.pop("segments"))
        return cls(segments=segments, **fields)


def read_transcript(row: Mapping[str, Any], *, where: str) -> Transcript:
    """The transcript in a row, which errors name; DataError if there is none."""
    found = read_field(row, "transcript", where=where)
    try:
        return Transcript.from_json(found)
    except (TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{where}: transcript is not one of tunesmith.environments: {error!r}") from error


def wrap_result(text: str) -> str:
    """The text of a result inside an assistant turn; a closing tag in it is broken up."""
    return f"{RESULT_OPEN}{text.replace('</result>', '< /result>')}{RESULT_CLOSE}"


TAG = re.compile(r"</?(?:think|result|answer|tool_call)>")
THOUGHT = re.compile(r"\s*(?:<think>(?:(?!</?\w[\w-]*>).)*</think>\s*)+", re.DOTALL)
UNREADABLE = ("arguments", "unknown_tool")


def find_format_error(transcript: Transcript) -> str | None:
    """What is wrong with the format of the transcript's protocol, in one sentence; None if nothing is.

    Tags: each step begins with `<think>` and ends with a call or with the answer; tags are balanced and not nested; the
    model writes no `<result>`; the answer has a closed `\\boxed{}` with text. Native: every call could be read, and the
    final message has such a box.
    """
    if transcript.finish != "answered":
        return f"there is no answer: {transcript.finish}"
    if not extract_boxed(transcript.answer_text) or not transcript.answer:
        return "the answer has no \\boxed{}"
    if transcript.protocol == "native":
        unreadable = [each for each in transcript.segments if each.failure in UNREADABLE]
        return f"a call of {unreadable[0].tool!r} cannot be read" if unreadable else None
    steps: list[list[Segment]] = [[]]
    for segment in transcript.segments:
        if segment.kind == "result":
            steps.append([])
        else:
            steps[-1].append(segment)
    return next((error for number, step in enumerate(steps, 1) if (error := find_step_error(step, number))), None)


def find_step_error(step: list[Segment], number: int) -> str | None:
    """What is wrong with one step of tags: thoughts, then a call or the answer."""
    text, last = "".join(each.text for each in step), step[-1] if step else None
    name = "answer" if last is None or last.kind == "answer" else last.tool
    thoughts, opening, rest = text.rpartition(f"<{name}>")
    if not opening or not THOUGHT.fullmatch(thoughts):
        return f"step {number} is not <think>...</think> followed by <{name}>"
    body = rest.removesuffix(f"</{name}>")
    if last is not None and last.kind == "call" and last.arguments is None:
        return f"the call of step {number} is empty or cannot be read"
    if TAG.search(body) and name == "answer":
        return f"step {number} has a tag inside of <{name}>"
    return None
