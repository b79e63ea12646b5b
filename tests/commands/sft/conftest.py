"""A model that is smaller than the pocket model, with its tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunesmith.model.pocket import build_pocket_model, build_pocket_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    tokenizer = build_pocket_tokenizer()
    tokenizer.save_pretrained(place)
    build_pocket_model(tokenizer, hidden_size=96, num_layers=1).save_pretrained(place)
    return place
