"""Task selection in runs: feedback to selectors, several data sets, operators, refills, and resuming."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import yaml

from small_runs import build_small_run, write_splits
from tunesmith import AlgorithmConfig, DatasetConfig, JudgeOutput, TaskSelectorConfig
from tunesmith.commands.tune.plan import count_refilled
from tunesmith.errors import ConfigError, DataError
from tunesmith.experience.store import load_rollouts
from tunesmith.model.checkpoint import RUN_STATE

RECIPE = Path(__file__).parents[3] / "recipes" / "data_augment"


async def judge_parity(task, response):
    """Tasks below 2 are always solved, those above 5 never, the others at random."""
    by_chance = float(sum(map(ord, response)) % 2)
    solved = 1.0 if task["number"] < 2 else 0.0 if task["number"] > 5 else by_chance
    return JudgeOutput(reward=solved, metrics={"length": float(len(response))})


@pytest.fixture
def data(tmp_path):
    rows = [{"question": f"Tom has {n} apples.", "number": n, "answer": str(n), "easy": 1 - n / 7} for n in range(8)]
    rows = [row | {"qwen2.5_7b_pass_rate": row["easy"] * 0.9, "qwen3_30b_pass_rate": row["easy"]} for row in rows]
    return write_splits(tmp_path / "data", rows)


@pytest.fixture
def run(tmp_path, data, pocket_folder):
    """Calls tune() with small settings; arguments and overrides may be given."""
    algorithm = AlgorithmConfig(group_size=2, batch_size=2, learning_rate=1e-3)
    return build_small_run(tmp_path, pocket_folder, data, judge_func=judge_parity, algorithm=algorithm)


def read_metrics(result):
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows]


def read_tasks(result, step):
    return [group.task.index for group in load_rollouts(result.folder / f"rollouts/step_{step:06d}.parquet")]


def test_a_python_selector_chooses_receives_feedback_and_reports_reasons(run, data):
    selector = TaskSelectorConfig(
        selector_type="difficulty_based",
        feature_keys=["easy"],
        kwargs={"tau": 0, "target_reward": 1.0, "m": 4, "prior_count": 100},
    )
    result = run(train_dataset=DatasetConfig(path=data, total_steps=2, task_selector=selector))
    assert read_tasks(result, 1) == [0, 1]
    assert result.metrics["selector/num_feedback"] == 2
    told = json.loads((result.folder / "selection/step_000001.json").read_text())
    assert [choice["task_id"] for choice in told["choices"]] == ["train/0", "train/1"]
    assert "near the target 1" in told["choices"][0]["reason"] and sum(told["histogram"]) == 8


def test_a_selector_may_be_a_dict_or_a_name(run, data):
    chosen = {"selector_type": "sequential"}
    first = run(train_dataset=DatasetConfig(path=data, total_steps=2, task_selector=chosen))
    assert [read_tasks(first, step) for step in (1, 2)] == [[0, 1], [2, 3]]
    named = DatasetConfig(path=data, total_steps=1, task_selector="offline_easy2hard")
    with pytest.raises(ConfigError, match="takes at least 1 of feature_keys"):
        run(train_dataset=named, experiment_name="y")


def test_the_pareto_selector_learns_from_the_rollouts_of_a_run(run, data):
    selector = TaskSelectorConfig(selector_type="pareto", kwargs={"tool_keys": ["length"], "explore": 0.5})
    result = run(train_dataset=DatasetConfig(path=data, total_steps=3, task_selector=selector))
    assert result.metrics["selector/num_tasks_known"] == len(
        {task for s in (1, 2, 3) for task in read_tasks(result, s)}
    )
    saved = json.loads((result.folder / "selection/step_000001.json").read_text())
    assert {choice["reason"] for choice in saved["choices"]} == {"no rollouts yet"}
    resumed = run(
        "total_steps=4", train_dataset=DatasetConfig(path=data, task_selector=selector), continue_from_checkpoint=True
    )
    whole = run(
        "total_steps=4", train_dataset=DatasetConfig(path=data, task_selector=selector), experiment_name="whole"
    )
    assert read_tasks(resumed, 4) == read_tasks(whole, 4)


class LastFirst:
    """A user's selector: from the last task to the first; it stores the feedback."""

    def __init__(self, tasks, *, seed):
        self.next, self.received = len(tasks) - 1, []

    def select(self, batch_size):
        self.next -= batch_size
        return [self.next + offset + 1 for offset in range(batch_size)][::-1]

    def feedback(self, indices, pass_rates):
        self.received += list(zip(indices, pass_rates, strict=True))
        return {"mine/num_received": float(len(self.received))}

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


@pytest.mark.parametrize("kind", ["class", "object", "path"])
def test_a_users_selector_may_be_a_class_an_object_or_a_path(run, data, kind):
    given = {"class": LastFirst, "object": LastFirst(range(8), seed=0), "path": f"{__name__}:LastFirst"}[kind]
    result = run(train_dataset=DatasetConfig(path=data, total_steps=2, task_selector=given))
    assert [read_tasks(result, step) for step in (1, 2)] == [[7, 6], [5, 4]]
    assert result.metrics["mine/num_received"] == 4
    assert "LastFirst" in (result.folder / "config.yaml").read_text()


