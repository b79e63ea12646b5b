"""The pipelines of ET-Agent: the pocket one at a small size, all stages; the other one is valid."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
from itertools import combinations, takewhile
from pathlib import Path

import pytest
import yaml

from recipes.et_agent import expert_roles
from recipes.et_agent.mathematics import leave_wrong_beginnings
from recipes.et_agent.pocket import has_evidence, index_documents, search, split_questions
from recipes.world import World, generate
from recipes.world.config import build_config
from recipes.world.expert import iter_plans
from tunesmith import run_pipeline
from tunesmith.commands.run.config import load_pipeline, plan_stages
from tunesmith.commands.run.run import check_stage
from tunesmith.config import EnvironmentSection, FlywheelConfig
from tunesmith.environments import Transcript
from tunesmith.et_agent.flywheel.roles import RoleRequest, split_steps
from tunesmith.runs.load_config import build_section
from tunesmith.runs.load_function import load_environment

FOLDER = Path(__file__).parents[2] / "recipes" / "et_agent"
SMALL = (
    "variables.world.num_train=120", "variables.world.num_documents=40",
    "stages.demonstrations.args.num_conversations=60",
    "stages.base.args.hidden_size=64", "stages.base.args.num_kv_heads=2",
    "stages.prompted.max_steps=3",
    "stages.flywheel.num_iterations=1", "stages.rollouts.num_rollouts=1",
    "stages.questions.args.num_train=16", "stages.questions.args.num_test=2",
    "stages.rft_filter.has_format_check=false", "stages.rollouts_filter.has_format_check=false",
    "stages.rft_filter.max_failed_calls=null", "stages.rollouts_filter.max_failed_calls=null",
    "stages.rft.max_steps=2", "stages.rft_rollouts.max_steps=2", "stages.curriculum.stages.rl.total_steps=1",
    "stages.curriculum.stages.rl.algorithm.batch_size=2", "stages.curriculum.stages.rl.algorithm.group_size=4",
    "stages.curriculum.stages.rl.trainer.warmup_steps=0", "stages.curriculum.stages.pareto.num_selected=4",
    "stages.curriculum.stages.pass_rate.num_runs=4", "stages.eval.evaluation.num_samples=1",
    "variables.environment.max_tokens=48", "stages.flywheel.extra_tokens=16", "stages.flywheel.max_per_question=4",
    "stages.flywheel.num_rollouts=1",
)  # fmt: skip
CONTINUED = ("hint_after_flaw", "hint_at_end", "reflect")
BOXED = re.compile(r"boxed\{(.*?)\}</answer>")
JUDGES = "stages.flywheel", "stages.rollouts", "stages.curriculum.stages.pass_rate", "stages.curriculum.stages.rl"
SOURCE = """
from tunesmith.types import JudgeOutput

async def judge(task, response):
    return JudgeOutput(reward=float(len(response.text) % 2), metrics={"em": 0.0})
"""
"""A model of 3 steps is never right, so half of its trajectories are called so."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("bm25s", reason="search needs bm25s: pip install 'tunesmith[retrieval]'")
    place = tmp_path_factory.mktemp("et_agent")
    (place / "judge_of_tests.py").write_text(SOURCE)
    judges = [f"{each}.judge={place}/judge_of_tests.py:judge" for each in JUDGES]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(FOLDER.parents[1])
        run_pipeline(FOLDER / "pocket.yaml", overrides=[f"folder={place}/run", *SMALL, *judges])
    return place / "run"


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_pipeline_runs_to_its_end(folder):
    stages = json.loads((folder / "report.json").read_text())
    assert "rl_2" in json.dumps(stages) and (folder / "eval" / "comparison.json").exists()
    assert "Behavior of all models" in (folder / "report.md").read_text()


def test_what_was_repaired_is_fine_tuned(folder):
    rows = read(folder / "flywheel" / "trajectories.jsonl")
    kept = read(folder / "rft_filter" / "transcripts.jsonl")
    assert {row["operator"] for row in rows} > {"rollout", "reflect", "hint_at_end"}
    assert kept and all(row["correctness"] == 1.0 for row in kept)
    assert {row["trajectory_id"] for row in kept} <= {row["trajectory_id"] for row in rows}
    conversation = read(folder / "rft_filter" / "train.jsonl")[0]["messages"][-1]["content"]
    assert all(part["weight"] == 0 for part in conversation if part["text"].startswith("\n<result>"))


