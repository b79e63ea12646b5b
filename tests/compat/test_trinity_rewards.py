"""Trinity-RFT's reward functions, against values that its version 0.6.0 gave, and its workflows of mathematics."""

from __future__ import annotations

import asyncio
import json
import random
import re

import pytest

import tunesmith
from chat_templates import QWEN25
from fakes import FakeEngine, build_chat_tokenizer, say
from tunesmith.chat.renderer import Renderer
from tunesmith.compat import agentscope, trinity_rewards
from tunesmith.compat.trinity_rewards import (
    LINES,
    TAGGED,
    CountDownRewardFn,
    FormatReward,
    MathBoxedRewardFn,
    MathRewardFn,
    find_answers,
)
from tunesmith.errors import ConfigError
from tunesmith.rollout.service import ModelService
from tunesmith.types import Sampling

TOKENIZER = build_chat_tokenizer(QWEN25)
BOXED = [
    ("so \\boxed{72}", "72", 1.0), ("so 72", "72", 0.0), ("\\boxed{72.0}", "72", 1.0), ("\\boxed{-72}", "72", 0.0),
    ("\\boxed{1} \\boxed{72}", "72", 1.0), ("\\boxed{72} \\boxed{1}", "72", 0.0), ("\\boxed 72$ and", "72", 1.0),
    ("\\boxed{\\dfrac{1}{2}}", "\\frac{1}{2}", 1.0), ("\\boxed{72", "72", 0.0), ("\\boxed{72}", "so \\boxed{72}", 1.0),
    ("\\fbox{72}", "72", 0.0), ("\\boxed{5\\text{ cm}}", "5", 1.0), ("\\boxed{p - q}", "p - q", 1.0),
    ("\\boxed{P - q}", "p - q", 0.0), ("\\boxed{X^5 - x^4 + x}", "x^5 - x^4 + x", 0.0), ("\\boxed{X=5}", "x=5", 1.0),
    ("\\boxed{\\left(B\\right)}", "(B)", 1.0), ("\\boxed{(b)}", "(B)", 1.0), ("\\boxed{b}", "B", 1.0),
    ("\\boxed{\\pi x}", "x\\pi", 1.0), ("\\boxed{5\\text{ CM}}", "5\\text{ cm}", 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("response", "truth", "accuracy"), BOXED)
def test_a_boxed_answer_is_compared_with_the_truth(response, truth, accuracy):
    assert MathBoxedRewardFn()(response=response, truth=truth) == {"accuracy": accuracy, "format_score": 0.0}


def test_a_formula_in_answer_tags_is_compared_whole():
    pair = "\\left( 3, \\frac{\\pi}{2} \\right)"
    for text, accuracy in [(pair, 1.0), ("3", 0.0), ("x = 72", 0.0)]:
        assert MathRewardFn()(f"<think>a</think><answer>{text}</answer>", truth=pair)["accuracy"] == accuracy
    assert MathRewardFn()("<think>a</think><answer>It is 72.</answer>", truth="72")["accuracy"] == 1.0


def test_a_missing_think_tag_costs_the_format_score():
    score = MathBoxedRewardFn(any_argument=1)
    assert score("\\boxed{1}", "1", with_think=True) == {"accuracy": 1.0, "format_score": -0.1}
    assert score("</think><think>\\boxed{1}", "1", with_think=True, format_score_coef=0.2)["format_score"] == -0.2
    assert score("<think>a</think>\\boxed{1}", "1", with_think=True)["format_score"] == 0.0


def test_math_and_format_rewards():
    assert MathRewardFn()("<think>a</think> <answer>72</answer>", truth="72") == {"accuracy": 1.0, "format_score": 0.1}
    assert MathRewardFn()("it is $72$", truth="72") == {"accuracy": 1.0, "format_score": -0.1}
    assert MathRewardFn()("<answer>71</answer>", truth="72") == {"accuracy": 0.0, "format_score": -0.1}
    assert FormatReward()("<think>\na\n</think>\n<answer>\nb\n</answer>") == {"format_score": 0.1}
    with pytest.raises(ConfigError, match="answer_parser is not supported"):
        MathRewardFn(answer_parser=str)


@pytest.mark.parametrize(
    ("response", "target", "numbers", "score"),
    [("<answer>1+2*3</answer>", 7, [1, 2, 3], 1.0), ("<answer>1+2+3</answer>", 7, [1, 2, 3], 0.1), ("7", 7, [7], 0.0),
     ("<answer>6/4</answer>", 1.5, [4, 6], 1.0), ("<answer>1+1</answer>", 2, [1], 0.1),
     ("<answer>1/0</answer>", 1, [0, 1], 0.1),
     ("a\n<answer>5-3</answer>", 2, [3, 5], 1.0), ("<answer>5-3</answer>\nb", 2, [3, 5], 0.0),
     ("<answer>5-3=2</answer>", 2, [3, 5], 0.1), (f"<answer>{'1' * 5000}</answer>", 2, [3, 5], 0.1),
     ("<answer>99**999</answer>", 0.5, [99, 999], 0.1)],
)  # fmt: skip
def test_countdown(response, target, numbers, score):
    truth = json.dumps({"target": target, "numbers": numbers})
    assert CountDownRewardFn()(response, truth=truth) == {"score": score}


PIECES = ["<think>", "</think>", "<answer>", "</answer>", "\n", " ", "a"]
PLAIN_TAGGED = r".*?<think>.*?</think>\s*<answer>.*?</answer>\s*$"
PLAIN_LINES = r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$"


def test_formats_and_answers_are_found_as_by_trinitys_patterns():
    rng, formed = random.Random(1), 0
    starts = ("", "<think>\na\n</think>\n<answer>\n", "<think>a</think><answer>")
    for _ in range(3000):
        text = rng.choice(starts) + "".join(rng.choices(PIECES, k=rng.randrange(9)))
        for pattern, plain in ((TAGGED, PLAIN_TAGGED), (LINES, PLAIN_LINES)):
            matched = re.match(plain, text, re.DOTALL | re.MULTILINE) is not None
            assert FormatReward(pattern)(text) == {"format_score": 0.1 if matched else -0.1}, text
            formed += matched
        assert find_answers(text) == re.findall(r"<answer>(.*?)</answer>", text), text
    assert formed > 300


@pytest.mark.parametrize(
    "text",
    ["<think>2</think> <answer>4</answer> and then " * 20_000, "<think>\n" + "\n</think>\n<answer>\n" * 50_000,
     "<answer>" * 300_000],
)  # fmt: skip
def test_repeated_tags_are_read_in_linear_time(text):
    assert MathRewardFn()(text, truth="5") == {"accuracy": 0.0, "format_score": -0.1}
    assert FormatReward()(text) == {"format_score": -0.1}
    assert CountDownRewardFn()(text, truth='{"numbers": [5], "target": 5}')["score"] < 1


def ask(workflow, task, text):
    engine = FakeEngine(TOKENIZER, say(TOKENIZER, text))
    service = ModelService(engine, Renderer(TOKENIZER), model_name="m", sampling=Sampling(max_tokens=100))
    return asyncio.run(workflow(task, service.open(seed=0).model))


def test_the_workflows_answer_and_reward_a_task():
    task = {"problem": "1+1?", "solution": {"final": "2"}}
    task["format"] = {"prompt_key": "problem", "response_key": "solution.final"}
    output = ask(trinity_rewards.math_boxed_workflow, task, "so \\boxed{2}")
    assert (output.reward, output.metrics) == (1.0, {"accuracy": 1.0, "format_score": 0.0})
    output = ask(trinity_rewards.math_workflow, {"question": "1+1?", "answer": "2"}, "<answer>3</answer>")
    assert output.reward == pytest.approx(-0.1)
    with pytest.raises(ConfigError, match=r"prompt_key='question': the task has no such field; its fields are a"):
        ask(trinity_rewards.math_workflow, {"a": 1}, "x")


def test_classes_of_earlier_versions_of_agentscope_have_their_names():
    assert agentscope.TunerChatModel is tunesmith.TunerModelConfig
    assert agentscope.Algorithm is tunesmith.AlgorithmConfig
    assert agentscope.Dataset is tunesmith.DatasetConfig
