"""DSPy's MIPROv2 (Opsahl-Ong et al., 2024) on system prompts: the only file that imports DSPy.

DSPy is synchronous, so it runs in a thread of its own and calls the event loop of the workflows. Its own evaluation,
which scores an error as 0, is replaced: it receives mean rewards without failed runs. Only the prompt is optimized,
because a workflow has no place for DSPy's demonstrations; successful runs are shown to the model that proposes prompts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import dspy
from dspy.utils.exceptions import AdapterParseError
from openai.types.chat import ChatCompletion

from tunesmith.arguments import read_api_key
from tunesmith.compat.agentscope_config import PromptTuneConfig
from tunesmith.types import Task, Trajectory

VALIDATION_SHARE = 0.8
"""Share of the tasks that MIPROv2 evaluates prompts on; from the others it makes examples."""
MARKER = re.compile(r"\[\[ ## \w+ ## \]\]")
MAX_SINGLE_BATCH = 50
"""More tasks than this are evaluated in minibatches."""


class Search(Protocol):
    """What the optimizer calls, from its thread."""

    def run_one(self, prompt: str, position: int) -> Trajectory: ...

    def score(self, prompt: str, positions: Sequence[int]) -> float: ...

    def ask(self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> str: ...


def optimize_prompt(
    search: Search, tasks: Sequence[Task], config: PromptTuneConfig, *, initial_prompt: str, has_proposer: bool
) -> str:
    """The prompt with the best mean reward among the initial one and those that are proposed.

    With `has_proposer`, `search.ask` proposes, and otherwise the model that the config names.
    """
    model = ProposingModel(search) if has_proposer else build_litellm(config)
    optimizer = PromptOptimizer(
        search,
        metric=is_success,
        prompt_model=model,
        task_model=model,  # never called: the workflow calls its own model
        teacher_settings={"lm": model},
        auto=config.optimization_level,
        num_candidates=config.num_candidates,
        max_bootstrapped_demos=0,
        max_labeled_demos=0,
        seed=config.seed,
    )
    examples = [
        dspy.Example(task=PlacedRow(task.row, position)).with_inputs("task") for position, task in enumerate(tasks)
    ]
    with quiet(), dspy.context(adapter=LenientAdapter(use_json_adapter_fallback=False)):
        best = optimizer.compile(
            PromptProgram(search, initial_prompt),
            trainset=examples,
            num_trials=config.num_trials,
            minibatch=len(tasks) * VALIDATION_SHARE > MAX_SINGLE_BATCH,
            program_aware_proposer=False,
        )
    return str(best.prompt)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within: DSPy's log shows errors only; what it reports is in the result."""
    log = logging.getLogger("dspy")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Implementing custom LMs", category=DeprecationWarning)
            yield
    finally:
        log.setLevel(before)


def build_litellm(config: PromptTuneConfig) -> Any:
    """The model that the config names, by LiteLLM's name or on a server."""
    if config.lm_base_url is None:
        return dspy.LM(config.lm_model_name)
    api_key = read_api_key(config.lm_api_key_env, knob="lm_api_key_env") or "EMPTY"
    return dspy.LM(f"openai/{config.lm_model_name}", api_base=config.lm_base_url, api_key=api_key)


class PlacedRow(dict[str, Any]):
    """The row of a task with its position, which examples for the proposing model do not show."""

    def __init__(self, row: Mapping[str, Any], position: int) -> None:
        super().__init__(row)
        self.position = position


class PromptProgram(dspy.Module):  # type: ignore[misc]
    """The workflow as a DSPy program: the instructions of its one predictor are the system prompt."""

    def __init__(self, search: Search, prompt: str) -> None:
        super().__init__()
        self._search = search
        self.predictor = dspy.Predict(dspy.Signature("task -> answer", prompt))

    def __deepcopy__(self, memo: Any) -> PromptProgram:
        return PromptProgram(self._search, self.prompt)

    @property
    def prompt(self) -> str:
        return str(self.predictor.signature.instructions)

    def forward(self, task: PlacedRow) -> Any:
        """One run of the workflow, recorded as a call of the predictor."""
        run = self._search.run_one(self.prompt, task.position)
        prediction = dspy.Prediction(answer=run.response_text)
        if dspy.settings.trace is not None:
            inputs = {"task": json.dumps(task, ensure_ascii=False, default=str)}
            dspy.settings.trace.append((self.predictor, inputs, prediction))
        prediction.reward = run.reward
        return prediction


def is_success(example: Any, prediction: Any, trace: Any = None) -> bool:
    """Whether a run is an example for the model that proposes prompts."""
    return prediction.reward is not None and prediction.reward > 0


class PromptOptimizer(dspy.MIPROv2):  # type: ignore[misc]
    """MIPROv2 with the scores of `Search`."""

    def __init__(self, search: Search, **settings: Any) -> None:
        super().__init__(**settings)
        self._search = search

    def _optimize_prompt_parameters(
        self, program: Any, instruction_candidates: Any, demo_candidates: Any, evaluate: Any, *rest: Any
    ) -> Any:
        def score(candidate: PromptProgram, *, devset: Sequence[Any], **_: Any) -> Any:
            positions = [each.task.position for each in devset]
            return dspy.Prediction(score=self._search.score(candidate.prompt, positions), results=[])

        return super()._optimize_prompt_parameters(program, instruction_candidates, demo_candidates, score, *rest)


class ProposingModel(dspy.BaseLM):  # type: ignore[misc]
    """A language model of DSPy that asks ours."""

    def __init__(self, search: Search) -> None:
        super().__init__(model="tunesmith", cache=False)
        self._search = search

    def __deepcopy__(self, memo: Any) -> ProposingModel:
        return self

    def forward(self, prompt: str | None = None, messages: Any = None, **kwargs: Any) -> ChatCompletion:
        fields = {key: kwargs.get(key, self.kwargs.get(key)) for key in ("temperature", "max_tokens")}
        messages = messages or [{"role": "user", "content": prompt}]
        text = self._search.ask(messages, {key: value for key, value in fields.items() if value is not None})
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        reply = {"id": "1", "object": "chat.completion", "created": 0, "model": self.model, "choices": [choice]}
        return ChatCompletion.model_validate(reply)


class LenientAdapter(dspy.ChatAdapter):  # type: ignore[misc]
    """Takes a reply without DSPy's field markers as the text of the one field that was asked for: small models leave
    the markers out."""

    def parse(self, signature: Any, completion: str) -> dict[str, Any]:
        try:
            parsed: dict[str, Any] = super().parse(signature, completion)
        except AdapterParseError:
            text = MARKER.sub("", completion).strip()
            if len(signature.output_fields) != 1 or not text:
                raise
            return dict.fromkeys(signature.output_fields, text)
        return parsed
