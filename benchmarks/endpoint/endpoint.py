"""What the OpenAI-compatible endpoint costs: latency of a call, and the share of rollout throughput.

Three measurements, each in process (`model.client`) and over HTTP (agents in other processes, see `load.py`):

- `cost`: calls to an engine that answers at once, so all that is left is the endpoint. Processor time a call is that of
  the process that serves, with the client's own in process and without it over HTTP.
- `latency`: calls of 16 tokens to the model, next to the same requests given to the engine as token ids, and to the
  servers of vLLM (`--peers vllm`) and transformers (`--peers transformers`).
- `rollouts`: conversations of several turns; the number of tokens a turn is fixed and differs between turns. The same
  prompts and lengths are given to the engine directly, and the share that the endpoint costs is what the rate through
  the endpoint lacks to that of the engine.

In process the agent's own client is part of what is measured: `no client` are the same requests given to the endpoint
as JSON values, and the difference is what the OpenAI client costs. `--table FILE` prints the rows of docs/endpoint.md
from a result.

    python -m benchmarks.endpoint.endpoint --model models/smollm2-135m-instruct --device cuda \\
        --peers vllm transformers --out results/endpoint/endpoint_cuda.json
    python -m benchmarks.endpoint.endpoint --model models/pocket --device cpu --agents 1 64 \\
        --out results/endpoint/endpoint_cpu.json
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import statistics
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from benchmarks.endpoint.load import Measured, draw_length, run_load
from benchmarks.endpoint.peers import MAX_MODEL_LEN, PeerError, build_peer, find_free_port, start_peer
from benchmarks.endpoint.setup import LATENCY_TOKENS, InstantEngine, Setup
from benchmarks.endpoint.stack_samples import StackSamples
from benchmarks.endpoint.tables import describe, print_docs, print_rollouts, print_table
from benchmarks.shared.report import publish
from tunesmith.config import EngineSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.model.load import load_model, load_tokenizer, resolve_device, resolve_dtype

NUM_CALLS = {1: 100, 64: 20, 512: 8}
"""Agents -> calls of each in the measurements of latency."""


def measure_cost(tokenizer: PreTrainedTokenizerBase, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The endpoint alone: one row for each number of agents."""
    setup = Setup(InstantEngine(tokenizer), tokenizer, model=arguments.model)
    rows = []
    for num_agents in arguments.agents:
        shape = {"num_calls": NUM_CALLS.get(num_agents, 10), "num_tokens": arguments.new_tokens, "is_growing": True}
        row: dict[str, Any] = {"agents": num_agents}
        shape["num_calls"] = min(shape["num_calls"], 20)
        for name, run in setup.ways.items():
            setup.run(run, num_agents, **shape)
            measured = setup.run(run, num_agents, **shape)
            row[name] = describe(measured)
        rows.append(row)
    if arguments.profile:
        for run in setup.ways.values():
            profiler = cProfile.Profile()
            profiler.runcall(setup.run, run, num_agents, **shape)
            pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
    return rows


