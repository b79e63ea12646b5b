"""`tune_prompt` with DSPy's MIPROv2: it finds the prompt that works, and nothing that failed counts as a score."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("dspy", reason="needs DSPy, which the extra `prompt` installs")
pytest.importorskip("optuna", reason="needs Optuna, which the extra `prompt` installs")

import tunesmith
from tunesmith import DatasetConfig, JudgeOutput, PromptTuneConfig, TunerModelConfig, WorkflowOutput
from tunesmith.errors import RolloutError

NUM_TASKS = 10
MAGIC = "Say the magic word."


class Proposer:
    """A chat model that proposes prompts in turn: as plain text, and in DSPy's form."""

    def __init__(self, *prompts):
        self.prompts, self.requests = prompts, []

    async def __call__(self, messages):
        self.requests.append(messages)
        prompt = self.prompts[len(self.requests) % len(self.prompts)]
        if isinstance(prompt, Exception):
            raise prompt
        is_in_form = len(self.requests) % 2
        text = f"[[ ## proposed_instruction ## ]]\n{prompt}\n\n[[ ## completed ## ]]" if is_in_form else prompt
        return SimpleNamespace(content=[{"type": "text", "text": text}])


async def workflow(task, system_prompt):
    """The answer is right for even numbers, and with the magic prompt for all; 3 always fails."""
    await asyncio.sleep(0)
    if task["number"] == 3 or system_prompt == "Crash.":
        raise RuntimeError("boom")
    return WorkflowOutput(response="right" if system_prompt == MAGIC or task["number"] % 2 == 0 else "wrong")


async def judge(task, response):
    return JudgeOutput(reward=float(response == "right"))


@pytest.fixture
def dataset(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"number": number}) + "\n" for number in range(NUM_TASKS)))
    return DatasetConfig(path=str(path))


@pytest.fixture
def tune(dataset):
    def call(proposer, **given):
        arguments = {
            "workflow": workflow,
            "init_system_prompt": "Answer.",
            "judge_func": judge,
            "train_dataset": dataset,
            "eval_dataset": dataset,
            "config": PromptTuneConfig(optimization_level=None, num_candidates=4, num_trials=6),
        }
        return tunesmith.tune_prompt(prompt_model=proposer, **arguments | given)

    return call


def test_the_prompt_that_works_is_found(tune, capsys):
    proposer = Proposer("Be nice.", MAGIC)
    prompt, metrics = result = tune(proposer)
    assert prompt == MAGIC and result.is_improved
    assert (metrics["eval_reward_initial"], metrics["eval_reward_tuned"]) == (5 / 9, 1.0)  # the failed task is left out
    assert metrics["valset_improvement"] == pytest.approx(80.0)
    assert metrics["eval_num_failed_tuned"] == 1.0
    assert {each.prompt for each in result.candidates} == {"Answer.", "Be nice.", MAGIC}
    out, err = capsys.readouterr()
    assert "Improvement on 9 held-out tasks" in err and "prompt 1: reward" in err
    assert out == "" and "Bootstrap" not in err and "%|" not in err, "DSPy's own output"
    seen = json.dumps(proposer.requests)
    assert "Answer: right" in seen and "Answer: wrong" not in seen  # successful runs are examples
    assert "position" not in seen


def test_a_run_is_a_function_of_its_seed(tune):
    first, second = tune(Proposer("Be nice.", MAGIC)), tune(Proposer("Be nice.", MAGIC))
    assert first == second and first.candidates == second.candidates


def test_the_initial_prompt_stays_if_no_other_is_better(tune):
    result = tune(Proposer("Be nice.", "Be brief."))
    assert result.prompt == "Answer." and result.is_improved is False
    assert result.metrics["valset_improvement"] == 0.0
    assert result.describe().startswith("No improvement")


def test_a_prompt_under_which_workflows_fail_is_not_chosen(tune):
    async def negative(task, response):
        return JudgeOutput(reward=-1.0)  # so that a score of 0 for failures would win

    result = tune(Proposer("Crash.", "Crash."), judge_func=negative)
    assert result.prompt == "Answer."
    crashed = next(each for each in result.candidates if each.prompt == "Crash.")
    assert crashed.reward is None and crashed.num_failures == crashed.num_runs > 0
    assert "boom" in crashed.causes[0]


def test_a_failing_proposer_or_initial_prompt_ends_with_one_error(tune):
    with pytest.raises(RolloutError, match="the model that proposes prompts failed: ConnectionError: refused"):
        tune(Proposer(ConnectionError("refused")))
    with pytest.raises(RolloutError, match=r"(?s)the initial prompt cannot be evaluated: .* rollouts failed.*boom"):
        tune(Proposer("Be nice."), init_system_prompt="Crash.")
    for thread in [each for each in threading.enumerate() if each.name == "tunesmith-prompts"]:
        thread.join(timeout=60)
        assert not thread.is_alive()


def test_auto_levels_and_no_comparison(tune, dataset):
    config = PromptTuneConfig(compare_performance=False, eval_display_progress=False)
    result = tune(Proposer("Be nice.", MAGIC), config=config)
    assert result.prompt == MAGIC
    assert "valset_improvement" not in result.metrics and result.metrics["eval_reward_tuned"] == 1.0
    assert result.is_improved is None
    assert "eval_reward_tuned" not in tune(Proposer("Be nice."), eval_dataset=None).metrics


def test_it_may_be_called_in_a_running_loop_and_leaves_the_log_level(tune):
    before = logging.getLogger("dspy").level

    async def cell():
        return tune(Proposer("Be nice.", MAGIC))

    assert asyncio.run(cell()).prompt == MAGIC
    assert logging.getLogger("dspy").level == before


def test_local_weights_are_student_and_proposer(tune, pocket_folder):
    async def ask(task, system_prompt, model):
        messages = [{"role": "system", "content": system_prompt}, {"role": "user", "content": str(task["number"])}]
        return WorkflowOutput(response=(await model(messages)).choices[0].message.content)

    async def length(task, response):
        return JudgeOutput(reward=len(response) / 10)

    def run(seed):
        return tune(
            None,
            workflow=ask,
            judge_func=length,
            model=TunerModelConfig(model_path=pocket_folder, max_model_len=2048, max_tokens=6),
            config=PromptTuneConfig(optimization_level=None, num_candidates=3, num_trials=2, seed=seed),
            chat_model="openai",
        )

    first = run(1)
    assert first.metrics["num_failed"] == 0.0 and len(first.candidates) == 2
    assert run(1) == first
    assert run(2).candidates[1].prompt != first.candidates[1].prompt
