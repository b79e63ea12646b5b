"""Analyst and author who know the solution: what the flywheel is worth with roles that make no mistake.

`add_plans` writes to each question's row how the expert of the world answers it. A step helps if its results state a
fact that the plan needs and earlier results do not. These roles are an upper bound, for comparison: they read the
answer. Name them as `recipes/et_agent/expert_roles.py:analyst` and `...:author`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recipes.world import World
from recipes.world.config import build_config
from recipes.world.expert import iter_plans
from tunesmith.et_agent.flywheel.roles import Finding, RoleRequest, Step, StepDraft


def add_plans(out_dir: Path, *, world: Mapping[str, Any], questions: str) -> dict[str, int]:
    """Write train.jsonl: the rows of `questions`, each with its `plan`: lookups, conclusion and answer."""
    plans = list(iter_plans(World(config=build_config(dict(world))), "train"))
    rows = [json.loads(line) for line in Path(questions).read_text(encoding="utf-8").splitlines()]
    for row in rows:
        plan = plans[row["number"]]
        assert plan.question.question == row["question"]
        row["plan"] = {
            "lookups": [asdict(each) for each in plan.lookups],
            "conclusion": plan.conclusion,
            "answer": plan.answer,
        }
    (out_dir / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"questions": len(rows)}


def list_missing(lookups: Sequence[Mapping[str, Any]], steps: Sequence[Step]) -> list[Mapping[str, Any]]:
    """The lookups of which the results of the steps do not state all evidence."""
    found = " ".join(each.result for step in steps for each in step.results)
    return [each for each in lookups if any(value not in found for value in each["evidence"])]


def analyst(request: RoleRequest) -> Finding | None:
    """The first call whose results do not help; of a wrong trajectory without one, the last step."""
    lookups, steps = request.row["plan"]["lookups"], request.steps
    for index, step in enumerate(steps):
        if step.calls and len(list_missing(lookups, steps[: index + 1])) == len(list_missing(lookups, steps[:index])):
            return Finding(step=step.number, reason="its results state nothing that is needed")
    if request.goal == "find_redundant" or not steps:
        return None
    is_known = not list_missing(lookups, steps)
    return Finding(step=steps[-1].number, reason=f"it {'concludes wrongly' if is_known else 'ends without the facts'}")


def author(request: RoleRequest) -> StepDraft | list[str] | str | None:
    """The expert's next step, its thoughts, or what it would do next."""
    plan = request.row["plan"]
    if request.goal == "refine_thoughts":
        return write_thoughts(plan, request.steps, request.thoughts)
    if request.goal == "reflect":
        missing = list_missing(plan["lookups"], request.steps)
        return f"I go over my steps again. {missing[0]['thought'] if missing else plan['conclusion']}"
    assert request.finding is not None
    before = request.steps[: request.finding.step - 1]
    missing = list_missing(plan["lookups"], before)
    if not missing:
        return StepDraft(thought=plan["conclusion"], text=plan["answer"])
    query = missing[0]["query"]
    if any(query in call.text for step in before for call in step.calls):
        return None  # the search does not find it
    return StepDraft(thought=missing[0]["thought"], tool="search", text=query)


def write_thoughts(plan: Mapping[str, Any], steps: Sequence[Step], thoughts: Sequence[str]) -> list[str] | None:
    """The expert's thoughts for the steps that it would take too; others stay."""
    if len(thoughts) != len(steps):
        return None
    by_query = {each["query"]: each["thought"] for each in plan["lookups"]}
    written = []
    for step, thought in zip(steps, thoughts, strict=True):
        query = next((str(value) for call in step.calls for value in (call.arguments or {}).values()), "")
        written.append(plan["conclusion"] if step.answer else by_query.get(query, thought))
    return written
