"""The stage with the pocket model: provenance, caps, duplicates, seeds, resuming after kill -9, failures, settings."""

from __future__ import annotations

import json
import math
import os
import time

import pytest
from datasets import Dataset
from policies import call, make_transcript, result, think

from forked_programs import start_forked_programs
from tunesmith.commands.run.config import PlannedStage
from tunesmith.commands.run.run import check_stage
from tunesmith.config import FlywheelConfig
from tunesmith.errors import ConfigError, DataError, RolloutError, StorageError
from tunesmith.et_agent.flywheel.run import run_stage
from tunesmith.et_agent.flywheel.state import AttemptPlan, QuestionState, Record, find_fresh_records, plan_iteration
from tunesmith.rollout.chat_model import ChatModel
from tunesmith.runs.load_config import build_section
from tunesmith.runs.workspace import Workspace

FUNCTIONS = """
from pathlib import Path

from tunesmith.judges.squad import score_exact_match
from tunesmith.et_agent.flywheel.roles import Finding, StepDraft
from tunesmith.types import JudgeOutput

async def search(query: str) -> str:
    "Search."
    if Path("broken").exists():
        raise OSError("the disk is gone")
    return f"{query} was founded in 1748."

async def judge(task, response):
    return JudgeOutput(reward=float(len(response.text) % 2))

def analyst(request):
    return Finding(step=len(request.steps), reason="It is odd.")

def author(request):
    if request.goal == "replace_step":
        return StepDraft(thought="I look.", tool="search", text=request.row["question"])
    if request.goal == "reflect":
        return "I think again."
    return [f"{each} In short." for each in request.thoughts]
"""
PROGRAM = """
import json
from pathlib import Path
from tunesmith.config import FlywheelConfig
from tunesmith.et_agent.flywheel.run import run_stage
from tunesmith.runs.load_config import build_section
from tunesmith.runs.workspace import Workspace
from tunesmith.rollout.chat_model import ChatModel

config = build_section(FlywheelConfig, json.loads(Path("values.json").read_text()))
def build_model(endpoint, options):
    return ChatModel(endpoint, options=options)

run_stage(config, out_dir=Path("killed"), choose_model=lambda run: build_model)
"""


@pytest.fixture
def values(tmp_path, monkeypatch, pocket_folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n), "level": n} for n in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model": {"path": pocket_folder, "max_model_len": 2048, "max_tokens": 8, "device": "cpu"},
        "roles": {"analyst": "functions.py:analyst", "author": "functions.py:author"},
        "environment": {"tools": ["functions.py:search"], "max_tokens": 16, "prompt": "none"},
        "judge": "functions.py:judge",
        "train_dataset": {"path": "train.jsonl"},
        "extra_tokens": 8,
        "num_iterations": 2,
        "max_per_question": 6,
        "batch_size": 5,
        "engine": {"kv_cache_tokens": 8192},
        "rollout": {"chat_model": "openai"},
        "has_progress": False,
    }


def build_model(endpoint, options):
    return ChatModel(endpoint, options=options)


def run(values, out_dir):
    """The stage's result, and its counts by operator."""
    section = build_section(FlywheelConfig, values)
    done = run_stage(section, out_dir=out_dir, choose_model=lambda config: build_model)
    return done, json.loads((out_dir / "report.json").read_text())


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_attempts(folder):
    """The lines of attempts without times."""
    rows = read(folder / "attempts.jsonl")
    for row in rows:
        for segment in (row.get("transcript") or {}).get("segments", ()):
            segment["ms"] = 0.0
    return rows


