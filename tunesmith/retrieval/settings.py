"""Settings of `tunesmith search build` and `tunesmith search serve`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tunesmith.config.section import Section

MAX_TOP_N = 1000
"""Largest top_n of a search."""


class IndexSettings(Section):
    """What an index holds and how it ranks."""

    kind: Literal["bm25", "dense", "hybrid"] = "bm25"
    """bm25 ranks by shared words and needs no model; dense by embeddings; hybrid fuses both rankings."""
    text_field: str | None = None
    """Field with the text of a passage; by default `contents`, else `text` below `title`."""
    id_field: str = "id"
    """Field with the id of a passage; rows that have none are numbered."""
    chunk_words: int | None = Field(default=None, ge=10, le=100_000)
    """Split each text into passages of this many words, with ids that end in #0, #1, ...; set it for long texts."""
    stemmer: str = "english"
    """Snowball stemmer of BM25's words, such as english or german; none keeps words as they are."""
    stopwords: Literal["english", "none"] = "english"
    """Words that BM25 leaves out."""
    bm25_k1: float = Field(default=1.5, ge=0, le=10)
    """BM25: how much repetitions of a word in a passage count."""
    bm25_b: float = Field(default=0.75, ge=0, le=1)
    """BM25: how much long passages are penalized."""
    model: str | None = None
    """Embedding model for dense and hybrid: a folder or hub id that sentence-transformers loads."""
    faiss: str = "Flat"
    """faiss factory string of the dense index, such as Flat (exact), IVF4096,Flat or HNSW32."""
    nprobe: int = Field(default=32, ge=1)
    """Lists of an IVF index that a search reads; more is slower and finds more."""
    train_size: int = Field(default=200_000, ge=1000)
    """Passages on which faiss trains an index that needs training, drawn with seed 0."""
    query_prefix: str | None = None
    """Text before each query; by default the one that the model's name calls for (e5, bge), else none."""
    passage_prefix: str | None = None
    """Text before each passage; by default the one that the model's name calls for (e5), else none."""
    max_query_tokens: int = Field(default=128, ge=8, le=32768)
    """Tokens of a query that the model reads."""
    max_passage_tokens: int = Field(default=512, ge=8, le=32768)
    """Tokens of a passage that the model reads; limited by the model too."""
    batch_size: int = Field(default=64, ge=1, le=65536)
    """Texts per forward of the embedding model."""
    device: str | None = None
    """Device of the embedding model when building, such as cuda or cpu; by default a GPU if there is one."""

    @model_validator(mode="after")
    def _check_model(self) -> IndexSettings:
        if self.has_dense and self.model is None:
            raise ValueError(f"kind={self.kind} needs an embedding model: set model to a folder or hub id")
        return self

    @property
    def has_bm25(self) -> bool:
        return self.kind != "dense"

    @property
    def has_dense(self) -> bool:
        return self.kind != "bm25"


class ServerSettings(Section):
    """The search server."""

    host: str = "127.0.0.1"
    """Address to listen on; another address than this machine's own is open to the network, so set an API key."""
    port: int = Field(default=1243, ge=0, le=65535)
    """Port; 0 picks a free one."""
    api_key: str | None = None
    """Key that /search and /batch_search require, as `Authorization: Bearer KEY` or `X-API-Key: KEY`."""
    num_threads: int = Field(default=1, ge=1, le=256)
    """Batches that are searched at the same time."""
    max_batch: int = Field(default=64, ge=1, le=4096)
    """Queries per batch. A batch holds the queries that arrived while the one before was searched."""
    max_waiting: int = Field(default=4096, ge=1)
    """Queries that may wait; requests beyond it are answered 503, and the search tool tries again."""
    max_top_n: int = Field(default=100, ge=1, le=MAX_TOP_N)
    """Largest top_n of a request."""
    max_queries: int = Field(default=1024, ge=1)
    """Queries of one /batch_search."""
    max_query_chars: int = Field(default=10_000, ge=1)
    """Characters of a query."""
    max_body_bytes: int = Field(default=2**20, ge=1024)
    """Bytes of a request's body."""
    cache_mb: float = Field(default=64, ge=0, le=100_000)
    """Memory for cached rankings in MiB; 0 caches nothing."""
    device: str | None = None
    """Device of the embedding model, such as cuda or cpu; by default a GPU if there is one."""
