"""Branching rollouts on a scripted engine: exact numbers, shared turns, calls that are not repeated, failures."""

from __future__ import annotations

import asyncio

import openai
import pytest
from branched import NUM_ROUNDS, TASKS, TOKENIZER, ToolAgent, build_branching, build_service, run_branched

from tunesmith.errors import EngineError
from tunesmith.types import WorkflowOutput

pytestmark = pytest.mark.anyio


def list_turns(groups):
    return [run.turns for group in groups for run in group.trajectories]


@pytest.mark.parametrize("group_size", [2, 5, 8])
@pytest.mark.parametrize("initial", [1, None])
@pytest.mark.parametrize("base", [0.0, 0.4, 1.0])
async def test_a_group_has_exactly_its_size(group_size, initial, base):
    branching = build_branching(initial_rollouts=initial, base_probability=base, entropy_weight=0.0, beam=3)
    groups = await run_branched(ToolAgent(), branching, group_size=group_size, tasks=TASKS)
    stats = branching.stats.compute()
    for group in groups:
        assert [run.run_index for run in group.trajectories] == list(range(group_size))
        assert len(group.scored) == group_size
    num_branched = sum(run.parent is not None for group in groups for run in group.trajectories)
    assert stats["rollout/num_branched_rollouts"] == num_branched
    num_initial = 3 * branching.count_initial(group_size)
    assert num_branched + stats["rollout/num_fresh_rollouts"] + num_initial == 3 * group_size
    assert (num_branched > 0) == (base > 0 and branching.count_initial(group_size) < group_size)


async def test_a_branch_shares_its_parents_turns_and_repeats_no_call_of_its_parent():
    agent, service, branching = ToolAgent(), build_service(), build_branching(base_probability=0.6, initial_rollouts=2)
    (group,) = await run_branched(agent, branching, service=service, group_size=12)
    branches = [run for run in group.trajectories if run.parent is not None]
    assert len(branches) > 4
    num_shared = 0
    for run in branches:
        parent, shared = group.trajectories[run.parent], run.num_shared_turns
        assert 1 <= shared <= NUM_ROUNDS
        assert all(own is other for own, other in zip(run.turns[:shared], parent.turns[:shared], strict=True))
        assert run.turns[shared].prompt_ids == parent.turns[shared].prompt_ids
        assert run.branch_at == len(run.turns[shared].prompt_ids)
        for turn, owner in enumerate(run.turn_owners):
            sampler = group.trajectories[owner]
            assert sampler.num_shared_turns <= turn and sampler.turns[turn] == run.turns[turn]
        assert run.turns[shared].sampled_ids != parent.turns[shared].sampled_ids
        assert len(run.turns) == NUM_ROUNDS + 1
        num_shared += shared
    assert max(run.num_shared_turns for run in branches) > 1
    assert any(group.trajectories[run.parent].parent is not None for run in branches), "a branch of a branch"
    assert len(service.recorder.engine.requests) == 12 * (NUM_ROUNDS + 1) - num_shared
    assert agent.num_tool_calls == 12 * NUM_ROUNDS - num_shared
    assert agent.num_runs == 12
    stats = branching.stats.compute()
    assert stats["rollout/num_inherited_turns"] == stats["rollout/num_inherited_tool_calls"] == num_shared
    assert stats["rollout/num_inherited_tokens"] == 4 * num_shared
    assert stats["rollout/num_repeated_tool_calls"] == 0


async def test_groups_do_not_depend_on_concurrency_or_timing():
    class SlowAgent(ToolAgent):
        async def call_tool(self, query):
            await asyncio.sleep(0.001 * (len(query) + ord(query[0]) % 5))
            return await super().call_tool(query)

    knobs = {"base_probability": 0.5, "initial_rollouts": 3, "beam": 3}
    groups = [
        await run_branched(agent, build_branching(**knobs), group_size=9, tasks=TASKS, max_concurrency=number)
        for agent, number in ((ToolAgent(), 100), (ToolAgent(), 1), (SlowAgent(), 4))
    ]
    assert not [run.failure for each in groups for group in each for run in group.trajectories if run.failure]
    assert list_turns(groups[0]) == list_turns(groups[1]) == list_turns(groups[2])
    parents = [[run.parent for group in each for run in group.trajectories] for each in groups]
    assert parents[0] == parents[1] == parents[2]


class SideAgent(ToolAgent):
    """Sends a text beside its conversation, whatever becomes of it."""

    async def __call__(self, task, model):
        beside = asyncio.ensure_future(model([{"role": "user", "content": "x y " * 20_000}]))
        await asyncio.sleep(0)
        output = await super().__call__(task, model)
        await asyncio.gather(beside, return_exceptions=True)
        return output


