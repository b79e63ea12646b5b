"""Branching rollouts of tool agents: tags and native calls, stateless tools, tools with state."""

from __future__ import annotations

import itertools
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest
from agents import TOKENIZER, build_search

from fakes import FakeEngine
from sandboxes import build_tool
from tunesmith import JudgeOutput
from tunesmith.chat.renderer import Renderer
from tunesmith.config import BranchingSection, EnvironmentSection
from tunesmith.environments import Environment, TaskEnvironment, play, tool_agent
from tunesmith.errors import ConfigError
from tunesmith.experience.samples import build_samples
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.branching.tree import Branching
from tunesmith.rollout.group import build_requests
from tunesmith.rollout.open_sessions import count_open_sessions
from tunesmith.rollout.runner import Agent
from tunesmith.rollout.service import ModelService
from tunesmith.rollout.signature import check_workflow_branches
from tunesmith.rollout.workers.group_runner import GroupRunner
from tunesmith.tools.python.tool import PythonTool
from tunesmith.tools.tool import Tool
from tunesmith.types import Sampling, Task

pytestmark = pytest.mark.anyio
TASK = Task(task_id="train/0", index=0, row={"question": "Where?"})
NUM_CALLS = 2
WORDS = ("Paris", "Rome", "Oslo", "Bern", "Riga", "Kyiv")


async def judge(task, response):
    return JudgeOutput(reward=float(sum(map(ord, response.text)) % 3))


def write_tags(word: str, num_results: int, tool: str) -> str:
    action = f"<{tool}>{word}</{tool}>" if num_results < NUM_CALLS else f"<answer>\\boxed{{{word}}}</answer>"
    return f"<think>I ask about {word}.</think>{action}"


def write_native(word: str, num_results: int, tool: str) -> str:
    call = f'<tool_call>\n{{"name": "{tool}", "arguments": {{"query": "{word}"}}}}\n</tool_call>'
    return call if num_results < NUM_CALLS else f"It is \\boxed{{{word}}}"


async def run_group(
    tools, *, protocol="tags", write=write_tags, mark="<result>", tool="search", words=WORDS, workflow=None
):
    """A group of 8, of which at most 6 branch at their first opportunity."""

    def script(prompt, sampling, order):
        text = TOKENIZER.decode(prompt[num_system:], skip_special_tokens=False)
        reply = write(words[(sampling.seed >> 7) % len(words)], text.count(mark), tool)
        return [*TOKENIZER.encode(reply, add_special_tokens=False), TOKENIZER.eos_token_id]

    environment = Environment(EnvironmentSection(protocol=protocol, prompt="none"), tools)
    num_system = 0
    engine = FakeEngine(TOKENIZER, script)
    branching = Branching(section=BranchingSection(base_probability=0.8, initial_rollouts=2), vocab_size=400)
    actors = Actors(
        engine=None,
        agent=Agent(
            workflow=workflow or partial(tool_agent, environment=environment),
            judge=None if workflow else judge,
            timeout_s=30,
        ),
        model=ModelService(engine, Renderer(TOKENIZER), model_name="m", sampling=Sampling(max_tokens=1000)),
        max_concurrency=8,
        branching=branching,
    )
    async with GroupRunner(actors) as runner:
        (request,) = build_requests([TASK], size=8, seed=3, step=1)
        (group,) = await runner.run_all([replace(request, is_trained=True)])
    return group, engine, branching.stats.compute()