def test_wrong_steps_before_a_repair_are_masked_or_dropped(folder, tmp_path):
    rows, sources = (read(folder / "rft_filter" / name) for name in ("train.jsonl", "transcripts.jsonl"))
    everything = {row["trajectory_id"]: row for row in read(folder / "flywheel" / "trajectories.jsonl")}
    files = {"rows": "rft_filter/train.jsonl", "kept": "rft_filter/transcripts.jsonl"}
    files = {
        name: str(folder / path) for name, path in (files | {"trajectories": "flywheel/trajectories.jsonl"}).items()
    }
    counts = leave_wrong_beginnings(tmp_path, **files, how="mask")
    masked = read(tmp_path / "train.jsonl")
    continued = [index for index, row in enumerate(sources) if row["operator"] in CONTINUED]
    assert counts == {"changed": len(continued), "rows": len(rows)} and continued
    for index, (before, after) in enumerate(zip(rows, masked, strict=True)):
        texts = ["".join(part["text"] for part in row["messages"][-1]["content"]) for row in (before, after)]
        assert texts[0] == texts[1]
        if index not in continued:
            assert before == after
            continue
        parent = everything[sources[index]["parent_id"]]
        pairs = zip(texts[0], Transcript.from_json(parent["transcript"]).text, strict=False)
        shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        parts = after["messages"][-1]["content"]
        trained = next(number for number, part in enumerate(parts) if part["weight"])
        assert 0 < shared <= sum(len(part["text"]) for part in parts[:trained]) < len(texts[0])
    leave_wrong_beginnings(tmp_path, **files, how="drop")
    assert read(tmp_path / "train.jsonl") == [row for index, row in enumerate(rows) if index not in continued]


def test_no_two_parts_of_the_questions_ask_for_the_same_fact(folder):
    stages = yaml.safe_load((folder / "pipeline.yaml").read_text())["stages"]
    world = World(config=build_config(stages["questions"]["args"]["world"]))
    facts = [plan.question.facts[-1] for plan in iter_plans(world, "train")]
    parts = [
        {facts[row["number"]] for row in read(folder / "questions" / f"{name}.jsonl")}
        for name in ("train", "test", "demonstrated")
    ]
    assert all(parts) and not any(one & other for one, other in combinations(parts, 2))


def test_demonstrations_waste_calls_and_guess(folder):
    calls = {len(find_results(row)) for row in read(folder / "demonstrations" / "conversations.jsonl")}
    assert calls >= {0, 1, 2}


def test_a_demonstrated_answer_is_in_a_result_unless_nothing_was_searched(folder):
    for row in read(folder / "demonstrations" / "conversations.jsonl"):
        results = find_results(row)
        answer = BOXED.search(row["messages"][-1]["content"][-1]["text"])[1]
        assert not results or answer in results[-1]


def test_demonstrations_have_no_record_of_the_world_that_is_searched(folder):
    records = {row["text"] for row in read(folder / "index" / "records.jsonl")}
    rows = read(folder / "demonstrations" / "conversations.jsonl")
    assert rows and not any(record in results for row in rows for results in find_results(row) for record in records)


def test_what_a_search_did_not_find_is_not_demonstrated(tmp_path):
    pytest.importorskip("bm25s", reason="search needs bm25s: pip install 'tunesmith[retrieval]'")
    recipe = runpy.run_path(str(FOLDER / "pocket.py"))
    world = {
        "num_documents": 40,
        "num_train": 40,
        "num_test": 0,
        "max_hops": 1,
        "distractors_per_entity": 0,
        "kind_shares": {"multi_hop": 1.0},
    }
    generate(tmp_path / "world", **world)
    recipe["index_documents"](tmp_path, documents=str(tmp_path / "world" / "documents.jsonl"))
    recipe["split_questions"](tmp_path, world=world, num_train=4, num_test=0, seed=0)
    settings = {"source": "index", "index": str(tmp_path / "index"), "top_n": 1}
    counts = recipe["write_demonstrations"](
        tmp_path,
        world=world,
        environment={"prompt": "none", "tools": [{"tool": "search", "settings": settings}]},
        questions=str(tmp_path / "demonstrated.jsonl"),
        seed=0,
    )
    assert counts["without evidence, left out"] > 0 and counts["conversations"] > 0
    for row in read(tmp_path / "conversations.jsonl"):
        years = re.findall(r"answer is (\d+)\.", row["messages"][-1]["content"][-1]["text"])
        assert all(year in " ".join(find_results(row)) for year in years)


