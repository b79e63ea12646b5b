"""An evaluation while groups are in flight: their model calls wait, and nothing else of theirs changes."""

from __future__ import annotations

import asyncio
import time

import pytest

from conditions import until
from tunesmith.chat.renderer import Renderer
from tunesmith.config import EngineSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.model.pocket import build_pocket_model, build_pocket_tokenizer
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.group import GroupRequest, build_requests
from tunesmith.rollout.progress import RolloutProgress
from tunesmith.rollout.runner import Agent
from tunesmith.rollout.service import ModelService, UnrecordedModel
from tunesmith.rollout.workers.local import LocalWorker
from tunesmith.types import Sampling, Task, Trajectory, WorkflowOutput

TOKENIZER = build_pocket_tokenizer()
MODEL = build_pocket_model(TOKENIZER, hidden_size=96, num_layers=2)
use_plan_attention(MODEL)
MESSAGES = [{"role": "user", "content": "hi"}]


def build_service() -> ModelService:
    engine = LocalEngine(MODEL, TOKENIZER, EngineSection(kv_cache_tokens=2000), max_model_len=400)
    return ModelService(engine, Renderer(TOKENIZER), model_name="m", sampling=Sampling(max_tokens=4))


async def evaluate_in_flight(
    workflow, begun: asyncio.Event, *, is_paused: bool, **models
) -> tuple[Trajectory, Trajectory, float]:
    """A rollout of task "train" in flight, one of task "eval" of an evaluation once `begun` is set, and the seconds
    that do not count for the first."""
    service = build_service()
    agent = Agent(workflow=workflow, timeout_s=60, cancel_grace_s=1)
    engine = service.recorder.engine
    auxiliary = {name: build(service) for name, build in models.items()}
    worker = LocalWorker(
        Actors(
            engine=engine, model=service, service=service, agent=agent, max_concurrency=2, auxiliary_models=auxiliary
        ),
        max_staleness=1,
    )
    await worker.open(RolloutProgress(), lambda: None)
    await worker.set_version(0)
    train = Task(task_id="train", index=0, row={"kind": "train"})
    worker.start([GroupRequest(number=0, task=train, size=1, seed=(1, "in flight", 0))])
    await begun.wait()
    if is_paused:
        worker.pause()
    requests = build_requests([Task(task_id="eval", index=0, row={"kind": "eval"})], size=1, seed=3)
    (evaluated,) = await worker.evaluate(requests, policy_version=0)
    if is_paused:
        await worker.set_version(0)
    await until(lambda: worker.finished)
    (finished,) = worker.take([0])
    await worker.close()
    return finished.group.trajectories[0], evaluated.trajectories[0], worker.groups.watchdog.blocked_s


@pytest.mark.parametrize("is_paused", [True, False])
def test_an_evaluation_does_not_count_toward_the_time_limit_of_rollouts_in_flight(is_paused: bool) -> None:
    duration_s, started = 0.5, time.monotonic()

    async def run() -> tuple[Trajectory, Trajectory, float]:
        begun = asyncio.Event()

        async def workflow(task, model):
            await model(MESSAGES)
            begun.set()
            if task["kind"] == "train":
                await model(MESSAGES)  # waits for the end of the evaluation
            else:
                await asyncio.sleep(duration_s)
            return WorkflowOutput(reward=1.0)

        return await evaluate_in_flight(workflow, begun, is_paused=is_paused)

    trained, evaluated, uncounted_s = run_lockstep(run())
    assert trained.reward == evaluated.reward == 1.0
    assert duration_s <= uncounted_s <= time.monotonic() - started


def test_calls_of_an_opponent_in_flight_wait_for_the_end_of_an_evaluation() -> None:
    """The opponent is the policy itself, so its calls would share the evaluation's batches."""
    events: list[str] = []

    async def run() -> tuple[Trajectory, Trajectory, float]:
        begun, evaluating = asyncio.Event(), asyncio.Event()

        async def workflow(task, model, auxiliary_models):
            await model(MESSAGES)
            begun.set()
            if task["kind"] == "train":
                await evaluating.wait()
                await auxiliary_models["opponent"](MESSAGES)
                events.append("opponent")
            else:
                evaluating.set()
                for _ in range(5):
                    await auxiliary_models["opponent"](MESSAGES)
                events.append("evaluation")
            return WorkflowOutput(reward=1.0)

        return await evaluate_in_flight(workflow, begun, is_paused=True, opponent=UnrecordedModel)

    trained, evaluated, _ = run_lockstep(run())
    assert events == ["evaluation", "opponent"]
    assert trained.reward == evaluated.reward == 1.0