def test_every_trajectory_has_its_provenance_and_stays_within_the_cap(values, tmp_path):
    done, operators = run(values, tmp_path / "out")
    rows = read(tmp_path / "out" / "trajectories.jsonl")
    by_id = {row["trajectory_id"]: row for row in rows}
    assert len(by_id) == len(rows) == done.figures["trajectories"]
    for row in rows:
        siblings = [each for each in rows if each["question_id"] == row["question_id"]]
        assert len(siblings) <= 6 and {each["level"] for each in siblings} == {row["level"]}
        assert row["question"] == row["transcript"]["question"] and row["correctness"] in (0.0, 1.0)
        if row["iteration"] == 0:
            assert row["operator"] == "rollout" and row["parent_id"] is None
        else:
            parent = by_id[row["parent_id"]]
            assert parent["iteration"] < row["iteration"]
            is_for_correct = row["operator"] in ("rollout", "rewrite_redundant", "refine_thoughts")
            assert is_for_correct == (parent["correctness"] == 1.0)
    assert {row["iteration"] for row in rows} == {0, 1, 2}
    texts = [(row["question_id"], "".join(each["text"] for each in row["transcript"]["segments"])) for row in rows]
    assert len(set(texts)) == len(texts)
    repaired = [row for row in rows if row["operator"] == "repair_flaw"]
    assert repaired and all(
        any(each["result"] == f"{row['question']} was founded in 1748." for each in row["transcript"]["segments"])
        for row in repaired
    )
    assert sum(each["attempts"] for each in operators.values()) == len(
        [row for row in read(tmp_path / "out" / "attempts.jsonl") if "outcome" in row]
    )
    assert done.tokens > 0


def test_equal_seeds_give_equal_trajectories_and_others_do_not(values, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(values | {"seed": seed}, tmp_path / name)
    first, second, third = (read_attempts(tmp_path / name) for name in "abc")
    assert first == second and first[1:] != third[1:]


def test_a_killed_flywheel_resumes_after_the_last_complete_batch_and_gives_the_same(values, tmp_path):
    run(values, tmp_path / "whole")
    (tmp_path / "values.json").write_text(json.dumps(values))
    (tmp_path / "program.py").write_text(PROGRAM)
    process = start_forked_programs().fork(["python", "program.py"], folder=tmp_path)
    attempts = tmp_path / "killed" / "attempts.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (attempts.exists() and '"batch"' in attempts.read_text()):
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert attempts.exists() and '"batch"' in attempts.read_text()
    before = attempts.read_text()
    with attempts.open("a") as file:
        file.write(json.dumps({"question_id": "half a batch", "outcome": "kept"})[:30])
    run(values, tmp_path / "killed")
    assert attempts.read_text().startswith(before[: before.rindex('{"batch"')])
    assert read_attempts(tmp_path / "killed") == read_attempts(tmp_path / "whole")


def test_a_journal_that_ends_anywhere_is_continued(values, tmp_path):
    run(values | {"num_iterations": 1}, tmp_path / "out")
    path = tmp_path / "out" / "attempts.jsonl"
    whole, rows = path.read_bytes(), read_attempts(tmp_path / "out")
    for num_bytes in (0, 20, 500, 3000, -1, -30):
        path.write_bytes(whole[:num_bytes])
        run(values | {"num_iterations": 1}, tmp_path / "out")
        assert read_attempts(tmp_path / "out") == rows, num_bytes


def test_a_finished_flywheel_samples_nothing_again(values, tmp_path, monkeypatch):
    run(values, tmp_path / "out")
    before = (tmp_path / "out" / "attempts.jsonl").read_bytes()
    (tmp_path / "broken").write_text("")
    assert run(values, tmp_path / "out")[0].figures["trajectories"] == len(
        read(tmp_path / "out" / "trajectories.jsonl")
    )
    assert (tmp_path / "out" / "attempts.jsonl").read_bytes() == before


def test_answers_that_change_are_not_joined_with_trajectories_judged_before(values, tmp_path):
    """The plans of attempts are the same: only the rows tell."""
    values = values | {"num_iterations": 0}
    run(values, tmp_path / "out")
    train = tmp_path / "train.jsonl"
    rows = train.read_text()
    train.write_text("".join(json.dumps({**json.loads(row), "answer": "-1"}) + "\n" for row in rows.splitlines()))
    with pytest.raises(ConfigError, match="other settings: the content of questions changed"):
        run(values, tmp_path / "out")
    train.write_text(rows)
    journal = tmp_path / "out" / "attempts.jsonl"
    header, rest = journal.read_text().split("\n", 1)
    old = {key: value for key, value in json.loads(header).items() if key in ("digest", "seed")}
    journal.write_text(json.dumps(old) + "\n" + rest)
    run(values, tmp_path / "out")  # written by an earlier version


def test_attempts_of_other_settings_are_not_continued(values, tmp_path):
    run(values | {"num_iterations": 0}, tmp_path / "out")
    with pytest.raises(ConfigError, match="attempts.jsonl was made with other settings: seed was 42, is 5"):
        run(values | {"num_iterations": 0, "seed": 5}, tmp_path / "out")
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "Other?", "answer": "1"}) + "\n")
    with pytest.raises(ConfigError, match="the content of questions changed"):
        run(values | {"num_iterations": 0}, tmp_path / "out")


