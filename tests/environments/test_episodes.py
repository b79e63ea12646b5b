"""Environments of one's own: `play` sends observations and replies, counts rewards, and always closes."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

import pytest
from agents import ScriptedModel

from tunesmith.environments import TaskEnvironment, play
from tunesmith.environments.episode import Places
from tunesmith.errors import ToolUnavailableError
from tunesmith.rollout.open_sessions import count_open_sessions
from tunesmith.rollout.time_limit import UncountedTime
from tunesmith.tools.tool import ToolInputError
from tunesmith.user_lines import find_waiting_line

TASK = {"seed": 0, "number": 3}


class Guess:
    """Guess a number; 0.25 for each guess in the right direction."""

    closed = 0

    def __init__(self, log=None):
        self.log = [] if log is None else log

    async def reset(self, task):
        self.number = task["number"]
        return "Guess."

    async def step(self, action):
        self.log.append(action)
        if not action.isdigit():
            raise ToolInputError("write a number")
        if int(action) == self.number:
            return "Right.", 1.0, True
        return ("Higher.", 0.25, False) if int(action) < self.number else ("Lower.", 0.0, False)

    async def close(self):
        type(self).closed += 1


class PlainGuess(Guess):
    """The same with plain functions."""

    def reset(self, task):
        self.number = task["number"]
        return "Guess."

    def step(self, action):
        time.sleep(0.001)
        return ("Right.", 1.0, True) if action == str(self.number) else ("No.", 0.0, False)

    def close(self):
        type(self).closed += 1


def build(create, **settings):
    return TaskEnvironment(name="guess", create=create, **settings)


async def run(create, *replies, task=TASK, **settings):
    agent = ScriptedModel(*replies)
    output = await play(task, agent.model, build(create, **settings))
    return output, agent.close()


@pytest.mark.anyio
async def test_rewards_of_the_steps_add_up_and_the_turns_are_one_sample():
    output, turns = await run(Guess, "1", "three", "3", step_reward_key="step_reward")
    assert output.reward == 1.25
    assert output.metrics == {
        "finished": 1.0, "invalid_actions": 1.0,
        "step_reward/0": 0.25, "step_reward/1": 0.0, "step_reward/2": 1.0,
    }  # fmt: skip
    assert output.response == "3"
    for before, after in pairwise(turns):
        told = before.prompt_ids + before.sampled_ids
        assert after.prompt_ids[: len(told)] == told


@pytest.mark.anyio
async def test_plain_methods_run_in_threads():
    output, _ = await run(PlainGuess, "1", "3")
    assert (output.reward, output.metrics["finished"]) == (1.0, 1.0)


@pytest.mark.anyio
async def test_an_episode_ends_after_max_turns_with_the_rewards_so_far():
    output, turns = await run(Guess, "1", "2", "3", max_turns=2)
    assert (output.reward, output.metrics["finished"], len(turns)) == (0.5, 0.0, 2)


@pytest.mark.anyio
async def test_an_episode_ends_when_the_context_is_full():
    agent = ScriptedModel("1", "2", "1", "3", max_model_len=35)
    output = await play(TASK, agent.model, build(Guess))
    assert output.metrics["finished"] == 0.0 and 0 < len(agent.close()) < 4


@pytest.mark.anyio
async def test_the_system_prompt_comes_first():
    agent = ScriptedModel("3")
    await play(TASK, agent.model, build(Guess, system_prompt="Play well."))
    (turn,) = agent.close()
    assert "Play well." in agent.service.recorder.renderer.decode(list(turn.prompt_ids))


class Dying(Guess):
    async def step(self, action):
        raise RuntimeError("the server is gone")


class Hanging(Guess):
    async def step(self, action):
        await asyncio.sleep(60)


class HangingThread(Guess):
    def step(self, action):
        time.sleep(0.5)


class NumberReward(Guess):
    async def step(self, action):
        return "text", 1.0


class Picture(Guess):
    async def reset(self, task):
        return {"image": b""}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("create", "error", "message"),
    [
        (Dying, RuntimeError, "the server is gone"),
        (Hanging, ToolUnavailableError, "guess: step was not done after environment.step_timeout_s=0.05"),
        (HangingThread, ToolUnavailableError, "guess: step was not done after environment.step_timeout_s=0.05"),
        (NumberReward, TypeError, "step must return observation, reward and done, got tuple"),
        (Picture, TypeError, "reset must return text to observe, got dict"),
    ],
)
async def test_the_death_of_an_environment_is_raised_and_it_is_closed(create, error, message):
    create.closed = 0
    with pytest.raises(error, match=message):
        await run(create, "3", step_timeout_s=0.05)
    assert create.closed == 1
    assert count_open_sessions() == 0


class Waiting(Guess):
    async def step(self, action):
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(60), 0.001)
        return await super().step(action)


@pytest.mark.anyio
async def test_a_step_that_waits_goes_on_where_it_waited():
    output, _ = await run(Waiting, "3", step_timeout_s=30)
    assert output.reward == 1.0


@pytest.mark.anyio
async def test_the_line_at_which_a_step_waits_is_found():
    playing = asyncio.ensure_future(run(Hanging, "3"))
    await asyncio.sleep(0.01)
    line = find_waiting_line(playing.get_coro())
    assert line.endswith(f"test_episodes.py:{Hanging.step.__code__.co_firstlineno + 1} in step")
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert count_open_sessions() == 0


@pytest.mark.anyio
async def test_a_cancelled_rollout_closes_its_environment():
    has_begun = asyncio.Event()

    class Slow(Guess):
        closed = 0

        async def step(self, action):
            has_begun.set()
            await asyncio.sleep(60)

    task = asyncio.ensure_future(run(Slow, "3"))
    await has_begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert Slow.closed == 1 and count_open_sessions() == 0


@pytest.mark.anyio
async def test_concurrent_rollouts_have_environments_of_their_own():
    tasks = [{"seed": n, "number": n} for n in range(20)]
    outputs = await asyncio.gather(*(run(Guess, str(n), task=task) for n, task in enumerate(tasks)))
    assert [output.reward for output, _ in outputs] == [1.0] * 20


def test_the_splits_share_no_task_whatever_the_seeds():
    environment = build(Guess, describe=lambda seed: {"question": f"{seed % 2000}"})
    questions = [
        {row["question"] for row in environment.list_rows(split, number=200, seed=seed)}
        for split, seed in (("train", 0), ("train", 77), ("test", 0), ("test", 300))
    ]
    assert [len(each) for each in questions] == [200] * 4
    assert not (questions[0] | questions[1]) & (questions[2] | questions[3])
    by_seed = build(Guess)
    train = {row["seed"] for row in by_seed.list_rows("train", number=300, seed=5)}
    assert not train & {row["seed"] for row in by_seed.list_rows("test", number=300, seed=0)}


def test_a_set_with_too_few_tasks_says_how_many_it_has():
    environment = build(Guess, describe=lambda seed: {"question": f"{seed % 3}"})
    with pytest.raises(
        ValueError, match=r"has only \d different tasks of the split test, fewer than environment.num_test=3"
    ):
        environment.list_rows("test", number=3, seed=0)


@pytest.mark.anyio
async def test_a_session_that_cannot_be_closed_is_an_error_and_stays_open():
    class Leaking(Guess):
        async def close(self):
            raise OSError("no connection")

    before = count_open_sessions()
    with pytest.raises(OSError, match="no connection"):
        await run(Leaking, "3")
    assert count_open_sessions() == before + 1
    await run(Guess, "3")


class Essay(Guess):
    """Pays its length when the turns are used up."""

    async def step(self, action):
        self.log.append(action)
        return "More.", 0.0, action == "end"

    def finish(self):
        return float(len(self.log))


@pytest.mark.anyio
async def test_an_episode_that_max_turns_ends_is_paid_by_finish():
    output, _ = await run(Essay, "a", "b", "c", max_turns=3, step_reward_key="paid")
    assert (output.reward, output.metrics["paid/2"], output.metrics["finished"]) == (3.0, 3.0, 0.0)
    output, _ = await run(Essay, "a", "end", max_turns=3)
    assert (output.reward, output.metrics["finished"]) == (0.0, 1.0)


@pytest.mark.anyio
async def test_episodes_wait_for_a_place_without_a_time_limit():
    opened, most = 0, 0

    class Counted(Guess):
        async def reset(self, task):
            nonlocal opened, most
            opened += 1
            most = max(most, opened)
            await asyncio.sleep(0.02)
            return await super().reset(task)

        async def close(self):
            nonlocal opened
            opened -= 1

    environment = build(Counted, places=Places(2), step_timeout_s=5)
    counted = UncountedTime()

    async def play_one(number):
        if number == 5:
            counted.bind()
        async with environment.open(TASK):
            await asyncio.sleep(0)

    await asyncio.gather(*(play_one(number) for number in range(6)))
    assert (opened, most) == (0, 2)
    assert counted.compute_s() > 0.03
    waiting = [asyncio.create_task(play_one(number)) for number in range(6)]
    await asyncio.sleep(0.01)
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await asyncio.wait_for(play_one(0), 5)  # cancelled episodes gave their places back
    assert opened == 0
