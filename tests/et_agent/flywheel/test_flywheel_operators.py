"""Operators: what they keep of a trajectory, what is executed; defects of the published flywheel that are absent."""

from __future__ import annotations

from dataclasses import replace

import pytest
from policies import (
    FOUND,
    QUESTION,
    REPEATED,
    WRONG,
    ScriptedPolicy,
    answer,
    build_environment,
    call,
    make_attempt,
    make_transcript,
    result,
    think,
)

from recipes.et_agent import scripted_roles
from tunesmith.environments.transcript import Segment, find_format_error
from tunesmith.et_agent.flywheel.operators import BY_TOOL, GENERAL, OPERATORS, list_hints
from tunesmith.et_agent.flywheel.roles import Finding, StepDraft, reopen_end, split_steps

pytestmark = pytest.mark.anyio

END = "<think>I know.</think>\n<answer>It is \\boxed{1748}</answer>"
AFTER_HINT = "So I do.</think>\n<answer>It is \\boxed{1748}</answer>"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def read_forced(transcript) -> list[str]:
    return [each.text for each in transcript.segments if each.kind == "forced"]


async def test_a_rollout_is_new():
    proposal = await OPERATORS["rollout"](make_attempt(None, policy=ScriptedPolicy(END)))
    assert proposal.transcript.answer == "1748" and proposal.step is None


async def test_the_first_redundant_step_is_replaced_and_what_follows_is_new():
    asked = []

    def analyst(request):
        asked.append(request)
        return scripted_roles.analyst(request)

    attempt = make_attempt(REPEATED, is_correct=True, analyst=analyst, author=scripted_roles.author)
    proposal = await OPERATORS["rewrite_redundant"](attempt)
    assert (proposal.step, proposal.reason) == (2, "it repeats an earlier call")
    assert proposal.transcript.segments[:3] == REPEATED.segments[:3]
    assert proposal.transcript.answer == "1748" and len(proposal.transcript.calls) == 1
    assert proposal.transcript.finish == "answered" and find_format_error(proposal.transcript) is None
    assert asked[0].goal == "find_redundant" and len(asked[0].steps) == 3


async def test_a_replaced_call_is_really_executed():
    log: list[str] = []
    policy = ScriptedPolicy(END)
    attempt = make_attempt(
        WRONG, policy=policy, environment=build_environment(log),
        analyst=scripted_roles.analyst, author=scripted_roles.author,
    )  # fmt: skip
    proposal = await OPERATORS["repair_flaw"](attempt)
    assert log == ["Zaven Union"] and proposal.step == 1
    assert [each.result for each in proposal.transcript.calls] == [FOUND]
    assert FOUND in policy.requests[0]["messages"][-1]["content"]
    assert "Mihup" not in proposal.transcript.text


async def test_refined_thoughts_keep_their_case_and_everything_else_is_the_same_object():
    texts = ["Find Zaven Union.", "AGAIN.", "It is 1748."]
    attempt = make_attempt(REPEATED, is_correct=True, author=lambda request: texts)
    refined = (await OPERATORS["refine_thoughts"](attempt)).transcript
    assert [each.text for each in refined.segments if each.kind == "thought"] == [
        f"<think>{each}</think>\n" for each in texts
    ]
    for old, new in zip(REPEATED.segments, refined.segments, strict=True):
        assert new is old or old.kind == "thought"
    assert refined.finish == "answered" and refined.answer == "1748"


SAME = ["I look up Zaven Union.", "I Look Again.", "It was founded in 1748."]


@pytest.mark.parametrize("texts", [["one"], None, ["1", "2", "3", "4"], SAME])
async def test_a_refinement_of_another_length_or_none_changes_nothing(texts):
    attempt = make_attempt(REPEATED, is_correct=True, author=lambda request: texts)
    proposal = await OPERATORS["refine_thoughts"](attempt)
    assert proposal.transcript is None and proposal.reason