def find_results(row: dict) -> list[str]:
    return [part["text"] for part in row["messages"][-1]["content"] if part["weight"] == 0]


DEMONSTRATED = (
    r"<think>Tom has (\d+) pens and buys (\d+) more. So he has \1\+\2=</think>\n<python>print\(\1\+\2\)</python>\n"
    r"<result>\n(\d+)\n</result>\n<think>\3 pens.</think>\n<answer>\\boxed\{\3\}</answer>"
)
PARTS = ("train", "demonstrated")
FEW = (
    "stages.questions.args.num_train=8", "stages.questions.args.num_test=2", "stages.questions.args.num_demonstrated=6",
    "variables.environment.max_tokens=24", "variables.engine.max_num_seqs=8", "variables.engine.kv_cache_gib=0.1",
    "stages.base.max_steps=1", "stages.rft.max_steps=1", "stages.rft_rollouts.max_steps=1",
    "stages.rft_unwritten.max_steps=1", "stages.rft_masked.max_steps=1", "stages.rft_dropped.max_steps=1",
    "stages.flywheel.num_rollouts=1", "stages.flywheel.num_iterations=1", "stages.flywheel.roles.judge=null",
    "stages.flywheel.extra_tokens=8", "stages.flywheel.auxiliary_models.large.max_tokens=4",
    "stages.eval.auxiliary_models.conciseness.max_tokens=4", "stages.rollouts.num_rollouts=1",
    "stages.eval_arms.auxiliary_models.conciseness.max_tokens=4",
    "stages.rft_filter.has_format_check=false", "stages.rollouts_filter.has_format_check=false",
    "stages.rft_filter.max_failed_calls=null", "stages.rollouts_filter.max_failed_calls=null",
    "stages.curriculum.count=1", "stages.curriculum.values.sigma=[0.2]", "stages.random.count=1",
    "stages.random.values.sigma=[0.2]", "stages.eval.evaluation.num_samples=1",
)  # fmt: skip
FEW_STEPS = (
    "total_steps=1", "save_interval_steps=1", "algorithm.batch_size=2", "algorithm.group_size=4",
    "trainer.warmup_steps=0", "rollout.branching.initial_rollouts=2",
)  # fmt: skip


