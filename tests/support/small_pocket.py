"""A pocket model of two narrow layers, for tests whose subject is a run and not the model.

Most of such a run's CPU time is the model's. The tokenizer and chat template are the pocket model's.
"""

from __future__ import annotations

from pathlib import Path

from tunesmith.model.pocket import build_pocket_model, build_pocket_tokenizer


def write_small_pocket(folder: Path) -> Path:
    """Write the model with random weights, the same ones each time; returns the folder."""
    tokenizer = build_pocket_tokenizer()
    tokenizer.save_pretrained(folder)
    build_pocket_model(tokenizer, hidden_size=64, num_layers=2).save_pretrained(folder)
    return folder
