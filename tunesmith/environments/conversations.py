"""Transcripts as rows of conversations for fine-tuning.

In the protocol `tags` the assistant's turn is a list of text parts, each with a `weight`: what the model would write is
trained (1), results and forced text are context (0). So a fine-tuned model is trained on the tokens that rollouts
sample, with the boundaries that rollouts have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from tunesmith.environments.protocols import build_chat, build_messages
from tunesmith.environments.transcript import Segment, Transcript


def build_conversation(
    transcript: Transcript, *, system: str, tools: Sequence[Mapping[str, Any]], trains_forced: bool = False
) -> dict[str, Any]:
    """A row with `messages`, and with `tools` where calls are native; `trains_forced` trains forced text too."""
    first = build_messages(system, transcript.question)
    if transcript.protocol == "native":
        if not trains_forced and any(each.kind == "forced" for each in transcript.segments):
            raise ValueError("forced text in a native transcript cannot be left out of training: set trains_forced")
        row: dict[str, Any] = {"messages": [*first, *build_chat(transcript)]}
        return row | ({"tools": list(tools)} if tools else {})
    parts = [
        {"type": "text", "text": "".join(each.text for each in segments), "weight": weight}
        for weight, segments in groupby(
            transcript.segments, key=lambda each: int(is_written(each) or (trains_forced and each.kind == "forced"))
        )
    ]
    return {"messages": [*first, {"role": "assistant", "content": parts}]}


def is_written(segment: Segment) -> bool:
    """Whether the agent wrote the text: a thought, a call or the answer."""
    return segment.kind not in ("result", "forced")
