"""The loop of model calls and tool calls, with the real recorder: which tokens train, limits, prefixes, failures."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from agents import TOKENIZER, ScriptedModel, build_search

from tunesmith.config import EnvironmentSection
from tunesmith.environments import Environment, Segment, Transcript
from tunesmith.environments.transcript import find_format_error
from tunesmith.errors import ToolUnavailableError
from tunesmith.experience.samples import build_samples
from tunesmith.judges.composite import squad_judge
from tunesmith.judges.transcript import read_transcript
from tunesmith.tools.tool import tool
from tunesmith.types import Group, Task, Trajectory

pytestmark = pytest.mark.anyio

THINK = "<think>I look it up.</think>\n"
SEARCH = THINK + "<search>Paris</search>"
RESULT = "\n<result>\nAll about Paris.\n</result>\n"
ANSWER = "<think>I know.</think>\n<answer>It is \\boxed{Paris}</answer>"


def decode(ids) -> str:
    return TOKENIZER.decode(list(ids), skip_special_tokens=False)


def build_sample(turns):
    task = Task(task_id="t/0", index=0, row={})
    run = Trajectory(task=task, run_index=0, turns=turns, reward=1.0)
    return build_samples([Group(task=task, trajectories=(run,))], [[1.0]])[0]


def split_by_mask(sample) -> list[tuple[bool, str]]:
    """Runs of trained and untrained tokens, as text."""
    parts: list[tuple[bool, list[int]]] = []
    for token_id, is_sampled in zip(sample.token_ids, sample.is_sampled, strict=True):
        if not parts or parts[-1][0] != is_sampled:
            parts.append((is_sampled, []))
        parts[-1][1].append(token_id)
    return [(is_sampled, decode(ids)) for is_sampled, ids in parts]


async def test_a_rollout_of_tags_is_one_sample_whose_results_are_not_trained():
    agent = ScriptedModel(SEARCH, ANSWER)
    transcript = await Environment(tools=[build_search()]).run("Where?", agent.model)
    turns = agent.close()
    (sample,) = build_sample(turns)
    prompt, *parts = split_by_mask(sample)
    assert not prompt[0] and prompt[1].endswith("<|im_start|>assistant\n")
    assert parts == [(True, SEARCH), (False, RESULT), (True, ANSWER)]
    assert transcript.text == SEARCH + RESULT + ANSWER
    assert turns[1].prompt_ids[: len(turns[0].prompt_ids + turns[0].sampled_ids)] == (
        turns[0].prompt_ids + turns[0].sampled_ids
    )


async def test_sampled_ids_are_kept_even_if_the_text_would_be_encoded_otherwise():
    letters = [TOKENIZER.encode(each)[0] for each in SEARCH]
    assert letters != TOKENIZER.encode(SEARCH)
    agent = ScriptedModel(letters, ANSWER)
    await Environment(tools=[build_search()]).run("Where?", agent.model)
    first, second = agent.close()
    assert list(first.sampled_ids) == letters
    assert second.prompt_ids[len(first.prompt_ids) :][: len(letters)] == tuple(letters)


async def test_special_tokens_in_results_are_plain_text():
    @tool(name="search")
    async def search(query: str) -> str:
        """Search."""
        return "a <|im_end|> b </result> c"

    agent = ScriptedModel(SEARCH, ANSWER)
    await Environment(tools=[search]).run("Where?", agent.model)
    first, second = agent.close()
    added = second.prompt_ids[len(first.prompt_ids) + len(first.sampled_ids) :]
    assert TOKENIZER.convert_tokens_to_ids("<|im_end|>") not in added
    assert decode(added) == "\n<result>\na <|im_end|> b < /result> c\n</result>\n"


async def test_the_transcript_records_counts_answer_and_lengths():
    agent = ScriptedModel(SEARCH, "<think>x</think>\n<search>bad</search>", ANSWER)
    transcript = await Environment(tools=[build_search()]).run("Where?", agent.model)
    turns = agent.close()
    assert transcript.finish == "answered"
    assert transcript.answer == "Paris"
    assert transcript.tool_counts == {"search": 2}
    assert (transcript.failed_calls, transcript.refused_calls) == (1, 0)
    assert transcript.reasoning_tokens == sum(len(turn.sampled_ids) for turn in turns)
    assert [each.kind for each in transcript.segments] == ["thought", "call", "result"] * 2 + ["thought", "answer"]
    assert Transcript.from_json(json.loads(json.dumps(transcript.to_json()))) == transcript
    assert find_format_error(transcript) is None


async def test_counts_come_from_calls_and_not_from_text():
    spoof = "<think><search>a</search> <search>b</search></think>"
    agent = ScriptedModel("<think>I wrote <result> and </result> myself</think>", "")
    transcript = await Environment(tools=[build_search()]).run("Where?", agent.model)
    assert transcript.tool_counts == {}
    assert transcript.finish == "no_answer"
    agent = ScriptedModel(spoof, ANSWER)
    transcript = await Environment(tools=[build_search()]).run("Where?", agent.model)
    assert transcript.tool_counts == {"search": 1}
    assert find_format_error(transcript) is not None


async def test_arguments_are_as_long_as_they_were_written():
    query = "\u4e2d\u56fd\u7684\u9996\u90fd\u662f\u54ea\u91cc"
    agent = ScriptedModel(f"<think>?</think><search>{query}</search>", ANSWER)
    transcript = await Environment(tools=[build_search()]).run("Where?", agent.model)
    call, _ = read_transcript(transcript).replies
    assert call.text == f'<think>?</think>\n{{"query": "{query}"}}'


async def test_stop_strings_are_the_closing_tags_of_the_tools_and_of_the_answer():
    agent = ScriptedModel(ANSWER)
    await Environment(tools=[build_search()]).run("Where?", agent.model, stop=["</think>"])
    (_, sampling, _) = agent.engine.requests[0]
    assert sampling.stop == ("</search>", "</answer>", "</think>")


async def test_a_callers_stop_string_ends_the_rollout_and_the_next_run_continues_it():
    environment = Environment(tools=[build_search()])
    agent = ScriptedModel(SEARCH, ANSWER, ANSWER.removeprefix("<think>I know.</think>"))
    stopped = await environment.run("Where?", agent.model, stop=["</think>"])
    assert (stopped.finish, stopped.text) == ("stopped", "<think>I look it up.</think>")
    again = await environment.run("Where?", agent.model, prefix=stopped)
    assert again.finish == "answered"
    assert again.text.startswith(stopped.text)


async def test_over_the_limit_the_model_reads_so_and_answers():
    log: list[str] = []
    agent = ScriptedModel(SEARCH, SEARCH, ANSWER)
    environment = Environment(EnvironmentSection(max_calls=1), tools=[build_search(log)])
    transcript = await environment.run("Where?", agent.model)
    assert log == ["Paris"]
    assert transcript.finish == "answered"
    assert (transcript.tool_counts, transcript.refused_calls, transcript.failed_calls) == ({"search": 1}, 1, 0)
    assert "The limit of 1 tool calls is reached" in transcript.segments[5].result
    (sample,) = build_sample(agent.close())
    assert [text for is_sampled, text in split_by_mask(sample) if is_sampled] == [SEARCH, SEARCH, ANSWER]


async def test_a_second_call_over_the_limit_ends_the_rollout():
    agent = ScriptedModel(SEARCH, SEARCH, SEARCH)
    environment = Environment(EnvironmentSection(max_calls=1), tools=[build_search()])
    transcript = await environment.run("Where?", agent.model)
    assert transcript.finish == "call_limit"
    assert not transcript.open_calls
    assert (transcript.tool_counts, transcript.refused_calls) == ({"search": 1}, 2)
    (sample,) = build_sample(agent.close())
    assert split_by_mask(sample)[-1] == (True, SEARCH)


async def test_calls_that_run_beside_the_last_refused_one_are_counted():
    log: list[str] = []
    call = '<tool_call>\n{{"name": "{}", "arguments": {{"query": "{}"}}}}\n</tool_call>'
    tools = [build_search(log), replace(build_search(), name="other", max_calls=1)]
    agent = ScriptedModel(*(call.format("other", n) for n in "ab"), call.format("search", 1) + call.format("other", 2))
    transcript = await Environment(EnvironmentSection(protocol="native"), tools=tools).run("Where?", agent.model)
    assert (transcript.finish, log) == ("call_limit", ["1"])
    assert transcript.tool_counts == {"other": 1, "search": 1}


@pytest.mark.parametrize("protocol", ["tags", "native"])
async def test_an_answer_can_be_forced_after_the_call_limit(protocol):
    call = '<tool_call>\n{"name": "search", "arguments": {"query": "Paris"}}\n</tool_call>'
    environment = Environment(EnvironmentSection(protocol=protocol, max_calls=1), tools=[build_search()])
    first = await environment.run("Where?", ScriptedModel(*[SEARCH if protocol == "tags" else call] * 3).model)
    assert first.finish == "call_limit"
    answer = ScriptedModel("Lyon</answer>" if protocol == "tags" else "\\boxed{Lyon}")
    prefix = first.force("<answer>" if protocol == "tags" else "So it is ")
    second = await environment.run("Where?", answer.model, prefix=prefix, max_calls=0)
    assert (second.finish, second.answer) == ("answered", "Lyon")


async def test_forced_text_takes_the_place_of_a_call_that_was_not_run():
    log: list[str] = []
    environment = Environment(tools=[build_search(log)])
    prefix = environment.begin("Where?").append(*environment.protocol.read_text(SEARCH)).force("\n<answer>")
    transcript = await environment.run("Where?", ScriptedModel("Lyon</answer>").model, prefix=prefix)
    assert (log, transcript.text) == ([], THINK + "\n<answer>Lyon</answer>")


async def test_a_reply_without_text_has_its_token_counted():
    for protocol in ("tags", "native"):
        environment = Environment(EnvironmentSection(protocol=protocol), tools=[build_search()])
        agent = ScriptedModel("")
        transcript = await environment.run("Where?", agent.model)
        (turn,) = agent.close()
        assert (transcript.finish, transcript.reasoning_tokens) == ("no_answer", len(turn.sampled_ids))


@pytest.mark.parametrize(
    ("forced", "written"),
    [
        ("<think>I know.</think>\n<ans", "wer>\\boxed{Paris}</answer>"),
        ("<think>.</think><answer>\\boxed{", "Paris}</answer>"),
    ],
)
async def test_an_answer_is_read_from_where_its_tag_begins(forced, written):
    environment = Environment(tools=[build_search()])
    prefix = environment.begin("Where?").force(forced)
    transcript = await environment.run("Where?", ScriptedModel(written).model, prefix=prefix)
    assert (transcript.answer, find_format_error(transcript)) == ("Paris", None)


def test_calls_with_one_id_have_results_of_their_own():
    calls = [Segment(kind="call", text="{}", tool=each, arguments={}, call_id="") for each in "ab"]
    results = [Segment(kind="result", text=each, result=each, tool=each, call_id="") for each in "ab"]
    transcript = Transcript(question="?", segments=(*calls, *results), protocol="native")
    assert [(call.tool, result.result) for call, result in transcript.pairs] == [("a", "a"), ("b", "b")]
    assert [reply.calls[0].result for reply in transcript.build_replies()] == ["a", "b"]
    assert [each.tool for each in transcript.cut(3).open_calls] == ["b"]


@pytest.mark.parametrize("protocol", ["tags", "native"])
async def test_a_written_call_after_a_refused_one_has_an_id_of_its_own(protocol):
    environment = Environment(EnvironmentSection(protocol=protocol, max_calls=1), tools=[build_search()])
    transcript = environment.begin("q")
    for query in "abc":
        written = environment.write_call(transcript, tool="search", thought="I look.", text=query)
        transcript = await environment.execute(written)
    assert transcript.refused_calls == 2
    assert len({each.call_id for each in transcript.segments if each.kind == "call"}) == 3


async def test_a_tool_has_a_limit_of_its_own():
    agent = ScriptedModel(SEARCH, SEARCH, ANSWER)
    transcript = await Environment(tools=[build_search(max_calls=1)]).run("Where?", agent.model)
    assert "The limit of 1 calls of search is reached" in transcript.segments[5].result


async def test_tokens_are_limited_over_all_model_calls():
    environment = Environment(EnvironmentSection(max_tokens=60), tools=[build_search()])
    agent = ScriptedModel(SEARCH, ANSWER)
    transcript = await environment.run("Where?", agent.model)
    turns = agent.close()
    assert transcript.finish == "length"
    assert sum(len(turn.sampled_ids) for turn in turns) == transcript.reasoning_tokens == 60


async def test_a_full_context_ends_the_rollout():
    agent = ScriptedModel(SEARCH, ANSWER, max_model_len=1200)

    @tool(name="search")
    async def search(query: str) -> str:
        """Search."""
        return "x " * 1000

    transcript = await Environment(EnvironmentSection(prompt="none"), tools=[search]).run("Where?", agent.model)
    assert transcript.finish == "length"
    assert transcript.segments[-1].kind == "result"


async def test_long_results_lose_their_middle():
    @tool(name="search")
    async def search(query: str) -> str:
        """Search."""
        return "a" * 500 + "b" * 500

    agent = ScriptedModel(SEARCH, ANSWER)
    environment = Environment(EnvironmentSection(max_result_chars=200), tools=[search])
    result = (await environment.run("Where?", agent.model)).segments[2].result
    assert len(result) == 200
    assert result.startswith("aaa") and result.endswith("bbb") and "1000 characters" in result


@pytest.mark.parametrize(
    ("call", "kind"),
    [("<search></search>", "arguments"), ("Paris</search>", "arguments"), ("<search> \n </search>", "arguments")],
)
async def test_a_call_that_cannot_be_read_is_answered(call, kind):
    agent = ScriptedModel(THINK + call, ANSWER)
    transcript = await Environment(tools=[build_search()]).run("Where?", agent.model)
    result = next(each for each in transcript.segments if each.kind == "result")
    assert (result.ok, result.failure) == (False, kind)
    assert transcript.text == THINK + call + result.text + ANSWER
    assert find_format_error(transcript) is not None


async def test_several_arguments_are_a_json_object():
    @tool(name="search")
    async def search(query: str, top_n: int) -> str:
        """Search."""
        return f"{top_n} of {query}"

    agent = ScriptedModel('<think>a</think><search>{"query": "x", "top_n": 2}</search>', ANSWER)
    transcript = await Environment(tools=[search]).run("Where?", agent.model)
    assert transcript.segments[2].result == "2 of x"


async def test_half_a_character_of_a_call_does_not_fail_the_rollout():
    """JSON arguments may hold half of a surrogate pair, which a tool repeats: no request can hold that."""

    @tool(name="search")
    async def search(query: str, top_n: int) -> str:
        """Search."""
        return f"{top_n} of {query}"

    call = '<think>a</think><search>{"query": "\\ud83d \\ud83d\\ude00", "top_n": 2}</search>'
    transcript = await Environment(tools=[search]).run("Where?", ScriptedModel(call, ANSWER).model)
    assert [each.result for each in transcript.calls] == ["2 of \ufffd \U0001f600"]
    assert transcript.finish == "answered"


async def test_an_unavailable_tool_fails_the_rollout():
    @tool(name="search")
    async def search(query: str) -> str:
        """Search."""
        raise ToolUnavailableError("the server is down")

    agent = ScriptedModel(SEARCH, ANSWER)
    with pytest.raises(ToolUnavailableError, match="the server is down"):
        await Environment(tools=[search]).run("Where?", agent.model)


# Prefixes and forced text


async def test_an_opening_is_forced_and_never_trained():
    agent = ScriptedModel(SEARCH.removeprefix("<think>"), ANSWER)
    environment = Environment(EnvironmentSection(opening="<think>"), tools=[build_search()])
    transcript = await environment.run("Where?", agent.model)
    (sample,) = build_sample(agent.close())
    prompt, *parts = split_by_mask(sample)
    assert prompt[1].endswith("assistant\n<think>")
    assert [text for is_sampled, text in parts if is_sampled] == [SEARCH.removeprefix("<think>"), ANSWER]
    assert transcript.text == SEARCH + RESULT + ANSWER
    assert find_format_error(transcript) is None


async def test_a_hint_is_forced_and_never_trained():
    environment = Environment(tools=[build_search()])
    agent = ScriptedModel(SEARCH, ANSWER, " So Paris.</think>\n<answer>\\boxed{Lyon}</answer>")
    first = await environment.run("Where?", agent.model)
    prefix = first.cut(3).force("<think>Wait, I check that.")
    second = await environment.run("Where?", agent.model, prefix=prefix)
    assert second.answer == "Lyon"
    assert second.tool_counts == {"search": 1}
    samples = build_sample(agent.close())
    trained = [[text for is_sampled, text in split_by_mask(each) if is_sampled] for each in samples]
    assert [text for texts in trained for text in texts if "Wait" in text or "All about" in text] == []
    assert sum(texts.count(SEARCH) for texts in trained) == 1


async def test_an_answer_whose_tag_is_forced_is_read():
    environment = Environment(tools=[build_search()])
    prefix = environment.begin("Where?").force("<think>Time is up.</think>\n<answer>")
    transcript = await environment.run("Where?", ScriptedModel("Paris</answer>").model, prefix=prefix)
    assert (transcript.finish, transcript.answer) == ("answered", "Paris")
    assert (await squad_judge({"answer": "Paris"}, transcript)).reward == 1.0
    thought = Segment(kind="thought", text="Is it <answer>Rome", is_reasoning=True)
    native = Transcript(question="?", segments=(thought, Segment(kind="answer", text="Paris")), protocol="native")
    assert native.answer == "Paris"


async def test_a_prefix_of_another_author_is_never_trained_and_its_open_call_is_run():
    log: list[str] = []
    environment = Environment(tools=[build_search(log)])
    prefix = environment.begin("Where?").append(*environment.protocol.read_text(SEARCH))
    agent = ScriptedModel(ANSWER)
    transcript = await environment.run("Where?", agent.model, prefix=prefix)
    assert log == ["Paris"]
    assert transcript.text == SEARCH + RESULT + ANSWER
    (sample,) = build_sample(agent.close())
    assert split_by_mask(sample)[1:] == [(True, ANSWER)]
    assert transcript.reasoning_tokens == len(TOKENIZER.encode(ANSWER))


async def test_calls_of_a_prefix_count_towards_the_limit():
    environment = Environment(EnvironmentSection(max_calls=1), tools=[build_search()])
    first = await environment.run("Where?", ScriptedModel(SEARCH, ANSWER).model)
    again = await environment.run("Where?", ScriptedModel(SEARCH, ANSWER).model, prefix=first.cut(3))
    assert (again.tool_counts, again.refused_calls) == ({"search": 1}, 1)


def build_counter(numbers: list[int]):
    """A tool with state: counts the calls of its session, by the next of the numbers."""

    @asynccontextmanager
    async def open_session():
        step, count = numbers.pop(0), 0

        async def run(query: str) -> str:
            nonlocal count
            count += step
            return str(count)

        yield run

    @tool(name="search", open_session=open_session)
    async def search(query: str) -> str:
        """Count."""
        raise AssertionError("sessions are called")

    return search


async def test_a_stateful_tool_is_replayed_for_a_prefix():
    environment = Environment(tools=[build_counter([1, 1])])
    first = await environment.run("Where?", ScriptedModel(SEARCH, SEARCH, ANSWER).model)
    assert [each.result for each in first.calls] == ["1", "2"]
    second = await environment.run("Where?", ScriptedModel(SEARCH, ANSWER).model, prefix=first.cut(3))
    assert [each.result for each in second.calls] == ["1", "2"]


async def test_a_stateful_tool_that_replays_otherwise_is_refused():
    environment = Environment(tools=[build_counter([1, 5])])
    first = await environment.run("Where?", ScriptedModel(SEARCH, ANSWER).model)
    with pytest.raises(ToolUnavailableError, match="'search' gave another result"):
        await environment.run("Where?", ScriptedModel(SEARCH, ANSWER).model, prefix=first.cut(3))


# Native calls


def write_call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


NATIVE = EnvironmentSection(protocol="native", max_calls=2)


async def test_native_calls_give_the_same_transcript():
    agent = ScriptedModel("I look. " + write_call("search", query="Paris"), "It is \\boxed{Paris}")
    transcript = await Environment(NATIVE, tools=[build_search()]).run("Where?", agent.model)
    turns = agent.close()
    assert [each.kind for each in transcript.segments] == ["thought", "call", "result", "answer"]
    assert (transcript.answer, transcript.tool_counts, transcript.finish) == ("Paris", {"search": 1}, "answered")
    assert transcript.reasoning_tokens == sum(len(turn.sampled_ids) for turn in turns)
    assert find_format_error(transcript) is None
    (sample,) = build_sample(turns)
    untrained = "".join(text for is_sampled, text in split_by_mask(sample) if not is_sampled)
    assert "All about Paris." in untrained


async def test_native_calls_of_one_message_run_at_the_same_time_up_to_the_limit():
    running, most = 0, 0

    @tool(name="search")
    async def search(query: str) -> str:
        """Search."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return query

    calls = "\n".join(write_call("search", query=each) for each in "abc")
    agent = ScriptedModel(calls, "It is \\boxed{a}")
    transcript = await Environment(NATIVE, tools=[search]).run("Where?", agent.model)
    assert most == 2
    assert [each.result for each in transcript.calls] == ["a", "b"]
    assert transcript.refused_calls == 1
    assert transcript.finish == "answered"


