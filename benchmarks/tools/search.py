"""Searches per second and latency of `tunesmith search serve`, beside servers that search one request at a time.

    python -m benchmarks.tools.search --sizes 1000 100000 1000000 --out results/tools/search.json

The passages are worlds (`recipes.world`), the queries their training questions, each once per round.
Servers:

- ours: `tunesmith search serve`, without its cache, so that every request is a search
- same_index_serial: our index behind the scheduling of FlashRAG's host_wiki server: FastAPI, a semaphore and a list of
  free retrievers, and the search itself called synchronously in the `async def` handler
- flashrag_serial: the same scheduling with FlashRAG's own BM25Retriever (bm25s with numba), if FlashRAG is installed;
  else bm25s called as that class does, without numba where numba is not installed

Clients are in a process of their own and send the next request when the last one is answered. The servers take turns in
short rounds, so that other load on the machine meets all of them. `--model` adds a dense index of the smallest world.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from recipes.world import generate
from tunesmith.retrieval import IndexSettings, SearchIndex, build_index

SCRIPT = (sys.executable, "-m", "benchmarks.tools.search")
TOP_N = 4
PACKAGES = ("tunesmith", "bm25s", "PyStemmer", "numba", "numpy", "faiss-cpu", "sentence-transformers", "flashrag-dev")


# servers to compare with


def build_serial_app(search: Callable[[list[str], int], list[list[dict[str, str]]]]) -> Any:
    """FastAPI with the scheduling of host_wiki: the search is synchronous, so requests are served one at a time."""
    from fastapi import FastAPI
    from pydantic import BaseModel, create_model

    app = FastAPI()
    free = [0]
    semaphore = asyncio.Semaphore(1)
    query_request: Any = create_model("QueryRequest", query=(str, ...), top_n=(int, 10), return_score=(bool, False))
    batch_request: Any = create_model("BatchRequest", query=(list[str], ...), top_n=(int, 10))

    class Document(BaseModel):
        id: str
        contents: str

    async def answer(queries: list[str], top_n: int) -> list[list[Document]]:
        async with semaphore:
            retriever = free.pop()
            try:
                return [[Document(**row) for row in rows] for rows in search(queries, top_n)]
            finally:
                free.append(retriever)

    async def search_one(request: query_request) -> list[Document]:
        return (await answer([request.query], request.top_n))[0]

    async def search_batch(request: batch_request) -> list[list[Document]]:
        return await answer(request.query, request.top_n)

    search_one.__annotations__ = {"request": query_request, "return": list[Document]}
    search_batch.__annotations__ = {"request": batch_request, "return": list[list[Document]]}
    app.post("/search")(search_one)
    app.post("/batch_search")(search_batch)
    return app


def open_same_index(folder: Path) -> Callable[[list[str], int], list[list[dict[str, str]]]]:
    index = SearchIndex(folder)

    def search(queries: list[str], top_n: int) -> list[list[dict[str, str]]]:
        found = index.search_batch(queries, top_n)
        return [[{"id": hit.passage_id, "contents": hit.contents} for hit in hits] for hits in found]

    return search


def open_flashrag(folder: Path) -> Callable[[list[str], int], list[list[dict[str, str]]]]:
    """FlashRAG's BM25Retriever, or what it does with bm25s."""
    config = {
        "bm25_backend": "bm25s", "index_path": str(folder), "retrieval_method": "bm25", "retrieval_topk": TOP_N,
        "corpus_path": None, "save_retrieval_cache": False, "use_retrieval_cache": False, "retrieval_cache_path": None,
        "use_reranker": False,
    }  # fmt: skip
    try:
        from flashrag.retriever.retriever import BM25Retriever
    except ImportError:
        import bm25s
        import Stemmer

        stemmer = Stemmer.Stemmer("english")
        searcher = bm25s.BM25.load(folder, mmap=True, load_corpus=True)
        searcher.backend = "numba" if has_package("numba") else "numpy"

        def search_batch(queries: list[str], top_n: int) -> Any:
            tokens = bm25s.tokenize(queries, stemmer=stemmer, show_progress=False)
            return searcher.retrieve(tokens, k=top_n, show_progress=False)[0]
    else:
        retriever = BM25Retriever(config)

        def search_batch(queries: list[str], top_n: int) -> Any:
            if len(queries) == 1:
                return [retriever.search(queries[0], top_n)]
            return retriever.batch_search(queries, top_n)

    return lambda queries, top_n: [
        [{"id": row["id"], "contents": row["contents"]} for row in rows] for rows in search_batch(queries, top_n)
    ]


