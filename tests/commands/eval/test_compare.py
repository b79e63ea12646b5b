"""Comparisons of several models: estimates, paired differences, files on disk, and resuming after a kill."""

from __future__ import annotations

import json
import os
import statistics

import pytest
from typer.testing import CliRunner

from tunesmith.chat.renderer import Renderer
from tunesmith.cli import app
from tunesmith.commands.eval.comparison import (
    check_plot,
    compare_quantity,
    compare_results,
    compute_result,
    format_comparison,
    save_plot,
)
from tunesmith.commands.eval.sample_scores import (
    SampleScore,
    TaskScores,
    score_groups,
    scores_from_json,
    scores_to_json,
)
from tunesmith.errors import ConfigError, ModelError
from tunesmith.model.load import load_tokenizer
from tunesmith.runs.workspace import Workspace
from tunesmith.types import Distribution, Failure, Group, Task, Trajectory, Turn

AGENT = """
from pathlib import Path

from tunesmith import JudgeOutput, WorkflowOutput
from tunesmith.chat.client import create_chat_completion

async def ask(task, model):
    if Path("stop").exists() and Path("stop").read_text() in model.model_name:
        raise KeyboardInterrupt
    with Path("called").open("a") as file:
        file.write(model.model_name + chr(10))
    completion = await create_chat_completion(model, [{"role": "user", "content": task["question"]}])
    return WorkflowOutput(response=completion.choices[0].message.content)

async def judge(task, response):
    return JudgeOutput(reward=len(response) % 3 / 2, metrics={"accuracy": float(len(response) % 2)})
"""


def build_sample(reward, *, failure=None, tokens=3, calls=0, truncated=False, **metrics):
    return SampleScore(
        reward=reward,
        metrics=metrics,
        failure=failure,
        response="",
        sampled_tokens=tokens,
        tool_calls=calls,
        turns=1,
        truncated=truncated,
    )


def build_tasks(*rows):
    return [TaskScores(task_id=f"t/{index}", samples=tuple(row)) for index, row in enumerate(rows)]


def test_estimates_are_means_over_tasks_of_means_over_rollouts():
    tasks = build_tasks(
        [build_sample(1.0, accuracy=1.0, tokens=4, truncated=True), build_sample(0.0, accuracy=0.0, tokens=6)],
        [build_sample(0.5, accuracy=1.0, tokens=1), build_sample(None, failure="judge: none", tokens=9)],
    )
    found = compute_result("m", "path", tasks, seed=0)
    means = {name: each.mean for name, each in found.estimates.items()}
    assert means == {
        "reward": 0.5, "accuracy": 0.75, "sampled_tokens": 5.0, "tool_calls": 0.0, "turns": 1.0, "truncated": 0.25
    }  # fmt: skip
    assert [name for name, each in found.estimates.items() if each.is_share] == ["accuracy", "truncated"]
    assert (found.num_runs, found.num_failures, found.num_sampled_tokens) == (4, 1, 20)
    assert found.estimates["reward"].interval == (0.5, 0.5)


def test_pass_at_k_uses_the_outcome_metric():
    tasks = build_tasks([build_sample(0.3, accuracy=1.0), build_sample(0.2, accuracy=0.0)])
    assert "pass@2" not in compute_result("m", "path", tasks, seed=0).estimates
    found = compute_result("m", "path", tasks, seed=0, outcome_key="accuracy").estimates
    assert (found["pass@1"].mean, found["pass@2"].mean) == (0.5, 1.0)
    with pytest.raises(ConfigError, match=r"outcome_key='exact'.*reported are accuracy"):
        compute_result("m", "path", tasks, seed=0, outcome_key="exact")


def test_models_are_paired_by_task_and_unscored_tasks_are_excluded():
    before = build_tasks([build_sample(0.0)], [build_sample(0.0)], [build_sample(None, failure="x")])
    after = build_tasks([build_sample(1.0)], [build_sample(0.0)], [build_sample(1.0)])[::-1]
    found = compare_quantity("reward", before, after, seed=0)
    assert (found.num_better, found.num_worse, found.num_tasks) == (1, 0, 2)
    assert (found.mean, found.p_value, found.test) == (0.5, 1.0, "McNemar")
    assert compare_quantity("accuracy", before, after, seed=0) is None