@pytest.mark.parametrize("operator", ["hint_at_end", "hint_after_flaw"])
async def test_hints_are_whole_sentences_drawn_by_seed(operator):
    environment = build_environment()
    texts = set()
    for _ in range(3):
        attempt = make_attempt(
            WRONG, policy=ScriptedPolicy(AFTER_HINT), environment=environment,
            analyst=lambda request: Finding(step=1, reason="x"),
        )  # fmt: skip
        proposal = await OPERATORS[operator](attempt)
        (forced,) = read_forced(proposal.transcript)
        texts.add(forced)
        hint = forced.replace("<think>", "").strip()
        assert hint in (*GENERAL, *BY_TOOL["search"]) and len(hint.split()) > 4
        assert find_format_error(proposal.transcript) is None
    assert len(texts) == 1


async def test_a_hint_after_a_flawed_step_keeps_that_step_and_its_result():
    attempt = make_attempt(
        WRONG, policy=ScriptedPolicy(AFTER_HINT), analyst=lambda request: Finding(step=1, reason="x")
    )
    transcript = (await OPERATORS["hint_after_flaw"](attempt)).transcript
    assert transcript.segments[:3] == WRONG.segments[:3]
    assert transcript.segments[3].kind == "forced" and "1900" not in transcript.text


async def test_a_hint_after_the_last_step_addresses_it():
    attempt = make_attempt(
        WRONG, policy=ScriptedPolicy(AFTER_HINT), analyst=lambda request: Finding(step=2, reason="x")
    )
    proposal = await OPERATORS["hint_after_flaw"](attempt)
    assert proposal.step == 2 and "1900" in proposal.transcript.text
    assert proposal.transcript.answer == "1748" and find_format_error(proposal.transcript) is None


async def test_a_hint_at_the_end_moves_the_answer_into_the_thought():
    policy = ScriptedPolicy(AFTER_HINT)
    transcript = (await OPERATORS["hint_at_end"](make_attempt(WRONG, policy=policy))).transcript
    assert "<think>It Must Be 1900. It is \\boxed{1900} " in transcript.text
    assert transcript.answer == "1748" and transcript.text.count("<answer>") == 1
    sent = policy.requests[0]["messages"][-1]["content"]
    assert sent.endswith(read_forced(transcript)[0]) and sent.count("<think>") == sent.count("</think>") + 1


UNFINISHED = {
    "truncated in a thought": ([Segment(kind="thought", text="<think>I wonder Whether")], "length"),
    "closed thought": ([think("I am Done.")], "no_answer"),
    "nothing after a result": ([], "length"),
    "text that is no thought": ([Segment(kind="thought", text="1900")], "no_answer"),
    "call over the limit": ([think("Once More."), call("Mihup", 9)], "call_limit"),
}


@pytest.mark.parametrize("name", UNFINISHED)
async def test_a_trajectory_without_an_answer_keeps_its_steps(name):
    tail, finish = UNFINISHED[name]
    parent = make_transcript(*WRONG.segments[:3], *tail, finish=finish)
    transcript = (await OPERATORS["hint_at_end"](make_attempt(parent, policy=ScriptedPolicy(AFTER_HINT)))).transcript
    assert transcript.segments[:3] == WRONG.segments[:3]
    for segment in tail:
        if segment.kind == "thought":
            assert segment.text.replace("</think>\n", "") in transcript.text
    assert transcript.answer == "1748" and len(transcript.calls) == 1
    if name != "text that is no thought":
        assert find_format_error(transcript) is None


async def test_an_empty_trajectory_can_be_hinted():
    parent = make_transcript(finish="length")
    transcript = (await OPERATORS["hint_at_end"](make_attempt(parent, policy=ScriptedPolicy(AFTER_HINT)))).transcript
    assert transcript.segments[0].text.startswith("<think>") and transcript.answer == "1748"


async def test_a_reflection_is_written_text_of_the_trajectory():
    attempt = make_attempt(WRONG, policy=ScriptedPolicy(AFTER_HINT), author=scripted_roles.author)
    transcript = (await OPERATORS["reflect"](attempt)).transcript
    assert "In step 1 its result is not used." in transcript.text and not read_forced(transcript)
    assert find_format_error(transcript) is None


