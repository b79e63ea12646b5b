"""A search tool over a small file of documents, in this process: BM25 over titles and texts.

For worlds and tests of up to some ten thousand documents; larger collections want a search server of their own.
Results are deterministic: documents of equal score are in the order of the file.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunesmith.errors import MissingDataError
from tunesmith.tools.tool import Tool, ToolInputError

WORD = re.compile(r"\w+")
K1, B = 1.2, 0.75
"""BM25's usual saturation and length normalization (Robertson and Zaragoza, 2009)."""
NOT_FOUND = "Nothing was found: use other words."


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalIndex:
    """Inverted index of the documents: word -> (document, BM25 weight)."""

    texts: Sequence[str]
    postings: Mapping[str, Sequence[tuple[int, float]]] = field(repr=False)

    def search(self, query: str, top_n: int) -> list[str]:
        """The texts of the best documents, those without a word of the query left out."""
        scores: defaultdict[int, float] = defaultdict(float)
        for word in set(split_words(query)):
            for number, weight in self.postings.get(word, ()):
                scores[number] += weight
        best = sorted(scores, key=lambda number: (-scores[number], number))[:top_n]
        return [self.texts[number] for number in best]


def build_index(texts: Sequence[str]) -> LocalIndex:
    counts = [Counter(split_words(text)) for text in texts]
    lengths = [sum(each.values()) for each in counts]
    mean_length = sum(lengths) / max(len(lengths), 1) or 1.0
    num_documents_with = Counter(word for each in counts for word in each)
    postings: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for number, (each, length) in enumerate(zip(counts, lengths, strict=True)):
        for word, count in each.items():
            containing = num_documents_with[word]
            rarity = math.log(1 + (len(texts) - containing + 0.5) / (containing + 0.5))
            saturation = count * (K1 + 1) / (count + K1 * (1 - B + B * length / mean_length))
            postings[word].append((number, rarity * saturation))
    return LocalIndex(texts=texts, postings=dict(postings))


def split_words(text: str) -> list[str]:
    return WORD.findall(text.casefold())


def build_local_search(path: str, *, top_n: int = 4, max_document_chars: int = 1200, name: str = "search") -> Tool:
    """A search tool over a JSON Lines file of documents with `title` and `text`, or `contents`.

    A result is the best `top_n` documents, each cut at `max_document_chars`, with a blank line between them.
    """
    index = build_index([read_document(row) for row in read_rows(Path(path))])

    async def search(query: str) -> str:
        if not split_words(query):
            raise ToolInputError("the query has no words")
        found = index.search(query, top_n)
        return "\n\n".join(shorten(text, max_document_chars) for text in found) or NOT_FOUND

    return Tool.from_function(
        search, name=name, description=f"Search the documents; returns the best {top_n} for the words of the query."
    )


def read_rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise MissingDataError(f"there are no documents at {str(path)!r}: give the path of a JSON Lines file")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def read_document(row: Mapping[str, Any]) -> str:
    """A document as text, the title on a line of its own."""
    if "contents" in row:
        return str(row["contents"])
    return f"{row.get('title', '')}\n{row['text']}".strip()


def shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit] + "..."
