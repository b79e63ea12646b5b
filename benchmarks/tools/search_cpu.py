"""CPU time of a BM25 search in process: ours, with numba's sums of bm25s, with its ranking too, and FlashRAG's.

CPU time of the process, in rounds that take turns, so that other load on the machine hardly matters; without a server.

    python -m benchmarks.tools.search_cpu --sizes 1000 100000 1000000 --out results/tools/search_cpu.json

The first three search the same index for the same words: ours with the sums of bm25s in NumPy, the others with numba,
which has to be installed. The first two must find the same passages;
bm25s ranks passages with equal scores in any order. FlashRAG has an index and a tokenizer of bm25s. `first_s` is the
CPU time of the first search, which compiles.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tools.search import PACKAGES, TOP_N, has_package, open_flashrag, write_flashrag_index
from recipes.world import generate
from tunesmith.retrieval import SearchIndex, build_index
from tunesmith.retrieval.index.bm25 import WordSplitter, find_threshold, import_bm25s
from tunesmith.retrieval.index.ranking import Ranking, rank
from tunesmith.retrieval.index.search import BM25_FOLDER


def measure_ms(search: Callable[[str], Any], queries: Sequence[str]) -> float:
    """CPU milliseconds per query."""
    started = time.process_time()
    for query in queries:
        search(query)
    return 1000 * (time.process_time() - started) / len(queries)


def open_bm25s_sums(index: SearchIndex, folder: Path) -> Callable[[str], Any]:
    """A search that adds up by bm25s and ranks as ours does."""
    model = import_bm25s().BM25.load(folder, mmap=True, show_progress=False)
    model.activate_numba_scorer()
    splitter = WordSplitter(stemmer="english", stopwords="english")

    def search(query: str) -> Any:
        words = splitter.split(index.normalize(query))
        scores = model.get_scores_from_ids(sorted(model.vocab_dict[word] for word in words if word in model.vocab_dict))
        threshold = find_threshold(scores, TOP_N)
        found = np.flatnonzero(scores >= threshold if threshold > 0 else scores)
        return index.read_hits(rank(found, scores[found], TOP_N, index.passages.id_ranks))

    return search


def open_bm25s(index: SearchIndex, folder: Path) -> Callable[[str], Any]:
    """A search by bm25s alone."""
    model = import_bm25s().BM25.load(folder, mmap=True, show_progress=False)
    model.backend = "numba"
    splitter = WordSplitter(stemmer="english", stopwords="english")

    def search(query: str) -> Any:
        words = splitter.split(index.normalize(query))
        positions, scores = model.retrieve([words], k=TOP_N, show_progress=False)
        return index.read_hits(Ranking(positions[0][scores[0] > 0], scores[0][scores[0] > 0]))

    return search


def measure_size(size: int, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    corpus, ours, flashrag = (folder / f"{name}{size}" for name in ("w", "i", "fr"))
    if not corpus.exists():
        generate(corpus, num_documents=size, num_train=min(5000, 2 * size), num_test=10)
    documents = corpus / "documents.jsonl"
    if not ours.exists():
        build_index(documents, ours)
    if not flashrag.exists():
        write_flashrag_index(documents, flashrag)
    questions = [json.loads(line)["question"] for line in (corpus / "train.jsonl").read_text().splitlines()]
    index, theirs = SearchIndex(ours), open_flashrag(flashrag)
    servers: dict[str, Callable[[str], Any]] = {
        "ours": lambda query: index.search(query, TOP_N),
        "bm25s_sums": open_bm25s_sums(index, ours / BM25_FOLDER),
        "bm25s": open_bm25s(index, ours / BM25_FOLDER),
        "flashrag": lambda query: theirs([query], TOP_N),
    }
    first_s = {name: round(measure_ms(search, questions[:1]) / 1000, 3) for name, search in servers.items()}
    num_other_ties = 0
    for query in questions[:200]:
        found = [hit.passage_id for hit in servers["ours"](query)]
        assert found == [hit.passage_id for hit in servers["bm25s_sums"](query)]
        num_other_ties += found != [hit.passage_id for hit in servers["bm25s"](query)]
    rounds: dict[str, list[float]] = {name: [] for name in servers}
    for number in range(arguments.rounds):
        queries = questions[number * arguments.queries : (number + 1) * arguments.queries]
        for name, search in servers.items():
            rounds[name].append(round(measure_ms(search, queries), 4))
    row = {
        "num_passages": size,
        "cpu_ms": {name: statistics.median(each) for name, each in rounds.items()},
        "first_s": first_s,
        "rankings_with_other_ties": num_other_ties / 200,
    }
    print(json.dumps(row), flush=True)
    return row | {"rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--queries", type=int, default=200, help="queries of a round")
    parser.add_argument("--folder", type=Path, help="where worlds and indexes are kept between runs")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rows = [measure_size(size, folder, arguments) for size in arguments.sizes]
    record = {
        "name": "search_cpu",
        "unit": "CPU milliseconds per query, median of rounds",
        "top_n": TOP_N,
        "versions": {name: version(name) for name in PACKAGES if has_package(name)},
        "load": os.getloadavg(),
        "sizes": rows,
    }
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