async def test_limits_of_calls_count_the_prefix_and_the_extra_calls():
    again = "<think>More.</think>\n<search>Mihup</search>"
    policy = ScriptedPolicy(f"So.</think>\n{again.partition('</think>')[2].strip()}", again, again, again)
    environment = build_environment(max_calls=1)
    attempt = make_attempt(WRONG, policy=policy, environment=environment, extra_calls=1)
    transcript = (await OPERATORS["hint_at_end"](attempt)).transcript
    assert len(transcript.calls) == 2 and transcript.finish == "call_limit"


async def test_sampling_parameters_are_no_shared_state():
    policy = ScriptedPolicy(AFTER_HINT, AFTER_HINT)
    attempt = make_attempt(WRONG, policy=policy, analyst=lambda request: Finding(step=1, reason="x"))
    await OPERATORS["hint_after_flaw"](attempt)
    await OPERATORS["hint_at_end"](attempt)
    first, second = policy.requests
    assert first["stop"] == second["stop"] and first["stop"] is not second["stop"] and policy.options == {}


async def test_an_answer_that_is_boxed_already_gets_no_second_box():
    draft = StepDraft(thought="So it is.", text=r"The answer is \boxed{1748}.")
    attempt = make_attempt(WRONG, analyst=lambda request: Finding(step=2, reason="r"), author=lambda request: draft)
    done = await OPERATORS["repair_flaw"](attempt)
    assert done.transcript.segments[-1].text == r"<answer>\boxed{1748}</answer>"


async def test_a_draft_with_an_unknown_tool_or_nothing_in_it_is_no_trajectory():
    for draft in (StepDraft(thought="x", tool="browse", text="x"), StepDraft(thought="x", text=" ")):
        attempt = make_attempt(
            WRONG, analyst=lambda request: Finding(step=1, reason="x"), author=lambda request, draft=draft: draft
        )
        proposal = await OPERATORS["repair_flaw"](attempt)
        assert proposal.transcript is None and "proposed step" in proposal.reason


@pytest.mark.parametrize(
    ("operator", "roles", "message"),
    [
        ("repair_flaw", {"analyst": lambda request: 2}, "Finding or None for find_flaw, got int"),
        ("refine_thoughts", {"author": lambda request: "a"}, "list or tuple or None for refine_thoughts, got str"),
        ("reflect", {"author": lambda request: ["a"]}, "str or None for reflect, got list"),
    ],
)
async def test_a_reply_of_another_kind_is_an_error(operator, roles, message):
    with pytest.raises(TypeError, match=message):
        await OPERATORS[operator](make_attempt(WRONG, **roles))


async def test_a_finding_beyond_the_trajectory_is_an_error():
    attempt = make_attempt(WRONG, analyst=lambda request: Finding(step=7, reason="x"))
    with pytest.raises(ValueError, match="step 7 of a trajectory with 2 steps"):
        await OPERATORS["repair_flaw"](attempt)


def test_steps_cover_all_segments():
    steps = split_steps(REPEATED)
    assert [(each.start, each.end) for each in steps] == [(0, 3), (3, 6), (6, 8)]
    assert [each.thought for each in steps][1] == "I Look Again." and steps[2].answer is REPEATED.segments[-1]
    assert split_steps(make_transcript()) == ()


def test_native_trajectories_are_reopened_too():
    native = replace(
        make_transcript(Segment(kind="answer", text="It is \\boxed{1900}")), protocol="native", finish="answered"
    )
    reopened = reopen_end(native, "Wait, I check.", kind="forced")
    assert [each.kind for each in reopened.segments] == ["thought", "forced"] and reopened.finish is None
    assert reopened.segments[0].text == "It is \\boxed{1900}"


def test_there_are_at_least_six_hints_for_search():
    assert len(list_hints(["search"])) >= 6 and list_hints(["search"], ["Look once more."]) == ("Look once more.",)
    assert QUESTION and answer("1").text and result("x", 1).result