def test_two_flywheels_cannot_write_one_folder(values, tmp_path):
    with (
        Workspace(tmp_path / "out"),
        pytest.raises(StorageError, match=f"out is locked by process {os.getpid()}"),
    ):
        run(values, tmp_path / "out")


def test_failures_are_counted_and_too_many_end_the_run_without_a_wrong_answer(values, tmp_path):
    broken = FUNCTIONS.replace("    return JudgeOutput", '    raise OSError("down")\n    return JudgeOutput')
    (tmp_path / "functions.py").write_text(broken)
    with pytest.raises(RolloutError, match="4 of 4 rollouts failed(.|\n)*4 x workflow: OSError: down"):
        run(values, tmp_path / "out")
    assert not [row for row in read(tmp_path / "out" / "attempts.jsonl") if "outcome" in row]
    done, operators = run(values | {"rollout": {"chat_model": "openai", "max_failure_rate": 1.0}}, tmp_path / "all")
    assert done.figures["trajectories"] == 0 and operators["first rollout"]["failed"] == 4


def test_a_question_has_the_tools_that_its_row_names(values, tmp_path):
    (tmp_path / "functions.py").write_text(FUNCTIONS.replace("float(len(response.text) % 2)", "0.0"))
    rows = [{"question": f"What is {n} + {n}?", "answer": "7", "tools": ["search"] * n} for n in range(2)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(values | {"num_iterations": 1, "operators": ["repair_flaw"]}, tmp_path / "out")
    repairs = [row for row in read_attempts(tmp_path / "out") if row.get("operator") == "repair_flaw"]
    assert [row["reason"] for row in repairs] == ["the proposed step calls 'search'; the tools are ", "It is odd."]
    rows[0]["tools"] = ["python"]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="row 0 of 'train.jsonl': tools of a task must be a list of names"):
        run(values, tmp_path / "other")


def test_a_role_may_be_the_model_itself(values, tmp_path):
    _, operators = run(values | {"roles": {"judge": "model"}, "num_iterations": 1}, tmp_path / "out")
    assert operators["first rollout"]["attempts"] == 4
    assert not any(each["failed"] for each in operators.values())


def test_roles_of_the_model_have_a_token_limit_of_their_own_and_say_when_they_reach_it(values, tmp_path):
    _, operators = run(
        values
        | {"roles": {}, "role_max_tokens": 3, "num_iterations": 1, "operators": ["refine_thoughts", "repair_flaw"]},
        tmp_path / "out",
    )
    assert not any(each["failed"] for each in operators.values())
    reasons = {row.get("reason") for row in read_attempts(tmp_path / "out") if row.get("operator") == "repair_flaw"}
    assert "the reply of the role was truncated at its token limit" in reasons


def test_a_role_may_be_an_auxiliary_model(values, tmp_path, pocket_folder):
    local = {"path": pocket_folder, "max_model_len": 2048, "max_tokens": 4}
    more = {"auxiliary_models": {"big": local}, "roles": {"policy": "big", "analyst": "big", "author": "big"}}
    done, operators = run(values | more | {"num_iterations": 1}, tmp_path / "out")
    assert not any(each["failed"] for each in operators.values()) and done.tokens == 0


