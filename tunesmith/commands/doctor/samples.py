"""Checks of what is trained: branched histories and tasks that repeat."""

from __future__ import annotations

from tunesmith.commands.doctor.finding import Evidence, Finding, Outcome, Passed
from tunesmith.commands.doctor.record import RlRun

MAX_BRANCH_SHARE = 0.1
"""Branches per trained rollout: retries happen, but a branch in every tenth rollout is the way the agent works."""
MAX_PASSES = 20
"""Passes over the tasks; small models memorize a task within some tens of visits."""
NUM_READ_STEPS = 32
"""Steps, evenly spaced over the run, whose task ids are read."""
MIN_VISITS = 2.0
"""Visits per distinct task in the steps read, from which the distinct tasks are nearly all tasks."""


def find_branches(run: RlRun) -> Outcome:
    """Turns that do not extend the history of their rollout, so that it is trained as several samples."""
    branches, trained = run.sum_recent("rollout/num_branches"), run.sum_recent("rollout/num_trained_trajectories")
    recent, unextended = run.get_recent("rollout/num_branches"), run.sum_recent("rollout/num_unextended")
    if branches is None or not trained or recent is None:
        return None
    share = branches / trained
    observed = f"{share:.2g} branches per trained rollout"
    if share <= MAX_BRANCH_SHARE:
        return Passed(check="branches", figure=observed)
    evidence = [Evidence(source=recent.name, observed=observed, value=share, steps=recent.span)]
    if unextended:
        evidence.append(
            Evidence(
                source="rollout/num_unextended",
                observed=f"{unextended:.0f} calls repeated earlier messages whose tokens could not be reused",
                value=unextended,
                steps=recent.span,
            )
        )
    return Finding(
        check="branches",
        severity="note",
        problem="many model calls do not extend the conversation of their rollout, which is then trained in pieces",
        evidence=tuple(evidence),
        change="if the workflow has no sub-agents or retries, let it only append to its messages (do not edit, "
        "summarize or remove any, nor put the time into the system prompt), and keep the reasoning of earlier turns",
    )


def find_repeated_tasks(run: RlRun) -> Outcome:
    """A task pool so small that the model sees every task many times."""
    tried, steps = run.get("experience/num_tasks_tried"), run.rollouts.list_steps()
    if tried is None or not steps:
        return None
    visits, tasks = 0, set()
    for step in steps[:: -(-len(steps) // NUM_READ_STEPS)]:
        ids = {
            (row["group_index"], row["task_id"])
            for row in run.rollouts.read_table(step, ("group_index", "task_id")).to_pylist()
        }
        visits += len(ids)
        tasks |= {task_id for _, task_id in ids}
    passes = float(tried.values.sum()) / max(len(tasks), 1)
    if visits < MIN_VISITS * len(tasks):
        return Passed(check="task-pool", figure=f"{len(tasks)} different tasks in {visits} sampled groups")
    observed = f"about {len(tasks)} different tasks, visited {passes:.0f} times each"
    if passes <= MAX_PASSES:
        return Passed(check="task-pool", figure=observed)
    return Finding(
        check="task-pool",
        severity="note",
        problem=f"the run has few tasks: {observed}",
        evidence=(Evidence(source="rollouts/", observed=observed, value=passes, steps=(steps[0], steps[-1])),),
        change="add tasks to train_dataset, or stop when the held-out reward no longer rises "
        "(evaluation.interval_steps=10)",
        settings={"evaluation.interval_steps": 10},
    )
