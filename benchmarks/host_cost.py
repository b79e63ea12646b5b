"""What the host costs: microseconds of one core for each request, token and agent call, beside an instant device.

The engine runs as on a GPU, in blocks of 16 tokens with one block queued ahead, but the blocks are random numbers that
are there at once. What is left is the interpreter's work: scheduling, pages, prefill plans, stops, logprobs, prefix
digests; and for agents the endpoint, templates, tokenization, decoding, recording and judging. A device hides this work
as long as a block takes it longer than the host.

    python benchmarks/host_cost.py --model models/smollm2-135m-instruct --questions gsm8k/train.jsonl
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from agent_load import GROUP, ask, compute_stages, judge
from report import publish
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerBase

from tunesmith.chat.renderer import Renderer
from tunesmith.config import EngineSection, ModelSection
from tunesmith.engine.batch.decode_burst import BurstInput, BurstOutput
from tunesmith.engine.batch.input_batch import InputBatch
from tunesmith.engine.core.span import Span
from tunesmith.engine.cuda.attention_plans import LayeredPlan, build_prefill_plan
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.model.load import load_tokenizer
from tunesmith.rollout.chat_model import ChatModel
from tunesmith.rollout.groups import run_groups
from tunesmith.rollout.runner import Agent
from tunesmith.rollout.service import ModelService
from tunesmith.types import Completion, Sampling, Task

MAX_MODEL_LEN = 1024
HIDDEN_SIZE = 16
TILE_TOKENS = 16
"""New tokens that the prefill kernel takes at once."""


@dataclass(frozen=True, slots=True)
class InstantBurstHandle:
    output: BurstOutput

    def read(self) -> BurstOutput:
        return self.output


class InstantBurstDecoder:
    """Implements `tunesmith.engine.batch.decode_burst.BurstDecoder`."""

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
    """An engine whose model is never run."""
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

    runner.has_graphs, runner._run_body = True, run_body  # type: ignore[method-assign]
    runner._burst_decoder = InstantBurstDecoder(engine, max_num_seqs=num_sequences, vocab_size=len(tokenizer))
    engine._output_processor, engine._stepper = engine._build_stepper()
    return engine


def measure(work: Callable[[int], object], repeats: int) -> float:
    """Median seconds of the processor, after one run to warm up."""
    seconds = []
    for step in range(repeats + 1):
        started = time.process_time()
        work(step)
        seconds.append(time.process_time() - started)
    return statistics.median(seconds[1:])


def build_requests(engine: LocalEngine, arguments: argparse.Namespace) -> Callable[[int], None]:
    rng = np.random.default_rng(0)
    prompts = rng.integers(100, 1000, (arguments.sequences, arguments.prompt_tokens)).tolist()

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


def build_agents(
    engine: LocalEngine, tokenizer: PreTrainedTokenizerBase, arguments: argparse.Namespace
) -> Callable[[int], None]:
    section = ModelSection(path=arguments.model)
    renderer = Renderer(
        tokenizer,
        tool_call_parser=section.tool_call_parser,
        reasoning_parser=section.reasoning_parser,
        enable_thinking=section.enable_thinking,
    )
    service = ModelService(
        engine,
        renderer,
        model_name="policy",
        sampling=Sampling(max_tokens=arguments.new_tokens),
        build_model=lambda endpoint: ChatModel(endpoint),
    )
    lines = Path(arguments.questions).read_text(encoding="utf-8").splitlines()[: arguments.sequences // GROUP]
    tasks = [Task(task_id=f"q/{i}", index=i, row=json.loads(line)) for i, line in enumerate(lines)]
    agent = Agent(workflow=ask, judge=judge, timeout_s=600.0)

    def run(step: int) -> None:
        engine.resume(step)
        groups = run_lockstep(
            run_groups(
                tasks, group_size=GROUP, agent=agent, model=service, seed=0, step=step,
                max_concurrency=arguments.sequences,
            )
        )  # fmt: skip
        assert all(trajectory.failure is None for group in groups for trajectory in group.trajectories)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with a tokenizer")
    parser.add_argument("--questions", required=True, help="jsonl with the field question")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", help="results/NAME.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(arguments.model)
    engine = build_engine(tokenizer, arguments.sequences)
    requests_s = measure(build_requests(engine, arguments), arguments.repeats)
    run_agents = build_agents(engine, tokenizer, arguments)
    agents_s = measure(run_agents, arguments.repeats)
    profiler = cProfile.Profile(time.process_time)
    profiler.runcall(run_agents, arguments.repeats + 1)
    num_tokens = arguments.sequences * arguments.new_tokens
    figures = {
        "us_per_request": requests_s / arguments.sequences * 1e6,
        "us_per_token": requests_s / num_tokens * 1e6,
        "us_per_agent_call": agents_s / arguments.sequences * 1e6,
        "profiled_us_per_agent_call": compute_stages(profiler, arguments.sequences),
    }
    print(f"engine: {figures['us_per_request']:.0f} us a request, {figures['us_per_token']:.2f} us a token")
    print(f"agents: {figures['us_per_agent_call']:.0f} us a call, engine included; of the profile:")
    stages = compute_stages(profiler, arguments.sequences)
    for stage, cost in stages.items():
        print(f"  {stage:<24}{100 * cost / stages['all']:>5.0f} %")
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
