"""A policy that says what a script says, roles that are recorded, and trajectories to start from."""

from __future__ import annotations

import random
from types import SimpleNamespace

from openai.types.chat import ChatCompletion

from tunesmith.config import EnvironmentSection, FlywheelConfig
from tunesmith.environments import Environment, Transcript
from tunesmith.environments.transcript import Segment, wrap_result
from tunesmith.et_agent.flywheel.operators import FlywheelAttempt, Parent, list_hints
from tunesmith.tools.tool import tool

QUESTION = "When was Zaven Union founded?"


class ScriptedPolicy:
    """An OpenAI-compatible model with scripted replies; `requests` has what it was asked."""

    model_name = "m"

    def __init__(self, *replies: str | tuple[str, str]) -> None:
        self.replies = list(replies)
        self.requests: list[dict] = []
        self.options: dict = {}
        self.client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=self.create)))

    async def create(self, **request) -> ChatCompletion:
        self.requests.append(request)
        reply = self.replies.pop(0)
        text, reason = (reply, "stop") if isinstance(reply, str) else reply
        message = {"role": "assistant", "content": text}
        return ChatCompletion.model_validate(
            {
                "id": "1", "object": "chat.completion", "created": 0, "model": "m",
                "choices": [{"index": 0, "finish_reason": reason, "message": message}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 5, "total_tokens": 6},
            }
        )  # fmt: skip


def build_environment(log: list[str] | None = None, **values) -> Environment:
    @tool(name="search")
    async def search(query: str) -> str:
        """Search the encyclopedia."""
        if log is not None:
            log.append(query)
        return {"Zaven Union": "Zaven Union was founded in 1748."}.get(query, f"{query} is a town near Mihup.")

    return Environment(EnvironmentSection(**values), tools=[search])


def think(text: str) -> Segment:
    return Segment(kind="thought", text=f"<think>{text}</think>\n", tokens=3)


def call(query: str, number: int) -> Segment:
    text = f"<search>{query}</search>"
    return Segment(kind="call", text=text, tool="search", arguments={"query": query}, call_id=f"call{number}")


def result(text: str, number: int, **fields) -> Segment:
    return Segment(kind="result", text=wrap_result(text), result=text, tool="search", call_id=f"call{number}", **fields)


def answer(text: str) -> Segment:
    return Segment(kind="answer", text=f"<answer>It is \\boxed{{{text}}}</answer>", tokens=4)


def make_transcript(*segments: Segment, finish="answered") -> Transcript:
    return Transcript(question=QUESTION, segments=segments, finish=finish)


FOUND = "Zaven Union was founded in 1748."
REPEATED = make_transcript(
    think("I look up Zaven Union."), call("Zaven Union", 1), result(FOUND, 1),
    think("I Look Again."), call("Zaven Union", 2), result(FOUND, 2),
    think("It was founded in 1748."), answer("1748"),
)  # fmt: skip
WRONG = make_transcript(
    think("I look up Mihup."), call("Mihup", 1), result("Mihup is a city of 500 people.", 1),
    think("It Must Be 1900."), answer("1900"),
)  # fmt: skip


def make_attempt(
    transcript: Transcript | None,
    *,
    is_correct=False,
    policy=None,
    environment=None,
    analyst=None,
    author=None,
    **values,
) -> FlywheelAttempt:
    environment = environment or build_environment()
    config = FlywheelConfig(model={"path": "m"}, train_dataset={"path": "d"}, **values)
    return FlywheelAttempt(
        row={"question": QUESTION, "answer": "1748"},
        environment=environment,
        config=config,
        parent=None if transcript is None else Parent(transcript=transcript, is_correct=is_correct),
        policy=policy or ScriptedPolicy(),
        analyst=analyst or (lambda request: None),
        author=author or (lambda request: None),
        hints=list_hints(environment.tools, config.hints),
        rng=random.Random(1),
    )
