"""Trajectories for fine-tuning: what the filter removes and keeps, how diversity is measured, and what is trained."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace

import numpy as np
import pytest

from tunesmith.commands.run.run import run_stage as run_stage_of_kind
from tunesmith.commands.sft.conversations import ConversationReader
from tunesmith.config import RftFilterSection
from tunesmith.environments.transcript import Segment, Transcript, wrap_result
from tunesmith.errors import ConfigError, DataError
from tunesmith.et_agent.selection.rft import (
    count_word_pairs,
    measure_diversity,
    normalize,
    read_trajectory,
    run_stage,
)
from tunesmith.model.pocket import build_pocket_tokenizer


def make_transcript(*tools, answer="7", words="so", failure="", hint=None):
    segments = []
    for number, tool in enumerate(tools):
        segments += [
            Segment(kind="thought", text=f"<think>{words}</think>\n"),
            Segment(kind="call", text=f"<{tool}>x</{tool}>", tool=tool, arguments={"q": "x"}, call_id=str(number)),
            Segment(
                kind="result", text=wrap_result("docs"), tool=tool, result="docs", call_id=str(number),
                ok=not failure, failure=failure,
            ),
        ]  # fmt: skip
    if hint is not None:
        segments.append(Segment(kind="forced", text=f"<think>{hint}</think>"))
    segments += [
        Segment(kind="thought", text=f"<think>{words}</think>\n"),
        Segment(kind="answer", text=f"<answer>\\boxed{{{answer}}}</answer>"),
    ]
    return Transcript(question="q", segments=tuple(segments), finish="answered")


def make_row(question, transcript, correctness=1.0, **more):
    return {
        "question": question, "answer": "7", "correctness": correctness,
        "transcript": replace(transcript, question=question).to_json(), **more,
    }  # fmt: skip


def run_filter(section, out_dir):
    """The report."""
    run_stage(section, out_dir=out_dir, choose_model=lambda config: None)
    return json.loads((out_dir / "report.json").read_text())


@pytest.fixture
def filter_rows(tmp_path):
    def run(rows, **values):
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        section = RftFilterSection(data=str(tmp_path / "in.jsonl"), **values)
        return run_filter(section, tmp_path / "out"), read(tmp_path / "out" / "train.jsonl")

    return run


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_removed_trajectory_is_counted_under_its_first_reason(filter_rows):
    rows = [
        make_row("a", make_transcript("search"), operator="rollout"),
        make_row("a", make_transcript("search", words="so ")),
        make_row("b", make_transcript("search"), correctness=0.5),
        make_row("b", replace(make_transcript("search", failure="error"), finish="no_answer")),
        make_row("b", make_transcript("search", failure="timeout")),
        make_row("b", make_transcript("search", words="b")),
    ]
    result, kept = filter_rows(rows)
    assert result["dropped"] == {
        "wrong answer": 1, "format error": 1, "failed call": 1, "equal to an earlier one": 0,
        "above max_per_question": 0,
    }  # fmt: skip
    assert [row["question"] for row in kept] == ["a", "a", "b"]
    assert kept[0]["operator"] == "rollout" and "transcript" not in kept[0]
    result, kept = filter_rows([rows[0], rows[0], *rows[4:]], max_failed_calls=1)
    assert result["dropped"]["equal to an earlier one"] == 1 and len(kept) == 3


def test_equal_ids_of_two_files_are_two_questions(filter_rows, tmp_path):
    """Each flywheel numbers its questions from 0: trajectories of one file must not fill the limit of another's."""
    other = [make_row("b", make_transcript("python", words=f"b{i}"), question_id="train/0") for i in range(2)]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in other))
    own = [make_row("a", make_transcript("search", words=f"a{i}"), question_id="train/0") for i in range(2)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    section = RftFilterSection(data=(str(tmp_path / "in.jsonl"), str(tmp_path / "other.jsonl")), max_per_question=2)
    result = run_filter(section, tmp_path / "out")
    assert result["kept"] == 4 and result["before"]["questions"] == 2.0


def test_correctness_that_is_not_a_number_is_refused(filter_rows):
    with pytest.raises(DataError, match="correctness must be a finite number, got nan"):
        filter_rows([make_row("a", make_transcript("search"), correctness=float("nan"))])


def test_a_field_with_nan_is_refused(filter_rows, tmp_path):
    with pytest.raises(DataError, match="row 0 of .* has a number that is not finite in 'score'"):
        filter_rows([make_row("a", make_transcript("search"), score=float("nan"))])
    assert not (tmp_path / "out").exists()


def test_call_with_half_a_character_is_written(filter_rows, tmp_path):
    """A model may write half of a surrogate pair in the JSON arguments of a call."""
    half = json.loads('"\\ud83d"')
    transcript = make_transcript("search")
    segments = [replace(each, arguments={"q": half}) if each.kind == "call" else each for each in transcript.segments]
    result, _ = filter_rows([make_row("a", replace(transcript, segments=tuple(segments)))])
    assert result["kept"] == 1
    (row,) = read(tmp_path / "out" / "transcripts.jsonl")
    assert row["transcript"]["segments"][1]["arguments"] == {"q": half}


def test_different_orders_of_tools_are_kept_before_repeated_ones(filter_rows, tmp_path):
    texts = [("search", "search"), ("search",), ("search",), ("python",), ()]
    rows = [make_row("a", make_transcript(*tools, words=f"w{i}"), number=i) for i, tools in enumerate(texts)]
    result, kept = filter_rows(rows, max_per_question=3)
    assert [row["number"] for row in kept] == [1, 3, 4]
    assert result["dropped"]["above max_per_question"] == 2
    assert [row["number"] for row in filter_rows(rows, max_per_question=4)[1]] == [0, 1, 3, 4]
    assert len(filter_rows(rows, max_per_question=None)[1]) == 5
    assert [row["number"] for row in read(tmp_path / "out" / "transcripts.jsonl")] == [0, 1, 2, 3, 4]


def test_results_and_hints_are_context_and_everything_else_is_trained(filter_rows):
    transcript = make_transcript("search", hint="Let me check.")
    _, (row,) = filter_rows([make_row("How?", transcript, system="Use tags.")])
    (sample,) = ConversationReader(tokenizer := build_pocket_tokenizer()).read([row], max_model_len=512)
    trained = [i for i, flag in zip(sample.token_ids, sample.is_sampled, strict=True) if flag]
    text = tokenizer.decode(trained)
    assert "docs" not in text and "result" not in text and "Let me check" not in text
    assert "<search>x</search>" in text and "\\boxed{7}" in text
    whole = tokenizer.decode(sample.token_ids)
    assert transcript.text in whole and "Use tags." in whole
    _, (row,) = filter_rows([make_row("How?", transcript)], trains_forced=True)
    (sample,) = ConversationReader(tokenizer).read([row], max_model_len=512)
    trained = [i for i, flag in zip(sample.token_ids, sample.is_sampled, strict=True) if flag]
    assert "Let me check" in tokenizer.decode(trained)


def test_the_prompt_of_the_environment_replaces_that_of_the_rows(filter_rows):
    row = make_row("How?", make_transcript("calculator"), system="old")
    _, (kept,) = filter_rows([row], environment={"tools": ["calculator"]})
    assert kept["messages"][0]["role"] == "system" and "<calculator>" in kept["messages"][0]["content"]
    _, (kept,) = filter_rows([row], environment={"prompt": "none"})
    assert kept["messages"][0]["role"] == "user"


def test_diversity_before_and_after(filter_rows):
    rows = [
        make_row("a", make_transcript("search", words="one")),
        make_row("a", make_transcript("python", "python", words="two"), correctness=0.0),
        make_row("b", make_transcript("search", words="three")),
    ]
    result, _ = filter_rows(rows)
    before, after = result["before"], result["after"]
    assert before["tool_patterns_per_question"] == 1.5 and after["tool_patterns_per_question"] == 1
    assert before["std_tool_calls_in_question"] == 0.5 and after["std_tool_calls_in_question"] is None
    assert before["std_correctness_in_question"] == 0.5
    assert "embedding_spread" not in before
    assert 0 < after["lexical_spread"] < before["lexical_spread"] < 1


def test_the_lexical_spread_is_the_mean_cosine_distance_of_word_pairs():
    texts = ["a b c", "a b d", "x y", "a b c"]
    rows = [
        read_trajectory(
            make_row("q", Transcript(question="q", segments=(Segment(kind="thought", text=t),))), where="row"
        )
        for t in texts
    ]
    units = normalize(count_word_pairs(texts))
    distances = [1 - units[i] @ units[j] for i in range(4) for j in range(4) if i != j]
    assert measure_diversity(rows)["lexical_spread"] == pytest.approx(np.mean(distances))
    assert units[0] @ units[1] == pytest.approx(0.5), "two of four pairs: start-a, a-b; not b-c, c-end"
    same = measure_diversity([rows[0], rows[3]])
    assert same["lexical_spread"] == pytest.approx(0) and same["lexical_spread_in_question"] == pytest.approx(0)
    assert measure_diversity(rows[:1])["lexical_spread"] is None


def test_conversations_have_the_tools_that_the_row_names(filter_rows):
    environment = {"tools": ["calculator", "python"]}
    rows = [make_row(name, make_transcript(), tools=tools) for name, tools in (("a", ["python"]), ("b", None))]
    _, kept = filter_rows(rows, environment=environment)
    prompts = [row["messages"][0]["content"] for row in kept]
    assert ["<calculator>" in prompt for prompt in prompts] == [False, True]
    assert all("<python>" in prompt for prompt in prompts)


def test_an_embedding_model_without_its_package_is_an_error_and_never_another_measure(filter_rows):
    if importlib.util.find_spec("sentence_transformers") is not None:
        pytest.skip("sentence-transformers is installed")
    with pytest.raises(ConfigError, match="needs sentence-transformers"):
        filter_rows([make_row("a", make_transcript())], embedding_model="e5")


def test_rows_without_what_the_filter_needs_are_errors(filter_rows):
    good = make_row("a", make_transcript())
    for key in ("transcript", "correctness"):
        with pytest.raises(DataError, match=f"row 0 of .* has no '{key}'"):
            filter_rows([{name: value for name, value in good.items() if name != key}])
    with pytest.raises(DataError, match="transcript is not one of"):
        filter_rows([good | {"transcript": {"steps": []}}])
    with pytest.raises(DataError, match="passed the filter: 1 wrong answer"):
        filter_rows([good | {"correctness": 0}])


def test_the_stage_reports_counts_and_a_table(tmp_path):
    rows = [make_row("a", make_transcript("search")), make_row("a", make_transcript(), correctness=0)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = RftFilterSection(data=(str(tmp_path / "in.jsonl"),))
    result = run_stage_of_kind("rft_filter", settings, out_dir=tmp_path / "out", choose_model=lambda config: None)
    assert result.figures["kept trajectories"] == 1 and result.figures["dropped: wrong answer"] == 1
    assert "| tool patterns per question" in result.figures["tables"]


def test_an_embedding_model_gives_the_embedding_spread(filter_rows, pocket_folder):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = sentence_transformers.SentenceTransformer(str(pocket_folder), device="cpu")
    rows = [make_row("a", make_transcript(*tools, words=f"w {i}")) for i, tools in enumerate([("search",), (), ()])]
    result, _ = filter_rows(rows, embedding_model=str(pocket_folder))
    assert "lexical_spread" not in result["after"]
    vectors = model.encode([Transcript.from_json(row["transcript"]).text for row in rows]).astype(float)
    units = normalize(vectors)
    distances = [1 - units[i] @ units[j] for i in range(3) for j in range(3) if i != j]
    assert result["after"]["embedding_spread"] == pytest.approx(np.mean(distances), abs=1e-5)
