"""The server's JSON contract, its refusals, batching and cache."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
import urllib.request

import httpx
import pytest

from forked_programs import LOG, start_forked_programs
from search_corpora import PASSAGES, build_small_index, needs_bm25
from tunesmith.retrieval import SearchIndex, ServerSettings
from tunesmith.retrieval.server import build_app

pytestmark = needs_bm25


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return SearchIndex(build_small_index(tmp_path_factory.mktemp("index")))


def connect(app) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://search")


def ask(index, path, body, *, headers=None, **settings) -> httpx.Response:
    async def work():
        async with connect(build_app(index, ServerSettings(**settings))) as client:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await client.post(path, content=content, headers=headers)

    return asyncio.run(work())


MOUNTAIN = {"id": "p1", "contents": PASSAGES[0][1]}
FLOUR = [{"id": each, "contents": text} for each, text in (PASSAGES[2], PASSAGES[3])]


def test_search_answers_in_the_form_of_the_contract(index):
    response = ask(index, "/search", {"query": "  white SNOW ", "top_n": 2})
    assert response.status_code == 200 and response.json() == [MOUNTAIN]
    docs, scores = ask(index, "/search", {"query": "flour", "return_score": True}).json()
    assert docs == FLOUR
    assert scores == pytest.approx([hit.score for hit in index.search("flour")])
    assert ask(index, "/search", {"query": "zebra", "return_score": True}).json() == [[], []]
    assert ask(index, "/search", {"queries": "snow"}).json() == [MOUNTAIN]


@pytest.mark.parametrize("key", ["query", "queries"])
def test_batch_search_takes_query_and_queries(index, key):
    response = ask(index, "/batch_search", {key: ["snow", "zebra", "flour", "snow"], "top_n": 2})
    assert response.json() == [[MOUNTAIN], [], FLOUR, [MOUNTAIN]]
    docs, scores = ask(index, "/batch_search", {key: ["snow", "zebra"], "return_score": True}).json()
    assert docs == [[MOUNTAIN], []] and len(scores[0]) == 1 and scores[1] == []
    assert ask(index, "/batch_search", {key: []}).json() == []


def test_health_has_the_contract_s_fields_and_the_index(index):
    async def work():
        async with connect(build_app(index, ServerSettings(api_key="secret", num_threads=2))) as client:
            return (await client.get("/health")).json()

    health = asyncio.run(work())
    assert health["status"] == "healthy" and health["retrievers"] == {"total": 2, "available": 2}
    assert health["index"] == {"hash": index.info.index_hash, "kind": "bm25", "num_passages": 5}


@pytest.mark.parametrize(
    ("path", "body", "detail"),
    [
        ("/search", {"query": ""}, "query cannot be empty"),
        ("/search", {"query": " \n"}, "query cannot be empty"),
        ("/search", {}, "the body must have one of query and queries; neither is"),
        ("/search", {"query": "a", "queries": "b"}, "the body must have one of query and queries; both are given"),
        ("/search", {"query": ["a"]}, 'query must be a string, not ["a"]; lists go to /batch_search'),
        ("/search", {"query": 3}, "query must be a string, not 3; lists go to /batch_search"),
        ("/search", {"query": "a", "top_n": 0}, "top_n must be an integer from 1 to 100, not 0"),
        ("/search", {"query": "a", "top_n": 101}, "top_n must be an integer from 1 to 100, not 101"),
        ("/search", {"query": "a", "top_n": True}, "top_n must be an integer from 1 to 100, not true"),
        ("/search", {"query": "a", "top_n": "4"}, 'top_n must be an integer from 1 to 100, not "4"'),
        ("/search", {"query": "a", "return_score": 1}, "return_score must be true or false, not 1"),
        ("/search", {"query": "a" * 51}, "query has 51 characters, more than 50 (max_query_chars)"),
        ("/search", ["a"], "the body is not a JSON object"),
        ("/search", b"{query: 1}", "the body is not JSON"),
        ("/search", b"\xff", "the body is not JSON"),
        ("/search", b"[" * 900, "the body is not JSON"),
        ("/batch_search", {"queries": "a"}, 'queries must be a list of strings, not "a"'),
        ("/batch_search", {"query": ["a", 2]}, "query[1] must be a string, not 2"),
        ("/batch_search", {"query": ["a", " "]}, "query 1 cannot be empty"),
        ("/batch_search", {"query": ["a"] * 9}, "9 queries are more than 8 (max_queries)"),
    ],
)
def test_a_wrong_request_is_refused_with_what_is_wrong(index, path, body, detail):
    response = ask(index, path, body, max_query_chars=50, max_queries=8)
    assert (response.status_code, response.json()) == (400, {"detail": detail})


def test_a_long_body_is_not_read_to_its_end(index):
    sent = []

    async def stream():
        for _ in range(1000):
            sent.append(1024)
            yield b" " * 1024

    async def work():
        async with connect(build_app(index, ServerSettings(max_body_bytes=4096))) as client:
            return await client.post("/search", content=stream())

    response = asyncio.run(work())
    assert response.status_code == 413 and "more than 4096 bytes" in response.json()["detail"]
    assert len(sent) < 10


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic secret"}, 401),
        ({"X-API-Key": "s\u00e9cret".encode()}, 401),
        ({"Authorization": "Bearer secret"}, 200),
        ({"X-API-Key": "secret"}, 200),
    ],
)
def test_an_api_key_is_required_if_there_is_one(index, headers, status):
    assert ask(index, "/search", {"query": "snow"}, headers=headers, api_key="secret").status_code == status


class SlowIndex:
    """An index whose batches end when the test lets them; records the batches."""

    def __init__(self, index: SearchIndex) -> None:
        self._index = index
        self.batches: list[list[str]] = []
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.error: Exception | None = None

    def __getattr__(self, name):
        return getattr(self._index, name)

    def rank(self, searches):
        self.batches.append([query for query, _ in searches])
        self.entered.release()
        assert self.gate.acquire(timeout=30)
        if self.error is not None:
            raise self.error
        return self._index.rank(searches)


async def settle() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


async def start(client, *queries) -> list[asyncio.Task]:
    """Requests for queries, each waiting in the server."""
    tasks = [asyncio.create_task(client.post("/search", json={"query": query})) for query in queries]
    await settle()
    return tasks


def test_requests_that_arrive_during_a_search_are_the_next_batch(index):
    slow = SlowIndex(index)

    async def work():
        async with connect(build_app(slow, ServerSettings(max_batch=3))) as client:
            first = await start(client, "snow")
            await asyncio.to_thread(slow.entered.acquire, timeout=30)
            rest = await start(client, "sea", "flour", "SEA", "snow", "bread", "eggs")
            assert (await client.get("/health")).json()["retrievers"] == {"total": 1, "available": 0}
            slow.gate.release(3)
            return [response.json() for response in await asyncio.gather(*first, *rest)]

    answers = asyncio.run(work())
    assert slow.batches == [["snow"], ["sea", "flour", "bread"], ["eggs"]]
    assert answers[0] == answers[4] == [MOUNTAIN] and answers[1] == answers[3]


def test_rankings_are_cached_by_normalized_query_and_top_n(index):
    slow = SlowIndex(index)
    slow.gate.release(100)

    async def work():
        async with connect(build_app(slow, ServerSettings())) as client:
            for body in (
                {"query": "white snow"}, {"query": "White\n SNOW"}, {"query": "white snow", "return_score": True},
                {"query": "white snow", "top_n": 1},
            ):  # fmt: skip
                await client.post("/search", json=body)
            return (await client.get("/health")).json()["cache"]

    cache = asyncio.run(work())
    assert slow.batches == [["white snow"], ["white snow"]]
    assert (cache["hits"], cache["misses"], cache["entries"]) == (2, 2, 2)


def test_the_cache_is_bounded(index):
    async def work(cache_mb):
        async with connect(build_app(index, ServerSettings(cache_mb=cache_mb))) as client:
            for number in range(50):
                await client.post("/search", json={"query": f"snow {number}"})
            return (await client.get("/health")).json()["cache"]

    few = asyncio.run(work(0.01))
    assert 0 < few["entries"] < 50 and few["bytes"] <= 0.01 * 2**20
    assert asyncio.run(work(0))["entries"] == 0


def test_too_many_waiting_queries_are_answered_503(index):
    slow = SlowIndex(index)

    async def work():
        async with connect(build_app(slow, ServerSettings(max_waiting=2))) as client:
            tasks = await start(client, "snow")
            await asyncio.to_thread(slow.entered.acquire, timeout=30)
            tasks += await start(client, "sea", "flour")
            refused = await client.post("/search", json={"query": "bread"})
            same = await start(client, "sea")  # already waiting, so it costs nothing
            slow.gate.release(9)
            return refused, [task.status_code for task in await asyncio.gather(*tasks, *same)]

    refused, others = asyncio.run(work())
    assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
    assert others == [200] * 4


def test_a_failed_search_is_answered_500_and_the_next_one_works(index):
    slow = SlowIndex(index)
    slow.error = RuntimeError("disk on fire")
    slow.gate.release(9)

    async def work():
        async with connect(build_app(slow, ServerSettings())) as client:
            failed = await client.post("/search", json={"query": "snow"})
            slow.error = None
            return failed, await client.post("/search", json={"query": "snow"})

    failed, answered = asyncio.run(work())
    assert failed.status_code == 500 and "disk on fire" in failed.json()["detail"]
    assert answered.json() == [MOUNTAIN]


def test_a_request_that_goes_away_does_not_cancel_the_search_of_another(index):
    slow = SlowIndex(index)

    async def work():
        async with connect(build_app(slow, ServerSettings())) as client:
            (first,) = await start(client, "snow")
            await asyncio.to_thread(slow.entered.acquire, timeout=30)
            (second,) = await start(client, "snow")
            first.cancel()
            await settle()
            slow.gate.release(9)
            return await second

    assert asyncio.run(work()).json() == [MOUNTAIN]


def test_the_commands_build_and_serve(tmp_path, index):
    del index
    folder = build_small_index(tmp_path)
    tunesmith = [sys.executable, "-m", "tunesmith", "search"]
    command = [*tunesmith, "build", str(tmp_path / "corpus.jsonl"), "--out", str(tmp_path / "again")]
    command += ["--set", "bm25_b=1"]
    built = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.match(r"5 passages, bm25 index [0-9a-f]{16}: ", built.stdout)
    assert start_forked_programs().run(command[2:], folder=tmp_path) == 1
    assert "again exists; choose another folder" in (tmp_path / LOG).read_text()
    server = subprocess.Popen([*tunesmith, "serve", str(folder), "--port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        line = server.stdout.readline()
        assert line.startswith("serving 5 passages (bm25, index ")
        url = re.search(r"http://127\.0\.0\.1:\d+", line)[0]
        with urllib.request.urlopen(f"{url}/health", timeout=30) as response:
            assert json.load(response)["status"] == "healthy"
        asked = {"json": {"query": "snow"}}
        assert httpx.post(f"{url}/search", **asked).status_code == 200
        for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
            assert httpx.post(f"{url}/search", headers=headers, **asked).status_code == 403
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(30) in (0, 130, -signal.SIGINT)
