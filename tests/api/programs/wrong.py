"""A user program with mistakes that a type checker finds; the error of each marked line contains its comment."""

from typing import Any

from tunesmith import JudgeOutput, RunConfig, WorkflowOutput, sft, tune
from tunesmith.config import AlgorithmSection, LoraSection, ModelSection


async def without_model(task: dict[str, Any]) -> WorkflowOutput:
    return WorkflowOutput()


async def with_text(task: dict[str, Any], model: Any) -> str:
    return ""


async def with_question(task: str, model: Any) -> WorkflowOutput:
    return WorkflowOutput()


async def with_other_name(task: dict[str, Any], llm: Any) -> WorkflowOutput:
    return WorkflowOutput()


async def with_model(task: dict[str, Any], model: Any) -> JudgeOutput:
    return JudgeOutput(reward=1.0)


def plain_judge(task: dict[str, Any], response: Any) -> JudgeOutput:
    return JudgeOutput(reward=1.0)


async def with_number(task: dict[str, Any], response: Any) -> float:
    return 1.0


config = RunConfig(model=ModelSection(path="m"))
tune(config, workflow_func=without_model)  # error: Argument "workflow_func" to "tune" has incompatible type
tune(config, workflow_func=with_text)  # error: Coroutine[Any, Any, str]]"; expected "Workflow |
tune(config, workflow_func=with_question)  # error: "Callable[[str, Any], Coroutine
tune(config, workflow_func=with_other_name)  # error: Argument "workflow_func" to "tune" has incompatible type
tune(config, judge_func=with_model)  # error: Argument "judge_func" to "tune" has incompatible type
tune(config, judge_func=plain_judge)  # error: "Callable[[dict[str, Any], Any], JudgeOutput]"; expected
tune(config, judge_func=with_number)  # error: Coroutine[Any, Any, float]]"; expected "Judge |
sft(config, out="sft")  # error: Argument 1 to "sft" has incompatible type "RunConfig"
AlgorithmSection(kl_coef="high")  # error: Argument "kl_coef" to "AlgorithmSection" has incompatible type "str"
AlgorithmSection(kl_estimator="k9")  # error: incompatible type "Literal['k9']"
ModelSection(path="m", dtype="float8")  # error: expected "Literal['auto', 'float32', 'bfloat16']"
ModelSection(path="m", lora=LoraSection(rank=8))  # error: Unexpected keyword argument "rank" for "LoraSection"
metric = tune(config).metric  # error: "TuneResult" has no attribute "metric"
