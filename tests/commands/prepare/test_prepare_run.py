"""Data preparation: kept and dropped rows, contamination, pass-rate columns, and atomic output folders."""

from __future__ import annotations

import json
import shutil
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from fakes import full_disk
from tunesmith.cli import app, collect_changes, read_option
from tunesmith.commands.prepare.run import run_prepare
from tunesmith.commands.settings import load_settings
from tunesmith.commands.sft.conversations import ConversationReader
from tunesmith.commands.table import find_command
from tunesmith.config import PrepareSection
from tunesmith.errors import ConfigError, DataError, ModelError, StorageError
from tunesmith.model.load import load_tokenizer
from tunesmith.rollout.dispatcher import Dispatcher
from tunesmith.runs.load_config import load_section
from tunesmith.tasks.load import load_jsonl, load_rows


def make_row(number, *, name="Tom", result=None):
    return {
        "question": f"{name} has {number} red apples and buys twice as many green ones at the market. How many in all?",
        "answer": f"He buys {number}*2 = <<{number}*2={2 * number}>>{2 * number} green apples.\n"
        f"So he has {number}+{2 * number} = <<{number}+{2 * number}={result or 3 * number}>>{3 * number} apples now.\n"
        f"#### {3 * number}",
    }


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def data(tmp_path):
    """Four rows, two of them valid, and a test set."""
    folder = tmp_path / "data"
    folder.mkdir()
    bad = make_row(4, result=13)
    write(folder / "train.jsonl", [make_row(2), bad, make_row(3), {"question": "Why?", "answer": "Because."}])
    write(folder / "test.jsonl", [{"question": "A short one?", "answer": "It is <<1+1=3>>3\n#### 2"}])
    return folder


@pytest.fixture
def prepare(tmp_path, data):
    def call(out="out", **values):
        settings = PrepareSection.model_validate({"data": {"path": str(data)}, **values})
        return run_prepare(settings, out_dir=tmp_path / out)

    return call


def test_verified_rows_are_kept_and_others_counted_by_reason(prepare, tmp_path):
    report = prepare()
    assert (report.num_train, report.num_eval, report.eval_path) == (2, 0, None)
    assert report.content["train"]["dropped"] == {"wrong_calculation": 1, "no_answer": 1}
    assert report.content["train"]["examples"]["wrong_calculation"] == [
        {"source_index": 1, "detail": "wrong_calculation: 4+8 is not 13"}
    ]
    assert report.content["format"] == {
        "num_rows": 2,
        "num_valid": 2,
        "means": {"exact": 1.0, "format": 1.0, "reasoning": 1.0, "conciseness": 1.0},
    }
    first, second = load_jsonl(report.train_path)
    assert (first["answer"], first["num_steps"], first["source_index"], first["is_verified"]) == ("6", 2, 0, True)
    assert [call["function"]["arguments"] for m in second["messages"] for call in m.get("tool_calls", [])] == [
        {"expression": "3*2"},
        {"expression": "3+6"},
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "out"]
    assert sorted(path.name for path in report.folder.iterdir()) == ["DONE.json", "report.json", "train.jsonl"]


def test_prepared_rows_load_as_demonstrations_and_as_tasks(prepare, pocket_folder):
    report = prepare(eval_data={"path": str(prepare(out="other").folder.parent / "data")})
    reader = ConversationReader(load_tokenizer(pocket_folder))
    for path in (report.train_path, report.eval_path):
        assert reader.read(load_jsonl(path), max_model_len=10**6)
    (row, _) = load_rows(str(report.folder), name=None, split="train")
    assert {"question", "answer", "num_steps", "messages"} <= row.keys()


def test_every_evaluation_row_with_an_answer_is_kept(prepare, data):
    report = prepare(eval_data={"path": str(data)})
    assert report.num_eval == 1
    assert report.content["eval"]["num_unverified"] == 1
    (row,) = load_jsonl(report.eval_path)
    assert (row["answer"], row["is_verified"]) == ("2", False)
    assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant"]


def test_style_last_has_one_call_per_conversation(prepare):
    rows = load_jsonl(prepare(style="last").train_path)
    assert [sum(len(m.get("tool_calls", [])) for m in row["messages"]) for row in rows] == [1, 1]
    assert [row["num_steps"] for row in rows] == [2, 2]


def test_max_rows_and_other_fields(prepare, data):
    assert prepare(max_rows=1).num_train == 1
    rows = [{"q": row["question"], "steps": row["answer"]} for row in (make_row(5), make_row(6))]
    other = write(data.parent / "other.jsonl", rows)
    assert prepare(out="b", data={"path": other}, question_field="q", answer_field="steps").num_train == 2


