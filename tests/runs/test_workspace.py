"""The workspace of a command: one process at a time, inputs compared by key, finished parts kept, results whole."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from datetime import date, datetime

import pytest

from fakes import full_disk
from tunesmith.errors import ConfigError, StorageError
from tunesmith.runs.workspace import Workspace, check_same, compute_digest, digest_rows, name_aside, open_part
from tunesmith.storage import Journal, load_json, new_folder, save_json, save_text

INPUTS = {"settings": {"seed": 0, "model": {"path": "m"}}, "rows": compute_digest([1, 2])}


def measure(root, inputs, *, num_parts=3):
    """A result that is a folder: squares of the rows."""
    workspace = Workspace(root, is_whole=True)
    if (record := workspace.find_result(inputs)) is not None:
        return record
    with workspace, new_folder(root, inputs) as folder:
        save_json(folder / "values.json", [row * row for row in range(num_parts)])
    return workspace.find_result(inputs)


def measure_file(out, inputs, *, num_parts=3):
    """The worked example of the module."""
    with open_part(out, inputs) as journal:
        for row in range(len(journal.rows), num_parts):
            journal.append(row * row)
        save_json(out, [*journal.rows, "then new ones"])


def test_a_result_is_made_once_and_leaves_nothing_else(tmp_path):
    first = measure(tmp_path / "out", INPUTS)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    written = (tmp_path / "out/values.json").stat().st_mtime_ns
    assert measure(tmp_path / "out", INPUTS) == first
    assert (tmp_path / "out/values.json").stat().st_mtime_ns == written


def test_finished_parts_are_not_repeated_and_a_half_written_one_is(tmp_path):
    with pytest.raises(KeyboardInterrupt), open_part(tmp_path / "out", INPUTS) as journal:
        journal.append(70, 71)
        raise KeyboardInterrupt
    assert {path.name for path in tmp_path.iterdir()} == {"out.part", "out.part.json"}
    with (tmp_path / "out.part").open("a") as file:
        file.write("7")
    (tmp_path / "out.part.json.tmp-1").write_text("")
    measure_file(tmp_path / "out", INPUTS)
    assert load_json(tmp_path / "out") == [70, 71, "then new ones"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(ConfigError, match="out already exists; choose another file"):
        measure_file(tmp_path / "out", INPUTS)


def test_other_inputs_are_refused_by_name_before_and_after_the_end(tmp_path):
    other = {"settings": {"seed": 1, "model": {"path": "n"}}, "rows": compute_digest([1])}
    sentence = (
        "was made with other settings: the content of rows changed; model.path was 'm', is 'n'; seed was 0, is 1. "
        "Restore them, or choose another output"
    )
    save_json(tmp_path / "file.part.json", INPUTS)
    (tmp_path / "file.part").write_text("70\n")
    with pytest.raises(ConfigError) as refused:
        measure_file(tmp_path / "file", other)
    assert str(refused.value) == f"{tmp_path / 'file.part'} {sentence}"
    measure(tmp_path / "out", INPUTS)
    with pytest.raises(ConfigError) as refused:
        measure(tmp_path / "out", other)
    assert str(refused.value) == f"{tmp_path / 'out'} {sentence}"


def test_records_of_earlier_versions_are_compared_in_what_they_hold(tmp_path):
    given = {"digest": "b", "settings": {"seed": 1}, "rows": "c"}
    check_same(tmp_path, {"digest": "b"}, given)
    with pytest.raises(
        ConfigError, match="other settings: which ones is unknown, as an earlier version wrote it. Rest"
    ):
        check_same(tmp_path, {"digest": "a"}, given)
    with pytest.raises(ConfigError, match="other settings: seed was 2, is 1. Rest"):
        check_same(tmp_path, {"digest": "a", "settings": {"seed": 2}}, given)


def test_content_that_is_not_there_any_more_is_not_compared(tmp_path):
    check_same(tmp_path, {"sources": {"data": "a"}}, {"sources": {"data": None}})
    with pytest.raises(ConfigError, match="the content of data changed"):
        check_same(tmp_path, {"sources": {"data": "a"}}, {"sources": {"data": "b"}})
    with pytest.raises(ConfigError, match="data was 'a', is None"):
        check_same(tmp_path, {"settings": {"data": "a"}}, {"settings": {"data": None}})


def test_keys_that_may_change_are_not_compared(tmp_path):
    saved, given = {"monitor": {"trackers": ["a"]}, "steps": 2}, {"monitor": {"trackers": []}, "steps": 2}
    check_same(tmp_path, saved, given, mutable_keys=("monitor",))
    with pytest.raises(ConfigError, match="monitor.trackers was"):
        check_same(tmp_path, saved, given, mutable_keys=("steps",))


def test_the_process_that_holds_the_lock_is_named_and_a_killed_one_holds_none(tmp_path):
    for is_whole in (False, True):
        root, ready = tmp_path / f"out-{is_whole}", tmp_path / f"ready-{is_whole}"
        child = os.fork()
        if child == 0:
            held = Workspace(root, is_whole=is_whole).lock()
            (tmp_path / f"{root.name}.tmp-{os.getpid()}").write_text("half")
            ready.touch()
            time.sleep(60)
            held.close()
            os._exit(0)
        while not ready.exists():
            time.sleep(0.01)
        with pytest.raises(StorageError, match=f"{root.name} is locked by process {child}: wait for it to exit, or"):
            Workspace(root, is_whole=is_whole).lock()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with Workspace(root, is_whole=is_whole):
            assert (tmp_path / f"{root.name}.tmp-{child}").exists() == (not is_whole)
        assert not (tmp_path / f"{root.name}.lock").exists()


def test_other_files_and_damage_are_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("keep")
    with pytest.raises(StorageError, match=r"already holds other files \(thesis.txt\): choose another"):
        Workspace(tmp_path, is_whole=True).find_result(INPUTS)
    with pytest.raises(StorageError, match=r"thesis.txt already holds other files \(thesis.txt\)"):
        Workspace(tmp_path / "thesis.txt").check_unused()
    measure(tmp_path / "out", INPUTS)
    (tmp_path / "out/values.json").write_text("[]")
    with pytest.raises(StorageError, match="values.json is damaged"):
        measure(tmp_path / "out", INPUTS)


def test_a_journal_keeps_complete_rows_of_any_text(tmp_path):
    rows = [{"text": "\u2028 \ud800 ä\r"}, [1, None], "x"]
    Journal(tmp_path / "new/rows").append(*rows[:2])
    Journal(tmp_path / "new/rows").append(rows[2])
    whole = (tmp_path / "new/rows").read_bytes()
    for num_bytes in range(len(whole) + 1):
        (tmp_path / "new/rows").write_bytes(whole[:num_bytes])
        journal = Journal(tmp_path / "new/rows")
        assert journal.rows == rows[: whole[:num_bytes].count(b"\n")]
        journal.append("next")
        assert Journal(tmp_path / "new/rows").rows == [*journal.rows, "next"]
    journal = Journal(tmp_path / "new/rows")
    journal.keep(1)
    assert journal.rows == Journal(tmp_path / "new/rows").rows == rows[:1]
    save_text(tmp_path / "rows", "1\n{\n3\n")
    with pytest.raises(StorageError, match="line 2 is not JSON"):
        Journal(tmp_path / "rows")


def test_a_journal_on_a_full_disk_keeps_whole_rows(tmp_path):
    path = tmp_path / "rows"
    journal = Journal(path)
    journal.append("first")
    with full_disk(path.stat().st_size + 12), pytest.raises(StorageError, match=r"^cannot write .*rows: no space"):
        journal.append("second", "x" * 100)
    assert path.read_text() == '"first"\n'
    journal.append("third")
    assert Journal(path).rows == ["first", "third"]


def test_what_a_kill_in_the_first_write_left_is_no_file_of_others(tmp_path):
    (tmp_path / "config.yaml.tmp-1").write_text("")
    Workspace(tmp_path).check_unused()


def test_a_journal_waits_for_the_row_that_another_process_appends(tmp_path):
    path = tmp_path / "rows"
    path.write_text("1\n")
    opened = []
    with path.open("ab", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(b'"ha')
        waiting = threading.Thread(target=lambda: opened.append(Journal(path)))
        waiting.start()
        waiting.join(timeout=0.5)
        file.write(b'lf"\n')
    waiting.join()
    opened[0].append("next")
    assert Journal(path).rows == [1, "half", "next"]


def test_an_append_removes_the_row_that_another_process_left_incomplete(tmp_path):
    path = tmp_path / "rows"
    journal = Journal(path)
    path.write_text('1\n"ha')
    journal.append("next")
    assert Journal(path).rows == [1, "next"]


def test_what_is_set_aside_gets_an_unused_name(tmp_path):
    now = datetime(2025, 3, 4, 5, 6, 7)
    first = name_aside(tmp_path / "rl.old-", now=now)
    first.mkdir()
    assert first.name == "rl.old-20250304050607"
    assert name_aside(tmp_path / "rl.old-", now=now).name == "rl.old-20250304050607-2"


def test_a_digest_is_that_of_json_and_does_not_depend_on_where_values_are_in_memory():
    assert compute_digest({"b": 1, "a": [None]}) == "ba22878bdd35d8a55ab6eabae428dda7478f680ab4e886fce4b6373a5127df71"
    images = [object(), object()]
    assert str(images[0]) != str(images[1])
    assert compute_digest(images[0]) == compute_digest(images[1]) == compute_digest("<object object>")
    assert compute_digest(date(2026, 1, 2)) == compute_digest("2026-01-02")
    assert compute_digest({"b", "a"}) == compute_digest(["a", "b"])


def test_a_digest_of_rows_depends_on_their_content_and_order_and_some_rows_have_none():
    rows = [{"question": "a", "n": 1}, {"question": "b", "n": 2}]
    assert digest_rows(rows) == digest_rows([{"n": 1, "question": "a"}, rows[1]])
    assert len({digest_rows(each) for each in (rows, rows[::-1], rows[:1], [*rows, rows[0]], [])}) == 5
    assert digest_rows([{("a", "b"): 1}]) is None