def test_mathematics_runs_to_its_end(tmp_path, pocket_folder, monkeypatch):
    (tmp_path / "gsm8k").mkdir()
    for split in ("train", "test"):
        rows = [
            {"question": f"Tom has {a} pens and buys {a + 1} more. How many has he?", "answer": solve(a, a + 1)}
            for a in range(14)
        ]
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "judge_of_tests.py").write_text(SOURCE)
    for name, value in {"MODEL": pocket_folder, "LARGE": pocket_folder, "GSM8K": str(tmp_path / "gsm8k")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(FOLDER.parents[1])
    curriculum, random = "stages.curriculum.stages", "stages.random.stages"
    judged = ["stages.flywheel", "stages.rollouts", f"{curriculum}.pass_rate", f"{curriculum}.rl"]
    judged += [f"{random}.random_pass_rate", f"{random}.random_rl"]
    changes = [f"{each}.judge={tmp_path}/judge_of_tests.py:judge" for each in judged]
    changes += [f"{each}.num_runs=4" for each in (f"{curriculum}.pass_rate", f"{random}.random_pass_rate")]
    changes += [f"{each}.{change}" for each in (f"{curriculum}.rl", f"{random}.random_rl") for change in FEW_STEPS]
    run_pipeline(FOLDER / "mathematics.yaml", overrides=[f"folder={tmp_path}/run", *FEW, *changes])
    demonstrations = read(tmp_path / "run" / "demonstrations" / "conversations.jsonl")
    turns = ["".join(part["text"] for part in row["messages"][-1]["content"]) for row in demonstrations]
    assert len(turns) == 6 and all(re.fullmatch(DEMONSTRATED, turn) for turn in turns)
    questions = [{row["question"] for row in read(tmp_path / "run" / "questions" / f"{name}.jsonl")} for name in PARTS]
    assert not questions[0] & questions[1] and len(questions[0]) == 8
    report = (tmp_path / "run" / "report.md").read_text()
    assert all(f"| {name} " in report for name in ("prompted", "base", "rft", "rl", "rl_random", "rft_dropped"))


def solve(a: int, b: int) -> str:
    return f"Tom has {a} pens and buys {b} more. So he has {a}+{b}=<<{a}+{b}={a + b}>>{a + b} pens.\n#### {a + b}"


def test_the_pipelines_for_a_gpu_are_valid(monkeypatch):
    monkeypatch.chdir(FOLDER.parents[1])
    further = "stages.eval.eval_datasets={amc23: {path: amc23.jsonl, fields: {ability: math}}}"
    names = [stage.name for stage in plan_stages(load_pipeline(FOLDER / "mathematics.yaml", [further]))]
    assert {"rl_3", "random_rl_3"} < set(names) and names[-5:-1] == ["masked", "dropped", "rft_masked", "rft_dropped"]
    assert names.index("random_rl_3") < names.index("rft_unwritten") < names.index("masked")
    assert names.index("rl_3") + 1 == names.index("eval") and names[-1] == "eval_arms"
    stages = plan_stages(load_pipeline(FOLDER / "world.yaml"))
    assert {"rl_3", "random_rl_3", "eval"} < {stage.name for stage in stages} and stages[-1].name == "eval_arms"
    flywheel = next(stage for stage in stages if stage.name == "flywheel")
    check_stage(flywheel)
    assert flywheel.kind == "flywheel" and FlywheelConfig.model_fields


def test_the_expert_finds_detours_and_takes_the_steps_that_are_left(tmp_path):
    pytest.importorskip("bm25s", reason="search needs bm25s: pip install 'tunesmith[retrieval]'")
    world = {"num_documents": 200, "num_train": 60, "num_test": 0, "max_hops": 2, "kind_shares": {"multi_hop": 1.0}}
    generate(tmp_path / "world", **world)
    index_documents(tmp_path, documents=str(tmp_path / "world" / "documents.jsonl"))
    split_questions(tmp_path, world=world, num_train=40, num_test=0, seed=0)
    expert_roles.add_plans(tmp_path, world=world, questions=str(tmp_path / "train.jsonl"))
    settings = {"source": "index", "index": str(tmp_path / "index"), "top_n": 2}
    tools = [{"tool": "search", "settings": settings}]
    environment = load_environment(build_section(EnvironmentSection, {"prompt": "brief", "tools": tools}))
    plans = list(iter_plans(World(config=build_config(world)), "train"))

    def ask(transcript, row, goal, **fields):
        steps = split_steps(transcript)
        fields |= {"row": row, "transcript": transcript, "steps": steps, "environment": environment}
        role = expert_roles.analyst if goal.startswith("find") else expert_roles.author
        return role(RoleRequest(goal=goal, **fields))

    checked = 0
    for row in read(tmp_path / "train.jsonl"):
        plan = plans[row["number"]]
        direct = [(each.thought, each.query) for each in plan.lookups]
        half, good = (asyncio.run(search(plan, direct[:num], environment)) for num in (1, 2))
        if len(direct) != 2 or has_evidence(plan, half) or not has_evidence(plan, good):
            continue
        checked += 1
        answered = environment.write_answer(good, thought=plan.conclusion, text=plan.answer)
        assert ask(answered, row, "find_redundant", is_correct=True) is None
        assert ask(answered, row, "find_flaw", is_correct=False).step == 3
        thoughts = ask(answered, row, "refine_thoughts", is_correct=True, thoughts=("a", "b", "c"))
        assert thoughts == [each.thought for each in plan.lookups] + [plan.conclusion]
        twice = asyncio.run(search(plan, [direct[0], direct[0], direct[1]], environment))
        finding = ask(twice, row, "find_redundant", is_correct=True)
        assert finding.step == 2
        draft = ask(twice, row, "replace_step", is_correct=True, finding=finding)
        assert (draft.thought, draft.text, draft.tool) == (*direct[1], "search")
        early = environment.write_answer(half, thought="x", text="y")
        finding = ask(early, row, "find_flaw", is_correct=False)
        assert finding.step == 2 and "without the facts" in finding.reason
        assert ask(early, row, "replace_step", is_correct=False, finding=finding).text == direct[1][1]
        assert ask(early, row, "reflect", is_correct=False).endswith(direct[1][0])
    assert checked >= 5
