"""Inside a judge: an auxiliary model on an OpenAI-compatible server, and AgentScope's metrics."""

from __future__ import annotations

import json

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse

from chat_servers import ChatServer, build_completion
from tunesmith import AlgorithmConfig, DatasetConfig, JudgeOutput, TunerModelConfig, WorkflowOutput, tune
from tunesmith.errors import ConfigError


class Elsewhere(ChatServer):
    """Always gives the same answer, and records its requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict, str]] = []
        super().__init__(self.answer)

    async def answer(self, request: Request) -> JSONResponse:
        self.requests.append((await request.json(), request.headers["authorization"]))
        return JSONResponse(build_completion("judge", "0.25"))


@pytest.fixture
def elsewhere():
    server = Elsewhere()
    yield server
    server.close()


@pytest.fixture
def run(tmp_path, pocket_folder):
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "Tom has 3 apples.", "answer": "3"}) + "\n")

    def call(judge, *overrides):
        return tune(
            workflow_func=ask,
            judge_func=judge,
            model=TunerModelConfig(model_path=pocket_folder, max_model_len=128, max_tokens=4),
            train_dataset=DatasetConfig(path=str(tmp_path), total_steps=1),
            algorithm=AlgorithmConfig(group_size=2, batch_size=1),
            overrides=(
                "rollout.chat_model=openai", "model.device=cpu", "engine.kv_cache_tokens=4096",
                f"checkpoint_root_dir={tmp_path / 'runs'}", *overrides,
            ),
        )  # fmt: skip

    return call


async def ask(task, model):
    completion = await model([{"role": "user", "content": task["question"]}])
    return WorkflowOutput(response=completion.choices[0].message.content)


async def ask_the_judge(task, response, auxiliary_models):
    completion = await auxiliary_models["critic"]([{"role": "user", "content": f"Rate: {response}"}])
    return JudgeOutput(reward=float(completion.choices[0].message.content))


def test_a_judge_calls_a_model_on_a_server_with_its_own_settings(run, elsewhere, monkeypatch):
    monkeypatch.setenv("CRITIC_KEY", "secret")
    result = run(
        ask_the_judge,
        f"auxiliary_models.critic.base_url={elsewhere.url}",
        "auxiliary_models.critic.path=judge-model",
        "auxiliary_models.critic.api_key_env=CRITIC_KEY",
        "auxiliary_models.critic.temperature=0.25",
        "auxiliary_models.critic.max_tokens=7",
        "auxiliary_models.critic.enable_thinking=false",
    )
    assert result.metrics["rollout/reward_mean"] == 0.25
    assert len(elsewhere.requests) == 2
    body, authorization = elsewhere.requests[0]
    assert authorization == "Bearer secret"
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("judge-model", 0.25, 7)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


def test_a_missing_api_key_is_named_before_a_model_loads(run, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        run(
            ask_the_judge,
            "auxiliary_models.critic.base_url=http://127.0.0.1:9/v1",
            "auxiliary_models.critic.path=m",
            "auxiliary_models.critic.api_key_env=NO_SUCH_KEY",
        )


def test_a_metric_of_agentscope_works_in_a_judge(run):
    evaluate = pytest.importorskip("agentscope.evaluate")

    class Length(evaluate.MetricBase):
        def __init__(self) -> None:
            super().__init__(name="length", metric_type=evaluate.MetricType.NUMERICAL, description="letters")

        async def __call__(self, solution: evaluate.SolutionOutput) -> evaluate.MetricResult:
            return evaluate.MetricResult(name=self.name, result=float(len(solution.output)))

    async def judge(task, response):
        solution = evaluate.SolutionOutput(success=True, output=response, trajectory=[])
        result = await Length()(solution)
        return JudgeOutput(reward=result.result, metrics={"length": result.result})

    result = run(judge)
    assert result.metrics["rollout/length/mean"] == result.metrics["rollout/reward_mean"] > 0
