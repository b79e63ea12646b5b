"""What it costs when agents hold more live tokens than the KV cache: the scheduler alone, counted without a model.

Agents in groups of eight share a system prompt and their group's task. An agent's turn extends its conversation by a
reply and a tool's result, for which it waits; between turns nothing holds its blocks, and the prefix cache keeps them
until others need them. A step costs one unit, and one more for each `PREFILL_TOKENS` tokens of prompts in it, and tools
take units too. Compared are caches of different sizes, how long prefixes are kept from new requests (`KEPT_DISTANCES`
and `MIN_RUNNING` of the scheduler), smaller prefill chunks, and fewer agents at once (`rollout.max_concurrency`).
Everything follows from the seed.

    python -m benchmarks.engine.pressure --agents 64 512
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.shared.report import describe_settings, publish
from tunesmith.engine.core import scheduler as scheduler_module
from tunesmith.engine.core.block_manager import BlockPool
from tunesmith.engine.core.request import Request
from tunesmith.engine.core.scheduler import Scheduler
from tunesmith.types import Sampling

GROUP = 8
BLOCK_SIZE = 16
PREFILL_TOKENS = 1000
"""Prompt tokens whose computation takes as long as a decode step: some 4 ms of 0.6B parameters on an H200."""
SYSTEM_TOKENS, TASK_TOKENS, RESULT_TOKENS = 1000, 200, 500
NUM_TURNS = 8
REPLY_MEDIAN, REPLY_SIGMA = 150, 0.7
WAIT_MEDIAN, WAIT_SIGMA = 100, 1.0
"""Units that a tool takes."""


@dataclass(slots=True, kw_only=True)
class Agent:
    """A conversation of several turns."""

    index: int
    rng: random.Random
    token_ids: list[int]
    turn: int = 0
    sent_at: float = 0.0
    last_token_at: float | None = None
    num_left: int = 0
    max_computed: int = 0
    """Tokens of this conversation that were computed at some time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    kept_distances: float = scheduler_module.KEPT_DISTANCES
    """0: admission evicts whatever is cached."""
    min_running: int = scheduler_module.MIN_RUNNING
    max_batched_tokens: int = 16384
    max_concurrency: int = 1 << 30


