"""Workers of two ranks know one address: tasks, model calls, reports, lost workers, keys."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from single_run import TASK, build_service

from conditions import until
from tunesmith.cluster.links import Link, Links
from tunesmith.rollout.runner import Agent, run_trajectory
from tunesmith.rollout.task_server.app import ServerLimits, serve_tasks
from tunesmith.rollout.task_server.queue import TaskQueue
from tunesmith.types import Trajectory

pytestmark = pytest.mark.anyio


@dataclass
class Served:
    """Two queues, and a worker's client of the first."""

    queues: list[TaskQueue]
    links: list[Links]
    """Of each rank."""
    urls: list[str]
    services: list[Any]
    client: httpx.AsyncClient
    agents: list[Agent]

    def start(self, rank: int, *, seed: int = 1) -> asyncio.Task[Trajectory]:
        agent, service = self.agents[rank], self.services[rank]
        return asyncio.create_task(
            run_trajectory(TASK, 0, agent=agent, model=service, auxiliary_models={}, seed=seed, order=(seed,))
        )

    async def take(self, wait_s: float = 5) -> dict[str, Any]:
        reply = await self.client.get("/tasks/next", params={"worker": "w", "wait_s": wait_s})
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def report(self, taken: dict[str, Any], kind: str = "reward", **fields: Any) -> httpx.Response:
        return await self.client.post(f"/trajectories/{taken['attempt_id']}/{kind}", json=fields)

    async def work(self, taken: dict[str, Any], reward: float) -> None:
        async with openai.AsyncOpenAI(base_url=taken["base_url"], api_key=taken["api_key"]) as client:
            await client.chat.completions.create(model=taken["model"], messages=[{"role": "user", "content": "hi"}])
        assert (await self.report(taken, reward=reward)).json() == {"status": "accepted"}

    async def wait_for_offers(self, number: int) -> None:
        async with asyncio.timeout(20):
            while (await self.client.get("/health")).json()["num_waiting"] != number:  # noqa: ASYNC110 - over HTTP
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def serve(*, lost_after_s=20.0, headers=None, **limits):
    queues = [TaskQueue(timeout_s=30, lost_after_s=lost_after_s, has_judge=False) for _ in range(2)]
    agents = [Agent(workflow=queue.run_attempt, timeout_s=30, max_attempts=2) for queue in queues]
    services = [build_service() for _ in range(2)]
    given = ServerLimits(**({"max_body_bytes": 4096, "max_requests": 64} | limits))
    ends = [Link(end, timeout_s=20) for end in socket.socketpair()]
    links = [{1: ends[0]}, {0: ends[1]}]
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for rank, (queue, service) in enumerate(zip(queues, services, strict=True)):
            served = serve_tasks(queue, service, given, rank=rank, links=links[rank])
            urls.append(await stack.enter_async_context(served))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=urls[0], headers=headers, timeout=30))
        yield Served(queues=queues, links=links, urls=urls, services=services, client=client, agents=agents)


def read_message(reply: httpx.Response) -> str:
    return reply.json()["error"]["message"]


async def test_a_worker_of_one_address_runs_the_tasks_of_both_ranks():
    async with serve() as served:
        rollouts = [served.start(rank, seed=seed) for rank in (0, 1) for seed in (1, 2)]
        await served.wait_for_offers(4)
        taken = [await served.take() for _ in rollouts]
        ports = [httpx.URL(each["base_url"]).port for each in taken]
        assert ports == [ports[0], ports[1]] * 2, "ranks with equally many attempts at work take turns"
        assert ports[0] == served.client.base_url.port != ports[1]
        assert (await served.client.get("/health")).json() == {"status": "ok", "num_waiting": 0, "num_open": 4}
        for reward, each in enumerate(taken):
            await served.work(each, float(reward))
        trajectories = [await each for each in rollouts]
        assert [each.reward for each in trajectories] == [0.0, 2.0, 1.0, 3.0]
        assert [each.failure for each in trajectories] == [None] * 4
        assert [len(each.turns) for each in trajectories] == [1] * 4
        async with asyncio.timeout(20):  # the first rank learns of the end from the other's message
            while (await served.client.get("/health")).json()["num_open"]:  # noqa: ASYNC110 - over HTTP
                await asyncio.sleep(0.01)


