from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import full_disk
from tunesmith.errors import StorageError
from tunesmith.experience.store import (
    DISTRIBUTION,
    SCHEMA,
    RolloutFiles,
    load_rollouts,
    load_table,
    merge_rollouts,
    save_rollouts,
    truncate_rollouts,
)
from tunesmith.experience.store import TURN as TURN_TYPE
from tunesmith.types import Distribution, Failure, Group, Task, Trajectory, Turn

TASK = Task(task_id="sums/3", index=3, row={"question": "1+1", "answer": 2})
TURN = Turn(
    prompt_ids=(1, 2, 3),
    sampled_ids=(4, 5),
    logprobs=(-0.1, -2.5),
    policy_versions=(7, 8),
    distribution=Distribution(temperature=0.7, top_k=5, logit_bias=((4, -1.5),)),
    stop_reason="eos",
)
GOOD = Trajectory(task=TASK, run_index=0, turns=(TURN,), reward=0.25, metrics={"accuracy": 1.0}, response_text="two")
BAD = Trajectory(
    task=TASK, run_index=1, turns=(), reward=None, failure=Failure(where="judge", message="no verdict"), duration_s=1.5
)
GROUP = Group(task=TASK, trajectories=(GOOD, BAD))

numbers = st.floats(allow_nan=False)
ids = st.integers(0, 2**31 - 1)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
distributions = st.builds(
    Distribution,
    temperature=numbers,
    top_p=numbers,
    top_k=ids,
    min_p=numbers,
    logit_bias=st.lists(st.tuples(ids, numbers), max_size=2).map(tuple),
    repetition_penalty=numbers,
    presence_penalty=numbers,
    frequency_penalty=numbers,
    min_tokens=ids,
    end_ids=st.lists(ids, max_size=2).map(tuple),
    bad_words=st.lists(st.lists(ids, max_size=2).map(tuple), max_size=2).map(tuple),
    grammar=st.sampled_from(["", 'start: "x"']),
)
stop_reasons = st.sampled_from(["eos", "stop", "length", "context", "cancelled"])


@st.composite
def turns(draw) -> Turn:
    sampled = draw(st.lists(st.tuples(ids, numbers, ids), max_size=4))
    return Turn(
        prompt_ids=tuple(draw(st.lists(ids, max_size=4))),
        sampled_ids=tuple(token for token, _, _ in sampled),
        logprobs=tuple(logprob for _, logprob, _ in sampled),
        policy_versions=tuple(version for _, _, version in sampled),
        distribution=draw(distributions),
        stop_reason=draw(stop_reasons),
    )


@st.composite
def groups(draw) -> Group:
    row = draw(st.dictionaries(st.text(max_size=4), json_values, max_size=3))
    task = Task(task_id=draw(st.text(max_size=8)), index=draw(st.integers(0, 2**40)), row=row)
    trajectories = []
    for run_index in range(draw(st.integers(1, 3))):
        reward = draw(st.none() | numbers)
        failure = Failure(where="engine", message=draw(st.text(max_size=8))) if reward is None else None
        trajectory = Trajectory(
            task=task,
            run_index=run_index,
            turns=tuple(draw(st.lists(turns(), max_size=3))),
            reward=reward,
            metrics=draw(st.dictionaries(st.text(max_size=4), numbers, max_size=2)),
            failure=failure,
            response_text=draw(st.text(max_size=20)),
            duration_s=draw(numbers),
            **draw(st.sampled_from(({}, {"parent": 0, "branch_at": 5, "turn_owners": (0, 0)}))),
        )
        trajectories.append(trajectory)
    return Group(task=task, trajectories=tuple(trajectories))


@given(st.lists(groups(), max_size=3))
def test_rollouts_round_trip_exactly(tmp_path_factory, saved):
    path = tmp_path_factory.mktemp("rollouts") / "step_000001.parquet"
    save_rollouts(path, saved)
    assert load_rollouts(path) == saved


def test_two_groups_of_one_task_stay_separate(tmp_path):
    save_rollouts(tmp_path / "a.parquet", [GROUP, GROUP])
    assert load_rollouts(tmp_path / "a.parquet") == [GROUP, GROUP]


def test_trees_are_columns_and_older_files_without_them_load(tmp_path):
    path = tmp_path / "a.parquet"
    first, second = GROUP.trajectories
    tree = replace(GROUP, trajectories=(first, replace(second, parent=0, branch_at=3, turn_owners=(0,))))
    save_rollouts(path, [tree])
    table = pq.read_table(path)
    columns = ["parent", "branch_at", "num_shared_turns"]
    assert table.select(columns).to_pylist() == [
        {"parent": None, "branch_at": None, "num_shared_turns": 0},
        {"parent": 0, "branch_at": 3, "num_shared_turns": 1},
    ]
    pq.write_table(table.drop_columns(columns), path)
    assert load_rollouts(path) == [GROUP]


