"""Live sessions over HTTP: opened by requests, ended by feedback, dropped without it, taken by rollouts."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
import pytest
from single_run import TASK, build_service

from tunesmith.rollout.runner import Agent, run_trajectory
from tunesmith.rollout.task_server.app import ServerLimits, serve_live
from tunesmith.rollout.task_server.live import LiveSessions

pytestmark = pytest.mark.anyio

BODY = {"messages": [{"role": "user", "content": "hi"}]}


class Served:
    def __init__(self, sessions, service, client):
        self.sessions, self.service, self.client = sessions, service, client

    async def call(self, session_id="s", headers=(), **options):
        sent = {"X-Session-Id": session_id} | dict(headers)
        return await self.client.post("/v1/chat/completions", json=BODY, headers=sent, **options)

    async def reward(self, session_id="s", **fields):
        return await self.client.post(f"/sessions/{session_id}/reward", json={"reward": 1} | fields)

    async def run(self):
        agent = Agent(workflow=self.sessions.run_session, timeout_s=60)
        return await run_trajectory(TASK, 0, agent=agent, model=self.sessions, auxiliary_models={}, seed=1)


@contextlib.asynccontextmanager
async def serve(*, feedback_timeout_s=60.0, max_sessions=8, headers=None, **limits):
    sessions = LiveSessions(seed=1, feedback_timeout_s=feedback_timeout_s, max_sessions=max_sessions)
    service = build_service()
    given = {"max_body_bytes": 4096, "max_requests": 64} | limits
    async with (
        serve_live(sessions, service, ServerLimits(**given)) as url,
        httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as client,
    ):
        yield Served(sessions, service, client)


def read_error(reply):
    return reply.status_code, reply.json()["error"]["message"]


async def test_a_rollout_takes_the_calls_and_the_feedback_of_one_session():
    async with serve() as served:
        rollout = asyncio.create_task(served.run())
        await served.call("one")
        await served.call("two")
        by_path = await served.client.post("/sessions/one/v1/chat/completions", json=BODY)
        assert by_path.json()["choices"][0]["message"]["content"] == "fine"
        reply = await served.reward("one", reward=0.25, metrics={"stars": 4}, response="thanks")
        assert reply.json() == {"status": "accepted"}
        trajectory = await rollout
        assert (await served.client.get("/health")).json() == {"status": "ok", "num_open": 1, "num_scored": 0}
        assert (await served.client.get("/v1/models")).json()["data"][0]["id"] == "m"
    assert (trajectory.reward, trajectory.response_text, trajectory.metrics) == (0.25, "thanks", {"stars": 4.0})
    assert len(trajectory.turns) == 2


async def test_calls_in_flight_end_before_a_rollout_takes_feedback_that_is_there():
    async with serve() as served:
        await served.call("scored")
        await served.reward("scored")
        started, finish = asyncio.Event(), asyncio.Event()
        generate = served.service.recorder.engine.generate

        async def generate_late(*arguments, **options):
            started.set()
            await finish.wait()
            return await generate(*arguments, **options)

        served.service.recorder.engine.generate = generate_late
        call = asyncio.create_task(served.call("waiting"))
        await started.wait()
        rollout = asyncio.create_task(served.run())
        done, _ = await asyncio.wait({rollout}, timeout=0.2)
        assert not done
        later = asyncio.create_task(served.call("later"))  # it does not delay the rollout
        finish.set()
        assert (await call).status_code == 200
        assert (await rollout).reward == 1.0
        assert (await later).status_code == 200


async def test_feedback_ends_a_session_and_a_later_call_opens_a_new_one():
    async with serve() as served:
        await served.call()
        await served.reward()
        assert read_error(await served.reward()) == (409, "the session has its feedback, and no model call since")
        await served.call()
        await served.reward(reward=0)
        trajectories = [await served.run(), await served.run()]
    assert [(each.reward, len(each.turns)) for each in trajectories] == [(1.0, 1), (0.0, 1)]


async def test_a_session_without_feedback_is_dropped_and_counted():
    async with serve(feedback_timeout_s=0.2) as served:
        await served.call()
        for _ in range(100):
            if served.sessions.num_open == 0:
                break
            await asyncio.sleep(0.05)
        status, message = read_error(await served.reward())
        stats = served.service.recorder.compute_stats()
    assert status == 404
    assert message == "no session of this id waits for feedback: it never existed, or was dropped"
    assert stats["rollout/num_dropped_sessions"] == 1


async def test_beyond_the_maximum_the_session_with_the_oldest_call_is_dropped():
    async with serve(max_sessions=2) as served:
        for session_id in ("one", "two", "one", "three"):
            await served.call(session_id)
        statuses = [(await served.reward(each)).status_code for each in ("one", "two", "three")]
    assert statuses == [200, 404, 200]


async def test_requests_without_a_session_or_with_a_wrong_reward_are_refused():
    async with serve() as served:
        status, message = read_error(await served.client.post("/v1/chat/completions", json=BODY))
        assert status == 400
        assert "send the header X-Session-Id" in message
        unknown = await served.client.post("/v1/embeddings", json=BODY, headers={"X-Session-Id": "s"})
        assert read_error(unknown) == (404, "POST /v1/embeddings: not found")
        assert (
            await served.client.post("/v1/chat/completions", json={}, headers={"X-Session-Id": "s"})
        ).status_code == 400
        assert read_error(await served.reward()) == (409, "the session has no completion to give feedback on")
        await served.call()
        assert read_error(await served.reward(reward=None)) == (400, "reward: missing; post a number")
        assert (await served.reward()).status_code == 200


async def test_a_conversation_whose_calls_were_all_refused_takes_no_feedback():
    """It would be a failed rollout, and enough of them end the run."""
    async with serve() as served:
        served.service.recorder.engine.max_model_len = 2
        assert (await served.call()).status_code == 400
        assert read_error(await served.reward()) == (409, "the session has no completion to give feedback on")
        served.service.recorder.engine.max_model_len = 1000
        await served.call()
        assert (await served.reward()).status_code == 200
        assert len((await served.run()).turns) == 1


async def test_names_of_metrics_that_no_tracker_can_write_are_replaced():
    async with serve() as served:
        await served.call()
        body = '{"reward": 1, "metrics": {"stars \\ud800": 4}}'
        assert (await served.client.post("/sessions/s/reward", content=body)).status_code == 200
        assert (await served.run()).metrics == {"stars \ufffd": 4.0}


async def test_every_request_asks_for_the_key():
    async with serve(api_key="right", headers={"Authorization": "Bearer right"}) as served:
        wrong = {"Authorization": "Bearer wrong", "X-Session-Id": "s"}
        assert (await served.client.post("/v1/chat/completions", json=BODY, headers=wrong)).status_code == 401
        assert (await served.call()).status_code == 200
        assert (await served.client.post("/sessions/s/reward", json={"reward": 1}, headers=wrong)).status_code == 401
        assert (await served.reward()).status_code == 200


async def test_anthropics_clients_send_the_key_as_x_api_key():
    async with serve(api_key="right") as served:
        for key, status in (("right", 200), ("wrong", 401)):
            headers = {"X-API-Key": key, "X-Session-Id": "s"}
            body = BODY | {"max_tokens": 4}
            assert (await served.client.post("/v1/messages", json=body, headers=headers)).status_code == status


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "http://localhost:3000"}])
async def test_a_web_page_opens_no_session_and_forges_no_feedback(headers):
    async with serve() as served:
        assert (await served.call("page", headers)).status_code == 403
        assert served.sessions.num_open == 0
        assert (await served.call()).status_code == 200
        forged = await served.client.post("/sessions/s/reward", json={"reward": 1}, headers=headers)
        assert forged.status_code == 403 and served.sessions.num_scored == 0


async def test_after_the_run_calls_are_refused():
    async with serve() as served:
        served.sessions.finish()
        assert read_error(await served.call()) == (410, "the run has ended: it serves no model any more")
