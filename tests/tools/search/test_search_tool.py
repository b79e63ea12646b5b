"""The search tool: what the model reads, retries, failures, the cache, and the web adapters."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import tempfile
import textwrap
from urllib.parse import parse_qs

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from web_search_recordings import BING, SERPER, ReplayServer

from conditions import SkippableTime
from forked_programs import start_forked_programs
from search_corpora import PASSAGES, build_small_index, needs_bm25, write_corpus
from tunesmith.config import ToolSection
from tunesmith.errors import ConfigError, DataError, StorageError, ToolUnavailableError
from tunesmith.retrieval import SearchIndex
from tunesmith.runs.load_function import load_tool
from tunesmith.tools.search.settings import SearchToolSection
from tunesmith.tools.search.tool import (
    Passage,
    ResultCache,
    SearchTool,
    format_passages,
    read_bing,
)
from tunesmith.tools.tool import ToolInputError

DOCS = [{"id": "a", "contents": "A\n" + "x" * 30}, {"id": "b", "contents": "B\nshort"}]
CLOSED_PORT = "http://127.0.0.1:9"


def with_server(server: ReplayServer, work, **settings):
    """Run `work(tool)` with a tool that talks to the server."""

    async def run():
        async with server.serve():
            tool = SearchTool(SearchToolSection(**{"url": server.url, "backoff_s": 0, **settings}))
            try:
                return await work(tool)
            finally:
                await tool.aclose()

    return asyncio.run(run())


def test_passages_are_cut_and_joined_by_blank_lines():
    passages = [Passage("a", "x" * 8), Passage("b", "yy")]
    assert format_passages(passages, 5) == "xxxxx...\n\nyy"
    assert format_passages(passages, 8) == "xxxxxxxx\n\nyy"
    assert format_passages([], 5) == "No results found."


def test_the_model_reads_the_passages_of_the_server():
    server = ReplayServer(DOCS)
    text = with_server(server, lambda tool: tool("  what\nis A "), top_n=2, max_passage_chars=20)
    assert text == "A\n" + "x" * 18 + "...\n\nB\nshort"
    ((method, headers, path, body),) = server.requests
    assert (method, path, json.loads(body)) == ("POST", "/search", {"query": "what is A", "top_n": 2})
    assert "authorization" not in headers


def test_the_api_key_is_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    server = ReplayServer(DOCS)
    with_server(server, lambda tool: tool("q"), api_key_variable="MY_KEY")
    assert server.requests[0][1]["authorization"] == "Bearer secret"


TIME: list[SkippableTime] = []


@pytest.fixture(autouse=True)
def time_of_servers(passing_time):
    TIME[:] = [passing_time]


async def hang(request: Request) -> Response:
    """The client's limit, and no more, passes at once."""
    TIME[0].skip_soon(60)
    await asyncio.sleep(1000)
    return Response()


async def refuse_late(request: Request) -> Response:
    TIME[0].skip_soon(20)
    return JSONResponse({}, 503)


@pytest.mark.parametrize("trouble", [JSONResponse({}, 503), JSONResponse({}, 429), JSONResponse({}, 500), hang])
def test_a_server_in_trouble_is_asked_again(trouble):
    server = ReplayServer(trouble, trouble, DOCS)
    text = with_server(server, lambda tool: tool("q"), num_retries=2, timeout_s=50)
    assert text.endswith("B\nshort") and len(server.requests) == 3


@pytest.mark.parametrize(
    ("step", "num_requests", "message"),
    [
        (JSONResponse({"detail": "busy"}, 503), 3, "failed 3 times, the last time with: status 503, .*busy"),
        (hang, 3, "the last time with: no answer within 50 s"),
        (JSONResponse({"detail": "wrong key"}, 401), 1, "refused the request: status 401, .*wrong key"),
        (JSONResponse({"detail": "no"}, 400), 1, "refused the request: status 400"),
        (Response("<html>"), 1, "did not answer with JSON: status 200, <html>"),
        ({"results": []}, 1, 'did not answer with a list of {"id", "contents"}'),
    ],
)
def test_a_server_that_does_not_answer_is_a_failure_and_never_a_result(step, num_requests, message):
    server = ReplayServer(step)

    async def work(tool):
        with pytest.raises(ToolUnavailableError, match=message):
            await tool("q")

    with_server(server, work, num_retries=2, timeout_s=50)
    assert len(server.requests) == num_requests