def test_an_auxiliary_model_with_the_name_of_a_role_reaches_the_judge(values, tmp_path, pocket_folder):
    judge = """
from tunesmith.types import JudgeOutput

async def judge(task, response, auxiliary_models):
    model = auxiliary_models["policy"]
    completion = await model([{"role": "user", "content": "Right?"}])
    return JudgeOutput(reward=float(completion.usage.completion_tokens == 1))
"""
    (tmp_path / "asking.py").write_text(judge)
    local = {"path": pocket_folder, "max_model_len": 512, "max_tokens": 1}
    more = {"auxiliary_models": {"policy": local}, "judge": "asking.py:judge", "num_iterations": 0}
    done, _ = run(values | more, tmp_path / "out")
    assert done.figures["right trajectories"] == done.figures["trajectories"] == 4


def test_mistakes_in_settings_are_named(values, tmp_path):
    with pytest.raises(ConfigError, match="roles.author='big' is neither a model"):
        build_section(FlywheelConfig, values | {"roles": {"author": "big"}})
    with pytest.raises(ConfigError, match="roles.policy='a:b' must be a model"):
        build_section(FlywheelConfig, values | {"roles": {"policy": "a:b"}})
    with pytest.raises(ConfigError, match="each hint must be a sentence"):
        build_section(FlywheelConfig, values | {"hints": ["W"]})
    with pytest.raises(ConfigError, match="hints"):
        build_section(FlywheelConfig, values | {"hints": "Wait, I check."})
    (tmp_path / "train.jsonl").write_text(json.dumps({"answer": "1"}) + "\n")
    with pytest.raises(DataError, match="row 0 of 'train.jsonl' has no 'question'"):
        run(values, tmp_path / "out")


def test_a_question_with_nan_is_refused_before_a_model_loads(values, tmp_path):
    rows = [{"question": "What is 2 + 2?", "score": 1.0}, {"question": "What is 3 + 3?", "score": math.nan}]
    Dataset.from_list(rows).to_parquet(str(tmp_path / "train.parquet"))
    wrong = build_section(FlywheelConfig, values | {"train_dataset": {"path": "train.parquet"}})

    def choose_model(config):
        raise AssertionError("no model is needed")

    with pytest.raises(DataError, match="row 1 of 'train.parquet' has a number that is not finite in 'score'"):
        run_stage(wrong, out_dir=tmp_path / "out", choose_model=choose_model)
    assert not (tmp_path / "out").exists()


def test_roles_are_checked_before_the_first_stage(values):
    wrong = values | {"roles": {"author": "functions.py:nobody"}}
    with pytest.raises(ConfigError, match=r"stages\.flywheel: .*nobody"):
        check_stage(PlannedStage(name="flywheel", kind="flywheel", values=wrong, references=()))


def make_record(state, number, text, correctness, *, calls=0):
    segments = [each for i in range(calls) for each in (call(str(i), i), result("x", i))]
    transcript = make_transcript(*segments, think(text))
    plan = AttemptPlan(question_id="q", number=number, iteration=0, operator="rollout", parent=None)
    return Record(plan=plan, outcome="kept", correctness=correctness, transcript=transcript)


def test_parents_are_right_ones_with_few_calls_first_and_each_is_used_once():
    config = FlywheelConfig(model={"path": "m"}, train_dataset={"path": "d"}, max_parents_per_question=1)
    state = QuestionState(question_id="q", row={"question": "q"})
    records = [
        make_record(state, 0, "a", 0.0), make_record(state, 1, "b", 1.0, calls=2),
        make_record(state, 2, "c", 1.0, calls=1), make_record(state, 3, "b", 1.0, calls=2),
    ]  # fmt: skip
    marked = find_fresh_records(records, {"q": state})
    assert [each.outcome for each in marked] == ["kept", "kept", "kept", "duplicate"] and len(state.kept) == 3
    order = []
    for iteration in (1, 2, 3, 4):
        plans = plan_iteration(state, iteration, config)
        order.append({plan.parent for plan in plans})
        find_fresh_records([Record(plan=plan, outcome="nothing") for plan in plans], {"q": state})
        assert [plan.number for plan in plans] == sorted({plan.number for plan in plans})
    assert order == [{2}, {1}, {0}, set()]
