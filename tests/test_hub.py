"""Hub ids and paths, and an unreachable hub."""

from __future__ import annotations

import time

import huggingface_hub
import pytest

from tunesmith import hub
from tunesmith.errors import MissingDataError, ModelError
from tunesmith.model.load import load_config
from tunesmith.tasks.load import load_rows

CLOSED = "http://127.0.0.1:9"
"""Nothing listens on this port."""


@pytest.fixture
def closed_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", CLOSED)
    hub.probe.cache_clear()
    yield
    assert not huggingface_hub.constants.HF_HUB_OFFLINE  # restored
    hub.probe.cache_clear()


def test_paths_are_distinguished_from_hub_ids(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    paths = [
        "./a",
        "/a",
        "~/a",
        "../a",
        "a/b/c",
        "a b",
        "tasks.jsonl",
        "data/tasks.parquet",
        "weights.gguf",
        "models/pockt",
    ]
    names = [
        "gpt2",
        "openai/gsm8k",
        "Qwen/Qwen2.5-0.5B",
        "Qwen/Qwen2.5-Math-1.5B",
        "meta-llama/Llama-3.2-1B",
        "data/train",
    ]
    assert [name for name in paths if not hub.is_path_like(name)] == []
    assert [name for name in names if hub.is_path_like(name)] == []


def test_an_unreachable_hub_is_reported_without_retries(closed_hub):
    started = time.monotonic()
    for work in (
        lambda: load_rows("nobody/no-such-set", name=None, split="train"),
        lambda: load_rows("nobody/no-such-set", name=None, split="train", num_rows=1),
    ):
        with pytest.raises(MissingDataError, match=f"{CLOSED} cannot be reached.*HF_HUB_OFFLINE=1.*as its path"):
            work()
    with pytest.raises(ModelError, match=f"model.path='nobody/no-such-model'.*{CLOSED} cannot be reached"):
        load_config("nobody/no-such-model")
    assert time.monotonic() - started < 60  # retries take 23 s for each of the three


def test_paths_cause_no_hub_request(closed_hub):
    with pytest.raises(MissingDataError, match="'task.jsonl' does not exist"):
        load_rows("task.jsonl", name=None, split="train")
    with pytest.raises(ModelError, match="no such folder"):
        load_config("tests/no-such-model")
    assert hub.probe.cache_info().misses == 0
