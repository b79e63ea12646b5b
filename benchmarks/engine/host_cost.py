"""Host overhead: microseconds of one core per request, token and agent call, with an instant device.

The engine runs as on a GPU, in bursts of 16 tokens with one burst queued ahead, but the bursts are random numbers that
are available at once. What remains is the work of the interpreter: scheduling, KV-cache blocks, prefill plans, stop
conditions, logprobs, prefix digests; and for agents the endpoint, chat templates, tokenization, detokenization,
recording and judging. A device hides this work while a burst takes longer on the device than on the host.

    python -m benchmarks.engine.host_cost --model models/smollm2-135m-instruct --questions gsm8k/train.jsonl
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerBase

from benchmarks.engine.agent_load import build_agents, compute_part_costs, load_tasks
from benchmarks.shared.report import publish
from tunesmith.config import EngineSection
from tunesmith.engine.batch.decode_burst import BurstInput, BurstOutput, InputBatch
from tunesmith.engine.core.span import Span
from tunesmith.engine.cuda.attention_plans import LayeredPlan, build_prefill_plan
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.model.load import load_tokenizer
from tunesmith.types import Completion, Sampling

MAX_MODEL_LEN = 1024
HIDDEN_SIZE = 16
TILE_TOKENS = 16
"""New tokens per tile of the prefill kernel."""


@dataclass(frozen=True, slots=True)
class InstantBurstHandle:
    output: BurstOutput

    def read(self) -> BurstOutput:
        return self.output


class InstantBurstDecoder:
    """Has the methods of `tunesmith.engine.cuda.cuda_graphs.DecodeGraphs` that the engine calls."""

    def __init__(self, engine: LocalEngine, *, max_num_seqs: int, vocab_size: int) -> None:
        self._runner = engine._runner
        columns = MAX_MODEL_LEN // engine._settings.page_size + 16
        self.input_batch = InputBatch(max_num_seqs, num_columns=columns, scratch_block=self._runner.num_blocks)
        self._rng = np.random.default_rng(0)
        self._vocab_size = vocab_size

    def launch(self, rows: BurstInput, *, num_steps: int) -> InstantBurstHandle:
        np.take(self.input_batch.block_table_SP, rows.slots_R, axis=0)
        shape = (num_steps + 1, len(rows.slots_R))
        ids = self._rng.integers(100, self._vocab_size, shape, dtype=np.int32)
        return InstantBurstHandle(BurstOutput(ids, np.full(shape, -1.0, dtype=np.float32)))

    def build_prefill_plan(self, spans: Sequence[Span]) -> LayeredPlan:
        return build_prefill_plan(self._runner.cache, spans, tile_tokens=TILE_TOKENS, device=torch.device("cpu"))

    def installed(self) -> AbstractContextManager[None]:
        return nullcontext()

    def refresh(self) -> None:
        pass


def build_engine(tokenizer: PreTrainedTokenizerBase, num_sequences: int) -> LocalEngine:
    """An engine whose model is never executed."""
    sizes = {"hidden_size": HIDDEN_SIZE, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=1, **sizes))
    use_plan_attention(model)
    settings = EngineSection(
        max_num_seqs=num_sequences,
        kv_cache_tokens=num_sequences * 600,
        max_batched_tokens=16384,
        has_packed_weights=False,
    )
    engine = LocalEngine(model, tokenizer, settings, max_model_len=MAX_MODEL_LEN)
    runner = engine._runner

    def run_body(ids_1T: torch.Tensor, *_rest: object) -> torch.Tensor:
        return torch.empty(*ids_1T.shape, HIDDEN_SIZE)

    runner.has_graphs = True
    runner._run_body = run_body  # type: ignore[method-assign, assignment]
    decoder = InstantBurstDecoder(engine, max_num_seqs=num_sequences, vocab_size=len(tokenizer))
    runner._burst_decoder = decoder  # type: ignore[assignment]
    engine._output_processor, engine._stepper = engine._build_stepper()
    return engine


def measure(work: Callable[[int], object], repeats: int) -> float:
    """Median CPU seconds, after one warm-up run."""
    seconds = []
    for step in range(repeats + 1):
        started = time.process_time()
        work(step)
        seconds.append(time.process_time() - started)
    return statistics.median(seconds[1:])


def build_requests(engine: LocalEngine, arguments: argparse.Namespace) -> Callable[[int], None]:
    rng = np.random.default_rng(0)
    largest = min(1000, engine._vocab_size)
    prompts = rng.integers(100, largest, (arguments.sequences, arguments.prompt_tokens)).tolist()

    async def generate() -> list[Completion]:
        calls = [
            engine.generate(prompt, Sampling(max_tokens=arguments.new_tokens, seed=i, ignore_eos=True), order=(i,))
            for i, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*calls)

    def run(step: int) -> None:
        engine.resume(step)
        assert len(run_lockstep(generate())) == len(prompts)

    return run


def build_agent_work(
    engine: LocalEngine, tokenizer: PreTrainedTokenizerBase, arguments: argparse.Namespace
) -> Callable[[int], None]:
    run_agents = build_agents(engine, tokenizer, arguments, load_tasks(arguments, arguments.sequences))

    def run(step: int) -> None:
        engine.resume(step)
        groups = run_agents(step)
        assert all(trajectory.failure is None for group in groups for trajectory in group.trajectories)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the tokenizer")
    parser.add_argument("--questions", required=True, help="JSON lines file with a field question")
    parser.add_argument("--sequences", type=int, default=512, help="concurrent requests or agents")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="tokens per prompt of plain requests")
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens sampled per request")
    parser.add_argument("--repeats", type=int, default=5, help="measured repeats")
    parser.add_argument("--out", help="JSON file for the result, results/engine/NAME.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(arguments.model)
    engine = build_engine(tokenizer, arguments.sequences)
    requests_s = measure(build_requests(engine, arguments), arguments.repeats)
    run_agents = build_agent_work(engine, tokenizer, arguments)
    agents_s = measure(run_agents, arguments.repeats)
    profiler = cProfile.Profile(time.process_time)
    profiler.runcall(run_agents, arguments.repeats + 1)
    num_tokens = arguments.sequences * arguments.new_tokens
    figures: dict[str, Any] = {
        "us_per_request": requests_s / arguments.sequences * 1e6,
        "us_per_token": requests_s / num_tokens * 1e6,
        "us_per_agent_call": agents_s / arguments.sequences * 1e6,
        "profiled_us_per_agent_call": compute_part_costs(profiler, arguments.sequences),
    }
    print(f"engine: {figures['us_per_request']:.0f} us per request, {figures['us_per_token']:.2f} us per token")
    print(f"agents: {figures['us_per_agent_call']:.0f} us per call, engine included; shares of the profile:")
    costs = figures["profiled_us_per_agent_call"]
    for part, cost in costs.items():
        print(f"  {part:<24}{100 * cost / costs['all']:>5.0f} %")
    publish(
        name="host_cost",
        unit="tokens a second of one core",
        ours=num_tokens / requests_s,
        peers={},
        device="cpu",
        details=figures | {"sequences": arguments.sequences, "new_tokens": arguments.new_tokens},
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