def test_several_training_sets_are_mixed_by_weight(run, data):
    sets = {
        "few": DatasetConfig(path=data, weight=1.0, total_steps=2, task_selector="sequential"),
        "many": DatasetConfig(path=data, split="test", weight=3.0, task_selector="sequential"),
    }
    result = run(train_dataset=sets, algorithm=AlgorithmConfig(algorithm_type="reinforce", group_size=1, batch_size=4))
    groups = [g for step in (1, 2) for g in load_rollouts(result.folder / f"rollouts/step_{step:06d}.parquet")]
    assert sorted(group.task.task_id for group in groups) == sorted(
        ["few/0", "few/1", *(f"many/{index}" for index in range(6))]
    )


def test_operators_on_tasks_report_their_counts(run, capfd):
    result = run(
        "train_dataset.operators=[{name: difficulty_score, args: {feature_keys: [easy]}}, "
        "{name: priority_order, args: {weights: {difficulty_score: 1.0}, top_k: 4}}]",
        "train_dataset.task_selector.selector_type=sequential",
    )
    assert [read_tasks(result, step) for step in (1, 2)] == [[7, 6], [5, 4]]
    assert "tasks/priority_order/num_removed 4" in "".join(capfd.readouterr())


def test_operators_filter_training_groups_but_not_saved_rollouts(run):
    result = run(
        "experience.operators=[{name: dapo_dynamic_sampling}]",
        "train_dataset.task_selector.selector_type=sequential",
    )
    assert read_metrics(result)[0]["experience/dapo_dynamic_sampling/num_filtered_groups"] == 2
    assert read_metrics(result)[0]["train/num_updates"] == 0
    assert read_tasks(result, 1) == [0, 1]


def test_reward_shaping_changes_training_but_not_saved_rollouts(run):
    """Equal rewards have zero advantage; a bonus of 2 for every second rollout changes that."""
    numbers = itertools.count()

    async def judge(task, response):
        return JudgeOutput(reward=1.0, metrics={"odd": float(next(numbers) % 2)})

    result = run(
        "experience.operators=[{name: reward_shaping_mapper, args: {reward_shaping_configs: "
        "[{stats_key: odd, op_type: ADD, weight: 2}]}}]",
        judge_func=judge,
    )
    metrics = read_metrics(result)[0]
    assert metrics["experience/reward_shaping_mapper/num_skipped"] == 0
    assert metrics["experience/reward_shaping_mapper/reward_diff_mean"] == 1
    assert metrics["algorithm/num_trained_groups"] > 0 and metrics["train/grad_norm"] > 0
    groups = load_rollouts(result.folder / "rollouts/step_000001.parquet")
    assert {trajectory.reward for group in groups for trajectory in group.trajectories} == {1.0}


@pytest.mark.parametrize(
    "operator",
    [
        "{name: reward_shaping_mapper, args: {reward_shaping_configs: [{stats_key: lengt, op_type: ADD, weight: 1}]}}",
        "{name: dapo_dynamic_sampling, args: {metric_key: lengt}}",
    ],
)
def test_an_unreported_metric_stops_the_run_with_its_name(run, operator):
    with pytest.raises(ConfigError, match="'lengt', which none of 4 rollouts reports .did you mean 'length'"):
        run(f"experience.operators=[{operator}]")


