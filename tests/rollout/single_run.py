"""One run of a workflow against a scripted engine, as the tests of the runner need it."""

from __future__ import annotations

from chat_templates import QWEN25
from fakes import FakeEngine, Script, build_chat_tokenizer, say
from tunesmith.chat.renderer import Renderer
from tunesmith.rollout.runner import Agent, run_trajectory
from tunesmith.rollout.service import ModelService
from tunesmith.types import Sampling, Task, Trajectory, WorkflowOutput

TOKENIZER = build_chat_tokenizer(QWEN25)
TASK = Task(task_id="train/0", index=0, row={"question": "q", "tags": ["a"]})


def build_service(script: Script | None = None, **options) -> ModelService:
    engine = FakeEngine(TOKENIZER, script or say(TOKENIZER, "fine"))
    return ModelService(engine, Renderer(TOKENIZER), model_name="m", sampling=Sampling(max_tokens=50), **options)


async def run(workflow, judge=None, *, service=None, auxiliary_models=None, timeout_s=60.0, grace_s=0.05) -> Trajectory:
    return await run_trajectory(
        TASK,
        3,
        agent=Agent(workflow=workflow, judge=judge, timeout_s=timeout_s, cancel_grace_s=grace_s),
        model=service or build_service(),
        auxiliary_models=auxiliary_models or {},
        seed=1,
    )


async def call_model(model) -> str:
    completion = await model([{"role": "user", "content": "hi"}])
    return completion.choices[0].message.content


async def answer(task, model):
    return WorkflowOutput(reward=0.5, response=await call_model(model), metrics={"a": 1.0, "b": 2.0})
