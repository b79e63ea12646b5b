"""Tokens per second of the engine and of transformers' `generate`, on the same model, prompts and lengths.

Cases: `equal` samples 128 tokens for each of 16 prompts of one length; `ragged` samples as many tokens as the reference
answer has for each of 64 questions, which `generate` processes in left-padded batches of 16 in file order; `group`
samples 8 completions for each of 16 prompts. Both sides sample at temperature 1 and alternate; the fastest repeat
counts.

    python -m benchmarks.engine.engine_cpu --case ragged --model models/smollm2-135m-instruct --prompts gsm8k/test.jsonl
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from benchmarks.shared.report import publish
from tunesmith.config import EngineSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.model.load import load_model
from tunesmith.storage import load_json_lines
from tunesmith.types import Completion, Sampling

BATCH_SIZE = 16
PAD_ID = 0
MAX_NEW_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts, and the number of tokens to sample for each."""

    prompts: list[list[int]]
    lengths: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


def build_load(case: str, model_path: str, prompts_path: str | None, vocab_size: int) -> Load:
    generator = torch.Generator().manual_seed(0)
    if case == "equal":
        return Load(torch.randint(5, vocab_size, (16, 64), generator=generator).tolist(), [128] * 16)
    if case == "group":
        prompts = torch.randint(5, vocab_size, (16, 64), generator=generator).tolist()
        lengths = torch.randint(16, 97, (128,), generator=generator).tolist()
        return Load([prompt for prompt in prompts for _ in range(8)], lengths)
    if prompts_path is None:
        raise SystemExit("the ragged case needs --prompts: a JSON lines file with the fields question and answer")
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    prompts, lengths = [], []
    for row in load_json_lines(Path(prompts_path))[:64]:
        messages = [{"role": "user", "content": row["question"]}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompts.append(tokenizer.encode(text, add_special_tokens=False))
        lengths.append(min(MAX_NEW_TOKENS, len(tokenizer.encode(row["answer"], add_special_tokens=False))))
    return Load(prompts, lengths)


def build_ours(arguments: argparse.Namespace, load: Load) -> Callable[[], None]:
    dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
    model = load_model(arguments.model, dtype=dtype, device=torch.device(arguments.device))
    longest = max(len(prompt) + length for prompt, length in zip(load.prompts, load.lengths, strict=True))
    engine = LocalEngine(model, None, EngineSection(), max_model_len=longest)
    run = run_lockstep if arguments.device == "cpu" else asyncio.run

    async def generate() -> list[Completion]:
        calls = [
            engine.generate(prompt, Sampling(max_tokens=length, seed=seed, ignore_eos=True))
            for seed, (prompt, length) in enumerate(zip(load.prompts, load.lengths, strict=True))
        ]
        return await asyncio.gather(*calls)

    def sample() -> None:
        engine.resume(0)  # drops the KV cache and packs the weights again, as after a training step
        completions = run(generate())
        assert [len(completion.sampled_ids) for completion in completions] == load.lengths

    return sample


class StopAtLengths(StoppingCriteria):
    """Stops each row of a batch after its own number of new tokens."""

    def __init__(self, prompt_length: int, lengths: Sequence[int], device: str) -> None:
        self._ends = torch.tensor([prompt_length + length for length in lengths], device=device)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self._ends <= input_ids.shape[1]


def load_peer(arguments: argparse.Namespace) -> PreTrainedModel:
    dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).to(arguments.device).eval()
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=PAD_ID)
    return model


def build_generate(model: PreTrainedModel, arguments: argparse.Namespace, load: Load) -> Callable[[], None]:
    def sample() -> None:
        for first in range(0, len(load.prompts), BATCH_SIZE):
            prompts, lengths = load.prompts[first : first + BATCH_SIZE], load.lengths[first : first + BATCH_SIZE]
            width = max(map(len, prompts))
            ids = torch.full((len(prompts), width), PAD_ID)
            mask = torch.zeros((len(prompts), width), dtype=torch.long)
            for row, prompt in enumerate(prompts):
                ids[row, width - len(prompt) :] = torch.tensor(prompt)
                mask[row, width - len(prompt) :] = 1
            output = model.generate(
                ids.to(arguments.device),
                attention_mask=mask.to(arguments.device),
                max_new_tokens=max(lengths),
                stopping_criteria=StoppingCriteriaList([StopAtLengths(width, lengths, arguments.device)]),
            )
            assert output.shape[1] == width + max(lengths)

    return sample


def build_generate_batch(model: PreTrainedModel, load: Load) -> Callable[[], None]:
    """Continuous batching of transformers; it accepts one length for all prompts, so only equal lengths compare."""

    def sample() -> None:
        config = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=load.lengths[0],
            eos_token_id=-1,
            pad_token_id=PAD_ID,
        )
        outputs = model.generate_batch(load.prompts, generation_config=config, progress_bar=False)
        lengths = [len(output.generated_tokens) for output in outputs.values()]
        assert lengths == load.lengths, lengths

    return sample


def measure(sides: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each side, alternating; the first turn of each is a warm-up and is dropped."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("sampling", total=len(sides) * (repeats + 1))
        for turn in range(repeats + 1):
            for name, sample in sides.items():
                progress.update(task, description=f"{name}, {'warm-up' if turn == 0 else f'turn {turn}'}")
                started = time.perf_counter()
                sample()
                if turn:
                    seconds[name].append(time.perf_counter() - started)
                progress.advance(task)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="device of both sides (cpu)")
    parser.add_argument("--model", required=True, help="folder of a Hugging Face causal language model")
    parser.add_argument("--case", choices=["equal", "ragged", "group"], default="equal", help="workload (equal)")
    parser.add_argument("--prompts", help="JSON lines file with question and answer, for the ragged case")
    parser.add_argument("--repeats", type=int, default=2, help="measured turns of each side (2)")
    parser.add_argument("--num-threads", type=int, default=1, help="torch threads on a CPU (1)")
    parser.add_argument("--continuous-batching", action="store_true", help="also run transformers' generate_batch")
    parser.add_argument("--out", help="JSON file for the result and its environment")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.num_threads)
    peer = load_peer(arguments)
    load = build_load(arguments.case, arguments.model, arguments.prompts, peer.config.vocab_size)
    sides = {"tunesmith": build_ours(arguments, load), "transformers generate": build_generate(peer, arguments, load)}
    if arguments.continuous_batching:
        if len(set(load.lengths)) > 1:
            parser.error("--continuous-batching compares equal lengths only; use --case equal")
        sides["transformers generate_batch"] = build_generate_batch(load_peer(arguments), load)
    seconds = measure(sides, arguments.repeats)
    rates = {name: load.num_tokens / min(times) for name, times in seconds.items()}
    table = Table(
        "side", "tokens/s", "relative", title=f"{arguments.case}: {load.num_tokens} tokens, {arguments.device}"
    )
    for name, rate in rates.items():
        table.add_row(name, f"{rate:.1f}", f"{rate / rates['tunesmith']:.2f}")
    Console().print(table)
    publish(
        name=f"engine_{arguments.case}",
        unit="sampled tokens/s",
        ours=rates.pop("tunesmith"),
        peers=rates,
        device=arguments.device,
        details={"model": Path(arguments.model).name, "num_tokens": load.num_tokens, "seconds": seconds},
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
