"""CPU time of a BM25 search in process: compiled sums, NumPy sums, and bm25s as FlashRAG calls it.

CPU time of the process, in rounds that take turns, so that other load on the machine hardly matters; without a server.

    python -m benchmarks.tools.search_cpu --sizes 1000 100000 1000000 --out results/tools/search_cpu.json

The first two search the same index and must return the same rankings. numba is needed.
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

from benchmarks.tools.search import PACKAGES, TOP_N, has_package, open_flashrag, write_flashrag_index
from tunesmith.et_agent.world import generate
from tunesmith.retrieval import SearchIndex, build_index


def measure_ms(search: Callable[[str], Any], queries: Sequence[str]) -> float:
    """CPU milliseconds per query."""
    started = time.process_time()
    for query in queries:
        search(query)
    return 1000 * (time.process_time() - started) / len(queries)


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
    compiled, plain = SearchIndex(ours), SearchIndex(ours)
    assert plain._bm25 is not None
    plain._bm25._scratch = None
    theirs = open_flashrag(flashrag)
    servers: dict[str, Callable[[str], Any]] = {
        "compiled": lambda query: compiled.search(query, TOP_N),
        "numpy": lambda query: plain.search(query, TOP_N),
        "flashrag": lambda query: theirs([query], TOP_N),
    }
    for query in questions[:50]:
        assert servers["compiled"](query) == servers["numpy"](query)
        theirs([query], TOP_N)
    rounds: dict[str, list[float]] = {name: [] for name in servers}
    for number in range(arguments.rounds):
        queries = questions[number * arguments.queries : (number + 1) * arguments.queries]
        for name, search in servers.items():
            rounds[name].append(round(measure_ms(search, queries), 4))
    row = {"num_passages": size, "cpu_ms": {name: statistics.median(each) for name, each in rounds.items()}}
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
