r"""Trinity-RFT's reward functions and its workflows of mathematics, under their names.

A judge that imports `MathBoxedRewardFn` and others from `trinity.common.rewards` imports them from here. The functions
`math_workflow`, `math_boxed_reward` and so on are what run files name (`default_workflow_type`,
`default_reward_fn_type`). They give the values of Trinity-RFT's for right and wrong answers in the form that they ask
for. Answers are compared by value and by math-verify, within its time limit: Trinity-RFT's `MathBoxedRewardFn` compares
text without units, and its `MathRewardFn` accepts `3` for the pair `(3, 4)`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tunesmith.chat.client import create_chat_completion, read_reasoning
from tunesmith.errors import ConfigError
from tunesmith.judges.numeric import read_braces, read_text, score_numeric
from tunesmith.judges.tir import score_math
from tunesmith.tools.calculator import compute_expression
from tunesmith.types import JudgeOutput, WorkflowOutput

Reward = Callable[[Mapping[str, Any], Any], Awaitable[JudgeOutput]]
ANSWER, ANSWER_CLOSE = re.compile(r"<answer>(.*?)</answer>"), "</answer>"
TAGGED = r"(?>.*?<think>)(?>.*?</think>\s*<answer>).*?</answer>\s*$"
LINES = r"^(?><think>\n.*?\n</think>\n<answer>\n).*?\n</answer>$"
"""Where the first tags do not match, no later ones do: without atomic groups, all combinations of tags are tried."""
EQUATION = re.compile(r"[\d+\-*/().\s]+")
TOLERANCE = 1e-5
TAGS_PROMPT = (
    "Solve the user's problem. Reason first, between <think> and </think>; then state the answer alone, between "
    "<answer> and </answer>."
)
BOXED_PROMPT = "Solve the user's problem step by step, and put the final answer into \\boxed{}."
THINK_PROMPT = "Reason between <think> and </think> before you answer."


class MathBoxedRewardFn:
    r"""1 if the last `\boxed{}` equals the truth; -0.1 for a missing think tag."""

    def __init__(self, **kwargs: Any) -> None: ...

    def __call__(
        self,
        response: str,
        truth: str | None = None,
        with_think: bool | None = False,
        format_score_coef: float | None = 0.1,
        **kwargs: Any,
    ) -> dict[str, float]:
        boxed = find_boxed(response)
        accuracy = 0.0
        if boxed is not None and truth is not None:
            accuracy = score_math(f"\\boxed{{{boxed}}}", [find_boxed(truth) or truth])
        is_formed = not with_think or (
            response.count("<think>") == response.count("</think>") == 1
            and response.find("<think>") < response.find("</think>")
        )
        return {"accuracy": accuracy, "format_score": 0.0 if is_formed else -(format_score_coef or 0.1)}


class FormatReward:
    """0.1 if the response has the pattern, else -0.1."""

    def __init__(self, pattern: str | None = None) -> None:
        self.pattern = pattern or LINES

    def __call__(self, response: str) -> dict[str, float]:
        is_formed = re.match(self.pattern, response, re.DOTALL | re.MULTILINE)
        return {"format_score": 0.1 if is_formed else -0.1}


class MathRewardFn:
    """1 if the content of the first answer tag, or else the response, has the value of the truth; and its format."""

    def __init__(self, answer_parser: Any = None, pattern: str = TAGGED) -> None:
        if answer_parser is not None:
            raise ConfigError("answer_parser is not supported: MathRewardFn compares by math-verify; write a judge")
        self.format_reward = FormatReward(pattern)

    def __call__(self, response: str, prompt: str | None = None, truth: str | None = None) -> dict[str, float]:
        found = find_answers(response)
        accuracy = 0.0
        if truth is not None and found:
            accuracy = score_math(f"<answer>{found[0]}</answer>", [truth])
        elif truth is not None:
            accuracy = score_numeric(response, truth) or 0.0
        return {"accuracy": accuracy, **self.format_reward(response)}


class CountDownRewardFn:
    """1 for an equation that uses each number once and has the target's value, 0.1 for another equation, 0 for none."""

    def __call__(self, response: str, prompt: str | None = None, truth: str | None = None) -> dict[str, float]:
        goal = json.loads(truth or "{}")
        found = find_answers(response.split("\n")[-1])
        if not found:
            return {"score": 0.0}
        equation = found[-1].strip()
        try:
            numbers = sorted(map(int, re.findall(r"\d+", equation)))
            if numbers != sorted(goal["numbers"]) or not EQUATION.fullmatch(equation):
                return {"score": 0.1}
            value = compute_expression(equation)
        except ValueError:  # also of a number with more digits than Python reads
            return {"score": 0.1}
        return {"score": 1.0 if abs(value - goal["target"]) < TOLERANCE else 0.1}