def build_comparison():
    outcomes = {"base": [0.0] * 12, "sft": [1.0] * 8 + [0.0] * 4, "rl": [1.0] * 10 + [0.0] * 2}
    results = {
        label: compute_result(label, label, build_tasks(*[[build_sample(r, tokens=4)] for r in rewards]), seed=0)
        for label, rewards in outcomes.items()
    }
    return {"test": compare_results("test", results, seed=0)}


def test_every_later_model_is_compared_with_every_earlier_one():
    contrasts = build_comparison()["test"].contrasts
    assert [(each.before, each.after) for each in contrasts] == [("base", "sft"), ("base", "rl"), ("sft", "rl")]
    assert contrasts[0].difference.p_value == 2 / 2**8


def test_the_table_has_proportions_in_percent_and_differences_with_their_test():
    table = format_comparison(build_comparison()).splitlines()
    assert table[0] == "### test: 12 tasks, 1 rollout of each"
    assert "| 66.7% (" in next(line for line in table if line.startswith("| reward"))
    assert "| 4 (4 - 4)" in next(line for line in table if line.startswith("| sampled tokens"))
    assert "| 0 of 12 " in next(line for line in table if line.startswith("| failed rollouts"))
    contrast = next(line for line in table if line.startswith("| base -> sft"))
    assert "+0.6667" in contrast
    assert "8 / 0 / 12" in contrast
    assert "0.0078" in contrast
    assert "McNemar" in contrast