def test_a_dead_server_is_a_failure_of_the_tool_and_names_what_to_do():
    tool = SearchTool(SearchToolSection(url=CLOSED_PORT, num_retries=1, backoff_s=0)).build_tool()
    with pytest.raises(ToolUnavailableError, match=r"127.0.0.1:9/search failed 2 times.*Start the server, or set url"):
        asyncio.run(tool.call({"query": "q"}))


@pytest.mark.parametrize("step", [hang, refuse_late])
def test_a_time_limit_in_the_environment_makes_a_dead_server_no_observation(step):
    server = ReplayServer(step)

    async def work(_):
        settings = {"url": server.url, "num_retries": 100, "backoff_s": 0.05}
        tool = load_tool(ToolSection(tool="search", timeout_s=50, settings=settings))
        with pytest.raises(ToolUnavailableError, match=r"has not answered within 50 s.*timeout_s of the tool"):
            await tool.call({"query": "q"})
        server.steps = [DOCS]
        return await tool.call({"query": "q"})

    result = with_server(server, work)
    assert result.ok and result.text.endswith("B\nshort")


def test_a_wrong_query_is_an_error_of_the_model():
    tool = SearchTool(SearchToolSection(url=CLOSED_PORT, max_query_chars=10)).build_tool()
    empty = asyncio.run(tool.call({"query": " \n"}))
    long = asyncio.run(tool.call({"query": "x" * 11}))
    assert (empty.ok, empty.failure, empty.text) == (False, "error", "Error: the query is empty")
    assert not long.ok and "11 characters; at most 10" in long.text
    with pytest.raises(ToolInputError):
        asyncio.run(SearchTool(SearchToolSection(url=CLOSED_PORT))(""))


@pytest.mark.parametrize("source", ["server", "serper", "bing"])
def test_a_lone_surrogate_in_a_query_is_replaced(source, monkeypatch):
    monkeypatch.setenv("SERPER_API_KEY", "key")
    monkeypatch.setenv("BING_API_KEY", "key")
    answer = {"server": DOCS, "serper": SERPER, "bing": BING}[source]
    server = ReplayServer(answer)
    result = with_server(server, lambda tool: tool.build_tool().call({"query": "smile \ud83d"}), source=source)
    assert result.ok and len(server.requests) == 1
    _, _, path, body = server.requests[0]
    sent = parse_qs(path.partition("?")[2])["q"][0] if source == "bing" else json.loads(body)
    assert sent in ("smile \ufffd", {"query": "smile \ufffd", "top_n": 4}, {"q": "smile \ufffd", "num": 4})


def test_results_fit_the_limit_that_the_tool_announces():
    tool = SearchTool(SearchToolSection(url=CLOSED_PORT, top_n=3, max_passage_chars=100)).build_tool()
    longest = format_passages([Passage(str(number), "x" * 500) for number in range(3)], 100)
    assert len(longest) <= tool.max_result_chars
    assert tool.text_argument == "query" and tool.timeout_s is None