async def test_unknown_tools_and_malformed_arguments_are_results():
    agent = ScriptedModel(write_call("find", query="a"), write_call("search", text="a"), "It is \\boxed{a}")
    transcript = await Environment(NATIVE, tools=[build_search()]).run("Where?", agent.model)
    assert [each.failure for each in transcript.calls] == ["unknown_tool", "arguments"]
    assert find_format_error(transcript) == "a call of 'find' cannot be read"


async def test_a_native_prefix_is_continued():
    environment = Environment(NATIVE, tools=[build_search()])
    agent = ScriptedModel(write_call("search", query="Paris"), "It is \\boxed{Paris}", "It is \\boxed{Lyon}")
    first = await environment.run("Where?", agent.model)
    second = await environment.run("Where?", agent.model, prefix=first.cut(2))
    assert (second.answer, second.tool_counts) == ("Lyon", {"search": 1})
    turns = agent.close()
    assert turns[1].prompt_ids == turns[2].prompt_ids


# Format


@pytest.mark.parametrize(
    ("replies", "error"),
    [
        ([ANSWER], None),
        (["<answer>\\boxed{a}</answer>"], "step 1 is not <think>...</think> followed by <answer>"),
        (["<think>a</think> b <answer>\\boxed{a}</answer>"], "step 1 is not"),
        (["<think>a<answer>\\boxed{a}</answer>"], "step 1 is not"),
        (["<think>a</think><result>b</result><answer>\\boxed{a}</answer>"], "step 1 is not"),
        (["<think>a</think><answer>a</answer>"], "no \\boxed{}"),
        (["<think>a</think><answer>\\boxed{}</answer>"], "no \\boxed{}"),
        (["<think>a</think><answer><think>b</think>\\boxed{a}</answer>"], "a tag inside of <answer>"),
        (["<think>a</think>"], "there is no answer: no_answer"),
        ([SEARCH, "<answer>\\boxed{a}</answer>"], "step 2 is not"),
        ([SEARCH, ANSWER], None),
    ],
)
async def test_format_errors(replies, error):
    agent = ScriptedModel(*replies)
    transcript = await Environment(tools=[build_search()]).run("Where?", agent.model)
    found = find_format_error(transcript)
    assert found is None if error is None else error in found