def test_a_plot_requires_matplotlib(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'tunesmith\[plot\]'"):
        check_plot()


def test_a_plot_is_a_png_file(tmp_path):
    pytest.importorskip("matplotlib")
    save_plot(tmp_path / "x.png", build_comparison())
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_handles_models_with_equal_scores_on_all_tasks(tmp_path):
    pytest.importorskip("matplotlib")
    tasks = build_tasks(*([build_sample(0.05)] * 3 for _ in range(7)))
    result = compute_result("m", "m", tasks, seed=0, seconds=1.0)
    low, high = result.estimates["reward"].interval
    assert not low <= result.estimates["reward"].mean <= high, "rounding moves the mean out of its interval"
    save_plot(tmp_path / "x.png", {"test": compare_results("test", {"m": result}, seed=0)})
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_sample_scores_count_tokens_tool_calls_and_truncated_turns(pocket_folder):
    tokenizer = load_tokenizer(pocket_folder)

    def build_turn(text, stop_reason):
        ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        return Turn(
            prompt_ids=(1,), sampled_ids=ids, logprobs=(0.0,) * len(ids), policy_versions=(0,) * len(ids),
            distribution=Distribution(), stop_reason=stop_reason,
        )  # fmt: skip

    call = '<tool_call>{"name": "calculate", "arguments": {"expression": "1 + 1"}}</tool_call>'
    turns = (build_turn(call + call, "eos"), build_turn("<tool_call>{oops}</tool_call> 2", "length"))
    task = Task(task_id="t/0", index=0, row={})
    failure = Failure(where="workflow", message="broke")
    runs = (
        Trajectory(task=task, run_index=0, turns=turns, reward=1.0, metrics={"a": 1}, response_text="2"),
        Trajectory(task=task, run_index=1, turns=turns[:1], reward=None, failure=failure),
    )
    (found,) = score_groups([Group(task=task, trajectories=runs)], Renderer(tokenizer))
    first, second = found.samples
    assert (first.tool_calls, first.turns, first.truncated) == (2, 2, True)
    assert first.sampled_tokens == sum(len(turn.sampled_ids) for turn in turns)
    assert (second.tool_calls, second.truncated, second.failure) == (2, False, "workflow: broke")
    assert found.compute_mean("a") == 1.0
    assert scores_from_json(json.loads(json.dumps(scores_to_json([found])))) == [found]


@pytest.fixture
def workplace(tmp_path, pocket_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    for name in ("one", "two"):
        (tmp_path / name).symlink_to(pocket_folder)
        rows = [{"question": f"{name} {n}?"} for n in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "workflow": "agent.py:ask",
        "judge": "agent.py:judge",
        "model": {"max_model_len": 128, "max_tokens": 6, "device": "cpu"},
        "eval_datasets": {"a": {"path": "one.jsonl"}, "b": {"path": "two.jsonl"}},
        "engine": {"kv_cache_tokens": 4096},
        "rollout": {"chat_model": "openai"},
    }
    models = {"first": "one", "second": "two"}
    (tmp_path / "eval.yaml").write_text(json.dumps(config | {"models": models}))
    (tmp_path / "run.yaml").write_text(json.dumps(config | {"model": config["model"] | {"path": "one"}}))
    return tmp_path


def test_the_error_of_a_set_names_its_key(workplace, tmp_path):
    (tmp_path / "two.jsonl").write_text("")
    output = run_eval("eval.yaml", "--out", "out", expected_status=1).output
    assert "eval_datasets.b: the data set 'two.jsonl' has no rows" in output


def run_eval(*arguments, expected_status=0):
    result = CliRunner().invoke(app, ["eval", *arguments])
    assert result.exit_code == expected_status, result.output
    return result


def read_outcomes(folder):
    saved = json.loads((folder / "comparison.json").read_text())
    return {
        (name, label): [
            [sample["response"] for sample in task["attempts"]] for task in saved[name]["models"][label]["tasks"]
        ]
        for name in saved
        for label in saved[name]["models"]
    }


def test_an_evaluation_file_compares_its_models_on_every_set(workplace):
    output = run_eval("eval.yaml", "--out", "out", "--samples", "2").output
    saved = json.loads((workplace / "out/comparison.json").read_text())
    assert (workplace / "out/comparison.md").read_text().strip() in output
    assert list(saved) == ["a", "b"]
    for set_comparison in saved.values():
        first, second = set_comparison["models"]["first"], set_comparison["models"]["second"]
        assert first["estimates"] == second["estimates"], "equal weights and seeds"
        accuracies = [[sample["metrics"]["accuracy"] for sample in task["attempts"]] for task in first["tasks"]]
        assert first["estimates"]["accuracy"]["mean"] == pytest.approx(
            statistics.fmean(statistics.fmean(each) for each in accuracies)
        )
        assert first["num_runs"] == 6
        assert {each["difference"]["p_value"] for each in set_comparison["contrasts"]} == {1.0}
    assert not (workplace / "out/parts").exists()


def test_a_run_file_with_labeled_models_gives_the_same_numbers(workplace):
    run_eval("eval.yaml", "--out", "out", "--seed", "5")
    run_eval("run.yaml", "--model", "first=one", "--model", "second=two", "--out", "other", "--seed", "5")
    assert read_outcomes(workplace / "out") == read_outcomes(workplace / "other")
    run_eval("run.yaml", "--model", "first=one", "--out", "third", "--seed", "6")
    assert read_outcomes(workplace / "third")["a", "first"] != read_outcomes(workplace / "out")["a", "first"]


def test_greedy_rollouts_of_one_task_are_equal(workplace):
    run_eval("run.yaml", "--temperature", "0", "--samples", "3", "--out", "out")
    assert all(len(set(task)) == 1 for task in read_outcomes(workplace / "out")["a", "one"])


def test_a_killed_evaluation_resumes_with_the_models_not_yet_evaluated(workplace):
    run_eval("eval.yaml", "--out", "whole")
    (workplace / "called").unlink()
    (workplace / "stop").write_text("two")
    run_eval("eval.yaml", "--out", "killed", expected_status=130)
    assert not (workplace / "killed/comparison.json").exists()
    assert set((workplace / "called").read_text().split()) == {str(workplace / "one")}
    (workplace / "called").unlink()
    (workplace / "stop").unlink()
    run_eval("eval.yaml", "--out", "killed")
    assert set((workplace / "called").read_text().split()) == {str(workplace / "two")}
    assert read_outcomes(workplace / "killed") == read_outcomes(workplace / "whole")


def test_what_a_killed_evaluation_left_is_removed_and_files_of_others_are_not(workplace):
    out, left = workplace / "out", ("comparison.json.tmp-1", "comparison.md.tmp-1", "comparison.png.tmp-1")
    (out / "parts.tmp-1").mkdir(parents=True)
    for name in (*left, "parts.tmp-1/a.json", "rates.jsonl.tmp-1"):
        (out / name).write_text("")
    run_eval("eval.yaml", "--out", "out")
    assert {path.name for path in out.iterdir()} == {
        "comparison.json", "comparison.md", "rates.jsonl.tmp-1", "run.lock"
    }  # fmt: skip


def test_tasks_that_change_after_a_kill_are_evaluated_again(workplace):
    (workplace / "stop").write_text("two")
    run_eval("eval.yaml", "--out", "killed", expected_status=130)
    (workplace / "called").unlink()
    (workplace / "stop").unlink()
    file = workplace / "one.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({**row, "question": row["question"] + "?"}) + "\n" for row in rows))
    run_eval("eval.yaml", "--out", "killed")
    assert (workplace / "called").read_text().split().count(str(workplace / "one")) == len(rows)


def test_two_evaluations_cannot_write_one_folder(workplace):
    with Workspace(workplace / "out"):
        refused = run_eval("eval.yaml", "--out", "out", expected_status=1)
    assert f"out is locked by process {os.getpid()}: wait for it to exit, or choose another folder" in refused.output
    assert not (workplace / "called").exists()
    run_eval("eval.yaml", "--out", "out")


def test_a_comparison_of_other_models_is_not_overwritten(workplace):
    run_eval("eval.yaml", "--out", "out")
    table = (workplace / "out/comparison.md").read_text()
    failed = run_eval("run.yaml", "--model", "first=two", "--out", "out", expected_status=1)
    assert "out was made with other settings: models.first was" in failed.output
    assert f"models.second was '{workplace / 'two'}', is None. Restore them, or choose another output" in failed.output
    assert (workplace / "out/comparison.md").read_text() == table
    run_eval("eval.yaml", "--out", "out", "--seed", "5")
    assert (workplace / "out/comparison.md").read_text() != table


@pytest.mark.parametrize("content", ["[]", '{"a": 1}', '{"a": {"models": {"first": "one"}}}'])
def test_a_file_of_another_program_is_not_overwritten(workplace, content):
    (workplace / "out").mkdir()
    (workplace / "out/comparison.json").write_text(content)
    output = run_eval("eval.yaml", "--out", "out", expected_status=1).output
    assert "out/comparison.json is no comparison of models: choose another folder" in output
    assert (workplace / "out/comparison.json").read_text() == content


def test_cells_of_tables_have_no_column_or_line_ends():
    text = format_comparison({"t": compare_results("t", build_results({"a|b": 1.0, "c\nd": 2.0}), seed=0)})
    assert "| a/b " in text and "| c d " in text
    (width,) = {len(line) for line in text.splitlines() if line.startswith("|")}
    assert width


def build_results(metrics):
    return {"m": compute_result("m", "path", build_tasks([build_sample(1.0, **metrics)]), seed=0)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval.yaml", "--model", "x=one", "--model", "x=two"], "has the label 'x' twice"),
        (["eval.yaml", "--model", "x="], "--model 'x=' has no path; write LABEL=PATH"),
        (["eval.yaml", "--model", "x=/no/model"], "/no/model"),
        (["eval.yaml", "--set", "judge=agent.py:jugde"], "jugde"),
        (["eval.yaml", "--set", "model.max_tokns=3"], "max_tokens"),
        (["run.yaml", "--set", "eval_datasets.a.path=none.jsonl"], "none.jsonl"),
        (["eval.yaml", "--set", "eval_datasets.a.weight=2"], "eval_datasets.a.weight=2 has no effect"),
        (["run.yaml", "--plot"], "plot"),
    ],
)
def test_invalid_input_is_one_sentence_and_no_model_is_evaluated(workplace, arguments, message):
    result = run_eval(*arguments, expected_status=1)
    assert message in result.output
    assert not (workplace / "called").exists()


def test_an_empty_folder_is_not_a_model(workplace):
    (workplace / "empty").mkdir()
    from tunesmith.commands.eval.compare import find_model

    with pytest.raises(ModelError, match="holds no model"):
        find_model(str(workplace / "empty"))
