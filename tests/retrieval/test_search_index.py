"""Index folders: what is found, how they are refused, and sources of passages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from datasets import Dataset

from recipes.world import generate
from search_corpora import PASSAGES, build_small_index, needs_bm25, write_corpus
from tunesmith.errors import ConfigError, DataError, StorageError
from tunesmith.retrieval import IndexSettings, SearchIndex, build_index
from tunesmith.storage import locked

pytestmark = needs_bm25


def find_ids(index: SearchIndex, query: str, top_n: int = 10) -> list[str]:
    return [hit.passage_id for hit in index.search(query, top_n)]


def test_passages_with_the_words_of_a_query_are_found_in_any_form_and_no_others(tmp_path):
    index = SearchIndex(build_small_index(tmp_path))
    assert find_ids(index, "baking with EGGS") == ["p4", "p3"]
    assert set(find_ids(index, "mountain snow")) == {"p1", "p2"}
    assert find_ids(index, "mountain snow", 1) == ["p1"]
    assert find_ids(index, "zebra") == []
    assert index.search("bread")[0].contents == PASSAGES[2][1]


def test_scores_are_those_of_bm25s(tmp_path):
    import bm25s

    generate(tmp_path / "world", num_documents=1000, num_train=60, num_test=10)
    build_index(tmp_path / "world" / "documents.jsonl", tmp_path / "index")
    index = SearchIndex(tmp_path / "index")
    model = bm25s.BM25.load(tmp_path / "index" / "bm25")
    splitter = index._bm25._splitter
    for line in (tmp_path / "world" / "train.jsonl").read_text().splitlines():
        question = json.loads(line)["question"]
        known = [word for word in splitter.split(question) if word in model.vocab_dict]
        expected = np.sort(model.get_scores(known))[::-1][:10]
        scores = [hit.score for hit in index.search(question)]
        assert scores == pytest.approx(expected[expected > 0].tolist(), rel=1e-5)


def test_bm25_finds_the_gold_passage_that_names_an_entity(tmp_path):
    generate(tmp_path / "world", num_documents=1000, num_train=200, num_test=10)
    info = build_index(tmp_path / "world" / "documents.jsonl", tmp_path / "index")
    index = SearchIndex(tmp_path / "index")
    assert info.num_passages == 1000 and index.info == info
    rows = [json.loads(line) for line in (tmp_path / "world" / "train.jsonl").read_text().splitlines()]
    found = [bool(set(row["passages"]) & set(find_ids(index, row["question"], 5))) for row in rows]
    assert np.mean(found) > 0.9


def test_a_ranking_does_not_depend_on_what_is_searched_with_it(tmp_path):
    index = SearchIndex(build_small_index(tmp_path))
    queries = ["sea mountain", "flour", "white bread", "sea"]
    assert index.search_batch(queries) == [index.search(query) for query in queries]


def test_equal_passages_are_ordered_by_id_whatever_their_order_in_the_corpus(tmp_path):
    passages = [(f"d{number}", "the same words") for number in (10, 9, 2, 33)]
    build_index(write_corpus(tmp_path / "corpus.jsonl", passages), tmp_path / "index")
    assert find_ids(SearchIndex(tmp_path / "index"), "words", 3) == ["d10", "d2", "d33"]


def test_rebuilding_gives_the_same_index(tmp_path):
    first = build_index(write_corpus(tmp_path / "a.jsonl"), tmp_path / "a")
    second = build_index(write_corpus(tmp_path / "b.jsonl"), tmp_path / "b")
    other = build_index(write_corpus(tmp_path / "b.jsonl", PASSAGES[:4]), tmp_path / "c")
    stemless = build_index(tmp_path / "b.jsonl", tmp_path / "d", IndexSettings(stemmer="none"))
    assert first.index_hash == second.index_hash
    assert len({first.index_hash, other.index_hash, stemless.index_hash}) == 3
    for path in (tmp_path / "a").rglob("*"):
        if path.is_file() and path.name != "manifest.json":
            assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes(), path


def test_titles_texts_and_text_of_any_kind_round_trip(tmp_path):
    rows = [
        {"id": 7, "title": "Sails", "text": "wind \u2028 and \x85 water"},
        {"title": "", "text": "nothing but \ud800 surrogates and \u0000"},
        {"id": "x", "title": None, "text": "an accent: caf\u00e9"},
    ]
    (tmp_path / "corpus.jsonl").write_text("\n\n".join(map(json.dumps, rows)) + "\n\n")
    build_index(tmp_path / "corpus.jsonl", tmp_path / "index")
    index = SearchIndex(tmp_path / "index")
    assert index.search("sails")[0].contents == "Sails\nwind \u2028 and \x85 water"
    assert index.search("surrogates")[0].contents == rows[1]["text"]
    assert find_ids(index, "surrogates") == ["2"]
    assert find_ids(index, "CAF\u00c9") == ["x"]


def test_a_folder_of_texts_in_chunks(tmp_path):
    (tmp_path / "texts" / "deep").mkdir(parents=True)
    (tmp_path / "texts" / "deep" / "long.txt").write_text(" ".join(f"w{number}" for number in range(25)))
    (tmp_path / "texts" / "short.md").write_text("hello there")
    (tmp_path / "texts" / "image.png").write_bytes(b"\xff\xfe")
    build_index(tmp_path / "texts", tmp_path / "index", IndexSettings(chunk_words=10))
    index = SearchIndex(tmp_path / "index")
    assert index.info.num_passages == 4
    (hit,) = index.search("w20")
    assert hit.passage_id == "deep/long.txt#2" and hit.contents == "long\nw20 w21 w22 w23 w24"
    assert find_ids(index, "hello") == ["short.md#0"]


def test_a_data_set_with_fields_of_other_names(tmp_path):
    rows = [{"docid": f"n{number}", "body": f"number {number}"} for number in range(3)]
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "set"))
    build_index(tmp_path / "set", tmp_path / "index", IndexSettings(text_field="body", id_field="docid"))
    assert find_ids(SearchIndex(tmp_path / "index"), "2") == ["n2"]


def test_the_files_of_a_hub_repository_are_a_data_set(tmp_path, monkeypatch):
    folder = tmp_path / "owner" / "name"
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text("A data set.")
    rows = Dataset.from_list([{"id": f"n{number}", "text": f"number {number}"} for number in range(3)])
    rows.to_parquet(str(folder / "data" / "train-00000-of-00001.parquet"))
    rows.select([0]).to_parquet(str(folder / "data" / "test-00000-of-00001.parquet"))
    monkeypatch.chdir(tmp_path)
    assert build_index("owner/name", tmp_path / "index").num_passages == 3
    assert find_ids(SearchIndex(tmp_path / "index"), "2") == ["n2"]
    assert build_index("owner/name", tmp_path / "other", split="test").num_passages == 1
    with pytest.raises(DataError, match="'owner/name' has no split 'dev'; it has train, test"):
        build_index("owner/name", tmp_path / "third", split="dev")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the corpus has no passages"),
        ('{"id": "a", "contents": "x"}\n{"id": "a", "contents": "y"}\n', "passages 0 and 1 have the same id 'a'"),
        ('{"id": "a", "body": "x"}\n', "line 1 of .* has no text in 'contents' or 'text'; its fields are id, body"),
        ('{"id": "a", "contents": "x"}\n{"id"\n', "line 2 of .* is not JSON"),
        ('["a"]\n', "line 1 of .* is not a JSON object"),
        ('{"id": "a", "contents": "the"}\n', "no passage has a word that BM25 could index"),
    ],
)
def test_a_corpus_that_cannot_be_read_is_refused_and_leaves_nothing(tmp_path, text, message):
    (tmp_path / "corpus.jsonl").write_text(text)
    with pytest.raises(DataError, match=message):
        build_index(tmp_path / "corpus.jsonl", tmp_path / "out" / "index")
    assert list((tmp_path / "out").glob("*")) == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("train.jsonl", "", r"'.*' has a file without rows"),
        ("train.csv", "", r"the data set '.*' \(split 'train'\) cannot be read: No columns to parse"),
        ("train.jsonl", '{"contents": "x"}\n{"contents": y}\n', "the data set .* cannot be read: JSON parse error"),
    ],
)
def test_a_data_set_that_cannot_be_read_is_refused(tmp_path, name, text, message):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / name).write_text(text)
    with pytest.raises(DataError, match=message):
        build_index(tmp_path / "set", tmp_path / "index")


@pytest.mark.parametrize("part", [{"split": "test"}, {"name": "main"}])
def test_a_file_or_a_folder_of_texts_has_no_splits_and_configurations(tmp_path, part):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("apples")
    for source in (write_corpus(tmp_path / "c.jsonl"), tmp_path / "texts"):
        with pytest.raises(
            DataError, match=f"{next(iter(part))}='.*' has no effect: .* is not a Hugging Face data set"
        ):
            build_index(source, tmp_path / "index", **part)


def test_sources_and_settings_that_do_not_exist_are_refused(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        build_index(tmp_path / "none.jsonl", tmp_path / "index")
    (tmp_path / "corpus.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"is not a \.jsonl file"):
        build_index(tmp_path / "corpus.parquet", tmp_path / "index")
    with pytest.raises(ConfigError, match="stemmer='klingon' is not one of none, .*english"):
        build_index(write_corpus(tmp_path / "c.jsonl"), tmp_path / "index", IndexSettings(stemmer="klingon"))
    with pytest.raises(ValueError, match="kind=dense needs an embedding model"):
        IndexSettings(kind="dense")


def test_an_existing_folder_is_not_overwritten(tmp_path):
    folder = build_small_index(tmp_path)
    with pytest.raises(StorageError, match="index exists; choose another folder"):
        build_index(tmp_path / "corpus.jsonl", folder)


def change_version(folder):
    values = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(values | {"format_version": 99}))


def cut_passages(folder):
    os.truncate(folder / "passages.jsonl", 10)


DAMAGES = [
    (lambda folder: (folder / "manifest.json").unlink(), "has no manifest.json; build it again"),
    (lambda folder: (folder / "manifest.json").write_text("{}"), "does not describe a search index"),
    (change_version, r"has index format 99, and this version of tunesmith \(.*\) reads format 1; build it again"),
    (cut_passages, "is not a complete search index: passages.jsonl has 10 bytes instead of"),
    (lambda folder: (folder / "bm25" / "data.csc.index.npy").unlink(), "data.csc.index.npy is missing; build it again"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_an_incomplete_index_or_one_of_another_version_is_refused(tmp_path, damage, message):
    folder = build_small_index(tmp_path)
    damage(folder)
    with pytest.raises(DataError, match=message):
        SearchIndex(folder)


def test_a_killed_build_leaves_no_index(tmp_path):
    write_corpus(tmp_path / "corpus.jsonl")
    program = textwrap.dedent("""
        import os, signal
        from tunesmith.retrieval.index import search
        search.write_manifest = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        search.build_index("corpus.jsonl", "index")
    """)
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not (tmp_path / "index").exists()
    assert len(list(tmp_path.glob("index.tmp-*"))) == 1
    with pytest.raises(DataError, match="there is no index"):
        SearchIndex(tmp_path / "index")
    with locked(tmp_path / "index.lock", tmp_path / "index"):
        with pytest.raises(StorageError, match=f"index is locked by process {os.getpid()}"):
            build_index(tmp_path / "corpus.jsonl", tmp_path / "index")
        assert len(list(tmp_path.glob("index.tmp-*"))) == 1
    build_index(tmp_path / "corpus.jsonl", tmp_path / "index")
    assert [path.name for path in tmp_path.glob("index*")] == ["index"]
