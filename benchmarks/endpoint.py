"""What the OpenAI-compatible endpoint costs: latency of a call, and the share of rollout throughput.

Three measurements, each in process (`model.client`) and over HTTP (agents in other processes, see `endpoint_load.py`):

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

    python benchmarks/endpoint.py --model models/smollm2-135m-instruct --device cuda --peers vllm transformers \\
        --out results/endpoint_cuda.json
    python benchmarks/endpoint.py --model models/pocket --device cpu --agents 1 64 --out results/endpoint_cpu.json
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import pstats
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from endpoint_load import GROUP_SIZE, Measured, build_question, draw_length, run_load
from endpoint_peers import MAX_MODEL_LEN, PeerError, build_peer, find_free_port, start_peer
from report import publish
from stack_samples import StackSamples
from transformers import PreTrainedTokenizerBase

from tunesmith.chat.renderer import Renderer
from tunesmith.config import EngineSection, ModelSection, RolloutSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.model.load import load_model, load_tokenizer, resolve_device, resolve_dtype
from tunesmith.rollout.chat_model import ChatModel
from tunesmith.rollout.service import BoundModel, ModelService
from tunesmith.types import Completion, OnTokens, Sampling

NUM_CALLS = {1: 100, 64: 20, 512: 8}
"""Agents -> calls of each in the measurements of latency."""
LATENCY_TOKENS = 16
MODEL = "policy"
Prompts = list[list[tuple[int, ...]]]
"""For each agent the prompt ids of its calls."""


class InstantEngine:
    """Implements `tunesmith.types.Engine`: every completion is the same text, at once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._text_ids = tokenizer.encode(" ".join(build_question(agent, 0) for agent in range(0, 80, GROUP_SIZE)))
        self.eos_ids = frozenset({tokenizer.eos_token_id})
        self.max_model_len = 10**6
        self.policy_version = 0

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        order: tuple[int, ...] = (),
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        await asyncio.sleep(0)
        ids = tuple(self._text_ids[: sampling.max_tokens])
        logprobs = (-1.0,) * len(ids)
        if on_tokens is not None:
            on_tokens(ids, logprobs)
        return Completion(
            sampled_ids=ids, logprobs=logprobs, policy_versions=(self.policy_version,) * len(ids), stop_reason="length"
        )

    def pause(self) -> None:
        pass

    def resume(self, policy_version: int) -> None:
        self.policy_version = policy_version

    def compute_stats(self) -> dict[str, float]:
        return {}


class Setup:
    """An engine behind the endpoint, and the agents that call it."""

    def __init__(self, engine: Any, tokenizer: PreTrainedTokenizerBase, *, model: str) -> None:
        section = ModelSection(path=model)
        renderer = Renderer(
            tokenizer,
            tool_call_parser=section.tool_call_parser,
            reasoning_parser=section.reasoning_parser,
            enable_thinking=section.enable_thinking,
        )
        self._engine = engine
        self._service = ModelService(
            engine, renderer, model_name=MODEL, sampling=Sampling(max_tokens=LATENCY_TOKENS), build_model=ChatModel
        )
        self.prompts: Prompts = []
        """Those of the last agents in process."""
        self.ways: dict[str, Callable[..., Awaitable[Measured]]] = {
            "in process": self.run_in_process, "no client": self.run_without_client, "http": self.run_over_http,
        }  # fmt: skip

    def run(self, work: Callable[..., Awaitable[Measured]], *arguments: int, **shape: int) -> Measured:
        """Run agents with an empty KV cache."""
        self._engine.pause()
        self._engine.resume(self._engine.policy_version + 1)
        gc.collect()

        async def measure() -> Measured:
            started = time.process_time()
            measured = await work(*arguments, **shape)
            return replace(measured, cpu_s=time.process_time() - started)

        return run_lockstep(measure(), RolloutSection(max_concurrency=512))

    def compute_engine_stats(self) -> dict[str, float]:
        """Metrics of the engine since the last call."""
        return self._engine.compute_stats()

    def _open(self, num_agents: int) -> list[BoundModel]:
        return [self._service.open(seed=index, order=(index,)) for index in range(num_agents)]

    async def run_in_process(self, num_agents: int, **shape: int) -> Measured:
        """Agents that call `model.client`."""

        async def call(client: Any, fields: dict[str, Any]) -> str:
            extra = {"ignore_eos": fields.pop("ignore_eos")}
            reply = await client.chat.completions.create(**fields, extra_body=extra)
            return reply.choices[0].message.content

        return await self._run_agents(call, num_agents, **shape)

    async def run_without_client(self, num_agents: int, **shape: int) -> Measured:
        """Agents that give the endpoint JSON values and receive JSON values."""

        async def call(client: Any, fields: dict[str, Any]) -> str:
            reply = await self._service.endpoint.complete(client.api_key, fields)
            return reply["choices"][0]["message"]["content"]

        return await self._run_agents(call, num_agents, **shape)

    async def _run_agents(
        self,
        call_model: Callable[[Any, dict[str, Any]], Awaitable[str]],
        num_agents: int,
        *,
        num_calls: int,
        num_tokens: int,
        is_growing: bool,
    ) -> Measured:
        latencies: list[float] = []
        bound = self._open(num_agents)

        async def act(index: int, client: Any) -> None:
            messages: list[dict[str, str]] = []
            for call in range(num_calls):
                messages.append({"role": "user", "content": build_question(index, call)})
                length = draw_length(index, call, num_tokens, is_growing=is_growing)
                started = time.perf_counter()
                fields = {"model": MODEL, "messages": messages, "max_tokens": length, "ignore_eos": True}
                text = await call_model(client, fields)
                latencies.append(time.perf_counter() - started)
                messages.append({"role": "assistant", "content": text})
                if not is_growing:
                    messages.clear()

        started = time.perf_counter()
        await asyncio.gather(*(act(index, each.model.client) for index, each in enumerate(bound)))
        seconds = time.perf_counter() - started
        turns = [self._service.close(each) for each in bound]
        self.prompts = [[turn.prompt_ids for turn in each] for each in turns]
        num_sampled = sum(len(turn.sampled_ids) for each in turns for turn in each)
        return Measured(latencies_s=latencies, num_tokens=num_sampled, seconds=seconds)

    async def run_over_http(self, num_agents: int, *, num_calls: int, num_tokens: int, is_growing: bool) -> Measured:
        """Agents in other processes."""
        async with self._service.serve() as url:
            bound = self._open(num_agents)
            keys = [each.model.api_key for each in bound]
            fields = {"ignore_eos": True}
            port = urlsplit(url).port
            assert port is not None
            measured = await run_load(
                port, keys, model=MODEL, num_calls=num_calls, num_tokens=num_tokens, is_growing=is_growing,
                fields=fields,
            )  # fmt: skip
            for each in bound:
                self._service.close(each)
        return measured

    async def run_direct(self, *, num_tokens: int, is_growing: bool) -> Measured:
        """The calls of the last agents in process, given to the engine as token ids."""
        latencies: list[float] = []
        num_sampled = 0

        async def act(index: int, prompts: list[tuple[int, ...]]) -> None:
            nonlocal num_sampled
            for call, prompt_ids in enumerate(prompts):
                length = draw_length(index, call, num_tokens, is_growing=is_growing)
                sampling = Sampling(max_tokens=length, ignore_eos=True, seed=1000 * index + call)
                started = time.perf_counter()
                completion = await self._engine.generate(prompt_ids, sampling, order=(index, call))
                latencies.append(time.perf_counter() - started)
                num_sampled += len(completion.sampled_ids)

        started = time.perf_counter()
        await asyncio.gather(*(act(*each) for each in enumerate(self.prompts)))
        return Measured(latencies_s=latencies, num_tokens=num_sampled, seconds=time.perf_counter() - started)


