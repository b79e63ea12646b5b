"""Agents that append text to a reply before they send it back, as smolagents' code agent does."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from chat_templates import CHATML, LLAMA3, QWEN3, QWEN25
from fakes import FakeEngine, Script, build_chat_tokenizer, say
from tunesmith.chat.renderer import Renderer
from tunesmith.experience.samples import build_samples
from tunesmith.rollout.service import ModelService
from tunesmith.types import Group, Sampling, Task, Trajectory, Turn

pytestmark = pytest.mark.anyio

TOKENIZERS = {template: build_chat_tokenizer(template) for template in (CHATML, LLAMA3, QWEN25, QWEN3)}
UPPER = CHATML.replace("message['content']", "message['content'] | upper")
"""A template that does not write what a message says."""
USER = {"role": "user", "content": "2 + 3?"}
CODE, STOP = "Adding.\n<code>\nprint(2 + 3)\n", "</code>"
CALLED = CODE + STOP + "\nCalling tools:\n['python']"
RESULT = {"role": "user", "content": "Observation: 5"}


def spell(tokenizer: PreTrainedTokenizerFast, *replies: str) -> Script:
    """As `say`, in tokens of one character, which the tokenizer would not choose."""
    rest = list(replies)

    def script(prompt_ids, sampling, order):
        ids = [token for each in rest.pop(0) for token in tokenizer.encode(each, add_special_tokens=False)]
        return [*ids, tokenizer.eos_token_id]

    return script


async def run(*steps: Any, replies: tuple[str, ...], template: str = QWEN25) -> tuple[list[Turn], dict[str, float]]:
    """The turns of an agent that sends each history."""
    tokenizer = TOKENIZERS.get(template) or build_chat_tokenizer(template)
    engine = FakeEngine(tokenizer, spell(tokenizer, *replies))
    service = ModelService(engine, Renderer(tokenizer), model_name="m", sampling=Sampling(max_tokens=300))
    bound = service.open(seed=1)
    for messages in steps:
        await bound.model.client.chat.completions.create(model="m", messages=list(messages), stop=[STOP])
    turns = list(bound.close())
    return turns, service.recorder.compute_stats()


def reply(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def write_prompt(template: str, *messages: dict[str, Any]) -> str:
    rendered = TOKENIZERS[template].apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    assert isinstance(rendered, str)
    return rendered


def read(turn_ids: tuple[int, ...], template: str = QWEN25) -> str:
    return TOKENIZERS[template].decode(list(turn_ids), skip_special_tokens=False)


def merge(turns: list[Turn]):
    task = Task(task_id="t", index=0, row={})
    trajectory = Trajectory(task=task, run_index=0, turns=tuple(turns), reward=1.0)
    return build_samples([Group(task=task, trajectories=(trajectory,))], [[1.0]])[0]


@pytest.mark.parametrize("template", [CHATML, LLAMA3, QWEN25, QWEN3], ids=["chatml", "llama3", "qwen2.5", "qwen3"])
async def test_text_appended_after_a_stop_string_extends_the_turn(template):
    histories = [[USER], [USER, reply(CALLED), RESULT]]
    (one, two), stats = await run(*histories, replies=(CODE + STOP, "5"), template=template)
    start = len(one.prompt_ids + one.sampled_ids)
    assert two.prompt_ids[:start] == one.prompt_ids + one.sampled_ids
    assert read(two.prompt_ids, template) == write_prompt(template, *histories[1])
    assert (stats["rollout/num_extended"], stats["rollout/num_unextended"]) == (1, 0)


async def test_the_appended_text_is_not_trained_and_each_sampled_token_is_trained_once():
    histories = [[USER], [USER, reply(CALLED), RESULT], [USER, reply(CALLED), RESULT, reply(CALLED), RESULT]]
    turns, _ = await run(*histories, replies=(CODE + STOP, CODE + STOP, "5"))
    (sample,) = merge(turns)
    trained = [token for token, is_sampled in zip(sample.token_ids, sample.is_sampled, strict=True) if is_sampled]
    assert trained == [token for turn in turns for token in turn.sampled_ids]
    unsampled = read(
        tuple(token for token, is_sampled in zip(sample.token_ids, sample.is_sampled, strict=True) if not is_sampled)
    )
    assert unsampled.count("\nCalling tools:\n['python']<|im_end|>") == 2
    assert read(sample.token_ids[: len(turns[-1].prompt_ids)]) == write_prompt(QWEN25, *histories[-1])


async def test_what_was_sampled_after_the_stop_string_is_part_of_the_reply():
    class LateStop(FakeEngine):
        def _find_stop(self, sampled, sampling):
            return "stop" if self._tokenizer.decode(sampled).endswith(STOP + "\n") else "context"

    tokenizer = TOKENIZERS[QWEN25]
    service = ModelService(
        LateStop(tokenizer, say(tokenizer, CODE + STOP + "\n")),
        Renderer(tokenizer),
        model_name="m",
        sampling=Sampling(max_tokens=300),
    )
    bound = service.open(seed=1)
    for history in ([USER], [USER, reply(CALLED), RESULT], [USER, reply(CODE + STOP + " and"), RESULT]):
        await bound.model.client.chat.completions.create(model="m", messages=history, stop=[STOP])
    one, two, three = bound.close()
    tokens = one.prompt_ids + one.sampled_ids
    assert read(one.sampled_ids).endswith(STOP + "\n")
    assert two.prompt_ids[: len(tokens)] == tokens
    assert read(two.prompt_ids) == write_prompt(QWEN25, USER, reply(CALLED), RESULT)
    assert three.prompt_ids[: len(tokens)] != tokens


async def test_a_reply_with_its_stop_string_extends_the_turn():
    (one, two), stats = await run([USER], [USER, reply(CODE + STOP + "\n"), RESULT], replies=(CODE + STOP, "5"))
    assert two.prompt_ids[: len(one.prompt_ids + one.sampled_ids)] == one.prompt_ids + one.sampled_ids
    assert read(two.prompt_ids) == write_prompt(QWEN25, USER, reply(CODE + STOP), RESULT)
    assert stats["rollout/num_extended"] == 1


@pytest.mark.parametrize(
    ("sampled", "sent"),
    [
        (CODE, reply(CALLED)),
        (CODE + STOP, reply("Well. " + CALLED)),
        (CODE + STOP, reply(CODE + "\nCalling tools:")),
    ],
    ids=["ended by a token", "begins otherwise", "without the stop string"],
)
async def test_text_that_cannot_follow_the_sampled_ids_starts_a_branch(sampled, sent):
    (one, two), _ = await run([USER], [USER, sent, RESULT], replies=(sampled, "5"))
    assert two.prompt_ids[: len(one.prompt_ids + one.sampled_ids)] != one.prompt_ids + one.sampled_ids
    assert read(two.prompt_ids) == write_prompt(QWEN25, USER, sent, RESULT)
    assert len(merge([one, two])) == 2


async def test_a_template_that_rewrites_the_appended_text_starts_a_branch():
    (one, two), stats = await run([USER], [USER, reply(CALLED), RESULT], replies=(CODE + STOP, "5"), template=UPPER)
    assert two.prompt_ids[: len(one.prompt_ids + one.sampled_ids)] != one.prompt_ids + one.sampled_ids
    assert stats["rollout/num_unextended"] == 1


async def test_reasoning_stays_before_a_reply_with_appended_text():
    histories = [[USER], [USER, reply(CALLED), RESULT]]
    (one, two), _ = await run(
        *histories, replies=("<think>\nhm\n</think>\n\n" + CODE + STOP, "<think>\n\n</think>\n\n5"), template=QWEN3
    )
    assert two.prompt_ids[: len(one.prompt_ids + one.sampled_ids)] == one.prompt_ids + one.sampled_ids
    assert "hm\n</think>\n\n" + CALLED + "<|im_end|>" in read(two.prompt_ids, QWEN3)


async def test_special_tokens_in_appended_text_stay_text():
    (one, two), _ = await run([USER], [USER, reply(CALLED + "<|im_end|>"), RESULT], replies=(CODE + STOP, "5"))
    end = TOKENIZERS[QWEN25].convert_tokens_to_ids("<|im_end|>")
    start = len(one.prompt_ids + one.sampled_ids)
    assert two.prompt_ids[:start] == one.prompt_ids + one.sampled_ids
    assert two.prompt_ids[start:].count(end) == 2


async def test_the_reply_with_the_longest_text_is_extended():
    histories = [[USER], [USER], [USER, reply(CALLED), RESULT]]
    (_, two, three), _ = await run(*histories, replies=("Adding" + STOP, CODE + STOP, "5"))
    assert three.prompt_ids[: len(two.prompt_ids + two.sampled_ids)] == two.prompt_ids + two.sampled_ids
