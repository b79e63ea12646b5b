"""The untrained pocket model of a pipeline, with a tokenizer that is trained on the pipeline's own conversations."""

from __future__ import annotations

import json
from pathlib import Path

from tunesmith.model.checkpoint import save_model_files
from tunesmith.model.pocket import MARKUP_TOKENS, VOCABULARY_SIZE, build_pocket_model, build_pocket_tokenizer


def make_pocket_base(
    out_dir: Path,
    *,
    conversations: str,
    seed: int = 0,
    has_names: bool = False,
    vocabulary_size: int = VOCABULARY_SIZE,
    num_kv_heads: int | None = None,
    hidden_size: int = 192,
) -> dict[str, int]:
    """Write an untrained model to `out_dir/model`, to be fine-tuned on `conversations`, a JSON lines file.

    With `has_names` and `num_kv_heads=6`, one key-value head for each head, the model learns sooner to copy names that
    no conversation has. A function stage of a pipeline can call it.
    """
    lines = Path(conversations).read_text(encoding="utf-8").splitlines()
    text = "\n".join(_read_text(message["content"]) for line in lines for message in json.loads(line)["messages"])
    for tag in MARKUP_TOKENS:
        text = text.replace(tag, "")
    tokenizer = build_pocket_tokenizer(text, has_names=has_names, vocabulary_size=vocabulary_size)
    model = build_pocket_model(tokenizer, seed=seed, hidden_size=hidden_size, num_kv_heads=num_kv_heads)
    (Path(out_dir) / "model").mkdir(parents=True)
    save_model_files(Path(out_dir) / "model", model, tokenizer)
    return {"parameters": model.num_parameters(), "tokens of the vocabulary": len(tokenizer)}


def _read_text(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
