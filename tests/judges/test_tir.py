"""The judge of the suite `tir`: golden scores of answers, what a task is scored as, and a judging model's verdict."""

from __future__ import annotations

import asyncio

import pytest
from transcripts import replies

from chat_templates import QWEN25
from fakes import FakeEngine, build_chat_tokenizer, say
from tunesmith.chat.renderer import Renderer
from tunesmith.judges.tir import tir_judge
from tunesmith.judges.transcript import Reply
from tunesmith.rollout.service import ModelService
from tunesmith.types import Sampling

TOKENIZER = build_chat_tokenizer(QWEN25)
YES, NO = "<verdict>yes</verdict>", "<verdict>no</verdict>"


def answer(text):
    return replies(Reply(reasoning="I think.", content=f"<answer>It is \\boxed{{{text}}}</answer>"))


def score(prediction, gold, **fields):
    return asyncio.run(tir_judge({"question": "?", "answer": gold, **fields}, answer(prediction)))


def score_with_model(prediction, gold, *texts, name="judge"):
    engine = FakeEngine(TOKENIZER, say(TOKENIZER, *texts))
    service = ModelService(engine, Renderer(TOKENIZER), model_name="j", sampling=Sampling(max_tokens=200))
    models = {name: service.open(seed=0).model}
    output = asyncio.run(tir_judge({"question": "?", "answer": gold}, answer(prediction), auxiliary_models=models))
    return output, engine.requests


@pytest.mark.parametrize(
    ("prediction", "gold", "em", "f1"),
    [
        ("Barack Obama", ["Barack Hussein Obama", "the Obama"], 0.0, 4 / 5),
        ("the Eiffel tower", "Eiffel Tower!", 1.0, 1.0),
        ("yes", ["yes", "Yes indeed"], 1.0, 1.0),
        ("yes sir", "yes", 0.0, 0.0),
        ("Lyon", "Paris", 0.0, 0.0),
    ],
)
def test_questions_are_scored_by_f1(prediction, gold, em, f1):
    output = score(prediction, gold)
    assert output.metrics == {"em": em, "f1": pytest.approx(f1)}
    assert output.reward == pytest.approx(f1)


@pytest.mark.parametrize(
    ("prediction", "gold", "equal"),
    [
        ("72.0", "72", 1.0),
        ("1,000", 1000, 1.0),
        ("\\frac{1}{2}", "0.5", 1.0),
        ("0.5", "$\\frac{1}{2}$", 1.0),
        ("2\\sqrt{3}", "\\sqrt{12}", 1.0),
        ("(3, 4)", "(4, 3)", 0.0),
        ("7", ["5", "7"], 1.0),
        ("8", "some working\n#### 7", 0.0),
    ],
)
def test_math_is_scored_by_equality(prediction, gold, equal):
    output = score(prediction, gold)
    assert (output.reward, output.metrics["math_equal"]) == (equal, equal)


def test_a_field_of_the_task_says_what_it_is_scored_as():
    assert score("1990", "1990", ability="qa").metrics == {"em": 1.0, "f1": 1.0}
    with pytest.raises(ValueError, match="ability='poetry'"):
        score("1990", "1990", ability="poetry")


def test_without_an_accepted_answer_there_is_no_score():
    with pytest.raises(ValueError, match="no accepted answer"):
        score("a", [])


def test_a_model_decides_on_math_that_is_not_equal():
    output, requests = score_with_model("x = 5 apples", "5", *[YES] * 11)
    assert (output.metrics["math_equal"], output.metrics["llm_equal"]) == (1.0, 1.0)
    assert output.metrics["conciseness"] == 0.0
    assert len(requests) == 10, "an answer that is equal needs no verdict, only the votes on conciseness"
    output, requests = score_with_model("five", "5", YES, *[NO] * 10)
    assert (output.reward, output.metrics["math_equal"], output.metrics["llm_equal"]) == (1.0, 0.0, 1.0)
    assert output.metrics["conciseness"] == 1.0


def test_a_model_may_judge_conciseness_alone():
    for prediction, equal in (("five", 0.0), ("5", 1.0)):
        output, requests = score_with_model(prediction, "5", *[NO] * 10, name="conciseness")
        assert output.reward == equal
        assert output.metrics == {"em": equal, "math_equal": equal, "conciseness": 1.0}
        assert len(requests) == 10


def test_the_first_verdict_counts():
    output, requests = score_with_model("five", "5", NO, YES)
    assert (output.reward, output.metrics["llm_equal"]) == (0.0, 0.0)
    assert len(requests) == 11


def test_without_a_verdict_on_math_there_is_no_reward():
    output, _ = score_with_model("five", "5", "I cannot say")
    assert output.reward is None
    assert output.metrics == {"em": 0.0, "math_equal": 0.0}


def test_the_model_also_judges_other_answers_but_f1_is_the_reward():
    output, _ = score_with_model("Obama", "Barack Obama", YES, *[NO] * 10)
    assert output.reward == pytest.approx(2 / 3)
    assert output.metrics["llm_equal"] == 1.0


def test_an_empty_answer_equals_no_reference():
    assert score("", "the", ability="math").metrics == {"em": 0.0, "math_equal": 0.0}
    assert score("the", "the", ability="math").metrics == {"em": 1.0, "math_equal": 1.0}
