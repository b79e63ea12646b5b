"""Rows are held out by prompt: no question has trajectories on both sides."""

from __future__ import annotations

import pytest

from tunesmith.commands.sft.conversations import ConversationReader
from tunesmith.commands.sft.plan import count_rows, hold_out_rows
from tunesmith.config import SftConfig
from tunesmith.model.pocket import build_pocket_tokenizer

SECTIONS = {"model": {"path": "m", "max_model_len": 200, "lora": {}}, "train_dataset": {"path": "t"}}


def ask(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def split(rows, fraction, seed=0):
    samples = ConversationReader(build_pocket_tokenizer()).read(rows, max_model_len=200)
    config = SftConfig(**SECTIONS, eval_fraction=fraction, seed=seed)
    return [sorted({each.group_index for each in part}) for part in hold_out_rows(samples, config)]


@pytest.mark.parametrize("seed", range(5))
def test_trajectories_of_one_question_stay_together(seed):
    rows = [ask(f"{number} apples?", f"answer {answer}") for answer in range(4) for number in range(5)]
    train, held_out = split(rows, 0.2, seed)
    assert len(held_out) == 4 and len({row % 5 for row in held_out}) == 1
    assert sorted(train + held_out) == list(range(20))


def test_rows_of_different_prompts_and_texts_are_split_one_by_one():
    rows = [ask(f"{number} apples?", "a") for number in range(5)] + [{"text": f"text {n}"} for n in range(5)]
    assert [len(part) for part in split(rows, 0.3)] == [7, 3]


def test_rows_that_all_have_one_prompt_are_split_one_by_one():
    assert [len(part) for part in split([ask("a joke", f"joke {n}") for n in range(10)], 0.3)] == [7, 3]


@pytest.mark.parametrize("seed", range(5))
def test_prompt_with_most_of_the_rows_is_trained(seed):
    rows = [ask("a joke", f"joke {n}") for n in range(36)] + [ask(f"{n} apples?", "a") for n in range(4)]
    _, held_out = split(rows, 0.1, seed)
    assert held_out == [36, 37, 38, 39]


def test_few_prompts_with_many_rows_are_split_one_by_one():
    rows = [ask(("a joke", "a poem")[n % 2], f"{n}") for n in range(20)]
    assert [len(part) for part in split(rows, 0.1)] == [18, 2]


def test_fraction_of_zero_holds_nothing_out():
    samples = ConversationReader(build_pocket_tokenizer()).read([ask("a", "b")], max_model_len=200)
    train, held_out = hold_out_rows(samples, SftConfig(**SECTIONS))
    assert (count_rows(train), held_out) == (1, [])