def test_a_split_without_valid_rows_is_an_error(prepare, data):
    with pytest.raises(DataError, match="no row of .* remains; dropped: {'wrong_calculation': 1}"):
        prepare(data={"path": str(data), "split": "test"})


def test_training_questions_of_the_evaluation_set_are_dropped(prepare, data):
    write(data / "test.jsonl", [make_row(3), make_row(9, name="Ann")])
    report = prepare(eval_data={"path": str(data)}, contamination={"ngram_words": 30})
    contamination = report.content["contamination"]
    assert (report.num_train, contamination["num_exact"], contamination["num_ngram"]) == (1, 1, 0)
    assert report.content["train"]["dropped"]["contaminated_exact"] == 1
    assert [(each["source_index"], each["eval_index"]) for each in contamination["overlaps"]] == [(2, 0)]


def test_the_contamination_action_is_error_ignore_or_drop(prepare, data):
    write(data / "test.jsonl", [make_row(3)])
    values = {"eval_data": {"path": str(data)}}
    with pytest.raises(DataError, match="2 training questions overlap with eval_data; row 0 shares"):
        prepare(**values, contamination={"action": "error", "ngram_words": 8})
    through = prepare(**values, contamination={"action": "ignore", "ngram_words": 8})
    assert (through.num_train, through.content["contamination"]["num_exact"]) == (2, 1)
    strict = prepare(out="strict", **values, contamination={"ngram_words": 50})
    assert (strict.num_train, strict.content["train"]["dropped"]["contaminated_exact"]) == (1, 1)
    with pytest.raises(DataError, match=r"no row of .* remains; dropped: .*'contaminated_ngram': 1"):
        prepare(out="none", **values, contamination={"ngram_words": 8})


def test_lengths_are_measured_and_long_rows_dropped(prepare, data, pocket_folder):
    long = make_row(8)
    long["question"] = "Please. " * 60 + long["question"]
    write(data / "train.jsonl", [make_row(2), long])
    tokens = prepare(tokens={"model": pocket_folder}).content["tokens"]
    assert tokens["max"] > tokens["mean"] > tokens["trained"] / 2 > 0
    assert tokens["num_split_conversations"] == 0
    report = prepare(out="short", tokens={"model": pocket_folder, "max_model_len": tokens["max"] - 1})
    assert report.num_train == 1
    assert report.content["train"]["dropped"] == {"too_long": 1}


def tiny_model(folder):
    return {"path": folder, "max_model_len": 1024, "max_tokens": 2, "device": "cpu"}


def test_every_pass_rate_model_gets_a_column(prepare, pocket_folder, monkeypatch):
    pass_rate = {
        "models": {"small": tiny_model(pocket_folder), "large": tiny_model(pocket_folder)},
        "num_samples": 2,
        "batch_size": 1,
        "engine": {"kv_cache_tokens": 8192},
    }
    report = prepare(pass_rate=pass_rate)
    rows = load_jsonl(report.train_path)
    assert [(row["small_pass_rate"], row["large_pass_rate"]) for row in rows] == [(0.0, 0.0)] * 2
    assert report.content["pass_rate"]["small_pass_rate"] == {"mean": 0.0}


def test_pass_rates_resume_after_a_kill(prepare, pocket_folder, tmp_path, monkeypatch):
    pass_rate = {"models": {"m": tiny_model(pocket_folder)}, "num_samples": 1, "batch_size": 1}
    pass_rate["engine"] = {"kv_cache_tokens": 8192}
    measured = []
    original = Dispatcher.evaluate

    async def die_at_the_second_batch(dispatcher, tasks, **options):
        measured.append(tasks[0].task.row["place"])
        if len(measured) == 2:
            raise KeyboardInterrupt
        return await original(dispatcher, tasks, **options)

    monkeypatch.setattr(Dispatcher, "evaluate", die_at_the_second_batch)
    with pytest.raises(KeyboardInterrupt):
        prepare(pass_rate=pass_rate)
    assert not (tmp_path / "out").exists()
    assert prepare(pass_rate=pass_rate).num_train == 2
    assert measured == [0, 1, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "out"]


