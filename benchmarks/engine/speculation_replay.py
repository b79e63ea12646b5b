"""Drafts for the recorded replies of a run: tokens and steps that they save at the end of each training step.

Replies are replayed as if all requests of a step began at once, one token a step; once few are left, `Drafter` proposes
for them what it would in the engine, and a draft is accepted as far as the recorded reply has its tokens. With the
costs of a GPU drafts are looked for between bursts of 16 tokens. No model runs.

    python -m benchmarks.engine.speculation_replay runs/tunesmith/NAME/rollouts
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared.report import describe_settings, publish
from tunesmith.engine.core.drafts import CPU_COST, CUDA_COST, Drafter, ForwardCost
from tunesmith.engine.core.request import Request
from tunesmith.experience.store import RolloutFiles
from tunesmith.types import Sampling, count_equal

BURST = 16


def collect_requests(rows: Iterable[dict[str, Any]]) -> tuple[list[Request], list[list[int]]]:
    """The first turn of every rollout of a step, and its reply."""
    requests: list[Request] = []
    replies: list[list[int]] = []
    for row in rows:
        if not row["turns"] or not row["turns"][0]["sampled_ids"]:
            continue
        turn = row["turns"][0]
        replies.append(turn["sampled_ids"])
        requests.append(
            Request(
                request_id=len(requests), prompt_ids=tuple(turn["prompt_ids"]),
                order=(row["group_index"], row["run_index"]),
                sampling=Sampling(max_tokens=len(turn["sampled_ids"]) + 1),
            )
        )  # fmt: skip
    return requests, replies


def replay(rows: Iterable[dict[str, Any]], *, max_speculating: int, cost: ForwardCost, burst: int) -> dict[str, float]:
    """Counts of one step. The tail is what is left once at most `max_speculating` requests run."""
    requests, replies = collect_requests(rows)
    drafter = Drafter(max_requests=max_speculating, cost=cost)
    running = list(requests)
    figures = dict.fromkeys(("tail_steps", "tail_tokens", "drafted", "accepted", "forwards"), 0.0)
    figures["steps"] = max(map(len, replies))
    while running:
        is_tail = len(running) <= max_speculating
        drafts = (
            drafter.propose(running, max_tokens=1000) if is_tail and (burst == 1 or drafter.is_due(running)) else {}
        )
        num_steps = burst if is_tail and not drafts else 1
        num_tail = min(num_steps, max(len(replies[each.request_id]) - each.num_sampled for each in running))
        for request in running:
            reply, draft = replies[request.request_id], drafts.get(request.request_id, [])
            done = request.num_sampled
            num_accepted = count_equal(draft, reply[done:])
            new = reply[done : done + num_steps + num_accepted]
            request.extend(new, [-1.0] * len(new), 0)
            figures["drafted"] += len(draft)
            figures["accepted"] += num_accepted
            figures["tail_tokens"] += is_tail * len(new)
        ended = [each for each in running if each.num_sampled == len(replies[each.request_id])]
        for request in ended:
            drafter.end(request)
        running = [request for request in running if request not in ended]
        figures["forwards"] += is_tail if drafts or burst == 1 else is_tail * num_tail
    lengths = sorted(map(len, replies), reverse=True)
    figures["tail_steps"] = lengths[0] - (lengths[max_speculating] if len(lengths) > max_speculating else 0)
    return figures


def main(options: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rollouts", type=Path, help="folder of a run's rollout files")
    parser.add_argument("--speculating", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--groups", type=int, default=1 << 30, help="replay only so many groups of a step")
    parser.add_argument("--every", type=int, default=10, help="replay every so many steps")
    parser.add_argument("--out", help="JSON file for the result, results/engine/NAME.json")
    arguments = parser.parse_args(options)
    figures: list[dict[str, Any]] = []
    files = RolloutFiles(arguments.rollouts)
    columns = ("group_index", "run_index", "turns")
    steps = [
        [row for row in files.iter_rows(step, columns) if row["group_index"] < arguments.groups]
        for step in files.list_steps()[:: arguments.every]
    ]
    for device, cost, burst in (("cuda", CUDA_COST, BURST), ("cpu", CPU_COST, 1)):
        for max_speculating in arguments.speculating:
            total: dict[str, float] = {}
            for rows in steps:
                for name, value in replay(rows, max_speculating=max_speculating, cost=cost, burst=burst).items():
                    total[name] = total.get(name, 0.0) + value
            figures.append({"device": device, "max_speculating_seqs": max_speculating, **total})
            print(
                f"{device:<5}{max_speculating:>3} requests: {total['tail_steps']:,.0f} of {total['steps']:,.0f} steps "
                f"are the tail, {total['tail_tokens']:,.0f} tokens; {total['drafted']:,.0f} drafted, "
                f"{total['accepted']:,.0f} accepted; {total['forwards']:,.0f} steps with drafts",
                flush=True,
            )
    publish(
        name="speculation_replay", unit="accepted tokens", device="cpu", peers={}, out=arguments.out,
        ours=max(each["accepted"] for each in figures),
        details={"settings": describe_settings(arguments, hidden=["rollouts"]), "figures": figures},
    )  # fmt: skip


if __name__ == "__main__":
    main()