def test_equal_queries_at_the_same_time_are_one_request():
    server = ReplayServer(DOCS)

    async def work(tool):
        tasks = [asyncio.create_task(tool("same query")) for _ in range(5)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        return await asyncio.gather(*tasks[1:])

    assert len(set(with_server(server, work))) == 1
    assert len(server.requests) == 1


def answer_health(hash_: str):
    return {"status": "healthy", "index": {"hash": hash_}}


def test_results_are_cached_on_disk_for_later_tools_but_failures_are_not(tmp_path):
    cache = str(tmp_path / "deep" / "cache.sqlite")
    first = ReplayServer(answer_health("h1"), JSONResponse({}, 503), DOCS)

    async def fail_then_work(tool):
        with pytest.raises(ToolUnavailableError):
            await tool("q")
        return await tool("q")

    text = with_server(first, fail_then_work, cache=cache, num_retries=0)
    second = ReplayServer(answer_health("h1"), [])
    assert with_server(second, lambda tool: tool(" q "), cache=cache) == text
    assert [request[2] for request in second.requests] == ["/health"]
    third = ReplayServer(answer_health("h2"), [])  # another index
    assert with_server(third, lambda tool: tool("q"), cache=cache) == "No results found."
    old = ReplayServer(answer_health("h1"), [])
    assert with_server(old, lambda tool: tool("q"), cache=cache, cache_days=1e-9) == "No results found."


def test_a_result_is_cached_under_the_index_that_answered(tmp_path):
    cache = str(tmp_path / "cache.sqlite")
    changed = JSONResponse(DOCS, headers={"X-Index-Hash": "h2"})
    with_server(ReplayServer(answer_health("h1"), changed), lambda tool: tool("q"), cache=cache)
    later = ReplayServer(answer_health("h1"), [])
    assert with_server(later, lambda tool: tool("q"), cache=cache) == "No results found."


def test_a_server_without_an_index_hash_is_cached_by_its_address(tmp_path):
    server = ReplayServer({"status": "healthy"}, DOCS)

    async def work(tool):
        return [await tool("q"), await tool("q")]

    texts = with_server(server, work, cache=str(tmp_path / "cache.sqlite"))
    assert texts[0] == texts[1] and [request[2] for request in server.requests] == ["/health", "/search"]


def test_several_processes_share_a_cache(tmp_path):
    program = textwrap.dedent("""
        import sys
        from tunesmith.tools.search.tool import ResultCache
        from tunesmith.tools.search.tool import Passage
        cache = ResultCache("cache.sqlite")
        for number in range(30):
            cache.put(f"{number}", [Passage("id", sys.argv[1])])
            assert cache.get(f"{number}") is not None
    """)
    (tmp_path / "program.py").write_text(program)
    forks = start_forked_programs()
    children = [forks.fork(["python", "program.py", name], folder=tmp_path, log=f"{name}.log") for name in "abc"]
    assert [child.wait() for child in children] == [0] * 3
    assert [(tmp_path / f"{name}.log").read_text() for name in "abc"] == [""] * 3
    cache = ResultCache(tmp_path / "cache.sqlite")
    assert {cache.get(str(number))[0].contents for number in range(30)} <= {"a", "b", "c"}
    cache.close()


def test_a_cache_keeps_the_latest_results(tmp_path):
    cache = ResultCache(tmp_path / "cache.sqlite", max_entries=3)
    for key in "abcad":  # a is stored again
        cache.put(key, [Passage("id", key)])
    assert [key for key in "abcd" if cache.get(key)] == ["a", "c", "d"]
    cache.close()
    server = ReplayServer({"status": "healthy"}, DOCS)

    async def work(tool):
        for query in "xyz":
            await tool(query)

    with_server(server, work, cache=str(tmp_path / "cache.sqlite"), cache_entries=2)
    rows = sqlite3.connect(tmp_path / "cache.sqlite").execute("SELECT key FROM results").fetchall()
    assert [json.loads(key)[2] for (key,) in rows] == ["y", "z"]


def test_a_file_that_is_no_cache_is_refused(tmp_path):
    (tmp_path / "cache.sqlite").write_text("not a data base, but long enough to be looked at as one " * 20)
    with pytest.raises(StorageError, match=r"cannot use .*cache.sqlite as a cache of searches"):
        ResultCache(tmp_path / "cache.sqlite")
    sqlite3.connect(tmp_path / "other.sqlite").execute("CREATE TABLE results (key TEXT)")
    with pytest.raises(StorageError, match=r"other.sqlite as a cache of searches: .*passages"):
        ResultCache(tmp_path / "other.sqlite").get("key")


def test_serper_results_become_passages(tmp_path, monkeypatch):
    monkeypatch.setenv("SERPER_API_KEY", "serper-key")
    server = ReplayServer(SERPER)
    settings = {"source": "serper", "top_n": 3, "cache": str(tmp_path / "cache.sqlite")}

    async def work(tool):
        return [await tool.find("Apple Inc"), await tool.find("Apple  Inc")]

    found, again = with_server(server, work, **settings)
    assert found == again == [
        Passage("https://example.org/founded", "Apple Inc. / Founded\nApril 1, 1976"),
        Passage("", "Apple\nApple Inc. is an American multinational technology company."),
        Passage("https://www.apple.com/", "Apple\nDiscover the world of Apple."),
    ]  # fmt: skip
    ((method, headers, _, body),) = server.requests
    assert method == "POST" and headers["x-api-key"] == "serper-key"
    assert json.loads(body) == {"q": "Apple Inc", "num": 3}


def test_bing_results_become_passages(monkeypatch):
    monkeypatch.setenv("BING_API_KEY", "bing-key")
    server = ReplayServer(BING)
    found = with_server(server, lambda tool: tool("sailing & dinghies"), source="bing", top_n=1)
    assert found == "Dinghy sailing\nSmall sailing boats."
    ((method, headers, path, _),) = server.requests
    assert method == "GET" and headers["ocp-apim-subscription-key"] == "bing-key"
    assert path == "/?q=sailing+%26+dinghies&count=1" or path == "/?q=sailing%20%26%20dinghies&count=1"
    assert read_bing({"_type": "SearchResponse"}, "url") == []


@pytest.mark.parametrize("source", ["serper", "bing"])
def test_web_answers_of_another_form_and_exhausted_quotas_are_failures(source, monkeypatch):
    monkeypatch.setenv("SERPER_API_KEY", "key")
    monkeypatch.setenv("BING_API_KEY", "key")

    async def work(tool):
        with pytest.raises(ToolUnavailableError, match=f"did not answer in {source.title()}'s form"):
            await tool("q")
        with pytest.raises(ToolUnavailableError, match="refused the request: status 403, .*Not enough credits"):
            await tool("q")

    quota = JSONResponse({"message": "Not enough credits"}, 403)
    with_server(ReplayServer({"message": "hello"}, quota), work, source=source)


def test_a_web_service_without_a_key_and_wrong_settings_are_refused(monkeypatch, tmp_path):
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="needs an API key in the environment variable SERPER_API_KEY"):
        SearchTool(SearchToolSection(source="serper"))
    with pytest.raises(ValueError, match="source: index needs a folder or file in index"):
        SearchToolSection(source="index")
    with pytest.raises(ValueError, match="no other source takes one"):
        SearchToolSection(index="folder")
    with pytest.raises(DataError, match="there is no index"):
        SearchTool(SearchToolSection(source="index", index=str(tmp_path / "none")))


