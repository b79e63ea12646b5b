"""The records that packages exchange: every one has an example, and the examples are one rollout that fits together."""

from __future__ import annotations

import dataclasses
import doctest

from pydantic import BaseModel

from tunesmith import types


def list_records() -> list[type]:
    """The records in the order of the file, in which later examples use earlier ones."""
    found = [each for each in vars(types).values() if isinstance(each, type) and each.__module__ == types.__name__]
    return [each for each in found if dataclasses.is_dataclass(each) or issubclass(each, BaseModel)]


def test_the_example_of_every_record_runs():
    namespace = dict(vars(types))
    runner = doctest.DocTestRunner()
    without = []
    for record in list_records():
        example = doctest.DocTestParser().get_doctest(record.__doc__ or "", namespace, record.__name__, None, None)
        if not example.examples and record is not types.DeferredTokens:  # a callback, not a value
            without.append(record.__name__)
        runner.run(example, clear_globs=False)
        namespace.update(example.globs)
    assert runner.failures == 0
    assert not without


def test_the_examples_are_of_one_rollout():
    namespace = dict(vars(types))
    for record in list_records():
        for each in doctest.DocTestParser().get_examples(record.__doc__ or ""):
            exec(each.source, namespace)
    turn, sample = namespace["turn"], namespace["sample"]
    completion = namespace["completion"]
    assert turn.prompt_ids + turn.sampled_ids == sample.token_ids
    assert (completion.sampled_ids, completion.logprobs) == (turn.sampled_ids, turn.logprobs)
    assert tuple(index for index, is_sampled in enumerate(sample.is_sampled) if is_sampled) == (5, 6)
    assert (namespace["span"].start, namespace["span"].end) == (len(turn.prompt_ids), len(sample.token_ids))
