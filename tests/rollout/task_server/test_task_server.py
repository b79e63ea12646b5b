"""Workers over HTTP: attempts, reports, time limits, lost workers, keys and bounds."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from single_run import TASK, build_service

from conditions import HANG_S, until
from tunesmith.rollout.runner import Agent, run_trajectory
from tunesmith.rollout.task_server.app import EXCEPTION_HANDLERS, ServerLimits, serve_tasks
from tunesmith.rollout.task_server.queue import TaskQueue
from tunesmith.types import JudgeOutput, Trajectory

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "hi"}]


@dataclass
class Served:
    """A queue with its server, and a client of it."""

    queue: TaskQueue
    service: Any
    client: httpx.AsyncClient
    agent: Agent

    def start(self, *, seed: int = 1, run_index: int = 0) -> asyncio.Task[Trajectory]:
        """A rollout that waits for a worker."""
        return asyncio.create_task(
            run_trajectory(TASK, run_index, agent=self.agent, model=self.service, auxiliary_models={}, seed=seed)
        )

    async def take(self, worker: str = "w", wait_s: float = 5) -> dict[str, Any]:
        reply = await self.client.get("/tasks/next", params={"worker": worker, "wait_s": wait_s})
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def report(self, taken: dict[str, Any], kind: str = "reward", **fields: Any) -> httpx.Response:
        return await self.client.post(f"/trajectories/{taken['attempt_id']}/{kind}", json=fields)

    async def call(self, taken: dict[str, Any]) -> httpx.Response:
        body = {"model": taken["model"], "messages": MESSAGES}
        headers = {"Authorization": f"Bearer {taken['api_key']}"}
        return await self.client.post(f"{taken['base_url']}/chat/completions", json=body, headers=headers)


@contextlib.asynccontextmanager
async def serve(
    judge=None, *, timeout_s=30.0, lost_after_s=20.0, max_attempts=3, headers=None, end_grace_s=0.0, **limits
):
    queue = TaskQueue(timeout_s=timeout_s, lost_after_s=lost_after_s, has_judge=judge is not None)
    agent = Agent(workflow=queue.run_attempt, judge=judge, timeout_s=timeout_s, max_attempts=max_attempts)
    service = build_service()
    given = {"max_body_bytes": 4096, "max_requests": 64} | limits
    async with (
        serve_tasks(queue, service, ServerLimits(**given), end_grace_s=end_grace_s) as url,
        httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as client,
    ):
        yield Served(queue=queue, service=service, client=client, agent=agent)


def read_message(reply: httpx.Response) -> str:
    """The sentence of an error."""
    return reply.json()["error"]["message"]


async def test_a_worker_takes_a_task_calls_the_model_and_posts_a_reward():
    async with serve() as served:
        rollout = served.start()
        taken = await served.take()
        assert taken["task"] == TASK.row
        assert taken["deadline_s"] == 30
        assert taken["attempt_id"] in taken["base_url"]
        async with openai.AsyncOpenAI(base_url=taken["base_url"], api_key=taken["api_key"]) as client:
            completion = await client.chat.completions.create(model=taken["model"], messages=MESSAGES)
        reply = await served.report(taken, reward=0.5, metrics={"steps": 2}, response="done")
        assert reply.json() == {"status": "accepted"}
        trajectory = await rollout
    assert completion.choices[0].message.content == "fine"
    assert (trajectory.reward, trajectory.failure) == (0.5, None)
    assert trajectory.metrics == {"steps": 2.0}
    assert trajectory.response_text == "done"
    assert len(trajectory.turns) == 1


async def test_a_worker_that_waits_receives_the_next_task_and_then_learns_that_there_is_none():
    async with serve() as served:
        waiting = asyncio.create_task(served.take())
        await until(lambda: served.queue._has_news._waiters)
        rollout = served.start()
        taken = await waiting
        assert (await served.client.get("/tasks/next", params={"wait_s": 0})).status_code == 204
        await served.call(taken)
        await served.report(taken, reward=1)
        assert (await rollout).reward == 1.0


async def test_waiting_workers_learn_that_the_run_has_ended():
    async with serve() as served:
        waiting = asyncio.create_task(served.client.get("/tasks/next"))
        await until(lambda: served.queue._has_news._waiters)
        served.queue.finish()
        reply = await waiting
    assert reply.status_code == 410
    assert read_message(reply) == "the run has ended: there are no more tasks"


async def test_a_worker_that_asks_after_the_end_of_the_run_learns_of_it():
    async def ask_late(queue, url):
        await until(lambda: queue.is_finished)
        async with httpx.AsyncClient(base_url=url) as client:
            return await client.get("/tasks/next", params={"worker": "late"})

    async with serve(end_grace_s=HANG_S) as served:
        rollout = served.start()
        taken = await served.take("late")
        await served.call(taken)
        await served.report(taken, reward=1)
        await rollout
        asking = asyncio.create_task(ask_late(served.queue, served.client.base_url))
    assert (await asking).status_code == 410


async def test_each_of_several_workers_without_a_name_learns_of_the_end():
    async def ask_in_turn(queue, url):
        await until(lambda: queue.is_finished)
        async with httpx.AsyncClient(base_url=url, headers={"Connection": "close"}) as client:
            replies = [await client.get("/tasks/next")]
            await asyncio.sleep(0.2)  # the other worker works for longer
            return [*replies, await client.get("/tasks/next")]

    async with serve(end_grace_s=HANG_S) as served:
        for rollout, taken in [(served.start(), await served.take("")) for _ in range(2)]:
            await served.call(taken)
            await served.report(taken, reward=1)
            await rollout
        asking = asyncio.create_task(ask_in_turn(served.queue, served.client.base_url))
    assert [reply.status_code for reply in await asking] == [410, 410]


async def test_the_judge_scores_the_posted_response():
    async def judge(task, response):
        return JudgeOutput(reward=float(response["answer"] == 7))

    async with serve(judge) as served:
        rollout = served.start()
        taken = await served.take()
        await served.call(taken)
        refused = await served.report(taken, reward=1.0, response={"answer": 7})
        assert refused.status_code == 400
        assert "the judge of the run gives the reward" in read_message(refused)
        await served.report(taken, response={"answer": 7})
        assert (await rollout).reward == 1.0


async def test_a_failure_of_the_worker_is_a_failure_and_no_reward():
    async with serve() as served:
        rollout = served.start()
        taken = await served.take()
        await served.call(taken)
        assert (await served.report(taken, "failure", message="the browser crashed")).status_code == 200
        trajectory = await rollout
    assert trajectory.reward is None
    assert trajectory.failure.where == "workflow"
    assert trajectory.failure.message == "WorkerError: the browser crashed"
    assert trajectory.failure.line is None
    assert len(trajectory.turns) == 1


async def test_a_reward_without_a_model_call_is_a_failure():
    async with serve() as served:
        rollout = served.start()
        await served.report(await served.take(), reward=1.0)
        failure = (await rollout).failure
        assert "made no call to `model`" in failure.message
        assert failure.line is None  # the workflow is a function of the server, which the user cannot change


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"reward": NaN}', "reward: input should be a finite number"),
        (b'{"reward": 1e300}', "reward: input should be less than or equal to"),
        (b'{"reward": "1"}', "reward: input should be a valid number"),
        (b'{"reward": true}', "reward: input should be a valid number"),
        (b'{"reward": 1, "score": 2}', "score: extra inputs are not permitted"),
        (b'{"reward": 1, "metrics": {"a": "b"}}', "metrics.a: input should be a valid number"),
        (b'{"response": "x"}', "reward: missing, and the run has no judge"),
        (b"[1]", "the request: input should be a valid dictionary"),
        (b"reward=1", "the request body is not JSON"),
        (b'{"response": "' + b"x" * 5000 + b'"}', "the request is larger than rollout.max_body_mib="),
    ],
)
async def test_an_invalid_report_is_refused_and_the_attempt_stays_open(body, message):
    async with serve() as served:
        rollout = served.start()
        taken = await served.take()
        refused = await served.client.post(f"/trajectories/{taken['attempt_id']}/reward", content=body)
        assert refused.status_code in (400, 413)
        assert message in read_message(refused)
        await served.call(taken)
        await served.report(taken, reward=1)
        assert (await rollout).reward == 1.0


async def test_a_second_report_and_later_calls_are_refused():
    async with serve() as served:
        rollout = served.start()
        taken = await served.take()
        await served.call(taken)
        await served.report(taken, reward=1)
        second = await served.report(taken, reward=0)
        trajectory = await rollout
        third = await served.report(taken, "failure", message="late")
        late_call = await served.call(taken)
    assert [second.status_code, third.status_code, late_call.status_code] == [409, 409, 410]
    assert read_message(second) == "the attempt has ended: it has its report"
    assert (trajectory.reward, len(trajectory.turns)) == (1.0, 1)


async def test_reports_and_calls_after_the_time_limit_are_refused():
    async with serve(timeout_s=0.3) as served:
        rollout = served.start()
        taken = await served.take()
        await served.call(taken)
        trajectory = await rollout
        late = await served.report(taken, reward=1)
        late_call = await served.call(taken)
    assert (trajectory.reward, trajectory.failure.where) == (None, "timeout")
    assert (late.status_code, late_call.status_code) == (410, 410)
    assert read_message(late).startswith("the attempt has ended: its time limit of 0.3 s has passed")


async def test_waiting_for_a_worker_does_not_count_toward_the_time_limit(passing_time):
    async with serve(timeout_s=50) as served:
        rollout = served.start()
        await until(lambda: served.queue.num_waiting)
        passing_time.skip(60)
        taken = await served.take()
        await served.call(taken)
        await served.report(taken, reward=1)
        assert (await rollout).reward == 1.0


async def test_the_task_of_a_lost_worker_is_issued_again_as_a_new_attempt():
    async with serve(lost_after_s=0.2) as served:
        rollout = served.start()
        lost = await served.take("one")
        await served.call(lost)
        taken = await served.take("two")
        served.queue._lost_after_s = 20
        assert taken["attempt_id"] != lost["attempt_id"]
        assert taken["task"] == lost["task"]
        late_call = await served.call(lost)
        late = await served.report(lost, reward=0)
        await served.call(taken)
        await served.report(taken, reward=1)
        trajectory = await rollout
    assert (late_call.status_code, late.status_code) == (410, 410)
    assert "its worker was lost: no model call and no heartbeat for 0.2 s" in read_message(late)
    assert (trajectory.reward, len(trajectory.turns)) == (1.0, 1)


async def test_heartbeats_keep_an_attempt():
    async with serve(lost_after_s=0.4) as served:
        rollout = served.start()
        taken = await served.take()
        await served.call(taken)
        for _ in range(8):
            await asyncio.sleep(0.1)
            assert (await served.report(taken, "heartbeat")).json() == {"status": "ok"}
        await served.report(taken, reward=1)
        assert (await rollout).reward == 1.0


async def test_after_the_last_attempt_the_rollout_has_failed():
    async with serve(lost_after_s=0.1, max_attempts=2) as served:
        rollout = served.start()
        first, second = await served.take("one"), await served.take("two")
        trajectory = await rollout
    assert first["attempt_id"] != second["attempt_id"]
    assert not served.queue._num_away, "nobody waits for them at the end of the run"
    assert trajectory.reward is None
    assert trajectory.failure.message == (
        "WorkerLostError: worker 'two' made no model call and sent no heartbeat for 0.1 s"
    )


async def test_a_worker_that_disconnects_while_it_waits_receives_no_task():
    async with serve() as served:
        waiting = asyncio.create_task(served.take("gone"))
        await until(lambda: served.queue._has_news._waiters)
        waiting.cancel()
        await until(lambda: not served.queue._has_news._waiters)
        rollout = served.start()
        taken = await served.take("here")
        await served.call(taken)
        await served.report(taken, reward=1)
        assert (await rollout).reward == 1.0


async def test_the_queue_asks_for_its_key_and_the_model_for_the_attempts():
    async with serve(api_key="right", headers={"Authorization": "Bearer right"}) as served:
        rollout = served.start()
        for wrong in ("Bearer wrong", "Bearer", "right"):
            refused = await served.client.get("/tasks/next", headers={"Authorization": wrong})
            assert refused.status_code == 401
            assert "send it as Authorization: Bearer KEY" in read_message(refused)
        taken = await served.take()
        path = f"/trajectories/{taken['attempt_id']}/reward"
        refused = await served.client.post(path, json={"reward": 1}, headers={"Authorization": "Bearer wrong"})
        assert refused.status_code == 401
        assert (await served.call(taken)).status_code == 200
        await served.report(taken, reward=1)
        assert (await rollout).reward == 1.0


FOREIGN = [
    pytest.param({"Host": "evil.example:8765"}, id="a name of the page that resolves to this machine"),
    pytest.param({"Host": "0.0.0.0:8765"}, id="an address that browsers take for this machine"),
    pytest.param({"Origin": "https://evil.example"}, id="a script of a page"),
    pytest.param({"Origin": "null"}, id="a script of a file or a sandboxed frame"),
    pytest.param({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, id="an image of a page"),
]


@pytest.mark.parametrize("headers", FOREIGN)
async def test_a_web_page_takes_no_task_and_reports_nothing(headers):
    async with serve() as served:
        rollout = served.start()
        await until(lambda: served.queue.num_waiting == 1)
        refused = await served.client.get("/tasks/next", headers=headers)
        assert refused.status_code == 403 and "key" in read_message(refused)
        assert served.queue.num_waiting == 1
        taken = await served.take()
        forged = await served.client.post(f"/trajectories/{taken['attempt_id']}/reward", json={}, headers=headers)
        assert forged.status_code == 403
        await served.call(taken)
        assert (await served.report(taken, reward=0.5)).status_code == 200
        assert (await rollout).reward == 0.5


@pytest.mark.parametrize("headers", FOREIGN)
async def test_with_a_key_the_key_decides(headers):
    async with serve(api_key="secret") as served:
        for key, status in (("wrong", 401), ("secret", 204)):
            asked = headers | {"Authorization": f"Bearer {key}"}
            reply = await served.client.get("/tasks/next", params={"wait_s": 0}, headers=asked)
            assert reply.status_code == status


async def test_the_public_name_of_the_server_is_accepted_as_its_host():
    async with serve(public_url="https://train.example.com/{rank}") as served:
        for host, status in (("train.example.com", 204), ("evil.example.com", 403)):
            reply = await served.client.get("/tasks/next", params={"wait_s": 0}, headers={"Host": host})
            assert reply.status_code == status


async def test_requests_that_fit_nothing_are_refused_with_a_sentence():
    async with serve() as served:
        found = [
            await served.client.post("/trajectories/none/reward", json={"reward": 1}),
            await served.client.post("/attempts/none/v1/chat/completions", json={}),
            await served.client.post("/v1/chat/completions", json={}),
            await served.client.delete("/tasks/next"),
            await served.client.get("/tasks/next", params={"wait_s": "long"}),
            await served.client.get("/tasks/next", params={"wait_s": 1e6}),
        ]
    assert [reply.status_code for reply in found] == [404, 404, 404, 405, 400, 400]
    assert [read_message(reply) for reply in found] == [
        "there is no such attempt: use the attempt_id of a task that you took",
        "there is no such attempt: use the attempt_id of a task that you took",
        "POST /v1/chat/completions: not found",
        "DELETE /tasks/next: method not allowed",
        "wait_s: input should be a valid number, unable to parse string as a number",
        "wait_s: input should be less than or equal to 60",
    ]


async def test_more_requests_than_the_limit_are_refused():
    async with serve(max_requests=1) as served:
        waiting = asyncio.create_task(served.client.get("/tasks/next"))
        await until(lambda: served.queue._has_news._waiters)
        refused = await served.client.get("/health")
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert "serve.max_requests=1" in read_message(refused)
        waiting.cancel()
        async with asyncio.timeout(HANG_S):  # the request ends after its wait for a task
            while (await served.client.get("/health")).status_code == 503:  # noqa: ASYNC110 - over HTTP
                await asyncio.sleep(0.01)
        assert (await served.client.get("/health")).json() == {"status": "ok", "num_waiting": 0, "num_open": 0}


def test_errors_are_answered_without_a_thread():
    """The end of the server would interrupt it, which is logged with a traceback."""
    assert all(map(asyncio.iscoroutinefunction, EXCEPTION_HANDLERS.values()))