def write_flashrag_index(corpus: Path, folder: Path) -> None:
    """A bm25s index with its corpus, as FlashRAG's index builder writes it."""
    import bm25s
    import Stemmer

    rows = [json.loads(line) for line in corpus.read_text(encoding="utf-8").splitlines()]
    passages = [{"id": row["id"], "contents": f"{row['title']}\n{row['text']}"} for row in rows]
    stemmer = Stemmer.Stemmer("english")
    tokens = bm25s.tokenize([each["contents"] for each in passages], stemmer=stemmer, show_progress=False)
    model = bm25s.BM25(corpus=passages, backend="numba" if has_package("numba") else "numpy")
    model.index(tokens, show_progress=False)
    model.save(folder, corpus=passages)


def serve_serial(kind: str, folder: Path) -> None:
    """Serve until killed; the port is the first line of stdout."""
    import uvicorn

    search = open_same_index(folder) if kind == "same_index_serial" else open_flashrag(folder)
    search(["warm up"], TOP_N)
    run_on_free_port(uvicorn, build_serial_app(search))


def run_on_free_port(uvicorn: Any, app: Any) -> None:
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(2048)
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listener])


# clients


async def send_requests(port: int, bodies: Iterator[bytes], path: str, until: float, times: list[float]) -> None:
    """One client: a connection that sends the next request when the last one is answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    try:
        while time.perf_counter() < until:
            body = next(bodies)
            started = time.perf_counter()
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200"), answer
            fields = dict(line.lower().split(b": ", 1) for line in answer.split(b"\r\n")[1:-2])
            await reader.readexactly(int(fields[b"content-length"]))
            times.append(time.perf_counter() - started)
    finally:
        writer.close()


def run_clients(port: int, queries: list[str], *, num_clients: int, batch: int, seconds: float) -> dict[str, Any]:
    """Latencies in ms of all requests of a round, and queries per second."""
    endless = cycle(queries)

    def iter_bodies() -> Iterator[bytes]:
        while True:
            given: Any = next(endless) if batch == 1 else list(islice(endless, batch))
            yield json.dumps({"query": given, "top_n": TOP_N}).encode()

    async def work() -> tuple[list[float], float]:
        times: list[float] = []
        started = time.perf_counter()
        bodies, path = iter_bodies(), "/search" if batch == 1 else "/batch_search"
        await asyncio.gather(*(send_requests(port, bodies, path, started + seconds, times) for _ in range(num_clients)))
        return times, time.perf_counter() - started

    times, elapsed = asyncio.run(work())
    return {"qps": len(times) * batch / elapsed, "ms": [1000 * each for each in times]}


# one size


@contextmanager
def start(command: list[str]) -> Iterator[tuple[subprocess.Popen, int]]:
    """A server process and its port; bm25s draws no progress bars."""
    environment = os.environ | {"DISABLE_TQDM": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = ""
        while "http://" not in line:
            line = process.stdout.readline()
            assert line, f"{command} ended"
        yield process, int(line.split()[-1].rsplit(":", 1)[1])
    finally:
        process.kill()
        process.wait()


def read_memory_mib(pid: int) -> dict[str, float]:
    """Resident memory of a process, and the part of it that is no mapped file."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = {
        key: value.split()[0] for key, value in (line.split(":", 1) for line in text.splitlines()) if "kB" in value
    }
    return {"resident": int(found["VmRSS"]) / 1024, "anonymous": int(found["RssAnon"]) / 1024}


