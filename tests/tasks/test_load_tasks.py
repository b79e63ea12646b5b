"""Tasks are loaded from folders and files; every problem with them is a one-sentence error."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset, DatasetDict, Split

from tunesmith.config import DatasetSection
from tunesmith.errors import DataError
from tunesmith.tasks.load import list_plain_files, load_plain_rows, load_rows, load_tasks
from tunesmith.tasks.load_library import iter_library_rows

ROWS = [{"question": "What is 2 + 2?", "answer": "4"}, {"question": "What is 4 + 4?", "answer": "8"}]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "my_dataset"
    folder.mkdir()
    for split, rows in (("train", ROWS), ("test", ROWS[:1])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def test_folder_with_splits(folder):
    tasks = load_tasks(DatasetSection(path=str(folder), split="train"), name="train")
    assert [task.task_id for task in tasks] == ["train/0", "train/1"]
    assert [dict(task.row) for task in tasks] == ROWS
    assert len(load_tasks(DatasetSection(path=str(folder), split="test"), name="eval")) == 1


def test_one_file_of_each_format(tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps(ROWS), encoding="utf-8")
    (tmp_path / "rows.csv").write_text("question,answer\nWhat is 2 + 2?,four\n", encoding="utf-8")
    assert len(load_tasks(DatasetSection(path=str(tmp_path / "rows.json")), name="t")) == 2
    assert load_tasks(DatasetSection(path=str(tmp_path / "rows.csv")), name="t")[0].row["answer"] == "four"


def test_a_file_is_a_split_of_its_own_name(folder):
    assert len(load_tasks(DatasetSection(path=str(folder / "test.jsonl"), split="test"), name="t")) == 1
    with pytest.raises(DataError, match="is one split"):
        load_tasks(DatasetSection(path=str(folder / "test.jsonl"), split="validation"), name="t")


def test_a_file_has_no_configurations(folder):
    with pytest.raises(DataError, match="name 'main' has no effect: the file .* remove name"):
        load_tasks(DatasetSection(path=str(folder / "test.jsonl"), name="main"), name="t")


def test_preview_reads_the_first_rows(folder):
    assert load_rows(str(folder), name=None, split="train", num_rows=1) == ROWS[:1]


def test_unknown_split_lists_the_splits(folder):
    with pytest.raises(DataError, match=r"no split 'validation'; it has .*train"):
        load_tasks(DatasetSection(path=str(folder), split="validation"), name="t")
    with pytest.raises(DataError, match=r"no split 'validation'; it has .*train"):
        load_rows(str(folder), name=None, split="validation", num_rows=2)


def test_without_a_split_name_the_data_set_must_have_one_split(folder):
    with pytest.raises(DataError, match="set split to one of them"):
        load_tasks(DatasetSection(path=str(folder), split=None), name="t")


@pytest.mark.parametrize(
    ("name", "text"), [("rows.jsonl", "\nnull\n"), ("rows.json", "[null, {}]"), ("d/a.json", "null")]
)
def test_a_first_row_of_null_is_refused_before_it_ends_the_process(tmp_path, name, text):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    path = file if file.parent == tmp_path else file.parent
    with pytest.raises(
        DataError, match="the first row of .* is null; it must be a JSON object|line 2 of .* must be a JSON object"
    ):
        load_rows(str(path), name=None, split="train")


def test_wrong_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"question": "of the working folder"}\n')
    for path in (str(tmp_path / "nothing"), ""):
        with pytest.raises(DataError, match="does not exist"):
            load_tasks(DatasetSection(path=path), name="t")


def test_empty_file(tmp_path):
    (tmp_path / "train.jsonl").write_text("", encoding="utf-8")
    for path in (tmp_path, tmp_path / "train.jsonl"):
        with pytest.raises(DataError):
            load_tasks(DatasetSection(path=str(path)), name="t")


@pytest.mark.parametrize(("name", "text"), [("train.csv", "question,answer\n"), ("train.json", "[]")])
def test_a_file_without_rows(tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8")
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(DataError, match=r"^the data set '.*' \(split 'train'\) has no rows$"):
            load_tasks(DatasetSection(path=str(path)), name="t")


def test_broken_json(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": \n', encoding="utf-8")
    with pytest.raises(DataError, match="cannot be read"):
        load_tasks(DatasetSection(path=str(tmp_path)), name="t")


def test_an_unreadable_file_is_named_with_the_reason(tmp_path, capfd):
    broken, latin = tmp_path / "broken.jsonl", tmp_path / "latin.jsonl"
    broken.write_text(json.dumps(ROWS[0]) + '\n{"question": \n', encoding="utf-8")
    latin.write_bytes(b'{"question": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"^line 2 of '\S*broken.jsonl' is not JSON: Expecting value"):
        load_tasks(DatasetSection(path=str(broken)), name="t")
    assert capfd.readouterr().err == ""  # of `datasets`
    with pytest.raises(DataError, match=r"^line 1 of '\S*latin.jsonl' is not JSON: .*0xe9"):
        load_tasks(DatasetSection(path=str(latin), required_fields=()), name="t")
    for path in (broken, latin):
        with pytest.raises(DataError, match=f"{path.name}' is not JSON: "):
            load_rows(str(path), name=None, split=None, num_rows=2)


def test_missing_field_names_field_and_row(tmp_path):
    rows = [ROWS[0], {"question": "What is 1 + 1?"}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.raises(DataError, match="row 1 .*has no 'answer'"):
        load_tasks(DatasetSection(path=str(tmp_path), required_fields=("question", "answer")), name="t")


def test_unknown_file_ending(tmp_path):
    (tmp_path / "train.txt").write_text("hello", encoding="utf-8")
    with pytest.raises(DataError, match="allowed endings"):
        load_tasks(DatasetSection(path=str(tmp_path / "train.txt")), name="t")


def test_folder_written_by_save_to_disk(tmp_path):
    Dataset.from_list(ROWS, split=Split.TEST).save_to_disk(tmp_path / "sft_test")
    for split in ("train", "test", "sft_test", None):
        tasks = load_tasks(DatasetSection(path=str(tmp_path / "sft_test"), split=split), name="t")
        assert [dict(task.row) for task in tasks] == ROWS
    assert load_rows(str(tmp_path / "sft_test"), name=None, split="train", num_rows=1) == ROWS[:1]
    with pytest.raises(DataError, match="split 'validation': the folder .* is one split; set split to 'train'"):
        load_tasks(DatasetSection(path=str(tmp_path / "sft_test"), split="validation"), name="t")
    with pytest.raises(DataError, match="name 'main' has no effect: the folder"):
        load_tasks(DatasetSection(path=str(tmp_path / "sft_test"), name="main"), name="t")


def test_folder_of_splits_written_by_save_to_disk(tmp_path):
    splits = {"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[:1])}
    DatasetDict(splits).save_to_disk(tmp_path / "saved")
    assert len(load_tasks(DatasetSection(path=str(tmp_path / "saved")), name="t")) == 2
    assert len(load_tasks(DatasetSection(path=str(tmp_path / "saved"), split="test"), name="t")) == 1
    with pytest.raises(DataError, match="no split 'validation'; it has train, test"):
        load_rows(str(tmp_path / "saved"), name=None, split="validation", num_rows=1)
    with pytest.raises(DataError, match="set split to one of them"):
        load_tasks(DatasetSection(path=str(tmp_path / "saved"), split=None), name="t")


def test_an_unknown_name_of_a_folder_is_reported_with_those_that_it_has(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "1+1"}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"cannot be read: name 'main' not found\. Available: \['default'\]"):
        load_tasks(DatasetSection(path=str(tmp_path), name="main"), name="t")


def test_damaged_folder_of_save_to_disk(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    next((tmp_path / "saved").glob("*.arrow")).write_bytes(b"no arrow")
    with pytest.raises(DataError, match="cannot be read"):
        load_tasks(DatasetSection(path=str(tmp_path / "saved")), name="t")


def test_an_empty_field_is_reported_as_empty(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"question": "1+1", "answer": "2"}\n{"question": "1+2", "answer": null}\n')
    with pytest.raises(DataError, match=r"row 1 of .* has no 'answer': its value is empty \(null"):
        load_tasks(DatasetSection(path=str(path), required_fields=("answer",)), name="t")


@pytest.mark.parametrize(
    ("lines", "is_plain"),
    [
        (['{"q": "a b", "f": 2.5, "b": true, "e": null}', '{"q": "", "f": 1e-3, "b": false, "e": null}'], True),
        (['{"n": 1}', '{"n": -3}'], True),
        (['{"q": "2024 apples", "n": 1}', '{"q": "é", "n": null}'], True),
        (['{"q": "2024-03-01"}', '{"q": "2024-03-02"}'], False),
        (['{"q": "2024-03-01"}', '{"q": "no date"}'], False),
        (['{"n": 1}', '{"n": 2.5}'], False),
        (['{"n": 9223372036854775808}'], False),
        (['{"a": 1, "b": 2}', '{"a": 1}'], False),
        (['{"a": {"b": 1}}', '{"a": {"c": "x"}}'], False),
        (['{"a": ["x", "y"]}', '{"a": []}'], False),
        (['{"a": 1}', "", '{"a": 2}'], True),
    ],
)  # fmt: skip
def test_plain_rows_are_those_that_the_library_reads(tmp_path, lines, is_plain):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    expected = list(iter_library_rows(str(path), name=None, split="train", is_streamed=False))
    assert load_plain_rows(path) == (expected if is_plain else None)
    found = load_rows(str(path), name=None, split="train")
    assert found == expected
    assert [{key: type(value) for key, value in row.items()} for row in found] == [
        {key: type(value) for key, value in row.items()} for row in expected
    ]


@pytest.mark.parametrize(
    ("rows", "file", "is_plain"),
    [
        ([{"q": "a", "n": 1}], "train.jsonl", True),
        ([{"q": "a", "n": None}], "validation.jsonl", True),
        ([{"n": 1, "q": "a"}], "test.jsonl", False),
        ([{"q": "2024-03-01", "n": 1}], "test.jsonl", False),
        ([{"q": "a", "n": 1}], "test-00001.jsonl", False),
        ([{"q": "a", "n": 1}], "README.md", False),  # may name splits and files
    ],
)
def test_plain_rows_of_a_folder_are_those_that_the_library_reads(tmp_path, rows, file, is_plain):
    for name, own in (("train.jsonl", [{"q": "b", "n": 7}]), ("test.jsonl", [{"q": "c", "n": -1}] * 2), (file, rows)):
        (tmp_path / name).write_text("".join(f"{json.dumps(row)}\n" for row in own), encoding="utf-8")
    for split in ("train", "test"):
        files = list_plain_files(tmp_path, split)
        assert bool(files and load_plain_rows(*files)) == is_plain
        expected = list(iter_library_rows(str(tmp_path), name=None, split=split, is_streamed=False))
        assert load_rows(str(tmp_path), name=None, split=split) == expected


def test_splits_whose_numbers_have_two_types_are_refused(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"n": 7}\n')
    (tmp_path / "test.jsonl").write_text('{"n": 2.5}\n')
    with pytest.raises(DataError, match="Float value 2.5.* truncated"):
        load_rows(str(tmp_path), name=None, split="train")


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}\n', '{"a": "\\ud800"}\n', '{"a": NaN}\n', "", '["x"]\n', "{\n"])
def test_other_rows_are_left_to_the_library(tmp_path, text):
    path = tmp_path / "rows.jsonl"
    path.write_text(text, encoding="utf-8")
    assert load_plain_rows(path) is None
