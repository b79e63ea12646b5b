"""Operators on tasks, and paraphrases from a model served over HTTP."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer

import pytest

from tunesmith.errors import DataError
from tunesmith.tasks.operators import (
    compute_quality,
    deduplicate,
    find_rejection,
    is_faithful,
    length_filter,
    normalize,
    order_by_priority,
    paraphrase,
    score_difficulty,
    score_quality,
)
from tunesmith.types import Task


def tasks_of(*rows):
    return [Task(task_id=f"t/{i}", index=i, row=row) for i, row in enumerate(rows)]


def kept(result):
    return [task.index for task in result[0]]


def test_duplicates_differ_only_in_spacing_case_and_punctuation():
    tasks = tasks_of({"q": "What is 2 + 2?"}, {"q": 'what  is "2+2"'}, {"q": "What is 2 + 3?"})
    assert kept(deduplicate(tasks, fields=["q"])) == [0, 2]
    assert deduplicate(tasks, fields=["q"])[1] == {"num_removed": 1}


def test_tasks_that_differ_in_an_operator_sign_are_kept():
    texts = [
        "2 + 3",
        "2 - 3",
        "2 * 3",
        "-2 + 3",
        "2.3",
        "2 3",
        "(2 + 3) * 4",
        "2 + (3 * 4)",
        "2^3",
        "2%3",
        "5!",
        "5",
        ".5",
        "f(3)",
        "f'(3)",
        "f''(3)",
        "(f g)(3)",
        "(f g)'(3)",
        "y + y = 0",
        "y' + y = 0",
    ]
    assert kept(deduplicate(tasks_of(*({"q": text} for text in texts)), fields=["q"])) == list(range(len(texts)))


def test_length_filter_counts_characters():
    tasks = tasks_of({"q": "ab"}, {"q": "abcd"}, {"q": "abcdef"})
    assert kept(length_filter(tasks, field="q", min_chars=3, max_chars=5)) == [1]


def test_quality_of_prose_is_above_that_of_noise():
    prose = "A train leaves the station at noon and travels sixty miles before it stops for water."
    assert compute_quality(prose) > 0.95
    assert compute_quality("!!!! ???? $$$$ ####") == 0.0
    assert compute_quality("<<a>> ## b ** {c} // [d] %% e") < 0.8
    assert compute_quality("again and again and " * 20) < 0.5
    assert compute_quality("  ") == 0.0


def test_scores_are_added_as_new_fields():
    tasks = tasks_of({"q": "Hello there", "easy": 0.25, "easier": 0.75})
    (task,), _ = score_quality(tasks, field="q")
    assert task.row["quality_score"] == compute_quality("Hello there")
    (task,), _ = score_difficulty(tasks, feature_keys=["easy", "easier"], to="hard")
    assert task.row["hard"] == 0.5
    with pytest.raises(DataError, match="already have a field 'easy'"):
        score_quality(tasks, field="q", to="easy")


def test_priority_is_a_weighted_sum_with_stable_ties():
    tasks = tasks_of({"a": 1, "b": 0}, {"a": 0, "b": 3}, {"a": 1, "b": 0})
    assert kept(order_by_priority(tasks, weights={"a": 1.0, "b": 0.5})) == [1, 0, 2]
    assert kept(order_by_priority(tasks, weights={"a": 1.0, "b": -0.5}, top_k=2)) == [0, 2]


def test_a_missing_or_non_numeric_field_is_named():
    with pytest.raises(DataError, match="t/0 has no 'z'; its fields are q"):
        length_filter(tasks_of({"q": "a"}), field="z")
    with pytest.raises(DataError, match=r"t/0 has no 'q': its value is empty \(null"):
        length_filter(tasks_of({"q": None}), field="q")
    with pytest.raises(DataError, match="which is not a finite number"):
        order_by_priority(tasks_of({"q": "a"}), weights={"q": 1.0})
    with pytest.raises(DataError, match="q=nan, which is not a finite number"):
        order_by_priority(tasks_of({"q": 1.0}, {"q": float("nan")}, {"q": 3.0}), weights={"q": 1.0})
    with pytest.raises(DataError, match="t/0 has q=3.0, which is not a pass rate"):
        score_difficulty(tasks_of({"q": 3}), feature_keys=["q"])


@pytest.mark.parametrize(
    ("rewritten", "expected"),
    [
        ("Ann owns 3 pens and gets 12", True),
        ("Ann has 3 pens, then 12", False),
        ("Ann owns 3 pens", False),
        ("Ann owns .3 pens and gets 12", False),
        (" ", False),
    ],
)
def test_a_faithful_paraphrase_keeps_every_number(rewritten, expected):
    assert is_faithful("Ann has 3 pens, then 12", rewritten) is expected


@pytest.fixture
def foreign_server(request):
    """A server that answers every request with the body given as parameter."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(request.param)

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()