def run_child(*arguments: str) -> dict[str, float]:
    """Wall and CPU seconds and peak memory of this script in a child process."""
    started = time.perf_counter()
    process = subprocess.Popen([*SCRIPT, *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = status
    assert status == 0, arguments
    return {
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_mib": round(usage.ru_maxrss / 1024),
    }


def measure_size(
    num_passages: int, folder: Path, arguments: argparse.Namespace, *, model: str | None
) -> dict[str, Any]:
    corpus = folder / f"world{num_passages}"
    if not corpus.exists():
        generate(corpus, num_documents=num_passages, num_train=min(5000, 2 * num_passages), num_test=10)
    questions = [json.loads(line)["question"] for line in (corpus / "train.jsonl").read_text().splitlines()]
    ours, flashrag = folder / f"index{num_passages}{'dense' if model else ''}", folder / f"flashrag{num_passages}"
    report: dict[str, Any] = {"num_passages": num_passages, "kind": "dense" if model else "bm25"}
    report["build"] = run_child("--build", str(corpus / "documents.jsonl"), str(ours), *([model] if model else []))
    report["index_mib"] = round(sum(path.stat().st_size for path in ours.rglob("*") if path.is_file()) / 2**20, 1)
    command = [sys.executable, "-m", "tunesmith", "search", "serve", str(ours), "--port", "0", "--set", "cache_mb=0"]
    commands = {
        "ours": command,
        "same_index_serial": [*SCRIPT, "--serve", "same_index_serial", str(ours)],
    }
    if model is None:
        report["flashrag_build"] = run_child("--build-flashrag", str(corpus / "documents.jsonl"), str(flashrag))
        commands["flashrag_serial"] = [*SCRIPT, "--serve", "flashrag_serial", str(flashrag)]
    with ExitStack() as stack:
        servers = {name: stack.enter_context(start(each)) for name, each in commands.items()}
        report["cases"] = [
            measure_case(servers, questions, arguments, num_clients=num_clients, batch=batch)
            for batch in (1, arguments.batch)
            for num_clients in (arguments.clients if model is None or batch == 1 else [1])
        ]
        report["server_mib"] = {name: read_memory_mib(process.pid) for name, (process, _) in servers.items()}
    shutil.rmtree(ours)
    shutil.rmtree(flashrag, ignore_errors=True)
    return report


def measure_case(
    servers: dict[str, tuple[subprocess.Popen, int]],
    questions: list[str],
    arguments: argparse.Namespace,
    *,
    num_clients: int,
    batch: int,
) -> dict[str, Any]:
    """Rounds of all servers in turn; the first round warms up and is not counted."""
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
    for number in range(arguments.rounds + 1):
        for name, (_, port) in servers.items():
            seconds = arguments.seconds if number else min(1.0, arguments.seconds)
            found = run_clients(port, questions, num_clients=num_clients, batch=batch, seconds=seconds)
            if number:
                rounds[name].append(found)
    figures = {name: summarize(each) for name, each in rounds.items()}
    print(json.dumps({"clients": num_clients, "batch": batch, **figures}), flush=True)
    return {"clients": num_clients, "batch": batch, "servers": figures}


def summarize(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    times = sorted(ms for each in rounds for ms in each["ms"])
    return {
        "qps": round(statistics.median(each["qps"] for each in rounds), 1),
        "qps_best_round": round(max(each["qps"] for each in rounds), 1),
        "p50_ms": round(times[len(times) // 2], 2),
        "p99_ms": round(times[min(len(times) - 1, int(0.99 * len(times)))], 2),
        "requests": len(times),
    }


def has_package(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def print_table(reports: list[dict[str, Any]]) -> None:
    print("\n| passages | request | clients | server | queries/s | p50 ms | p99 ms |\n|---|---|---|---|---|---|---|")
    for report in reports:
        for case in report["cases"]:
            request = "single" if case["batch"] == 1 else f"batch of {case['batch']}"
            for name, figures in case["servers"].items():
                print(
                    f"| {report['num_passages']:,} ({report['kind']}) | {request} | {case['clients']} | {name} | "
                    f"{figures['qps']:g} | {figures['p50_ms']:g} | {figures['p99_ms']:g} |"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 100_000, 1_000_000])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="Length of a round of one server.")
    parser.add_argument("--model", help="Embedding model: also measure a dense index of the first size.")
    parser.add_argument("--folder", type=Path, help="Where worlds are kept between runs.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--build", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--build-flashrag", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve_serial(arguments.serve[0], Path(arguments.serve[1]))
    elif arguments.build:
        corpus, out, *model = arguments.build
        build_index(corpus, out, IndexSettings(kind="dense", model=model[0]) if model else None)
    elif arguments.build_flashrag:
        write_flashrag_index(*map(Path, arguments.build_flashrag))
    else:
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    jobs = [(size, None) for size in arguments.sizes]
    jobs += [(arguments.sizes[0], arguments.model)] if arguments.model else []
    reports: list[dict[str, Any]] = []
    record: dict[str, Any] = {
        "name": "search",
        "top_n": TOP_N,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "load": [os.getloadavg()],
        "versions": {name: version(name) for name in PACKAGES if has_package(name)},
        "sizes": reports,
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for size, model in jobs:
            reports.append(measure_size(size, folder, arguments, model=model))
            record["load"].append(os.getloadavg())
            if arguments.out:
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print_table(reports)


if __name__ == "__main__":
    main()
