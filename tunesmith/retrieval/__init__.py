"""Search over passages: an index (BM25, dense vectors, or both) served over HTTP or opened in process."""

from tunesmith.retrieval.index.folder import IndexInfo
from tunesmith.retrieval.index.search import Hit, SearchIndex, build_index
from tunesmith.retrieval.settings import IndexSettings, ServerSettings

__all__ = ["Hit", "IndexInfo", "IndexSettings", "SearchIndex", "ServerSettings", "build_index"]