async def test_no_branch_leaves_its_parent_while_an_earlier_call_is_tokenized_in_a_thread():
    branching = build_branching(base_probability=1.0, entropy_weight=0.0, initial_rollouts=1)
    (group,) = await run_branched(SideAgent(), branching, group_size=6)
    assert [run.failure for run in group.trajectories] == [None] * 6


class RefusedAgent(ToolAgent):
    """Sends a text that is too long before its conversation."""

    async def __call__(self, task, model):
        await asyncio.gather(model([{"role": "user", "content": "x y " * 20_000}]), return_exceptions=True)
        return await super().__call__(task, model)


async def test_branches_leave_their_parent_after_a_call_that_was_refused():
    service = build_service()
    service.recorder.engine.max_model_len = 2000
    branching = build_branching(base_probability=1.0, entropy_weight=0.0, initial_rollouts=1)
    (group,) = await run_branched(RefusedAgent(), branching, service=service, group_size=6)
    assert [run.failure for run in group.trajectories] == [None] * 6
    assert sum(run.parent is not None for run in group.trajectories) > 2


async def test_steps_are_independent_of_each_other():
    branching = build_branching(base_probability=0.5)
    first = await run_branched(ToolAgent(), branching, tasks=TASKS)
    await run_branched(ToolAgent(), branching, tasks=TASKS, seed=8)
    assert list_turns(await run_branched(ToolAgent(), branching, tasks=TASKS)) == list_turns(first)


async def test_branches_follow_the_entropy_of_the_tokens_after_the_tool_result():
    """Only the second reply is uncertain, so that with a large weight every branch is there."""
    service = build_service()
    engine = service.recorder.engine

    def entropy_of(prompt, token_id):
        return 3.0 if TOKENIZER.decode(prompt).count("found") == 1 else 1.0

    engine.entropy_of = entropy_of
    branching = build_branching(base_probability=0.0, entropy_weight=100.0, initial_rollouts=4, entropy_window=2)
    (group,) = await run_branched(ToolAgent(), branching, service=service, group_size=8)
    branches = [run for run in group.trajectories if run.parent is not None]
    assert len(branches) == 4
    assert {run.num_shared_turns for run in branches} == {1}
    assert sorted(run.parent for run in branches) == [0, 2, 4, 6], "each initial rollout has its share"


async def test_a_failed_parent_leaves_its_branches_and_a_failed_branch_is_a_failure():
    class FailingAgent(ToolAgent):
        async def call_tool(self, query):
            result = await super().call_tool(query)
            if ord(query[0]) % 3 == 0:
                raise ValueError("dead server")
            return result

    branching = build_branching(base_probability=0.7, initial_rollouts=3)
    (group,) = await run_branched(FailingAgent(), branching, group_size=24)
    assert len(group.trajectories) == 24
    failures = {run.run_index: run.failure for run in group.trajectories if run.failure is not None}
    failed = failures.keys()
    assert {failure.message for failure in failures.values()} == {"ValueError: dead server"}
    branches = [run for run in group.trajectories if run.parent is not None]
    assert any(run.parent in failed and run.run_index not in failed for run in branches)
    assert any(run.run_index in failed for run in branches)


async def test_a_workflow_whose_replay_differs_fails_with_the_difference():
    numbers = iter(range(1000))

    async def unstable(task, model):
        agent = ToolAgent(1)

        async def call_tool(query):
            return f"result {next(numbers)}"

        agent.call_tool = call_tool
        return await agent(task, model)

    (group,) = await run_branched(unstable, build_branching(base_probability=1.0), group_size=4)
    branches = [run for run in group.trajectories if run.parent is not None]
    assert branches
    for run in branches:
        assert run.failure.where == "workflow"
        assert "call 1 to the model has another prompt (token" in run.failure.message


async def test_a_difference_that_the_workflow_catches_is_a_failure_too():
    is_first = iter([True, False])

    async def careless(task, model):
        agent = ToolAgent(1)
        try:
            return await agent({"question": "a" if next(is_first) else "b"}, model)
        except openai.BadRequestError:
            return WorkflowOutput(reward=1.0)

    (group,) = await run_branched(careless, build_branching(base_probability=1.0), group_size=2)
    assert "call 0 to the model has another prompt" in group.trajectories[1].failure.message


async def test_a_branch_that_ends_before_its_branch_point_is_a_failure():
    rounds = iter([2, 0])

    async def shrinking(task, model):
        return await ToolAgent(next(rounds))(task, model)

    branching = build_branching(base_probability=1.0)
    (group,) = await run_branched(shrinking, branching, group_size=2)
    assert "ended before call 1 to the model" in group.trajectories[1].failure.message


async def test_workflows_without_tools_run_every_rollout_from_the_task():
    branching = build_branching(base_probability=1.0)
    (group,) = await run_branched(ToolAgent(0), branching, group_size=6)
    assert [run.parent for run in group.trajectories] == [None] * 6
    assert branching.stats.compute()["rollout/num_fresh_rollouts"] == 3
    assert len({run.turns[0].sampled_ids for run in group.trajectories}) == 6