def simulate(num_agents: int, num_blocks: int, variant: Variant, *, max_num_seqs: int) -> dict[str, float]:
    """Run all agents to their end."""
    scheduler_module.KEPT_DISTANCES, scheduler_module.MIN_RUNNING = variant.kept_distances, variant.min_running
    scheduler = Scheduler(
        BlockPool(num_blocks), block_size=BLOCK_SIZE, max_num_seqs=max_num_seqs,
        max_batched_tokens=variant.max_batched_tokens, has_prefix_cache=True,
    )  # fmt: skip
    system = [random.Random(0).randrange(30000) for _ in range(SYSTEM_TOKENS)]
    agents: list[Agent] = []
    agent_of: dict[int, Agent] = {}
    waiting: list[tuple[float, int]] = []
    for index in range(num_agents):
        task = random.Random(f"task {index // GROUP}")
        prompt = system + [task.randrange(30000) for _ in range(TASK_TOKENS)]
        agents.append(Agent(index=index, rng=random.Random(f"agent {index}"), token_ids=prompt))
    num_started, num_open, now, num_steps, num_requests = 0, 0, 0.0, 0, 0
    num_computed = num_first = num_preemptions = num_sampled = 0
    first_waits: list[float] = []
    gaps: list[float] = []
    while num_started < num_agents or num_open:
        while num_started < num_agents and num_open < variant.max_concurrency:
            heapq.heappush(waiting, (0.0, num_started))
            num_started, num_open = num_started + 1, num_open + 1
        if not scheduler.has_requests:
            now = max(now, waiting[0][0])
        while waiting and waiting[0][0] <= now:
            agent = agents[heapq.heappop(waiting)[1]]
            agent.num_left = max(8, int(REPLY_MEDIAN * agent.rng.lognormvariate(0, REPLY_SIGMA)))
            agent.sent_at, agent.last_token_at = max(now, 0.0), None
            assert len(agent.token_ids) < num_blocks * BLOCK_SIZE, "a conversation exceeds the whole cache"
            request = Request(
                request_id=num_requests, prompt_ids=tuple(agent.token_ids), sampling=Sampling(max_tokens=1 << 20),
                order=(agent.index // GROUP, agent.index % GROUP, agent.turn, 0),
            )  # fmt: skip
            agent_of[num_requests] = agent
            num_requests += 1
            scheduler.add(request)
        step = scheduler.schedule()
        num_preemptions += step.num_preemptions
        num_prefilled = 0
        for chunk in step.chunks:
            agent = agent_of[chunk.request.request_id]
            num_prefilled += chunk.stop - chunk.start if chunk.stop - chunk.start > 1 else 0
            num_computed += chunk.stop - chunk.start
            num_first += max(0, chunk.stop - max(agent.max_computed, chunk.start))
            agent.max_computed = max(agent.max_computed, chunk.stop)
        scheduler.commit(step.chunks)
        now += 1 + num_prefilled / PREFILL_TOKENS
        num_steps += 1
        for chunk in step.chunks:
            if not chunk.has_last_token:
                continue
            request, agent = chunk.request, agent_of[chunk.request.request_id]
            if agent.last_token_at is None:
                first_waits.append(now - agent.sent_at)
            else:
                gaps.append(now - agent.last_token_at)
            agent.last_token_at = now
            request.extend([agent.rng.randrange(30000)], [-1.0], 0)
            num_sampled += 1
            agent.num_left -= 1
            if agent.num_left:
                continue
            scheduler.remove(request)
            agent.turn += 1
            if agent.turn == NUM_TURNS:
                num_open -= 1
                continue
            agent.token_ids = request.token_ids + [agent.rng.randrange(30000) for _ in range(RESULT_TOKENS)]
            heapq.heappush(waiting, (now + WAIT_MEDIAN * agent.rng.lognormvariate(0, WAIT_SIGMA), agent.index))
    gaps.sort()
    first_waits.sort()
    return {
        "units": now,
        "steps": num_steps,
        "sampled": num_sampled,
        "computed": num_computed,
        "computed_again": num_computed - num_first,
        "preemptions": num_preemptions,
        "first_token_median": statistics.median(first_waits),
        "first_token_99": first_waits[int(0.99 * len(first_waits))],
        "gap_median": statistics.median(gaps),
        "gap_99": gaps[int(0.99 * len(gaps))],
        "gap_longest": gaps[-1],
    }


def count_live_tokens(num_agents: int) -> int:
    """Tokens of all conversations at their expected end."""
    reply = REPLY_MEDIAN * 2.718281828 ** (REPLY_SIGMA**2 / 2)
    return int(num_agents * (NUM_TURNS * reply + (NUM_TURNS - 1) * RESULT_TOKENS + TASK_TOKENS + SYSTEM_TOKENS))


def list_variants(num_agents: int) -> dict[str, Variant]:
    return {
        "nothing kept": Variant(kept_distances=0),
        "kept for 1 distance": Variant(kept_distances=1),
        "kept for 2": Variant(kept_distances=2),
        "kept for 1, none must run": Variant(kept_distances=1, min_running=1),
        "kept for 1, chunks of 1,024": Variant(kept_distances=1, max_batched_tokens=1024),
        "nothing kept, chunks of 1,024": Variant(kept_distances=0, max_batched_tokens=1024),
        "nothing kept, half at once": Variant(kept_distances=0, max_concurrency=num_agents // 2),
        "nothing kept, a quarter": Variant(kept_distances=0, max_concurrency=num_agents // 4),
    }


def main(options: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.25, 0.125], help="cache / live tokens")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--out", help="JSON file for the result, results/engine/NAME.json")
    arguments = parser.parse_args(options)
    figures: list[dict[str, Any]] = []
    for num_agents in arguments.agents:
        for share in arguments.shares:
            num_blocks = int(share * count_live_tokens(num_agents)) // BLOCK_SIZE
            print(f"{num_agents} agents, a cache of {share:g} of their tokens ({num_blocks * BLOCK_SIZE:,})")
            for name, variant in list_variants(num_agents).items():
                figure = simulate(num_agents, num_blocks, variant, max_num_seqs=arguments.max_num_seqs)
                figures.append({"agents": num_agents, "share": share, "variant": name, **figure})
                print(
                    f"  {name:<30}{figure['units']:>9,.0f} units{figure['steps']:>8,} steps"
                    f"{figure['computed_again']:>12,} again{figure['preemptions']:>7,} preempted"
                    f"   first token {figure['first_token_median']:>7,.1f} {figure['first_token_99']:>8,.0f}"
                    f"   gaps {figure['gap_median']:>5.1f} {figure['gap_99']:>6.1f} {figure['gap_longest']:>7,.0f}",
                    flush=True,
                )
    publish(
        name="pressure",
        unit="sampled tokens a unit, first case",
        ours=figures[0]["sampled"] / figures[0]["units"],
        peers={},
        device="cpu",
        details={"settings": describe_settings(arguments), "figures": figures},
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