@pytest.mark.parametrize(
    "foreign_server", [b"<html></html>", b'{"choices": []}', b'{"choices": null}', b'{"ok": 1}', b'"hm"'], indirect=True
)
def test_a_server_that_is_not_openai_compatible_is_named(foreign_server, tmp_path):
    with pytest.raises(DataError, match=f"{foreign_server}/.* is it an OpenAI server"):
        paraphrase(
            tasks_of({"q": "What is 2?"}),
            field="q",
            model="m",
            base_url=foreign_server,
            cache_path=str(tmp_path / "cache.jsonl"),
        )


@pytest.fixture
def rewriter():
    """An OpenAI-compatible server that rewrites questions and counts requests.

    It answers questions with "wait" two at a time, each in other words if they have "apart", fails
    on those with "fail", and is cut off at its token limit on those with "cut".
    """
    asked, in_flight, most_in_flight, together = [], [], [], threading.Barrier(2)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append(body["seed"])
            text = body["messages"][0]["content"].split("\n\n")[-1]
            if "wait" in text:
                in_flight.append(text)
                together.wait(timeout=60)
                most_in_flight.append(len(in_flight))
                place = together.wait(timeout=60)
                in_flight.remove(text)
                text += " please" * place if "apart" in text else ""
            if "fail" in text:
                self.send_error(400)
                return
            answer = f"Say: {text}" if body["seed"] == 0 else "Say: nothing"
            reason = "length" if "cut" in text else "stop"
            choice = {"index": 0, "finish_reason": reason, "message": {"role": "assistant", "content": answer}}
            head = {"id": "x", "object": "chat.completion", "created": 0, "model": "m"}
            reply = json.dumps(head | {"choices": [choice]})
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(reply.encode())

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", asked, most_in_flight
    server.shutdown()


def test_paraphrases_are_requested_once_and_cached(rewriter, tmp_path):
    url, asked, _ = rewriter
    args = {
        "field": "q",
        "model": "m",
        "base_url": url,
        "cache_path": str(tmp_path / "cache.jsonl"),
        "num_variants": 2,
    }
    tasks = tasks_of({"q": "What is 2?", "answer": "2"})
    made, metrics = paraphrase(tasks, **args)
    assert [task.task_id for task in made] == ["t/0", "t/0/paraphrase-0"]
    assert made[1].row == {"q": "Say: What is 2?", "answer": "2"} and made[1].index == 0
    assert metrics == {"num_asked": 2, "num_refused": 1, "num_repeated": 0, "num_echoed": 0}
    with (tmp_path / "cache.jsonl").open("a") as file:
        file.write('["cut sho')
    again, metrics = paraphrase(tasks, **args)
    assert again == made and metrics["num_asked"] == 0 and len(asked) == 2


def test_runs_that_share_a_cache_use_the_first_reply(rewriter, tmp_path):
    """Both runs ask before either has a reply; the server answers each in other words."""
    url, asked, _ = rewriter
    args = {"field": "q", "model": "m", "base_url": url, "cache_path": str(tmp_path / "cache.jsonl")}
    tasks = tasks_of({"q": "wait apart"})
    with ThreadPoolExecutor() as runs:
        one, other = (each[0] for each in runs.map(lambda _: paraphrase(tasks, **args), range(2)))
    assert len(asked) == 2 and len((tmp_path / "cache.jsonl").read_text().splitlines()) == 2
    resumed, metrics = paraphrase(tasks, **args)
    assert metrics["num_asked"] == 0 and resumed == one == other