@needs_bm25
def test_an_index_is_searched_in_process_without_a_server(tmp_path):
    folder = build_small_index(tmp_path)
    tool = SearchTool(SearchToolSection(source="index", index=str(folder), top_n=2)).build_tool()
    result = asyncio.run(tool.call({"query": "flour"}))
    assert result.ok and result.text == f"{PASSAGES[2][1]}\n\n{PASSAGES[3][1]}"
    assert asyncio.run(tool.call({"query": "zebra"})).text == "No results found."
    assert [hit.contents for hit in SearchIndex(folder).search("flour", 2)] == result.text.split("\n\n")


@needs_bm25
def test_passages_of_a_file_are_searched_without_an_index_folder(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    tool = SearchTool(SearchToolSection(source="index", index=str(corpus), top_n=2)).build_tool()
    assert list((tmp_path / "temporary").iterdir()) == []
    assert asyncio.run(tool.call({"query": "flour"})).text == f"{PASSAGES[2][1]}\n\n{PASSAGES[3][1]}"
    corpus.write_text('{"body": "x"}\n')
    with pytest.raises(DataError, match="line 1 of .* has no text"):
        SearchTool(SearchToolSection(source="index", index=str(corpus))).build_tool()


@needs_bm25
def test_search_is_a_built_in_tool_of_environments(tmp_path):
    settings = {"source": "index", "index": str(build_small_index(tmp_path)), "top_n": 1}
    tool = load_tool(ToolSection(tool="search", settings=settings, name="wiki", max_calls=3))
    assert (tool.name, tool.max_calls) == ("wiki", 3)
    assert asyncio.run(tool.call({"query": "flour"})).text == PASSAGES[2][1]
    with pytest.raises(ConfigError, match=r"environment.tools: search: settings: .*did you mean 'top_n'"):
        load_tool(ToolSection(tool="search", settings={"topn": 1}))