def test_the_error_of_a_data_set_names_its_key(run, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match=r"^eval_datasets\.test: the data set '.*empty\.jsonl' has no rows$"):
        run(f"eval_datasets={{test: {{path: {tmp_path / 'empty.jsonl'}}}}}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train_dataset.operators=[{name: dedup}]", r"train_dataset\.operators: unknown operator on tasks 'dedup'"),
        ("train_dataset.task_selector.selector_type=rand", r"train_dataset\.task_selector: unknown selector 'rand'"),
        ("experience.operators=[{name: gate}]", r"experience\.operators: unknown operator 'gate'"),
    ],
)
def test_an_unknown_component_is_named_with_its_key(run, override, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        run(override)


def test_an_operator_may_be_an_object(run):
    def drop_all(groups):
        return [type(group)(task=group.task, trajectories=()) for group in groups], {"seen": len(groups)}

    result = run(operators=[drop_all])
    assert result.metrics["experience/drop_all/seen"] == 2
    assert result.metrics["train/num_updates"] == 0


def test_groups_with_zero_advantage_are_replaced_within_the_budget(run):
    result = run("experience.refill_budget=4", "train_dataset.task_selector.selector_type=sequential", "total_steps=1")
    metrics = read_metrics(result)[0]
    tried = read_tasks(result, 1)
    assert len(tried) == metrics["experience/num_tasks_tried"] > 2
    assert tried[:4] == [0, 1, 2, 3] and len(tried) <= 8
    assert metrics["algorithm/num_trained_groups"] == metrics["experience/num_useful_groups"] <= 2


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (
            ("train_dataset.task_selector.selector_type=dificulty_based",),
            ConfigError,
            "did you mean 'difficulty_based'",
        ),
        (("train_dataset.task_selector.args.m=4",), ConfigError, "unknown argument 'm'"),
        (("train_dataset.operators=[{name: length_filter, args: {field: nothing}}]",), DataError, "no 'nothing'"),
        (("experience.operators=[{name: reward_filter, args: {limit: 1}}]",), ConfigError, "unknown argument 'limit'"),
        (("experience.operators=[{name: 'no.such.place'}]",), ConfigError, "experience.operators: no module"),
        (
            ("eval_datasets.t.path=d", "eval_datasets.t.weight=2"),
            ConfigError,
            r"eval_datasets\.t\.weight=2 has no effect",
        ),
        (("eval_datasets.t.path=d", "eval_datasets.t.operators=[{name: x}]"), ConfigError, "operators has no effect"),
        (("experience.refill_budget=1.4",), ConfigError, "no task beyond a batch of 2: raise it to 1.5"),
        (
            ("experience.replay.capacity=9",),
            ConfigError,
            "capacity=9 has no effect with num_groups=0",
        ),
        (("experience.replay={num_groups: 2, capacity: 1}",), ConfigError, "capacity=1 is less than num_groups=2"),
        (("algorithm.correction.cap=3",), ConfigError, r"correction\.cap=3 has no effect.*experience\.replay"),
        (
            ("algorithm.algorithm_type=opmd", "algorithm.correction.cap=3", "experience.replay.num_groups=2"),
            ConfigError,
            "cap=3.0 has no effect on 'opmd'",
        ),
        (("train_dataset.operators=x",), ConfigError, r"train_dataset\.operators must be a list, got 'x'"),
        (("train_dataset.weight=2",), ConfigError, r"train_dataset\.weight=2 has no effect"),
        (("train_datasets.b.path=d",), ConfigError, "train_dataset and train_datasets are both given"),
    ],
)
def test_invalid_input_is_refused_before_a_model_loads(run, monkeypatch, overrides, error, message):
    def fail(*args, **kwargs):
        raise AssertionError("a model was loaded before the input was checked")

    monkeypatch.setattr("tunesmith.commands.tune.tune.load_actors", fail)
    with pytest.raises(error, match=message):
        run(*overrides)


def test_a_resumed_run_selects_refills_and_replays_like_an_uninterrupted_one(run, data):
    shaping = "{stats_key: length, op_type: ADD, weight: 0.1}"
    settings = (
        "train_dataset.task_selector.selector_type=difficulty_based",
        "train_dataset.task_selector.args={m: 4, tau: 0.1, do_sample: true, max_repeats: 1}",
        "experience.refill_budget=2",
        "experience.replay={num_groups: 2, sigma: 1.0}",
        f"experience.operators=[{{name: reward_shaping_mapper, args: {{reward_shaping_configs: [{shaping}]}}}}]",
        "trainer.mismatch_stop=100",
    )
    whole = run(*settings, "total_steps=4")
    run(*settings, "total_steps=2", experiment_name="parts")
    parts = run(*settings, "total_steps=4", experiment_name="parts", continue_from_checkpoint=True)
    assert read_metrics(parts) == read_metrics(whole)
    assert read_metrics(whole)[3]["experience/num_replayed_groups"] == 2
    for step in range(1, 5):
        name = f"selection/step_{step:06d}.json"
        assert (parts.folder / name).read_text() == (whole.folder / name).read_text()
    states = [json.loads((each.checkpoint / RUN_STATE).read_text()) for each in (whole, parts)]
    assert states[0] == states[1] and states[0]["selector"]["capability"] is not None


def test_the_recipes_difficulty_file_trains(run, data, monkeypatch, pocket_folder):
    monkeypatch.setenv("TUNESMITH_TRAIN_DATA", data)
    monkeypatch.setenv("TUNESMITH_EVAL_DATA", data)
    monkeypatch.setenv("TUNESMITH_MODEL", pocket_folder)
    result = run(
        "model.max_model_len=128", "model.max_tokens=4", "total_steps=2", "evaluation.at_start=false",
        config_path=RECIPE / "config_difficulty.yaml", train_dataset=None, model=None,
    )  # fmt: skip
    assert "selector/capability" in result.metrics
    assert "experience/pass_rate_calculator/valid_ratio" in result.metrics
    saved = yaml.safe_load((result.folder / "config.yaml").read_text())
    assert saved["train_dataset"]["task_selector"]["args"]["target_reward"] == 0.8


def test_a_refill_budget_counts_tasks_without_the_rounding_of_products():
    assert [count_refilled(budget, batch_size=size) for budget, size in ((1.15, 20), (1.0, 3), (2.5, 3))] == [23, 3, 7]
    for size in range(1, 200):
        with pytest.raises(ConfigError, match="no task beyond a batch") as caught:
            count_refilled(1 + 0.5 / size, batch_size=size)
        enough = float(str(caught.value).split("raise it to ")[1].split()[0])
        assert count_refilled(enough, batch_size=size) == size + 1