@pytest.mark.parametrize(
    ("protocol", "write", "mark"), [("tags", write_tags, "<result>"), ("native", write_native, "All about")]
)
async def test_a_branch_repeats_no_search_and_shares_its_parents_tokens(protocol, write, mark):
    log: list[str] = []
    group, engine, stats = await run_group([build_search(log)], protocol=protocol, write=write, mark=mark)
    assert [run.failure for run in group.trajectories] == [None] * 8
    branches = [run for run in group.trajectories if run.parent is not None]
    num_shared = sum(run.num_shared_turns for run in branches)
    assert len(branches) > 3
    assert all(run.metrics["tool_calls"] == NUM_CALLS for run in group.trajectories)
    assert len(log) == 8 * NUM_CALLS - num_shared
    assert len(engine.requests) == 8 * (NUM_CALLS + 1) - num_shared
    assert stats["rollout/num_inherited_tool_calls"] == num_shared
    samples, _ = build_samples([group], [[1.0] * 8])
    assert len(samples) == 8, "every rollout is one sample, its inherited turns included"
    for run in branches:
        sample, parent = samples[run.run_index], samples[run.parent]
        assert sample.token_ids[: run.branch_at] == parent.token_ids[: run.branch_at]
        assert sample.is_sampled[: run.branch_at] == parent.is_sampled[: run.branch_at]
        assert sample.is_sampled[run.branch_at]


class Counting:
    """Searches are counted, and the last reply is paid their number."""

    async def reset(self, task):
        self.number, self.tools = 0, [Tool.from_function(self.search)]
        return task["question"]

    async def search(self, query: str) -> str:
        """Search."""
        self.number += 1
        return f"All about {query}."

    async def step(self, action):
        return "", float(self.number), True

    async def close(self):
        pass


async def test_a_branch_repeats_the_calls_of_an_environments_own_tools():
    workflow = partial(play, environment=TaskEnvironment(name="counting", create=Counting))
    group, _, _ = await run_group([], write=write_native, mark="All about", workflow=workflow)
    assert sum(run.parent is not None for run in group.trajectories) > 3
    assert [(run.failure, run.reward) for run in group.trajectories] == [(None, float(NUM_CALLS))] * 8


class Walk:
    """Each reply is a step, and some cannot be repeated: the place is no function of the replies."""

    opened, stepped, closed = [], 0, []
    numbers = itertools.count(100)

    def __init__(self, way=()):
        self.way = list(way)

    async def reset(self, task):
        Walk.opened.append(self)
        return "Walk."

    async def step(self, action):
        Walk.stepped += 1
        self.way.append(next(self.numbers))
        return f"You are at {self.way[-1]}.", 1.0, len(self.way) == 3

    def finish(self):
        raise AssertionError("the episode has ended")

    def copy(self):
        return Walk(self.way)

    async def close(self):
        Walk.closed.append(self)


async def test_a_branch_goes_on_with_a_copy_of_its_parents_environment():
    before = count_open_sessions()
    workflow = partial(play, environment=TaskEnvironment(name="walk", create=Walk))
    group, _, stats = await run_group([], write=lambda word, *_: word, mark="You are", workflow=workflow)
    branches = [run for run in group.trajectories if run.parent is not None]
    assert len(branches) > 3
    assert [(run.failure, run.reward) for run in group.trajectories] == [(None, 3.0)] * 8
    num_shared = sum(run.num_shared_turns for run in branches)
    assert stats["rollout/num_inherited_tool_calls"] == num_shared
    assert Walk.stepped == 8 * 3 - num_shared
    assert len(Walk.opened) == 8 and len(set(map(id, Walk.closed))) == len(Walk.closed) == 8 + num_shared
    assert count_open_sessions() == before
    for run in branches:
        parent = group.trajectories[run.parent]
        assert run.turns[run.num_shared_turns - 1] is parent.turns[run.num_shared_turns - 1]


class Dice:
    """Its tool gives another result each time, so that a repeated call would be a failure."""

    numbers = itertools.count(100)

    def __init__(self, thrown=()):
        self.thrown, self.tools = list(thrown), [Tool.from_function(self.search)]

    async def reset(self, task):
        return "Throw."

    async def search(self, query: str) -> str:
        """Throw."""
        self.thrown.append(next(self.numbers))
        return f"All about {self.thrown}."

    async def step(self, action):
        return "", float(len(self.thrown)), True

    def copy(self):
        return Dice(self.thrown)

    async def close(self):
        pass


