"""ET-Agent's files: reading and writing gives an equal file, and conversions keep what both sides know."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tunesmith.cli import app
from tunesmith.environments.transcript import Transcript
from tunesmith.errors import ConfigError, DataError
from tunesmith.et_agent.formats.convert import convert_file
from tunesmith.et_agent.formats.files import load_records, save_records

GOOD = (
    "<think>I need the year.</think>\n<search>year of birth</search> <result>\nborn 1912\n</result>\n"
    "<think>Subtract.</think>\n<python>print(1979-1912)</python> <result>\n67\n</result>\n"
    "<think>Done.</think>\n<answer>The answer is \\[ \\boxed{67} \\]</answer>"
)
SHORT = "<think>I know it.</think><answer>\\[ \\boxed{66} \\]</answer>"
PROMPT = "You are a helpful assistant."
HEAD = {"instruction": PROMPT, "input": "How old?", "answer": ["67"], "source": "hotpotqa"}
COUNTS = [
    {"search_times": 1, "python_times": 1, "total_times": 2},
    {"search_times": 0, "python_times": 0, "total_times": 0},
]
ROLLOUTS = HEAD | {"rollout_outputs": [GOOD, SHORT], "predictions": ["67", "66"], "tool_counts": COUNTS}
SCORED = ROLLOUTS | {"correctness": [1.0, 0.0]}
RL = {
    "data_source": "qa_effi_rl",
    "prompt": [{"content": PROMPT, "role": "system"}, {"content": "How old?", "role": "user"}],
    "ability": "qa",
    "reward_model": {"ground_truth": ["67", "sixty-seven"], "style": "rule"},
    "extra_info": {"index": 0, "need_tools_kwargs": False, "question": "How old?", "split": "train"},
    "metadata": None,
}
FILES = {
    "et_pool": [
        {"question": "1+1?", "answer": "2", "source": "aime"},
        {"input": "Who?", "answer": ["Ada", "A. L."], "source": "2wiki", "id": 7},
    ],
    "et_evolve": [
        HEAD
        | {
            "initial_output": "", "prediction": "", "initial_logs": [],
            "evolve_trajectories_buffer": [SHORT, GOOD],
            "evolve_predictions": ["66", "67"],
            "evolve_trajectories_llm_judge_results": [False, True],
            "evolve_judgements": ["Incorrect", "Correct", "again"],
        },
        HEAD
        | {
            "initial_output": "Timeout", "prediction": "", "initial_logs": [],
            "evolve_trajectories_buffer": [], "evolve_predictions": [],
            "evolve_trajectories_llm_judge_results": [], "evolve_judgements": [],
        },
    ],
    "et_rft": [{"instruction": PROMPT, "input": "How old?", "output": GOOD}],
    "et_rollouts": [ROLLOUTS, SCORED],
    "et_pareto": [SCORED | {"score_tool": 1.0, "score_corr": 0.25, "rank": 0, "distance": 1e999}],
    "et_rl": [RL],
    "et_test": [{"id": 3, "question": "2+2?", "answer": 4, "url": "x"}, {"question": "Who?", "answer": ["Ada"]}],
}  # fmt: skip


def write(folder, name):
    path = folder / f"{name}.data"
    rows = FILES[name]
    if name == "et_rl":
        path = folder / "stage1.parquet"
        save_records(path, FILES[name], name)
    elif name == "et_test":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text(json.dumps(rows))
    return path


def read(path, name):
    if name == "et_rl":
        return pq.read_table(path).to_pylist()
    text = path.read_text()
    return [json.loads(line) for line in text.splitlines()] if name == "et_test" else json.loads(text)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_read_and_written_is_equal(tmp_path, name):
    path = write(tmp_path, name)
    copy = tmp_path / "copy"
    save_records(copy, load_records(path, name), name)
    assert read(copy, name) == FILES[name]


@pytest.mark.parametrize("name", ["et_test", "et_rft"])
def test_text_that_is_not_valid_unicode_is_written(tmp_path, name):
    rows = [row | {"question" if name == "et_test" else "input": "\ud800"} for row in FILES[name]]
    save_records(tmp_path / "file", rows, name)
    assert load_records(tmp_path / "file", name) == rows


def test_the_parquet_file_has_the_columns_of_the_original(tmp_path):
    table = pq.read_table(write(tmp_path, "et_rl"))
    assert table.column_names == ["data_source", "prompt", "ability", "reward_model", "extra_info", "metadata"]
    assert str(table.schema.field("reward_model").type) == "struct<ground_truth: list<element: string>, style: string>"


def test_fields_beyond_the_schema_of_the_original_are_kept_in_parquet(tmp_path):
    rows = [RL | {"extra_info": RL["extra_info"] | {"level": 3}}, RL | {"extra_info": RL["extra_info"] | {"level": 1}}]
    save_records(tmp_path / "rl.parquet", rows, "et_rl")
    assert load_records(tmp_path / "rl.parquet", "et_rl") == rows


def convert(tmp_path, name, target, source_path=None, out="out"):
    path = source_path or write(tmp_path, name)
    return convert_file(path, source=name, target=target, out=tmp_path / out)


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_evolve_buffers_become_one_row_per_trajectory_and_back(tmp_path):
    result = convert(tmp_path, "et_evolve", "transcripts")
    rows = read_rows(result.path)
    assert [row["correctness"] for row in rows] == [0.0, 1.0]
    assert [(row["question_id"], row["trajectory_index"]) for row in rows] == [(0, 0), (0, 1)]
    assert {row["system"] for row in rows} == {PROMPT} and rows[0]["answer"] == ["67"]
    assert result.format_errors == {}
    transcript = Transcript.from_json(rows[1]["transcript"])
    assert transcript.tool_counts == {"search": 1, "python": 1} and transcript.failed_calls == 0
    assert transcript.text == GOOD and transcript.answer == "67"
    convert_file(result.path, source="transcripts", target="et_evolve", out=tmp_path / "back.json")
    (back,) = json.loads((tmp_path / "back.json").read_text())
    original = dict(FILES["et_evolve"][0])
    original["evolve_judgements"] = []
    assert back == original


def test_a_trajectory_is_right_above_the_f1_of_the_original(tmp_path):
    (row, *_) = read_rows(convert(tmp_path, "et_evolve", "transcripts").path)
    scores = [0.75, 0.8, 0.9, 1.0]
    (tmp_path / "rows").write_text("".join(json.dumps({**row, "correctness": each}) + "\n" for each in scores))
    convert_file(tmp_path / "rows", source="transcripts", target="et_evolve", out=tmp_path / "back.json")
    (back,) = json.loads((tmp_path / "back.json").read_text())
    assert back["evolve_trajectories_llm_judge_results"] == [False, False, True, True]


def test_rollouts_become_tasks_for_the_pareto_stage_and_transcripts_become_rollouts(tmp_path):
    tasks = read_rows(convert(tmp_path, "et_rollouts", "tasks").path)
    assert tasks[1]["pass_rate_correctness"] == [1.0, 0.0] and tasks[1]["pass_rate_tool_calls"] == [2.0, 0.0]
    assert "pass_rate_correctness" not in tasks[0]
    rows = read_rows(convert(tmp_path, "et_rollouts", "transcripts", out="rows").path)
    scored = [row for row in rows if "correctness" in row]
    (tmp_path / "scored").write_text("".join(json.dumps(row) + "\n" for row in scored))
    convert_file(tmp_path / "scored", source="transcripts", target="et_rollouts", out=tmp_path / "back.json")
    assert json.loads((tmp_path / "back.json").read_text()) == [SCORED]


def test_pareto_rows_keep_their_front(tmp_path):
    (row,) = read_rows(convert(tmp_path, "et_pareto", "tasks").path)
    assert (row["pareto_front"], row["pareto_distance"]) == (0, None)


def test_fine_tuning_rows_become_transcripts_and_back(tmp_path):
    result = convert(tmp_path, "et_rft", "transcripts")
    convert_file(result.path, source="transcripts", target="et_rft", out=tmp_path / "back.json")
    assert json.loads((tmp_path / "back.json").read_text()) == FILES["et_rft"]


def test_fine_tuning_rows_become_conversations_whose_results_are_context(tmp_path):
    (row,) = read_rows(convert(tmp_path, "et_rft", "conversations").path)
    system, user, reply = row["messages"]
    assert (system["content"], user["content"]) == (PROMPT, "How old?")
    assert "".join(part["text"] for part in reply["content"]) == GOOD
    assert [part["text"] for part in reply["content"] if not part["weight"]] == [
        " <result>\nborn 1912\n</result>", " <result>\n67\n</result>"
    ]  # fmt: skip


def test_training_rows_become_tasks_and_back(tmp_path):
    rows = read_rows(convert(tmp_path, "et_rl", "tasks").path)
    assert rows == [{"question": "How old?", "answer": ["67", "sixty-seven"], "source": "qa", "system": PROMPT}]
    convert_file(tmp_path / "out", source="tasks", target="et_rl", out=tmp_path / "back.parquet")
    assert pq.read_table(tmp_path / "back.parquet").to_pylist() == [RL]


def test_source_pools_and_test_sets_become_tasks(tmp_path):
    assert read_rows(convert(tmp_path, "et_pool", "tasks").path)[1] == {
        "question": "Who?", "answer": ["Ada", "A. L."], "source": "2wiki", "id": 7
    }  # fmt: skip
    assert read_rows(convert(tmp_path, "et_test", "tasks", out="t").path)[0]["answer"] == 4


@pytest.mark.parametrize("name", ["et_rft", "et_test"])
def test_half_of_a_surrogate_pair_in_a_text_is_written(tmp_path, name):
    (row, *_) = read_rows(convert(tmp_path, "et_evolve", "transcripts").path)
    (tmp_path / "rows").write_text(json.dumps(row | {"question": "q \ud800"}))
    result = convert_file(tmp_path / "rows", source="transcripts", target=name, out=tmp_path / "back")
    (written,) = load_records(result.path, name)
    assert written.get("input", written.get("question")) == "q \ud800"


def test_the_command_converts_and_reports_format_errors(tmp_path):
    broken = [{"instruction": "", "input": "q", "output": "<answer>1</answer>"}]
    (tmp_path / "sft.json").write_text(json.dumps(broken))
    arguments = ["convert", str(tmp_path / "sft.json"), "--from", "et_rft", "--to", "transcripts"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "rows.jsonl")])
    assert result.exit_code == 0, result.output
    assert "rows.jsonl: 1 rows of transcripts" in result.output
    assert "1 transcripts with a format error: the answer has no \\boxed{}" in result.output
    again = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "rows.jsonl")])
    assert again.exit_code != 0 and "already exists" in again.output


def test_format_errors_are_counted_by_kind_whatever_their_step(tmp_path):
    good = "<think>a</think><search>b</search> <result>\nc\n</result>"
    outputs = [f"{good * number}so<answer>\\boxed{{1}}</answer>" for number in (0, 1, 2)]
    (tmp_path / "sft.json").write_text(json.dumps([{"instruction": "", "input": "q", "output": o} for o in outputs]))
    result = convert_file(tmp_path / "sft.json", source="et_rft", target="transcripts", out=tmp_path / "rows.jsonl")
    assert result.format_errors == {"a step is not <think>...</think> followed by <answer>": 3}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["3"], "line 1 of .*rows' must be a JSON object, got int"),
        (["{"], "line 1 of .*rows' is not JSON"),
        ([{"correctness": 1.0}, {"correctness": 1.0}, {}], "row 2 has no 'correctness'"),
        ([{"transcript": {"steps": []}}], "row 0: transcript is not one of tunesmith.environments: KeyError"),
    ],
)
def test_rows_that_cannot_be_exported_are_errors_that_name_them(tmp_path, lines, message):
    (row, _) = read_rows(convert(tmp_path, "et_evolve", "transcripts").path)
    del row["correctness"]
    texts = [line if isinstance(line, str) else json.dumps(row | line) for line in lines]
    (tmp_path / "rows").write_text("\n".join(texts))
    with pytest.raises(DataError, match=message):
        convert_file(tmp_path / "rows", source="transcripts", target="et_evolve", out=tmp_path / "back.json")


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("et_pool", {"question": "q"}, "has no 'answer'; its fields are question"),
        ("et_evolve", HEAD, "has no 'evolve_trajectories_buffer'"),
        ("et_rollouts", ROLLOUTS | {"predictions": ["1"]}, "parallel lists differ in length"),
        ("et_pareto", SCORED | {"rank": 0}, "has 'rank', but no 'score_tool'"),
        ("et_rft", {"instruction": "", "input": "q"}, "has no 'output'"),
        ("et_rft", 3, "must be a JSON object, got int"),
    ],
)
def test_malformed_rows_are_errors_that_name_row_and_field(tmp_path, name, row, message):
    (tmp_path / "file").write_text(json.dumps([row]))
    with pytest.raises(DataError, match="row 0 of .*" + message):
        load_records(tmp_path / "file", name)


def test_a_field_with_nan_is_refused(tmp_path):
    (tmp_path / "file").write_text(json.dumps([{"question": "q", "answer": "1", "score": float("nan")}]))
    with pytest.raises(DataError, match="row 0 of '.*file as tasks' has a number that is not finite in 'score'"):
        convert_file(tmp_path / "file", source="et_pool", target="tasks", out=tmp_path / "o")


def test_files_and_formats_that_do_not_fit_are_errors(tmp_path):
    (tmp_path / "file").write_text('{"a": 1}')
    with pytest.raises(DataError, match="must hold a JSON array"):
        load_records(tmp_path / "file", "et_rft")
    with pytest.raises(DataError, match="is not a Parquet file"):
        load_records(tmp_path / "file", "et_rl")
    with pytest.raises(ConfigError, match="et_rft cannot be converted to et_rl"):
        convert_file(tmp_path / "file", source="et_rft", target="et_rl", out=tmp_path / "o")
    with pytest.raises(ConfigError, match="fine-tuning rows have no answers"):
        convert(tmp_path, "et_rft", "tasks")
    with pytest.raises(ConfigError, match="--from 'alpaca' is not a format"):
        convert_file(tmp_path / "file", source="alpaca", target="tasks", out=tmp_path / "o")
    (tmp_path / "rows").write_text('{"question": "q", "answer": "a"}\n')
    with pytest.raises(DataError, match="row 0 has no 'transcript'"):
        convert_file(tmp_path / "rows", source="transcripts", target="et_rft", out=tmp_path / "o")