async def test_greedy_calls_do_not_branch():
    (group,) = await run_branched(
        ToolAgent(), build_branching(base_probability=1.0), service=build_service(temperature=0.0)
    )
    assert all(run.parent is None for run in group.trajectories)


async def test_parallel_samples_of_one_call_are_replayed_and_do_not_branch():
    async def several(task, model):
        messages = [{"role": "user", "content": task["question"]}]
        await model(messages, n=2)
        return await ToolAgent(2)(task, model)

    (group,) = await run_branched(several, build_branching(base_probability=1.0), group_size=4)
    branches = [run for run in group.trajectories if run.parent is not None]
    assert branches
    assert all(run.num_shared_turns >= 3 and len(run.turns) == 5 for run in branches)
    assert all(run.failure is None for run in group.trajectories)


async def test_streamed_replies_are_replayed():
    async def streaming(task, model):
        messages = [{"role": "user", "content": task["question"]}]
        for _ in range(3):
            stream = await model.client.chat.completions.create(model="m", messages=messages, stream=True)
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
            messages += [{"role": "assistant", "content": "".join(parts)}, {"role": "user", "content": "go on"}]
        return WorkflowOutput(reward=1.0)

    (group,) = await run_branched(streaming, build_branching(base_probability=1.0), group_size=6)
    assert sum(run.parent is not None for run in group.trajectories) == 3
    assert all(run.failure is None for run in group.trajectories)


async def test_an_error_of_the_engine_ends_the_rollout_and_not_its_branches():
    service = build_service()
    engine = service.recorder.engine
    generate, num_requests = engine.generate, 0

    async def fail_once(prompt_ids, sampling, **options):
        nonlocal num_requests
        num_requests += 1
        if num_requests == 6:
            raise EngineError("out of memory")
        return await generate(prompt_ids, sampling, **options)

    engine.generate = fail_once
    (group,) = await run_branched(ToolAgent(), build_branching(base_probability=0.5), service=service, group_size=8)
    assert len(group.trajectories) == 8
    assert [run.failure.where for run in group.trajectories if run.failure is not None] == ["engine"]


async def test_cancelling_a_step_leaves_no_task_behind():
    started = asyncio.Event()

    class Waiting(ToolAgent):
        async def call_tool(self, query):
            if self.num_tool_calls >= 6:
                started.set()
                await asyncio.sleep(60)
            return await super().call_tool(query)

    before = asyncio.all_tasks()
    running = asyncio.create_task(run_branched(Waiting(), build_branching(base_probability=1.0)))
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert asyncio.all_tasks() == before


async def test_what_a_request_asks_for_is_replayed_too():
    """Logprobs, and entropies that the workflow asks for itself, in whole and streamed replies."""
    seen: dict[bool, list] = {True: [], False: []}

    async def logging(task, model):
        messages = [{"role": "user", "content": task["question"]}]
        create = model.client.chat.completions.create
        whole = await create(model="m", messages=messages, logprobs=True)
        seen[True].append([each.logprob for each in whole.choices[0].logprobs.content])
        messages.append({"role": "assistant", "content": whole.choices[0].message.content})
        messages.append({"role": "user", "content": "go on"})
        await create(model="m", messages=messages)
        stream = await create(model="m", messages=messages[:1], logprobs=True, stream=True)
        chunks = [chunk.choices[0].logprobs async for chunk in stream]
        seen[False].append([each.logprob for part in chunks if part for each in part.content])
        return WorkflowOutput(reward=1.0)

    (group,) = await run_branched(logging, build_branching(base_probability=1.0), group_size=2)
    assert [run.failure for run in group.trajectories] == [None, None]
    assert group.trajectories[1].parent == 0
    assert seen[True][0] == seen[True][1] and len(seen[True][0]) == 4
    assert all(len(each) == 4 for each in seen[False])


def test_the_tree_of_a_task_does_not_depend_on_which_rank_runs_it():
    """Seeds follow from the position of a task in its round."""

    def run(part):
        branching = build_branching(base_probability=0.7)
        groups = asyncio.run(run_branched(ToolAgent(), branching, tasks=TASKS, part=part))
        return groups, branching.stats

    whole, stats = run(slice(None))
    (first, third), own = run(slice(0, 3, 2))
    (second,), other = run(slice(1, 2))
    assert [strip(group) for group in (first, second, third)] == [strip(group) for group in whole]
    own.add(other.take())
    assert own.compute() == pytest.approx(stats.compute())
    assert other.compute()["rollout/num_branch_points"] == 0


def strip(group):
    """What a group sampled, without times."""
    return [(run.turns, run.reward, run.parent, run.branch_at) for run in group.trajectories]