def test_pass_rates_of_a_model_that_was_trained_again_are_not_mixed(prepare, pocket_folder, tmp_path, monkeypatch):
    shutil.copytree(pocket_folder, tmp_path / "first")
    models = {"first": tiny_model(str(tmp_path / "first")), "second": tiny_model(str(pocket_folder))}
    pass_rate = {"models": models, "num_samples": 1, "batch_size": 1, "engine": {"kv_cache_tokens": 8192}}
    num_batches, original = [0], Dispatcher.evaluate

    async def die_in_the_second_model(dispatcher, tasks, **options):
        num_batches[0] += 1
        if num_batches[0] == 4:
            raise KeyboardInterrupt
        return await original(dispatcher, tasks, **options)

    def change_weights():
        file = tmp_path / "first/model.safetensors"
        save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})

    monkeypatch.setattr(Dispatcher, "evaluate", die_in_the_second_model)
    with pytest.raises(KeyboardInterrupt):
        prepare(pass_rate=pass_rate)
    before = (tmp_path / "first/model.safetensors").read_bytes()
    change_weights()
    with pytest.raises(ConfigError, match="first-.*made with other settings: the content of weights.rows changed"):
        prepare(pass_rate=pass_rate)
    (tmp_path / "first/model.safetensors").write_bytes(before)
    assert prepare(pass_rate=pass_rate).num_train == 2
    change_weights()
    with pytest.raises(
        ConfigError, match="out was made with other settings: the content of weights.first.rows changed"
    ):
        prepare(pass_rate=pass_rate)


class Rewriter(BaseHTTPRequestHandler):
    """An OpenAI-compatible server that adds words to the question, or loses it, and counts requests."""

    num_requests = 0
    loses_question = False

    def do_POST(self):
        type(self).num_requests += 1
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = body["messages"][0]["content"].rpartition("\n\n")[2]
        content = (
            "Nothing at all."
            if self.loses_question
            else f"Tell me, version {body['seed']}: {text}".replace("version 0", "")
        )
        message = {"role": "assistant", "content": content}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        payload = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def rewriter():
    handler = type("OneRewriter", (Rewriter,), {})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield handler, f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()


def test_paraphrases_follow_their_row_and_are_requested_once(prepare, rewriter, data):
    handler, url = rewriter
    values = {"paraphrase": {"base_url": url, "model": "m"}}
    report = prepare(**values)
    rows = load_jsonl(report.train_path)
    assert [(row["source_index"], row["paraphrase"]) for row in rows] == [(0, None), (0, 0), (2, None), (2, 0)]
    assert rows[1]["question"].startswith("Tell me") and rows[1]["messages"][1]["content"] == rows[1]["question"]
    assert rows[1]["messages"][2:] == rows[0]["messages"][2:]
    assert report.content["paraphrase"] == {
        "num_asked": 2, "num_refused": 0, "num_repeated": 0, "num_echoed": 0, "num_added": 2,
    }  # fmt: skip
    assert handler.num_requests == 2
    assert (report.folder / "paraphrases.jsonl").read_text().count("\n") == 2
    values["paraphrase"]["max_concurrency"] = 1
    assert prepare(**values).num_train == 4
    assert handler.num_requests == 2


def test_paraphrases_that_lose_a_number_are_refused(prepare, rewriter):
    handler, url = rewriter
    handler.loses_question = True
    report = prepare(paraphrase={"base_url": url, "model": "m", "num_variants": 2})
    assert report.num_train == 2
    assert report.content["paraphrase"] == {
        "num_asked": 4, "num_refused": 4, "num_repeated": 0, "num_echoed": 0, "num_added": 0,
    }  # fmt: skip


def test_paraphrases_are_checked_for_contamination(prepare, rewriter, data):
    _, url = rewriter
    write(data / "test.jsonl", [{"question": "Tell me, : Tom has 2 red apples", "answer": "#### 2"}])
    report = prepare(
        paraphrase={"base_url": url, "model": "m"},
        eval_data={"path": str(data)},
        contamination={"ngram_words": 7},
    )
    assert report.content["train"]["dropped"]["contaminated_ngram"] == 1
    assert report.num_train == 3


def test_the_same_settings_reuse_the_folder_and_others_are_refused(prepare, data):
    first = prepare()
    before = first.train_path.stat().st_mtime_ns
    again = prepare()
    assert again == first
    assert again.train_path.stat().st_mtime_ns == before
    with pytest.raises(
        ConfigError, match=r"out was made with other settings: seed was 42, is 1; style was 'all', is 'last'. "
    ):
        prepare(style="last", seed=1)


def test_changed_input_rows_are_detected(prepare, data):
    prepare(eval_data={"path": str(data)})
    train = (data / "train.jsonl").read_text()
    write(data / "train.jsonl", [make_row(7)])
    with pytest.raises(ConfigError, match="settings: the content of data changed; the content of eval_data changed"):
        prepare(eval_data={"path": str(data)})
    (data / "train.jsonl").write_text(train)
    assert prepare(eval_data={"path": str(data)}).num_train == 2
    data.rename(data.with_name("moved"))
    assert prepare(eval_data={"path": str(data)}).num_train == 2


