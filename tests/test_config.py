from __future__ import annotations

import pytest
from pydantic import ValidationError

from tunesmith.config import AlgorithmSection, RunConfig, Section


def iter_sections(section: type[Section] = Section):
    for inner in section.__subclasses__():
        yield inner
        yield from iter_sections(inner)


def test_only_the_model_must_be_named():
    config = RunConfig.model_validate({"model": {"path": "m"}})
    assert config.model.path == "m"
    assert config.train_dataset is None


def test_every_knob_has_a_sentence():
    bare = [f"{s.__name__}.{name}" for s in iter_sections() for name, f in s.model_fields.items() if not f.description]
    sections = {field for section in iter_sections() for field in section.model_fields}
    holders = {"model", "train_dataset", "auxiliary_models", "algorithm", "engine", "rollout", "trainer", "evaluation"}
    assert holders <= sections
    assert {name.split(".")[1] for name in bare} <= holders | {"monitor"}


def test_unknown_keys_are_errors_that_name_the_nearest():
    with pytest.raises(ValidationError, match="unknown key batchsize: did you mean 'batch_size'"):
        AlgorithmSection.model_validate({"batchsize": 3})


def test_sections_cannot_be_changed():
    with pytest.raises(ValidationError):
        AlgorithmSection().batch_size = 3


def test_a_default_is_valid():
    for section in iter_sections():
        required = [name for name, field in section.model_fields.items() if field.is_required()]
        if not required:
            assert section.model_validate(section().model_dump()) == section()