async def test_calls_of_an_environments_own_tools_are_not_repeated_where_it_can_copy_itself():
    before = count_open_sessions()
    workflow = partial(play, environment=TaskEnvironment(name="dice", create=Dice))
    words = ("Paris", "Paris")  # the same call again, after the branch point too
    group, _, stats = await run_group([], write=write_native, mark="All about", words=words, workflow=workflow)
    num_shared = sum(run.num_shared_turns for run in group.trajectories)
    assert [(run.failure, run.reward) for run in group.trajectories] == [(None, float(NUM_CALLS))] * 8
    assert stats["rollout/num_inherited_tool_calls"] == num_shared > 3
    assert stats["rollout/num_repeated_tool_calls"] == 0 and count_open_sessions() == before


class Lake(Counting):
    is_deterministic = True


def test_an_environment_with_state_that_can_neither_be_copied_nor_repeated_is_refused():
    def check(kind, **more):
        check_workflow_branches(partial(play, environment=TaskEnvironment(name="lake", create=partial(kind), **more)))

    check(Walk)
    check(Lake)
    sentence = "the workflow play cannot branch: environment lake has no method `copy`, nor does it declare `is_deter"
    with pytest.raises(ConfigError, match=sentence):
        check(Counting)
    with pytest.raises(ConfigError, match=sentence):
        check(Lake, run=play)


def build_counter(results) -> Tool:
    """A tool with state: it counts the calls of its session."""

    @asynccontextmanager
    async def open_session():
        numbers = results()

        async def search(query: str) -> str:
            return f"{query} {next(numbers)}"

        yield search

    async def search(query: str) -> str:
        raise AssertionError("calls run in a session")

    parameters = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
    return Tool(
        name="search",
        description="Search.",
        parameters=parameters,
        run=search,
        text_argument="query",
        open_session=open_session,
    )


async def test_calls_of_a_tool_with_state_are_repeated_in_the_branch_to_restore_the_state():
    group, _, stats = await run_group([build_counter(itertools.count)])
    assert [run.failure for run in group.trajectories] == [None] * 8
    num_shared = sum(run.num_shared_turns for run in group.trajectories)
    assert stats["rollout/num_repeated_tool_calls"] == num_shared > 0
    assert stats["rollout/num_inherited_tool_calls"] == 0
    for run in group.trajectories:
        text = TOKENIZER.decode(run.turns[-1].prompt_ids)
        assert " 0\n</result>" in text and " 1\n</result>" in text


async def test_a_tool_whose_state_cannot_be_restored_fails_the_branch():
    numbers = itertools.count()
    group, _, _ = await run_group([build_counter(lambda: numbers)])
    branches = [run for run in group.trajectories if run.parent is not None]
    assert branches
    for run in branches:
        assert "'search' keeps state, and in the branch the same call gave another result" in run.failure.message


@pytest.fixture
def sandbox_settings():
    sandbox = build_tool("bubblewrap")
    sandbox.close()
    return sandbox.settings


async def test_a_branch_has_the_variables_of_its_parents_python_session(sandbox_settings):
    tool = PythonTool(sandbox_settings).build_tool(is_session=True)
    words = ("n = globals().get('n', 0) + 1; print(n)", "n = globals().get('n', 0) + 10; print(n)")
    group, _, stats = await run_group([tool], tool="python", words=words)
    assert [run.failure for run in group.trajectories] == [None] * 8
    assert stats["rollout/num_repeated_tool_calls"] > 0
    for run in group.trajectories:
        calls = [each for turn in run.turns[:NUM_CALLS] for each in (1, 10) if f"+ {each};" in decode(turn)]
        text = TOKENIZER.decode(run.turns[-1].prompt_ids)
        assert f"\n{sum(calls)}\n</result>" in text


def decode(turn) -> str:
    return TOKENIZER.decode(turn.sampled_ids)
