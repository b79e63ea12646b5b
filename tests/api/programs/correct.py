"""A user program with every form of workflow, judge and config; it is type-checked, not run."""

import functools
import logging
from collections.abc import Mapping
from typing import Any

from tunesmith import (
    AlgorithmConfig,
    ChatModel,
    DatasetConfig,
    EvalConfig,
    JudgeOutput,
    PipelineConfig,
    PreferenceConfig,
    RunConfig,
    SftConfig,
    TunerModelConfig,
    WorkflowOutput,
    WorkflowType,
    evaluate,
    export,
    measure_pass_rates,
    prefer,
    run_pipeline,
    sft,
    tune,
)
from tunesmith.config import (
    AlgorithmSection,
    ConversationDataSection,
    DatasetSection,
    LoraSection,
    ModelSection,
    SftStage,
)
from tunesmith.errors import ConfigError
from tunesmith.judges.composite import RewardPart, compose
from tunesmith.judges.numeric import judge_number
from tunesmith.tools.calculator import calculate


async def plain(task: dict[str, Any], model: ChatModel) -> WorkflowOutput:
    completion = await model([{"role": "user", "content": task["question"]}])
    return WorkflowOutput(response=completion.choices[0].message.content)


def without_async(task: dict[str, Any], model: ChatModel) -> WorkflowOutput:
    return WorkflowOutput(response=model.as_sync_openai_client())


async def with_models(task: Mapping[str, Any], model: Any, auxiliary_models: dict[str, Any]) -> WorkflowOutput:
    return WorkflowOutput(response=calculate("1 + 1"))


async def with_all(
    task: dict[str, Any], model: Any, auxiliary_models: dict[str, Any], logger: logging.Logger
) -> WorkflowOutput:
    return WorkflowOutput(reward=1.0)


async def with_turns(task: dict[str, Any], model: Any, max_turns: int) -> WorkflowOutput:
    return WorkflowOutput(reward=float(max_turns))


class Agent:
    async def __call__(self, task: dict[str, Any], model: Any, logger: logging.Logger) -> WorkflowOutput:
        return WorkflowOutput(reward=0.0)


async def judge(task: dict[str, Any], response: Any) -> JudgeOutput:
    return JudgeOutput(reward=1.0, metrics={"length": 2.0})


config = RunConfig(
    model=ModelSection(path="m", dtype="bfloat16", lora=LoraSection(r=8)),
    train_dataset=DatasetSection(path="d"),
    algorithm=AlgorithmSection(kl_coef=1e-3),
)
agents: list[WorkflowType] = [
    plain,
    without_async,
    with_models,
    with_all,
    Agent(),
    functools.partial(with_turns, max_turns=3),
]
for agent in agents:
    result = tune(config, workflow_func=agent, judge_func=judge)
tune(config, workflow_func=plain, judge_func=judge_number)
tune(config, workflow_func=plain, judge_func=compose(RewardPart(name="one", score=lambda task, transcript: 1.0)))
tune(
    workflow_func=plain,
    model=TunerModelConfig(model_path="m", max_model_len=10),
    train_dataset=DatasetConfig(path="d"),
    algorithm=AlgorithmConfig(group_size=4),
)
rewards: list[float | None] = result.history["rollout/reward_mean"]
path: str = result.model_path
model, tokenizer = result.model()
data = ConversationDataSection(path="c")
sft(SftConfig(model=ModelSection(path="m"), train_dataset=data), out="o").history.to_pandas()
prefer(PreferenceConfig(model=ModelSection(path="m"), train_dataset=data), out="o").metrics["train/loss"]
held_out = {"test": DatasetSection(path="d")}
rates: dict[str, float] = evaluate(EvalConfig(models={"a": "b"}, eval_datasets=held_out), workflow_func=plain).metrics
exported: str = export(path, out="e", formats=("hf", "gguf")).model_path
stage = SftStage(model=ModelSection(path="m"), train_dataset=data)
steps: tuple[int, ...] = run_pipeline(PipelineConfig(folder="f", stages={"sft": stage})).stages["sft"].history.steps
measure_pass_rates(config, field="rate", out="o", workflow_func=plain, judge_func=judge)
try:
    tune("run.yaml")
except ConfigError as error:
    print(error)