def test_a_branch_of_a_branch_knows_who_sampled_each_shared_turn_after_loading(tmp_path):
    first = GROUP.trajectories[0]
    branch = replace(first, run_index=1, parent=0, branch_at=3, turn_owners=(0,))
    leaf = replace(first, run_index=2, parent=1, branch_at=5, turn_owners=(0, 1))
    tree = replace(GROUP, trajectories=(first, branch, leaf))
    save_rollouts(tmp_path / "a.parquet", [tree])
    assert load_rollouts(tmp_path / "a.parquet") == [tree]


def test_parquet_columns_hold_advantages_and_nulls(tmp_path):
    path = tmp_path / "a.parquet"
    save_rollouts(path, [GROUP], [[0.5, None]])
    rows = pq.read_table(path).to_pylist()
    assert [row["advantage"] for row in rows] == [0.5, None]
    assert [row["reward"] for row in rows] == [0.25, None]
    assert [row["failure_message"] for row in rows] == [None, "no verdict"]
    assert rows[0]["turns"][0]["logprobs"] == [-0.1, -2.5]


def test_turn_advantages_are_stored_with_their_mean(tmp_path):
    path = tmp_path / "a.parquet"
    save_rollouts(path, [GROUP], [[(0.5, -1.5), None]])
    rows = pq.read_table(path).to_pylist()
    assert [row["turn_advantages"] for row in rows] == [[0.5, -1.5], None]
    assert [row["advantage"] for row in rows] == [-0.5, None]


def test_advantages_must_match_the_trajectories(tmp_path):
    with pytest.raises(ValueError, match="zip"):
        save_rollouts(tmp_path / "a.parquet", [GROUP], [[0.5]])
    assert list(tmp_path.iterdir()) == []


def test_lone_surrogates_are_stored_as_replacement_characters(tmp_path):
    group = Group(task=TASK, trajectories=(replace(GOOD, response_text="a\ud83db", metrics={"\udc00": 1.0}),))
    save_rollouts(tmp_path / "a.parquet", [group])
    loaded = load_rollouts(tmp_path / "a.parquet")[0].trajectories[0]
    assert (loaded.response_text, loaded.metrics) == ("a\ufffdb", {"\ufffd": 1.0})


def test_values_that_are_not_json_are_stored_as_text(tmp_path):
    task = Task(task_id="t/0", index=0, row={"shape": (1, 2), "set": {3}})
    save_rollouts(tmp_path / "a.parquet", [Group(task=task, trajectories=(replace(GOOD, task=task),))])
    assert load_rollouts(tmp_path / "a.parquet")[0].task.row == {"shape": [1, 2], "set": "{3}"}


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.parquet"
    save_rollouts(path, [GROUP])
    large = Group(task=TASK, trajectories=(replace(GOOD, response_text="".join(map(chr, range(300, 20000)))),))
    with full_disk(8000), pytest.raises(StorageError, match=r"^cannot write .*a\.parquet: File too large$"):
        save_rollouts(path, [large])
    assert load_rollouts(path) == [GROUP]
    assert [p.name for p in tmp_path.iterdir()] == ["a.parquet"]


def test_files_that_are_not_rollouts_are_refused(tmp_path):
    path = tmp_path / "a.parquet"
    with pytest.raises(StorageError, match="No such file"):
        load_rollouts(path)
    path.write_text("text")
    with pytest.raises(StorageError, match="it is not a Parquet file"):
        load_rollouts(path)
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(StorageError, match="expected rollouts of format 1, found none"):
        load_rollouts(path)


def test_baseline_reward_and_turn_advantages_are_stored(tmp_path):
    path = tmp_path / "rollouts.parquet"
    group = replace(GROUP, baseline_reward=0.75)
    save_rollouts(path, [group], [[(0.5, -1.5), None]])
    assert [each.baseline_reward for each in load_rollouts(path)] == [0.75]
    rows = pq.read_table(path).to_pylist()
    assert rows[0]["advantage"] == -0.5 and rows[0]["turn_advantages"] == [0.5, -1.5]
    assert rows[0]["group_index"] == 0 and rows[0]["baseline_reward"] == 0.75