def measure_latency(setup: Setup, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Calls of few tokens to the model."""
    rows = []
    for num_agents in arguments.agents:
        shape = {"num_calls": NUM_CALLS.get(num_agents, 10), "num_tokens": LATENCY_TOKENS, "is_growing": False}
        setup.run(setup.run_in_process, num_agents, **shape | {"num_calls": 2})
        row: dict[str, Any] = {"agents": num_agents}
        row["in process"] = describe(setup.run(setup.run_in_process, num_agents, **shape))
        row["direct"] = describe(setup.run(setup.run_direct, num_tokens=LATENCY_TOKENS, is_growing=False))
        row["http"] = describe(setup.run(setup.run_over_http, num_agents, **shape))
        rows.append(row)
    return rows


def measure_rollouts(setup: Setup, arguments: argparse.Namespace) -> dict[str, Any]:
    """Conversations: tokens per second directly and through the endpoint, in turn, `--repeats` times."""
    num_agents, num_tokens = max(arguments.agents), arguments.new_tokens
    shape = {"num_calls": arguments.turns, "num_tokens": num_tokens, "is_growing": True}
    ways: dict[str, Callable[[], Awaitable[Measured]]] = {
        name: partial(way, num_agents, **shape) for name, way in setup.ways.items()
    }
    ways["direct"] = partial(setup.run_direct, num_tokens=num_tokens, is_growing=True)
    expected = sum(
        draw_length(agent, call, num_tokens, is_growing=True)
        for agent in range(num_agents)
        for call in range(arguments.turns)
    )
    rates: dict[str, list[float]] = {name: [] for name in ways}
    stepping: dict[str, list[float]] = {name: [] for name in ways}
    client_shares: list[float] = []
    for repeat in range(arguments.repeats + 1):
        for name, way in ways.items():
            measured = setup.run(way)
            assert measured.num_tokens == expected, "a reply ended early"
            stats = setup.compute_engine_stats()
            if repeat:
                rates[name].append(measured.num_tokens / measured.seconds)
                stepping[name].append(stats["perf/engine_busy_s"] / measured.seconds)
                client_shares += [] if measured.client_share is None else [measured.client_share]
    if arguments.profile:
        for name, way in ways.items():
            samples = StackSamples()
            with samples.taking():
                setup.run(way)
            print(f"\nprofile, {name}: {samples.report()}")
    medians = {name: statistics.median(each) for name, each in rates.items()}
    shares = {f"share_{name.replace(' ', '_')}": 1 - medians[name] / medians["direct"] for name in setup.ways}
    in_steps = {f"step_share_{name.replace(' ', '_')}": statistics.median(each) for name, each in stepping.items()}
    result = {"agents": num_agents, "tokens_per_s": medians, "tokens_per_s_all": rates, **shares, **in_steps}
    return result | {"client_share_http": statistics.median(client_shares)}


def measure_peer(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The same load on another server; what happened instead, if it does not run."""
    port = find_free_port()
    peer = build_peer(
        name, model=arguments.model, port=port, device=arguments.device.type, num_agents=max(arguments.agents)
    )

    limit_s = arguments.peer_limit_s

    def run(num_agents: int, *, num_calls: int, limit_s: float = limit_s, **shape: Any) -> Measured:
        keys, fields = ["none"] * num_agents, dict(peer.fields)
        return asyncio.run(
            run_load(port, keys, model=peer.model, num_calls=num_calls, fields=fields, limit_s=limit_s, **shape)
        )

    result: dict[str, Any] = {"latency": []}
    try:
        with start_peer(peer, port=port, ready_s=arguments.peer_ready_s) as started:
            result["ready_s"] = started.ready_s
            shape = {"num_tokens": LATENCY_TOKENS, "is_growing": False}
            try:
                result["first_call_s"] = run(1, num_calls=1, limit_s=arguments.peer_ready_s, **shape).seconds
            except OSError:
                result["output"] = started.read_end(60)
                raise
            for num_agents in arguments.agents:
                row: dict[str, Any] = {"agents": num_agents}
                try:
                    num_warm = 2 if name == "vllm" else 1
                    call_s = run(num_agents, num_calls=num_warm, **shape).seconds / num_warm
                    num_calls = max(1, min(NUM_CALLS.get(num_agents, 10), int(limit_s / 2 / call_s)))
                    measured = run(num_agents, num_calls=num_calls, **shape)
                    row[name] = describe(measured) | {"calls_per_agent": num_calls}
                except (RuntimeError, asyncio.IncompleteReadError, OSError) as error:
                    row["error"] = f"{type(error).__name__} within {limit_s:g} s: {error}"
                    result["output"] = started.read_end(60)
                result["latency"].append(row)
                print(f"{name}: {row}", flush=True)
            if name == "vllm":
                shape = {"num_tokens": arguments.new_tokens, "is_growing": True}
                measured = [run(max(arguments.agents), num_calls=arguments.turns, **shape) for _ in range(2)][1]
                result["rollout_tokens_per_s"] = measured.num_tokens / measured.seconds
    except (PeerError, RuntimeError, asyncio.IncompleteReadError, OSError) as error:
        result["error"] = f"{type(error).__name__}: {error}"
        print(f"{name}: {result['error']}", flush=True)
    return result


def build_setup(tokenizer: PreTrainedTokenizerBase, arguments: argparse.Namespace) -> Setup:
    model = load_model(arguments.model, dtype=resolve_dtype("auto", arguments.device), device=arguments.device)
    num_agents = max(arguments.agents)
    settings = EngineSection(max_num_seqs=num_agents, kv_cache_tokens=max(num_agents, 2) * MAX_MODEL_LEN)
    return Setup(LocalEngine(model, tokenizer, settings, max_model_len=MAX_MODEL_LEN), tokenizer, model=arguments.model)


def main() -> None:
    if sys.argv[1:2] == ["--table"]:
        print_docs(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--device", type=resolve_device, default="auto")
    parser.add_argument("--agents", type=int, nargs="+", default=[1, 64, 512], help="concurrent agents")
    parser.add_argument("--turns", type=int, default=4, help="turns of a conversation")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens a turn of conversations, on average")
    parser.add_argument("--repeats", type=int, default=3, help="measured repeats of the conversations")
    parser.add_argument("--peers", nargs="*", choices=["vllm", "transformers"], default=[])
    parser.add_argument("--peer-ready-s", type=float, default=150.0, help="time that a peer gets to start")
    parser.add_argument(
        "--peer-limit-s", type=float, default=30.0, help="longest time of one load; slow peers get fewer calls"
    )
    parser.add_argument("--parts", nargs="+", default=["cost", "latency", "rollouts"], help="what is measured")
    parser.add_argument(
        "--profile", action="store_true", help="print profiles: of the cost at the last number of agents, of rollouts"
    )
    parser.add_argument("--out", help="JSON file for the result, results/endpoint/NAME.json")
    arguments = parser.parse_args()
    if arguments.device.type == "cpu":
        torch.set_num_threads(1)
    tokenizer = load_tokenizer(arguments.model)
    details: dict[str, Any] = {
        key: value for key, value in vars(arguments).items() if key not in ("device", "model", "out")
    }
    if "cost" in arguments.parts:
        details["cost"] = measure_cost(tokenizer, arguments)
        print_table(f"the endpoint alone, {arguments.new_tokens} tokens a call", details["cost"])
    rollouts: dict[str, Any] = {"tokens_per_s": {}}
    if {"latency", "rollouts"} & set(arguments.parts):
        setup = build_setup(tokenizer, arguments)
        details["latency"] = measure_latency(setup, arguments) if "latency" in arguments.parts else []
        print_table(f"the model, {LATENCY_TOKENS} tokens a call", details["latency"])
        if "rollouts" in arguments.parts:
            rollouts = details["rollouts"] = measure_rollouts(setup, arguments)
    for name in arguments.peers:
        details[name] = measure_peer(name, arguments)
        print_table(f"{name}, {LATENCY_TOKENS} tokens a call", details[name]["latency"])
    print_rollouts(rollouts)
    peers = {
        name: details[name]["rollout_tokens_per_s"]
        for name in arguments.peers
        if "rollout_tokens_per_s" in details[name]
    }
    publish(
        name="endpoint",
        unit="tokens per second of rollouts over HTTP",
        ours=rollouts["tokens_per_s"].get("http", 0.0),
        peers=peers,
        device=arguments.device.type,
        details=details,
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
