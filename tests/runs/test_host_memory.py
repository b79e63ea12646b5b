"""A command whose host has no memory left ends with one sentence."""

from __future__ import annotations

import pytest
import torch
import typer

from tunesmith.runs.process import run_guarded


def allocate():
    torch.empty(2**50)


def raise_memory_error():
    raise MemoryError


@pytest.mark.parametrize("work", [allocate, raise_memory_error])
def test_a_host_without_memory_is_one_sentence_with_what_to_lower(work, capsys):
    with pytest.raises(typer.Exit):
        run_guarded(work, is_debug=False)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tunesmith: this host has too little free memory (")
    assert "engine.kv_cache_gib" in line


def test_other_errors_of_torch_keep_their_traceback():
    with pytest.raises(RuntimeError, match="shape"):
        run_guarded(lambda: torch.zeros(3).view(2, 2), is_debug=False)