def test_requests_are_concurrent_and_results_in_order(rewriter, tmp_path):
    """The server waits until it has two requests and never receives three at once."""
    url, asked, most_in_flight = rewriter
    args = {"field": "q", "model": "m", "base_url": url, "cache_path": str(tmp_path / "cache.jsonl")}
    tasks = tasks_of(*({"q": f"wait {n}"} for n in range(6)), {"q": "wait 0"})
    made, metrics = paraphrase(tasks, **args, max_concurrency=2)
    expected = [(f"t/{n}", f"wait {n % 6}") for n in range(7)]
    assert [(task.task_id, task.row["q"]) for task in made[::2]] == expected
    assert [(task.task_id, task.row["q"]) for task in made[1::2]] == [
        (f"{task_id}/paraphrase-0", f"Say: {text}") for task_id, text in expected
    ]
    assert metrics == {"num_asked": 6, "num_refused": 0, "num_repeated": 0, "num_echoed": 0} and len(asked) == 6
    assert set(most_in_flight) == {2}


@pytest.mark.parametrize(
    ("rewrite", "rejection"),
    [
        ("Ann owns 3 pens.", None),
        ("Ann owns four pens.", "refused"),
        ("Ann has 3 pens. How many?", "refused"),
        ("ann has 3 pens -- how many", None),
        ("Ann has 3 pens, how many", "repeated"),
        ("Ann  holds 3 PENS.", "repeated"),
        ("Bob has 3 pens.", "repeated"),
        ("Rewrite the following task in other words: Ann owns 3 pens.", "echoed"),
        ("Ann owns 3 pens. Keep its meaning, every number and name.", "echoed"),
        ("Here is the rewritten task: Ann owns 3 pens.", "echoed"),
        ("In other words, Ann owns 3 pens.", None),
    ],
)
def test_a_rewrite_that_adds_nothing_is_rejected(rewrite, rejection):
    source_of = {normalize("Ann has 3 pens. How many?"): "Ann has 3 pens. How many?", normalize("Bob has 3 pens"): "b"}
    accepted = {normalize("Ann holds 3 pens")}
    assert find_rejection("Ann has 3 pens. How many?", rewrite, accepted, source_of) == rejection


def test_a_preamble_in_the_task_itself_is_allowed():
    text = "Give the rewritten version of 2 + 2."
    assert find_rejection(text, "What is the rewritten version of 2 + 2?", set(), {}) is None


def test_repeated_and_echoed_rewrites_are_counted_and_rejected(tmp_path):
    replies = ["Ann owns 3 pens.", "ann owns 3 pens", "Rewrite the following task: 3 pens", "Ann owns no pen."]
    cache = tmp_path / "cache.jsonl"
    keys = [json.dumps(["m", 1.0, 1024, number, "Ann has 3 pens."]) for number in range(4)]
    cache.write_text("".join(json.dumps(line) + "\n" for line in zip(keys, replies, strict=True)))
    args = {"field": "q", "model": "m", "base_url": "http://127.0.0.1:9", "cache_path": str(cache), "num_variants": 4}
    made, metrics = paraphrase(tasks_of({"q": "Ann has 3 pens."}), **args)
    assert [task.row["q"] for task in made] == ["Ann has 3 pens.", "Ann owns 3 pens."]
    assert metrics == {"num_asked": 0, "num_refused": 1, "num_repeated": 1, "num_echoed": 1}


def test_a_rewrite_that_is_cut_off_is_refused(rewriter, tmp_path):
    url, _, _ = rewriter
    args = {"field": "q", "model": "m", "base_url": url, "cache_path": str(tmp_path / "cache.jsonl")}
    made, metrics = paraphrase(tasks_of({"q": "cut 3 pens"}), **args)
    assert [task.row["q"] for task in made] == ["cut 3 pens"] and metrics["num_refused"] == 1


def test_replies_before_a_failure_are_kept(rewriter, tmp_path):
    url, _, _ = rewriter
    args = {"field": "q", "model": "m", "base_url": url, "cache_path": str(tmp_path / "cache.jsonl")}
    with pytest.raises(DataError, match="'m' did not answer"):
        paraphrase(tasks_of({"q": "1 pen"}, {"q": "fail 2"}), **args, max_concurrency=1)
    made, metrics = paraphrase(tasks_of({"q": "1 pen"}), **args)
    assert metrics["num_asked"] == 0 and made[1].row == {"q": "Say: 1 pen"}