def test_rollouts_of_a_version_without_penalties_are_read_merged_and_truncated(tmp_path):
    path = tmp_path / "step_000001.parquet"
    save_rollouts(path, [GROUP])
    old_distribution = pa.struct([DISTRIBUTION.field(index) for index in range(5)])
    assert old_distribution.field(4).name == "logit_bias"
    old_turn = pa.struct([
        pa.field(field.name, old_distribution if field.name == "distribution" else field.type) for field in TURN_TYPE
    ])  # fmt: skip
    old = SCHEMA.set(SCHEMA.get_field_index("turns"), pa.field("turns", pa.list_(old_turn)))
    rows = pq.read_table(path).to_pylist()
    for turn in [turn for row in rows for turn in row["turns"]]:
        turn["distribution"] = {field.name: turn["distribution"][field.name] for field in old_distribution}
    pq.write_table(pa.Table.from_pylist(rows, schema=old), path)
    assert "grammar" not in str(pq.read_schema(path))
    assert load_rollouts(path) == [GROUP]
    other = tmp_path / "step_000002.parquet"
    save_rollouts(other, [GROUP])
    merge_rollouts(tmp_path / "steps_000001-000002.parquet", {1: path, 2: other})
    truncate_rollouts(tmp_path / "steps_000001-000002.parquet", tmp_path / "steps_000001-000001.parquet", 1)
    truncated = pq.read_table(tmp_path / "steps_000001-000001.parquet").to_pylist()
    assert {row["step"] for row in truncated} == {1}


def test_tracebacks_and_untrained_turns_are_stored(tmp_path):
    failure = Failure(where="judge", message="ValueError: no", line="judge.py:3 in judge", traceback="Traceback ...")
    failed = replace(BAD, failure=failure)
    masked = replace(GOOD, turns=(TURN, replace(TURN, is_trained=False)))
    save_rollouts(tmp_path / "step_000001.parquet", [Group(task=TASK, trajectories=(masked, failed))])
    (loaded,) = load_rollouts(tmp_path / "step_000001.parquet")
    assert loaded.trajectories[0] == masked
    assert loaded.trajectories[1].failure.traceback == "Traceback ..."
    table = load_table(tmp_path / "step_000001.parquet").select(["num_turns", "num_sampled_tokens", "untrained_turns"])
    counts = {"num_turns": 2, "num_sampled_tokens": 2 * len(TURN.sampled_ids), "untrained_turns": [1]}
    assert table.to_pylist() == [counts, {"num_turns": 0, "num_sampled_tokens": 0, "untrained_turns": None}]


def test_a_file_without_the_newer_columns_is_read_and_merged(tmp_path):
    newer = ["failure_traceback", "num_turns", "num_sampled_tokens", "untrained_turns"]
    for step in (1, 2):
        path = tmp_path / f"step_{step:06d}.parquet"
        save_rollouts(path, [GROUP])
        pq.write_table(pq.read_table(path).drop_columns(newer), path)
    assert load_rollouts(tmp_path / "step_000001.parquet") == [GROUP]
    merged = tmp_path / "steps_000001-000002.parquet"
    merge_rollouts(merged, {step: tmp_path / f"step_{step:06d}.parquet" for step in (1, 2)})
    (tmp_path / "step_000002.parquet").unlink()
    assert load_rollouts(tmp_path / "step_000002.parquet") == [GROUP]


def test_a_step_without_rollouts_is_empty_before_and_after_it_is_merged(tmp_path):
    single = {step: tmp_path / f"step_{step:06d}.parquet" for step in (1, 2)}
    save_rollouts(single[1], [GROUP])
    save_rollouts(single[2], [])
    files = RolloutFiles(tmp_path)
    assert files.read_table(2, ["reward"]).num_rows == 0
    merge_rollouts(tmp_path / "steps_000001-000002.parquet", single)
    for path in single.values():
        path.unlink()
    assert files.read_table(2, ["reward"]).num_rows == 0 and list(files.iter_rows(2, ["reward"])) == []
    assert files.read_table(1, ["reward"]).num_rows == 2


def test_steps_of_a_merged_file_without_statistics_are_read_from_its_rows(tmp_path):
    for step in (1, 2):
        save_rollouts(tmp_path / f"step_{step:06d}.parquet", [GROUP])
    merged, cut = tmp_path / "steps_000001-000002.parquet", tmp_path / "steps_000001-000001.parquet"
    merge_rollouts(merged, {step: tmp_path / f"step_{step:06d}.parquet" for step in (1, 2)})
    table = pq.read_table(merged)
    pq.write_table(table, merged, row_group_size=len(table) // 2, write_statistics=False, write_page_checksum=True)
    truncate_rollouts(merged, cut, 1)
    assert {row["step"] for row in pq.read_table(cut).to_pylist()} == {1}
    for step in (1, 2):
        (tmp_path / f"step_{step:06d}.parquet").unlink()
    cut.unlink()
    assert load_rollouts(tmp_path / "step_000002.parquet") == [GROUP]
