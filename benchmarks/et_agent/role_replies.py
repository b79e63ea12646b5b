"""A workflow that asks the roles of the flywheel about each trajectory, and counts the replies that can be used.

    # roles.yaml, for `tunesmith eval roles.yaml --out results`
    models: {large: MODEL}
    model: {max_model_len: 8192, max_tokens: 256, temperature: 0.7}
    workflow: benchmarks/et_agent/role_replies.py:ask_roles
    environment: {tools: [python]}
    eval_datasets: {trajectories: {path: FOLDER/flywheel/trajectories.jsonl}}
    evaluation: {num_samples: 1}

The reward is the share of usable replies: of the analyst a step and a reason, of the author a step whose call succeeds
or an answer, and a reflection. Nothing is said about whether they are right.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from tunesmith.environments import Environment, Transcript
from tunesmith.et_agent.flywheel.roles import (
    Finding,
    Goal,
    Role,
    RoleRequest,
    TruncatedReplyError,
    build_model_analyst,
    build_model_author,
    split_steps,
    write_step,
)
from tunesmith.types import WorkflowOutput


async def ask_roles(task: Mapping[str, Any], model: Any, environment: Environment) -> WorkflowOutput:
    transcript = Transcript.from_json(task["transcript"])
    steps, is_correct = split_steps(transcript), task["correctness"] >= 0.75

    async def ask(role: Role, goal: Goal, finding: Finding | None = None) -> Any:
        request = RoleRequest(
            goal=goal,
            row=task,
            transcript=transcript,
            steps=steps,
            is_correct=is_correct,
            environment=environment,
            finding=finding,
        )
        try:
            return await role(request)
        except TruncatedReplyError:
            return None

    author = build_model_author(model)
    found = await ask(build_model_analyst(model), "find_redundant" if is_correct else "find_flaw")
    replaced = found or Finding(step=len(steps), reason="It does not help.")
    draft = await ask(author, "replace_step", replaced)
    metrics = {
        "analyst": float(found is not None),
        "author": float(draft is not None),
        "author_runs": 0.0,
        "reflection": float(bool(await ask(author, "reflect"))),
    }
    if draft is not None:
        prefix = transcript.cut(steps[replaced.step - 1].start)
        try:
            prefix = write_step(draft, prefix, environment)
        except ValueError:
            pass
        else:
            ended = await environment.execute(prefix) if draft.tool else prefix
            metrics["author_runs"] = float(ended.failed_calls == prefix.failed_calls)
    usable = fmean(metrics[name] for name in ("analyst", "author_runs", "reflection"))
    return WorkflowOutput(response=str(found), reward=usable, metrics=metrics)
