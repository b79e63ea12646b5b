"""`tune()` with branching rollouts on the real engine: trees on disk, prefix cache, determinism, resuming, refusals."""

from __future__ import annotations

import json

import pytest
from safetensors.numpy import load_file

from small_pocket import write_small_pocket
from tunesmith import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, replayable, tune
from tunesmith.errors import ConfigError
from tunesmith.experience.store import load_rollouts

PLAIN = ("rollout.chat_model=openai", "model.device=cpu", "engine.kv_cache_tokens=8192", "monitor.has_progress=false")
PAGE_SIZE = 8
NUM_CALLS = {"search": 0}


@replayable
async def search(query: str) -> str:
    NUM_CALLS["search"] += 1
    return f"There are {len(query)} letters and {sum(map(ord, query)) % 10} apples."


async def agent(task, model):
    """Two searches, then an answer."""
    messages = [{"role": "user", "content": task["question"]}]
    for number in range(3):
        text = (await model(messages)).choices[0].message.content
        messages.append({"role": "assistant", "content": text})
        if number < 2:
            messages.append({"role": "user", "content": await search(text)})
    return WorkflowOutput(reward=float(sum(map(ord, text)) % 5), metrics={"tool_calls": 2.0})


async def agent_with_helper(task, model, auxiliary_models):
    return WorkflowOutput(reward=0.0)


@pytest.fixture
def run(tmp_path, pocket_folder):
    rows = [{"question": f"Tom has {n} apples. How many?", "answer": str(n)} for n in range(6)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def call(*overrides, name="x", workflow=agent, steps=2, model_path=pocket_folder, group_size=6):
        return tune(
            workflow_func=workflow,
            model=TunerModelConfig(model_path=model_path, max_model_len=256, max_tokens=8),
            train_dataset=DatasetConfig(path=str(tmp_path), total_steps=steps),
            algorithm=AlgorithmConfig(group_size=group_size, batch_size=2, learning_rate=1e-3),
            experiment_name=name,
            overrides=(
                *PLAIN,
                f"engine.page_size={PAGE_SIZE}",
                "algorithm.algorithm_type=grpo",
                f"checkpoint_root_dir={tmp_path / 'runs'}",
                "save_interval_steps=1",
                "rollout.branching.initial_rollouts=2",
                *overrides,
            ),
        )

    return call


def read_steps(result):
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if not name.startswith("perf/")}
        for line in lines
        if line["kind"] == "train"
    ]


def load_trees(result, step):
    return load_rollouts(result.folder / f"rollouts/step_{step:06d}.parquet")


def test_a_run_stores_trees_and_computes_no_prompt_twice(run):
    NUM_CALLS["search"] = 0
    result = run("rollout.branching.base_probability=0.7")
    steps = read_steps(result)
    groups = [group for step in (1, 2) for group in load_trees(result, step)]
    branches = [(run, group) for group in groups for run in group.trajectories if run.parent is not None]
    assert len(branches) >= 6
    for each, group in branches:
        shared = each.num_shared_turns
        assert each.turns[:shared] == group.trajectories[each.parent].turns[:shared]
        assert each.branch_at == len(each.turns[shared].prompt_ids)
    assert sum(line["rollout/num_branched_rollouts"] for line in steps) == len(branches)
    prefilled = sum(line["rollout/num_branch_prefill_tokens"] for line in steps)
    assert 0 < prefilled <= PAGE_SIZE * len(branches), "only the last, incomplete block is computed again"
    inherited = sum(line["rollout/num_inherited_tool_calls"] for line in steps)
    assert inherited == sum(each.num_shared_turns for each, _ in branches) > 0
    assert NUM_CALLS["search"] == sum(2 * len(group.trajectories) for group in groups) - inherited
    for line in steps:
        assert line["engine/num_sampled_tokens"] == (
            line["rollout/num_sampled_tokens"] - line["rollout/num_inherited_tokens"]
        )
        assert line["train/grad_norm"] > 0


@pytest.mark.parametrize("overrides", [(), ("rollout.branching.dynamic_budget_slope=0.5",)])
def test_a_resumed_run_equals_an_uninterrupted_one(run, overrides):
    overrides = (*overrides, "rollout.branching.base_probability=0.6", "rollout.branching.consecutive_penalty=0.3")
    whole = run(*overrides, name="whole", steps=2)
    run(*overrides, name="parts", steps=1)
    parts = run(*overrides, "continue_from_checkpoint=true", name="parts", steps=2)
    assert read_steps(parts) == read_steps(whole)
    last = "global_step_2/model.safetensors"
    expected, found = (load_file(result.folder / last) for result in (whole, parts))
    assert all((expected[name] == found[name]).all() for name in expected)
    assert [run.parent for group in load_trees(whole, 2) for run in group.trajectories] == [
        run.parent for group in load_trees(parts, 2) for run in group.trajectories
    ]


