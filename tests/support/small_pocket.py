"""A pocket model of two narrow layers, for tests whose subject is a run and not the model.

Most of such a run's CPU time is the model's. The tokenizer and chat template are the pocket model's.
"""

from __future__ import annotations

import json
from pathlib import Path

from tunesmith.model.pocket import build_pocket_model, build_pocket_tokenizer
from tunesmith.model.prepare import MARKER_NAME


def write_small_pocket(folder: Path, *, is_for_gguf: bool = False) -> Path:
    """Write the model with random weights, the same ones each time; returns the folder.

    It has the mark of the pocket model, so that a program that prepares that model in this folder takes this one.
    """
    tokenizer = build_pocket_tokenizer(is_for_gguf=is_for_gguf)
    tokenizer.save_pretrained(folder)
    build_pocket_model(tokenizer, hidden_size=64, num_layers=2).save_pretrained(folder)
    (folder / MARKER_NAME).write_text(json.dumps({"model": "pocket", "dtype": "float32"}))
    return folder
