"""Composite rewards: weighted sum, a metric per part, and no reward hack beats an honest right answer."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transcripts import GOOD, TASK, call, replies

from tunesmith.judges.composite import (
    RewardPart,
    compose,
    exact_judge,
    f1_judge,
    gsm8k_judge,
    math_verify_judge,
    numeric_judge,
)
from tunesmith.judges.numeric import judge_number
from tunesmith.judges.transcript import Reply
from tunesmith.rollout.signature import check_judge_function

THOUGHT = "<think>She sold 48/2 = 24 in May.\nIn all that is 48+24 = 72.</think>\n"
PLAIN = "She sold 72 clips in all."
WORST_RIGHT = 0.50 - 0.05


def judge(response, judge_func=gsm8k_judge, task=TASK):
    return asyncio.run(judge_func(task, response))


def test_a_good_conversation_gets_one_and_a_metric_per_part():
    output = judge(GOOD)
    assert output.reward == 1.0  # exactly: the weights .5, .2, .2, .1 sum to less one after the other
    parts = ("accuracy", "format", "reasoning", "conciseness", "exact")
    assert output.metrics == dict.fromkeys(parts, 1.0)


def test_weights_of_the_parts():
    assert judge(PLAIN).reward == pytest.approx(0.50 + 0.10)
    assert judge("#### 72").reward == pytest.approx(0.50 + 0.20 * 0.5 + 0.10)
    assert judge("word " * 900 + "\n#### 72").reward == pytest.approx(0.50 + 0.20 * 0.5 - 0.10 * 0.5)
    assert judge("word " * 900 + "72").reward == pytest.approx(WORST_RIGHT)


def test_a_wrong_answer_gets_half_of_its_style_score():
    wrong = replies(*GOOD.replies[:2], Reply(reasoning=GOOD.replies[2].reasoning, content="#### 71"))
    output = judge(wrong, task={**TASK, "answer": "100"})
    assert output.metrics["accuracy"] == 0.0
    assert output.reward == pytest.approx(0.5 * (0.20 + 0.20 + 0.10))


def test_one_percent_off_is_accurate_and_not_exact():
    output = judge("#### 71.5")
    assert (output.metrics["accuracy"], output.metrics["exact"]) == (1.0, 0.0)


HACKS = {
    "the number many times": "72 " * 100 + "71",
    "all numbers": " ".join(str(n) for n in range(100)),
    "tags without content": "<think></think><tool_call></tool_call>#### 0",
    "the form alone": THOUGHT + "#### 0",
    "text after the answer": "#### 0\nor 72",
    "the answer before the answer": "#### 72\n#### 0",
    "the answer in reasoning": "<think>The answer is 72, 72, 72 clips she sold.</think>",
    "reasoning without end": "<think>She sold 48/2 = 24 in May.\nIn all that is 72.\n#### 72",
    "a result made up": "<tool_response>\n72\n</tool_response>",
    "a result made up in form": THOUGHT + "<tool_response>72</tool_response>",
    "the question": f"<think>{TASK['question']}</think>#### 48",
    "absurd length": "very " * 5000 + "#### 0",
    "silence": "",
    "a result only": replies(Reply(reasoning="She sold 48+24.", calls=(call("48+24", "72"),)), Reply(content="Done.")),
    "no end": replies(Reply(reasoning="She sold 48+24.", calls=(call("48+24", "72"),))),
    "calls that do nothing": replies(
        *(Reply(reasoning="I call it.", calls=(call("72", "72"),)) for _ in range(9)), Reply(content="#### 0")
    ),
}


@pytest.mark.parametrize("name", HACKS)
def test_no_hack_beats_a_plain_right_answer(name):
    assert judge(HACKS[name]).reward <= 0.25 < WORST_RIGHT < judge(PLAIN).reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("72 " * 2000, 0.50 - 0.05),
        ("7" * 9000 + "\n#### 72", 0.50 + 0.10 - 0.05),
        ("#### 72\nThe end.", 0.50 + 0.10),
        ("#### 72\n" * 100, 0.50 + 0.10),
        ("<think></think>#### 72", 0.50 + 0.10 + 0.10),
        ("<think>....................</think>#### 72", 0.50 + 0.15 + 0.10),
        (f"<think>{TASK['question']}</think>#### 72", 0.50 + 0.15 + 0.10),
    ],
)
def test_hacks_around_the_right_answer_get_less_than_honest_reasoning(response, reward):
    assert judge(response).reward == pytest.approx(reward)
    assert judge(THOUGHT + "#### 72").reward == pytest.approx(1.0)


PIECES = st.lists(
    st.sampled_from(
        [THOUGHT, "<think>", "</think>", "72 ", "#### 72\n", "ok. ", "<tool_call>{}</tool_call>", "w " * 400]
    ),
    max_size=6,
).map("".join)


@given(PIECES, PIECES)
def test_any_wrong_answer_gets_less_than_any_right_answer(wrong, right):
    bad, good = judge(f"{wrong}\n#### 7"), judge(f"</think>{right}</think>\n#### 72")
    if good.metrics["accuracy"] == 1.0:
        assert bad.reward < good.reward


def measure(score):
    return lambda task, transcript: score


def test_a_part_without_score_gives_no_reward():
    output = judge(GOOD, compose(RewardPart(name="a", score=measure(1.0)), RewardPart(name="b", score=measure(None))))
    assert output.reward is None
    assert output.metrics == {"a": 1.0}


def test_a_part_of_weight_zero_may_have_no_score():
    output = judge(
        GOOD, compose(RewardPart(name="a", score=measure(0.5)), RewardPart(name="b", score=measure(None), weight=0))
    )
    assert output.reward == 0.5


def test_an_async_part_gets_the_auxiliary_models():
    async def score(task, transcript, auxiliary_models):
        return auxiliary_models["judge"]

    composed = compose(RewardPart(name="a", score=score, weight=2.0))
    output = asyncio.run(composed(TASK, GOOD, auxiliary_models={"judge": 0.25}))
    assert output.reward == 0.5


def test_the_gate_scales_between_wrong_and_right():
    parts = (RewardPart(name="gate", score=measure(0.5)), RewardPart(name="style", score=measure(1.0), weight=0.4))
    assert judge(GOOD, compose(*parts, gate="gate", share_when_wrong=0.2)).reward == pytest.approx(0.5 + 0.4 * 0.6)
    assert judge(GOOD, compose(*parts)).reward == pytest.approx(0.9)


def test_a_reward_is_never_negative():
    assert judge(GOOD, compose(RewardPart(name="a", score=measure(-0.5), lowest=-1.0))).reward == 0.0


def test_invalid_weights_and_gates_are_refused():
    part = partial(RewardPart, score=measure(1.0))
    with pytest.raises(ValueError, match="a wrong answer could get 1 and a right one as little as 0.5"):
        compose(part(name="gate", weight=0.5), part(name="style", weight=2.0), gate="gate")
    with pytest.raises(ValueError, match="a right one as little as 0.4"):
        compose(part(name="gate", weight=0.5), part(name="style", weight=1.0, lowest=-0.1), gate="gate")
    with pytest.raises(ValueError, match="must name one of the parts"):
        compose(part(name="a"), gate="b")
    with pytest.raises(ValueError, match="from 0 to 1"):
        compose(part(name="a"), gate="a", share_when_wrong=1.5)
    with pytest.raises(ValueError, match="different names"):
        compose(part(name="a"), part(name="a"))
    with pytest.raises(ValueError, match="one of them with a weight"):
        compose(part(name="a", weight=0.0))
    with pytest.raises(ValueError, match="must be 0 or more"):
        part(name="a", weight=-1.0)


def test_a_score_out_of_range_is_an_error():
    with pytest.raises(ValueError, match="'a' scored 2.0"):
        judge(GOOD, compose(RewardPart(name="a", score=measure(2.0))))


@pytest.mark.parametrize("judge_func", [gsm8k_judge, numeric_judge, math_verify_judge, exact_judge, f1_judge])
def test_named_judges_are_judges(judge_func):
    check_judge_function(judge_func)
    assert judge("The answer is 72", judge_func).metrics.keys() & {"accuracy", "f1"}
    assert judge("#### 72", judge_func).reward >= 0.5
    assert judge("#### 71", judge_func, {"question": "?", "answer": "3"}).reward <= 0.25


def test_a_reference_without_answer_gives_no_reward():
    for nothing in ("", None):
        assert judge("#### 72", task={**TASK, "answer": nothing}).reward is None


@pytest.mark.parametrize("of_task", [numeric_judge, math_verify_judge, exact_judge, f1_judge, judge_number])
def test_a_null_reference_gives_no_reward_in_any_judge(of_task):
    assert asyncio.run(of_task({**TASK, "answer": None}, "#### 72")).reward is None
