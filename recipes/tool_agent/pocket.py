"""The untrained model of the pocket pipeline: its tokenizer is trained on the expert's conversations."""

from __future__ import annotations

import json
from pathlib import Path

from tunesmith.model.checkpoint import save_model_files
from tunesmith.model.pocket import build_pocket_model, build_pocket_tokenizer

TAGS = ("<think>", "</think>")
"""Tags that are tokens of the pocket tokenizer already."""


def make_model(out_dir: Path, *, conversations: str, seed: int) -> dict[str, int]:
    """Write an untrained model to `out_dir/model`."""
    lines = Path(conversations).read_text(encoding="utf-8").splitlines()
    text = "\n".join(read_text(message["content"]) for line in lines for message in json.loads(line)["messages"])
    for tag in TAGS:
        text = text.replace(tag, "")
    tokenizer = build_pocket_tokenizer(text)
    model = build_pocket_model(tokenizer, seed=seed)
    (out_dir / "model").mkdir()
    save_model_files(out_dir / "model", model, tokenizer)
    return {"parameters": model.num_parameters(), "tokens of the vocabulary": len(tokenizer)}


def read_text(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
