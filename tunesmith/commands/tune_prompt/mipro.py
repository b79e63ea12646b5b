"""DSPy's MIPROv2 (Opsahl-Ong et al., 2024) on system prompts: the only file that imports DSPy.

DSPy is synchronous, so it runs in a thread of its own and calls the event loop of the workflows. Its own evaluation,
which scores an error as 0, is replaced: it receives mean rewards without failed runs. Only the prompt is optimized,
because a workflow has no place for DSPy's demonstrations; successful runs are shown to the model that proposes prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import threading
import warnings
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

import dspy
from dspy.utils.exceptions import AdapterParseError
from openai.types.chat import ChatCompletion

from tunesmith.arguments import read_api_key
from tunesmith.commands.tune_prompt.prompt_runs import PromptRuns, Teacher
from tunesmith.compat.agentscope_config import PromptTuneConfig
from tunesmith.environments.sets.random_state import silence
from tunesmith.errors import RolloutError
from tunesmith.types import Trajectory

T = TypeVar("T")

VALIDATION_SHARE = 0.8
"""Share of the tasks that MIPROv2 evaluates prompts on; from the others it makes examples."""
MARKER = re.compile(r"\[\[ ## \w+ ## \]\]")
MAX_SINGLE_BATCH = 50
"""More tasks than this are evaluated in minibatches."""


class _StoppedError(BaseException):
    """Ends the optimizer's thread; DSPy catches every Exception."""


class LoopSearch:
    """Runs the optimizer in a thread, and what it calls on the event loop. The first error ends the optimization."""

    def __init__(self, loop: asyncio.AbstractEventLoop, runs: PromptRuns, teacher: Teacher | None) -> None:
        self._loop = loop
        self.runs = runs
        self.teacher = teacher
        self._is_stopped = False
        self._error: BaseException | None = None

    def run_one(self, prompt: str, position: int) -> Trajectory:
        return self._call(self.runs.run(prompt, [position]))[0]

    def score(self, prompt: str, positions: Sequence[int]) -> float:
        return self._call(self.runs.score(prompt, positions))

    def ask(self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> str:
        assert self.teacher is not None, "prompts are proposed through LiteLLM"
        return self._call(self.teacher.ask(messages, fields))

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if self._is_stopped:  # interrupted
            work.close()
            raise _StoppedError
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except BaseException as error:
            self._error = self._error or error
            raise _StoppedError from error

    async def optimize(self, config: PromptTuneConfig, initial_prompt: str) -> str:
        """The best prompt that the optimizer finds."""
        found: Future[str] = Future()

        def work() -> None:
            with contextlib.suppress(InvalidStateError):  # the search was interrupted
                try:
                    prompt = optimize_prompt(self, config, initial_prompt)
                except _StoppedError:
                    found.set_exception(self._error)
                except Exception as raised:  # noqa: BLE001 - raised again on the event loop
                    error = RolloutError(f"DSPy found no prompt: {type(raised).__name__}: {raised}")
                    error.__cause__ = raised
                    found.set_exception(error)
                else:
                    found.set_result(prompt)

        thread = threading.Thread(target=work, name="tunesmith-prompts", daemon=True)
        try:
            with silence(thread):  # DSPy has no switch for its progress bars
                thread.start()
                return await asyncio.wrap_future(found)
        finally:
            self._is_stopped = True


def optimize_prompt(search: LoopSearch, config: PromptTuneConfig, initial_prompt: str) -> str:
    """The prompt with the best mean reward among the initial one and those that are proposed, by the teacher of the
    search or the model that the config names."""
    tasks = search.runs.tasks
    model = build_litellm(config) if search.teacher is None else ProposingModel(search)
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

    def __init__(self, search: LoopSearch, prompt: str) -> None:
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
    """MIPROv2 with the scores of `LoopSearch`."""

    def __init__(self, search: LoopSearch, **settings: Any) -> None:
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

    def __init__(self, search: LoopSearch) -> None:
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
