"""Conciseness by votes of a model: majority, ties, replies without a verdict."""

from __future__ import annotations

import asyncio

import pytest
from transcripts import GOOD, TASK, replies

from chat_templates import QWEN25
from fakes import FakeEngine, build_chat_tokenizer, say
from tunesmith.chat.renderer import Renderer
from tunesmith.judges.answers import match_numeric
from tunesmith.judges.composite import RewardPart, compose
from tunesmith.judges.redundancy import build_conciseness_score, compute_conciseness, format_trajectory, parse_vote
from tunesmith.judges.transcript import Reply
from tunesmith.rollout.service import ModelService
from tunesmith.types import Sampling

TOKENIZER = build_chat_tokenizer(QWEN25)
YES, NO = "Step 2 repeats step 1. <verdict>yes</verdict>", "<verdict>No.</verdict>"


def judge_with(*texts, num_votes):
    """The judge's output, and the number of prompts that the judging model received."""
    engine = FakeEngine(TOKENIZER, say(TOKENIZER, *texts))
    service = ModelService(engine, Renderer(TOKENIZER), model_name="j", sampling=Sampling(max_tokens=200))
    judge = compose(
        RewardPart(name="accuracy", score=match_numeric),
        RewardPart(name="no_redundancy", weight=0, score=build_conciseness_score(num_votes=num_votes)),
    )
    output = asyncio.run(judge(TASK, GOOD, auxiliary_models={"judge": service.open(seed=0).model}))
    return output, [TOKENIZER.decode(prompt) for prompt, _, _ in engine.requests]


@pytest.mark.parametrize(
    ("votes", "score"),
    [
        ([True, True, False], 0.0),
        ([True, False], 1.0),
        ([True] * 4 + [False] * 5 + [None], 1.0),
        ([True, None, None], 0.0),
        ([None, None], None),
        ([], None),
    ],
)
def test_more_yes_than_no_is_redundant(votes, score):
    assert compute_conciseness(votes) == score


@pytest.mark.parametrize(
    ("reply", "vote"),
    [
        (YES, True),
        (NO, False),
        ("<verdict>yes</verdict> no: <verdict> no </verdict>", False),
        ("yes", None),
        ("<verdict>maybe</verdict>", None),
        ("", None),
    ],
)
def test_a_vote_is_the_last_verdict(reply, vote):
    assert parse_vote(reply) is vote


def test_every_vote_reads_question_reference_calls_and_results():
    output, prompts = judge_with(YES, NO, YES, num_votes=3)
    assert output.metrics == {"accuracy": 1.0, "no_redundancy": 0.0} and output.reward == 1.0
    assert len(prompts) == 3
    for part in (TASK["question"], TASK["answer"], '{"expression": "48+24"}', "Result: 24", "#### 72"):
        assert all(part in prompt for prompt in prompts)


def test_without_a_readable_vote_there_is_no_score():
    output, _ = judge_with("hm", "?", num_votes=2)
    assert output.metrics == {"accuracy": 1.0}


def test_a_trajectory_lists_replies_calls_and_results_in_order():
    assert format_trajectory(GOOD).startswith(
        'Natalia sold 48/2 =\nCall of calculator: {"expression": "48/2"}\nResult: 24'
    )
    assert format_trajectory(replies(Reply(content="72"))) == "72"


def test_invalid_settings_are_refused():
    with pytest.raises(ValueError, match="num_votes=0"):
        build_conciseness_score(num_votes=0)
    score = build_conciseness_score(auxiliary_model="critic")
    with pytest.raises(ValueError, match=r"needs auxiliary_models\.critic; the run has judge"):
        asyncio.run(score(TASK, GOOD, {"judge": None}))
