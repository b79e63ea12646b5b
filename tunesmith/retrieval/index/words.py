"""Words of a text for BM25: lower case, without stop words, stemmed. Passages and queries are split in the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from tunesmith.errors import ConfigError
from tunesmith.retrieval.index.bm25s_import import import_bm25s

WORD = re.compile(r"\w+")


class WordSplitter:
    """Splits texts into stems; a stem is computed once per distinct word while an index is built.

    Raises:
        ConfigError: there is no such stemmer, or bm25s or PyStemmer is not installed.
    """

    def __init__(self, *, stemmer: str, stopwords: str) -> None:
        self._stem = _build_stemmer(stemmer)
        self._stopwords = _load_stopwords() if stopwords == "english" else frozenset()

    def split(self, text: str) -> list[str]:
        """Stems of the words in their order, repeated words included."""
        return [self._stem(word) for word in WORD.findall(text.lower()) if word not in self._stopwords]

    def collect_ids(self, texts: Iterable[str], vocabulary: dict[str, int]) -> list[list[int]]:
        """Ids of the stems of each text; new stems are added to `vocabulary`."""
        id_of_word: dict[str, int] = {}
        rows = []
        for text in texts:
            row = []
            for word in WORD.findall(text.lower()):
                known = id_of_word.get(word)
                if known is None:
                    known = -1 if word in self._stopwords else vocabulary.setdefault(self._stem(word), len(vocabulary))
                    id_of_word[word] = known
                if known >= 0:
                    row.append(known)
            rows.append(row)
        return rows


def _build_stemmer(name: str) -> Callable[[str], str]:
    if name == "none":
        return str
    try:
        import Stemmer
    except ImportError as error:
        raise ConfigError("BM25 with a stemmer needs PyStemmer: pip install 'tunesmith[retrieval]'") from error
    try:
        stem: Callable[[str], str] = Stemmer.Stemmer(name).stemWord
    except KeyError as error:
        known = ", ".join(["none", *Stemmer.algorithms()])
        raise ConfigError(f"stemmer={name!r} is not one of {known}") from error
    return stem


def _load_stopwords() -> frozenset[str]:
    return frozenset(import_bm25s().stopwords.STOPWORDS_EN)
