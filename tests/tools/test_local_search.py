"""Search over a small file of documents: BM25's order, ties, and text that is cut."""

from __future__ import annotations

import asyncio
import json
import math

import pytest

from tunesmith.errors import MissingDataError
from tunesmith.tools.local_search import NOT_FOUND, build_index, build_local_search

DOCUMENTS = [
    {"title": "Rain", "text": "It falls from clouds."},
    {"title": "Clouds", "text": "Clouds carry rain and hail."},
    {"title": "Stone", "text": "A stone falls."},
]


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "documents.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in DOCUMENTS))
    return str(file)


def search(path, query, **settings):
    tool = build_local_search(path, **settings)
    return asyncio.run(tool.call({"query": query}))


def test_the_best_documents_come_first(path):
    assert search(path, "Clouds?", top_n=2).text.split("\n\n") == [
        "Clouds\nClouds carry rain and hail.", "Rain\nIt falls from clouds.",
    ]  # fmt: skip
    assert search(path, "stone falls").text.startswith("Stone\n")


def test_weights_are_those_of_bm25():
    index = build_index(["a b", "a a a a"])
    rarity = math.log(1 + (2 - 1 + 0.5) / (1 + 0.5))
    assert index.postings["b"] == [(0, pytest.approx(rarity * 2.2 / (1 + 1.2 * (0.25 + 0.75 * 2 / 3))))]


def test_equal_documents_keep_the_order_of_the_file():
    assert build_index(["x y", "x z", "x w"]).search("x", 2) == ["x y", "x z"]


def test_a_query_without_words_is_the_models_mistake(path):
    assert search(path, "?!").failure == "error"
    assert search(path, "unknown").text == NOT_FOUND


def test_long_documents_are_cut(path):
    assert search(path, "hail", top_n=1, max_document_chars=10).text == "Clouds\nClo..."


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(MissingDataError, match="no documents at"):
        build_local_search(str(tmp_path / "none.jsonl"))
