"""Conversations of an agent with a calculator, for the tests of judges."""

from __future__ import annotations

from tunesmith.judges.transcript import Reply, ToolCallRecord, Transcript

TASK = {"question": "Natalia sold 48 clips in April and half as many in May. How many in all?", "answer": "72"}


def call(expression: str, result: str | None) -> ToolCallRecord:
    return ToolCallRecord(name="calculator", arguments=f'{{"expression": "{expression}"}}', result=result)


def replies(*parts: Reply) -> Transcript:
    return Transcript(replies=parts)


GOOD = replies(
    Reply(reasoning="Natalia sold 48/2 =", calls=(call("48/2", "24"),)),
    Reply(reasoning="24 clips in May.\nNatalia sold 48+24 =", calls=(call("48+24", "72"),)),
    Reply(reasoning="72 clips altogether in April and May.", content="#### 72"),
)