def test_a_damaged_or_incomplete_folder_is_an_error(prepare, tmp_path):
    report = prepare()
    report.train_path.write_text("{}\n")
    with pytest.raises(StorageError, match=r"train.jsonl is damaged: it has 3 bytes"):
        prepare()
    (report.folder / "DONE.json").unlink()
    with pytest.raises(StorageError, match=r"already holds other files \(report.json, train.jsonl\)"):
        prepare()
    (tmp_path / "empty").mkdir()
    assert prepare(out="empty").num_train == 2


def test_a_full_disk_leaves_no_partial_output(prepare, tmp_path):
    with full_disk(2000), pytest.raises(StorageError, match="cannot write"):
        prepare()
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("*.tmp-*"))
    assert prepare().num_train == 2


NEEDS_KEY = {"base_url": "http://x/v1", "model": "m", "api_key_env": "NO_SUCH_KEY"}


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"data": {"path": "./nowhere"}}, DataError, "does not exist"),
        ({"question_field": "prompt"}, DataError, r"data: row 0 of .* has no 'prompt'; .*set question_field"),
        ({"answer_field": "solution"}, DataError, "has no 'solution'"),
        ({"tokens": {"model": "./nowhere"}}, ModelError, "nowhere"),
        ({"pass_rate": {"models": {"m": {"path": "./nowhere"}}}}, ModelError, "nowhere"),
        ({"paraphrase": NEEDS_KEY}, ConfigError, "api_key_env: the environment variable NO_SUCH_KEY is not set"),
    ],
)  # fmt: skip
def test_invalid_input_is_one_sentence(prepare, tmp_path, values, error, message):
    with pytest.raises(error, match=message):
        prepare(**values)
    assert not (tmp_path / "out").exists()


def test_a_row_without_an_answer_is_named(prepare, data):
    write(data / "train.jsonl", [make_row(2), {"question": "What?"}])
    with pytest.raises(DataError, match="data: row 1 of .* has no 'answer'"):
        prepare()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stile": "all"}, "stile is not a known key: did you mean 'style'"),
        ({"style": "some"}, "style must be 'all' or 'last', got 'some'"),
        ({"contamination": {"ngram_words": 9}}, "contamination has no effect without eval_data"),
        ({"pass_rate": {"models": {}}}, "pass_rate.models"),
        ({"pass_rate": {"models": {"a b": {"path": "x"}}}}, "models.a b must consist of letters"),
        ({"paraphrase": {"model": "m"}}, "paraphrase.base_url is required"),
    ],
)
def test_invalid_settings_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        load_section(PrepareSection, None, values={"data": {"path": "x"}, **values})


def read_flags(**given):
    command = find_command("prepare")
    options = {option.name: option for option in command.options}
    values = {name: read_option(options[name], value) for name, value in given.items()}
    return load_settings(command, None, collect_changes(options, values))


def test_flags_become_settings():
    settings = read_flags(
        data="d", data_name="main", eval_data="e", style="last", paraphrase="http://h:1/v1/org/model-7b",
        pass_rate=["models/Qwen3-0.6B", "big=org/other"], samples=4, max_rows=9,
    )  # fmt: skip
    assert settings == PrepareSection.model_validate(
        {
            "data": {"path": "d", "name": "main"},
            "eval_data": {"path": "e"},
            "style": "last",
            "paraphrase": {"base_url": "http://h:1/v1", "model": "org/model-7b"},
            "pass_rate": {
                "models": {"qwen3_0.6b": {"path": "models/Qwen3-0.6B"}, "big": {"path": "org/other"}},
                "num_samples": 4,
            },
            "max_rows": 9,
        }
    )
    with pytest.raises(ConfigError, match="not of the form BASE_URL/MODEL"):
        read_flags(paraphrase="gpt")
    with pytest.raises(ConfigError, match="--pass-rate has the label 'm' twice"):
        read_flags(pass_rate=["a/m", "b/M"])


def test_the_command_prepares_and_reports(data, tmp_path):
    config = tmp_path / "prepare.yaml"
    config.write_text(f"data: {{path: {data}}}\nstyle: all\n")
    out = tmp_path / "prepared"
    result = CliRunner().invoke(app, ["prepare", str(config), "--out", str(out), "--style", "last", "--set", "seed=3"])
    assert result.exit_code == 0, result.output
    assert "2 rows of 4; dropped: wrong_calculation 1, no_answer 1" in result.output
    assert "2 of 2 rows valid" in result.output
    settings = json.loads((out / "DONE.json").read_text())["settings"]
    assert (settings["style"], settings["seed"]) == ("last", 3)


def test_the_command_names_a_missing_setting():
    result = CliRunner().invoke(app, ["prepare"])
    assert result.exit_code == 1
    assert "data is required" in result.output