def describe(measured: Measured) -> dict[str, float]:
    """Percentiles of the latency in milliseconds, and rates."""
    ordered = sorted(measured.latencies_s)
    cost = {} if measured.cpu_s is None else {"cpu_us_per_call": 1e6 * measured.cpu_s / len(ordered)}
    return cost | {
        "p50_ms": 1e3 * statistics.median(ordered),
        "p99_ms": 1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "calls_per_s": len(ordered) / measured.seconds,
        "tokens_per_s": measured.num_tokens / measured.seconds,
    }


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


def print_table(title: str, rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n{title}\n{'agents':>8}{'':>14}{'p50 ms':>10}{'p99 ms':>10}{'calls/s':>10}{'cpu us/call':>13}")
    for row in rows:
        for name, cell in row.items():
            if name == "error":
                print(f"{row['agents']:>8}  {cell}")
            elif name != "agents":
                cpu = f"{cell['cpu_us_per_call']:>13.0f}" if "cpu_us_per_call" in cell else ""
                print(
                    f"{row['agents']:>8}{name:>14}{cell['p50_ms']:>10.2f}{cell['p99_ms']:>10.2f}"
                    f"{cell['calls_per_s']:>10.0f}{cpu}"
                )


def print_rollouts(rollouts: Mapping[str, Any]) -> None:
    for name, rate in rollouts["tokens_per_s"].items():
        key = name.replace(" ", "_")
        share, in_steps = rollouts.get(f"share_{key}"), rollouts.get(f"step_share_{key}", 0.0)
        print(f"rollouts of {rollouts['agents']} agents, {name:<11}{rate:>10,.0f} tok/s", end="")
        print("" if share is None else f", the endpoint costs {100 * share:.1f} %", end="")
        print(f", {100 * in_steps:.0f} % of the time in engine steps" if in_steps else "")
    if "client_share_http" in rollouts:
        print(
            f"the busiest process of agents over HTTP computes {100 * rollouts['client_share_http']:.0f} % of the time"
        )


def print_docs(path: str) -> None:
    """The table and the rates of docs/endpoint.md from a result."""
    details = json.loads(Path(path).read_text())["details"]
    names = {"no client": "no client", "in process": "in process", "http": "HTTP"}
    columns = {"CPU a call": "cpu_us_per_call", "p50": "p50_ms", "p99": "p99_ms"}
    titles = [f"{column}, {name}" for column in columns for name in names.values()]
    print(f"| agents | {' | '.join(titles)} |")
    print("|---:" * (1 + len(titles)) + "|")
    for row in details["cost"]:
        values = [
            row[name][key] / (1e3 if key == "cpu_us_per_call" else 1) for key in columns.values() for name in names
        ]
        print(f"| {row['agents']} | {' | '.join(f'{value:.3g} ms' for value in values)} |")
    print("calls/s with the most agents:", {name: round(row[name]["calls_per_s"]) for name in names})
    print_rollouts(details["rollouts"])


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
    parser.add_argument("--out", help="JSON file for the result, results/NAME.json")
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