async def test_a_worker_that_waits_receives_another_ranks_task():
    async with serve() as served:
        waiting = asyncio.create_task(served.take())
        await until(lambda: served.queues[0]._has_news._waiters)
        rollout = served.start(1)
        taken = await waiting
        await served.work(taken, 1.0)
        assert (await rollout).reward == 1.0
        assert taken["deadline_s"] == 30


async def test_reports_are_refused_by_the_rank_of_the_attempt():
    async with serve() as served:
        rollout = served.start(1)
        taken = await served.take()
        assert (await served.report(taken, "heartbeat")).json() == {"status": "ok"}
        reply = await served.report(taken, metrics={})
        assert (reply.status_code, read_message(reply)[:16]) == (400, "reward: missing,")
        assert (await served.report(taken, reward="x" * 5000)).status_code == 413
        assert (await served.report(taken, "failure", message="no tool")).json() == {"status": "accepted"}
        assert "no tool" in (await rollout).failure.message
        reply = await served.report(taken, reward=1)
        assert (reply.status_code, read_message(reply)) == (409, "the attempt has ended: it has its report")
        late = f"/attempts/{taken['attempt_id']}/v1/models"
        assert (await served.client.get(taken["base_url"] + "/models")).status_code == 410
        reply = await served.client.get(late)
        assert reply.status_code == 404 and "base_url" in read_message(reply)


async def test_the_task_of_a_lost_worker_is_offered_again():
    async with serve(lost_after_s=0.2) as served:
        rollout = served.start(1)
        lost = await served.take()
        again = await served.take(wait_s=20)
        served.queues[1]._lost_after_s = 20
        assert again["attempt_id"] != lost["attempt_id"]
        assert (await served.report(lost, reward=5)).status_code == 410
        await served.work(again, 1.0)
        assert (await rollout).reward == 1.0


async def test_the_task_of_a_rollout_that_has_ended_is_offered_no_longer():
    async with serve() as served:
        rollout = served.start(1)
        await served.wait_for_offers(1)
        rollout.cancel()
        await served.wait_for_offers(0)


async def test_a_rank_whose_first_rank_is_gone_fails_its_rollouts():
    async with serve() as served:
        running = served.start(1)
        await served.wait_for_offers(1)
        await served.links[0][1].close()
        for trajectory in (await running, await served.start(1, seed=2)):
            assert trajectory.reward is None
            assert "the first rank no longer offers the task (another rank has ended" in trajectory.failure.message


async def test_the_attempts_of_a_lost_rank_are_offered_no_longer_and_their_reports_are_refused():
    async with serve() as served:
        rollouts = [served.start(1, seed=seed) for seed in (1, 2)]
        await served.wait_for_offers(2)
        taken = await served.take()
        await served.links[1][0].close()
        await served.wait_for_offers(0)
        assert (await served.client.get("/health")).json()["num_open"] == 0
        reply = await served.report(taken, reward=1)
        assert reply.status_code == 503 and "the rank of the attempt does not answer" in read_message(reply)
        served.queues[0].finish()  # ranks end with the run, and late workers are told so
        late = await served.report(taken, reward=1)
        assert (late.status_code, read_message(late)) == (410, "the attempt has ended: the run has ended")
        for each in rollouts:
            each.cancel()


async def test_only_the_first_rank_hands_out_and_reports_for_others_need_the_key():
    key = {"Authorization": "Bearer secret"}
    async with serve(api_key="secret", headers=key) as served:
        assert (await served.client.get(f"{served.urls[1]}/tasks/next")).status_code == 404
        rollout = served.start(1)
        taken = await served.take()
        served.client.headers.pop("authorization")
        assert (await served.report(taken, reward=1)).status_code == 401
        served.client.headers.update(key)
        await served.work(taken, 1.0)
        assert (await rollout).reward == 1.0


async def test_a_public_url_names_the_rank_of_the_task():
    async with serve(public_url="https://train.example.com/{rank}/") as served:
        rollouts = [served.start(rank) for rank in (0, 1)]
        await served.wait_for_offers(2)
        for rank in (0, 1):
            taken = await served.take()
            assert taken["base_url"] == f"https://train.example.com/{rank}/attempts/{taken['attempt_id']}/v1"
        for each in rollouts:
            each.cancel()