def find_answers(text: str) -> list[str]:
    """The contents of the answer tags, each on one line."""
    # up to the last closing tag of a line, every opening one has a closing one, which ends its search
    lines = (line[: line.rfind(ANSWER_CLOSE) + len(ANSWER_CLOSE)] for line in text.split("\n") if ANSWER_CLOSE in line)
    return [answer for line in lines for answer in ANSWER.findall(line)]


def find_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed`, in braces or after a space up to a dollar sign; None without one."""
    if "\\boxed " in text:
        return text.split("\\boxed ")[-1].split("$")[0]
    start = text.rfind("\\boxed{")
    return read_braces(text[start + len("\\boxed") :]) if start >= 0 else None


async def math_reward(task: Mapping[str, Any], response: Any) -> JudgeOutput:
    return _sum(MathRewardFn()(read_text(response), truth=read_truth(task)))


async def math_boxed_reward(task: Mapping[str, Any], response: Any) -> JudgeOutput:
    given = task.get("workflow_args") or {}
    args = {name: given[name] for name in ("with_think", "format_score_coef") if name in given}
    return _sum(MathBoxedRewardFn()(read_text(response), read_truth(task), **args))


async def format_reward(task: Mapping[str, Any], response: Any) -> JudgeOutput:
    return _sum(FormatReward()(read_text(response)))


async def countdown_reward(task: Mapping[str, Any], response: Any) -> JudgeOutput:
    return _sum(CountDownRewardFn()(read_text(response), truth=read_truth(task)))


async def math_workflow(task: Mapping[str, Any], model: Any) -> WorkflowOutput:
    """One question, answered in tags; the reward is `math_reward`, unless a judge is given."""
    return await _answer(task, model, TAGS_PROMPT, math_reward)


async def math_boxed_workflow(task: Mapping[str, Any], model: Any) -> WorkflowOutput:
    """One question, answered in a box; the reward is `math_boxed_reward`, unless a judge is given."""
    has_think = (task.get("workflow_args") or {}).get("with_think")
    prompt = f"{BOXED_PROMPT} {THINK_PROMPT}" if has_think else BOXED_PROMPT
    return await _answer(task, model, prompt, math_boxed_reward)


def read_truth(task: Mapping[str, Any]) -> str:
    """The field that `format.response_key` names, `answer` by default, as text."""
    return str(_read(task, "response_key", "answer"))


def _read(task: Mapping[str, Any], name: str, default: str) -> Any:
    key = (task.get("format") or {}).get(name, default)
    found: Any = task
    for part in [key] if key in task else key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            raise ConfigError(f"format.{name}={key!r}: the task has no such field; its fields are {', '.join(task)}")
        found = found[part]
    return found


async def _answer(task: Mapping[str, Any], model: Any, prompt: str, judge: Reward) -> WorkflowOutput:
    """The judged reply to the question, with its reasoning in think tags if the model's parser has taken it out."""
    system = (task.get("format") or {}).get("system_prompt", prompt)
    question = str(_read(task, "prompt_key", "question"))
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    message = (await create_chat_completion(model, messages)).choices[0].message
    reasoning = read_reasoning(message)
    response = f"<think>{reasoning}</think>{message.content or ''}" if reasoning else message.content or ""
    judged = await judge(task, response)
    return WorkflowOutput(response=response, reward=judged.reward, metrics=judged.metrics)


def _sum(scores: dict[str, float]) -> JudgeOutput:
    return JudgeOutput(reward=sum(scores.values()), metrics=scores)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    built_in = [each for each in globals() if each.endswith(("_reward", "_workflow", "RewardFn", "FormatReward"))]
    raise ConfigError(f"Trinity-RFT's {name!r} is not built in; built in are {', '.join(built_in)}; give your own")