@pytest.mark.parametrize("credit", ["soft", "hard"])
def test_the_update_does_not_depend_on_prefix_sharing(run, credit):
    results = [
        run(
            f"rollout.branching.credit={credit}",
            "rollout.branching.base_probability=1.0",
            f"trainer.has_prefix_sharing={has_sharing}",
            name=f"{credit}-{has_sharing}",
            steps=1,
        )
        for has_sharing in (True, False)
    ]
    shared, flat = (read_steps(result)[0] for result in results)
    assert shared["train/grad_norm"] == pytest.approx(flat["train/grad_norm"], rel=1e-4)
    assert shared["train/loss"] == pytest.approx(flat["train/loss"], rel=1e-4, abs=1e-6)


def test_credit_changes_the_update(run):
    norms = [
        read_steps(run(f"rollout.branching.credit={credit}", "rollout.branching.base_probability=1.0", name=credit))[0]
        for credit in ("soft", "hard")
    ]
    assert norms[0]["rollout/reward_mean"] == norms[1]["rollout/reward_mean"]
    assert norms[0]["train/grad_norm"] != pytest.approx(norms[1]["train/grad_norm"], rel=1e-3)


@pytest.mark.parametrize("algorithm", ["jsd", "on_policy_distill"])
def test_distillation_trains_a_shared_turn_once_with_hard_credit(run, tmp_path, algorithm):
    """Its terms are computed token by token, from teacher and policy."""
    teacher = write_small_pocket(tmp_path / "teacher")
    result = run(
        f"algorithm.algorithm_type={algorithm}",
        f"algorithm.teacher.path={teacher}",
        "rollout.branching.credit=hard",
        "rollout.branching.base_probability=1.0",
        steps=1,
    )
    runs = [each for group in load_trees(result, 1) for each in group.trajectories]
    own = [len(turn.sampled_ids) for each in runs for turn in each.turns[each.num_shared_turns :]]
    assert any(each.parent is not None for each in runs)
    assert read_steps(result)[0]["train/num_trained_tokens"] == sum(own)


@pytest.mark.parametrize(
    ("options", "overrides", "message"),
    [
        ({"group_size": 2}, (), "initial_rollouts=2 leaves no branch in a group of algorithm.group_size=2"),
        ({"group_size": 1}, (), "needs algorithm.group_size of at least 2"),
        ({}, ("model.temperature=0",), "temperature=0: a branch would repeat its parent"),
        ({}, ("rollout.branching.beam=1",), "beam"),
        ({}, ("rollout.branching.base_probability=1.5",), "base_probability"),
        ({"workflow": agent_with_helper}, (), "agent_with_helper cannot branch: it takes auxiliary_models"),
        *(
            ({}, (*overrides, "rollout.branching.credit=hard"), f"{cause} needs all tokens of each rollout")
            for cause, overrides in (
                ("'ppo'", ["algorithm.algorithm_type=ppo"]),
                ("'gspo'", ["algorithm.algorithm_type=gspo"]),
                ("correction.importance=sequence", ["algorithm.correction.importance=sequence"]),
                ("mask.level=geometric", ["algorithm.correction.mask={level: geometric, low: 0.9, high: 1.1}"]),
                ("mask.level=sequence", ["algorithm.correction.mask={level: sequence, low: 0.5, high: 2}"]),
                ("negative_sequence_delta=0.1", ["algorithm.correction.negative_sequence_delta=0.1"]),
                ("seq-mean-token-mean", ["algorithm.loss_aggregation=seq-mean-token-mean"]),
                ("seq-mean-token-mean", ["algorithm.algorithm_type=sapo"]),
            )
        ),
    ],
)
def test_what_cannot_branch_is_refused_before_a_model_loads(run, tmp_path, options, overrides, message):
    with pytest.raises(ValueError, match=message):
        run(*overrides, model_path=str(tmp_path / "no model here"), **options)


def test_a_workflow_that_says_that_it_cannot_branch_is_refused(run):
    async def stubborn(task, model):
        return WorkflowOutput(reward=0.0)

    stubborn.cannot_branch = "its browser cannot be reset"
    with pytest.raises(ConfigError, match="stubborn cannot branch: its browser cannot be reset"):
        run(workflow=stubborn)
