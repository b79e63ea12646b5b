"""Held-out tasks that are training tasks are counted; fields that only the training set has do not matter."""

from __future__ import annotations

import numpy as np

from tunesmith.commands.tune.plan import describe_overlaps
from tunesmith.tasks.contamination import count_shared_tasks
from tunesmith.types import Task


def tasks_of(*rows):
    return [Task(task_id=f"t/{index}", index=index, row=row) for index, row in enumerate(rows)]


TRAIN = tasks_of(
    {"question": "How many apples?", "answer": "4", "rate": 0.5},
    {"question": "How many pears?", "answer": "4", "rate": 0.5},
    {"question": "Which one?", "choices": ["a", "b"], "answer": "a"},
)


def test_equal_rows_are_counted_once_and_equal_answers_are_not():
    held_out = tasks_of(
        {"question": "How many apples?", "answer": "4"},
        {"question": "How many plums?", "answer": "4"},
        {"question": "How many pears?", "answer": "5"},
        {"question": "Which one?", "choices": ["a", "b"], "answer": "a"},
        {"question": "Which one?", "choices": ["a", "c"], "answer": "a"},
        {"problem": "How many apples?", "answer": "4"},
        {"number": 3},
    )
    assert count_shared_tasks([*TRAIN, *TRAIN], held_out) == 2
    assert count_shared_tasks(TRAIN, []) == count_shared_tasks([], held_out) == 0


def test_the_note_names_the_set():
    (note,) = describe_overlaps(TRAIN, {"test": TRAIN[:2], "other": tasks_of({"question": "x"})})
    assert note.startswith("eval_datasets.test: 2 of 2 tasks are training tasks too")


def test_texts_that_all_tasks_have_do_not_compare_every_pair():
    compared = []

    class Answer(str):
        __hash__ = str.__hash__

        def __eq__(self, other):
            compared.append(other)
            return str(self) == str(other)

    rows = [{"system": "Answer with a number. " * 9, "question": Answer(f"{number} apples?")} for number in range(60)]
    assert count_shared_tasks(tasks_of(*rows), tasks_of(*rows)) == 60
    assert len(compared) < 600


def test_values_without_a_truth_are_compared_by_their_text():
    rows = [{"question": "How many?", "values": np.array(values)} for values in ([1, 2], [1, 3])]
    assert count_shared_tasks(tasks_of(*rows), tasks_of(rows[0])) == 1
