"""Decoding on a CPU at several context lengths: the engine and transformers' `generate` on the same model and prompts.

Every point samples the same number of tokens for each of N sequences of one length, from random prompts without shared
prefixes or, with `--shared`, from one prompt for all, as in a group. Only decoding is timed, from the moment every
sequence has its first token until all results are returned, in CPU seconds: with one thread these equal the wall time
of an idle machine. The engine returns a logprob with every token, `generate` tokens alone. The sides alternate. Rates
are medians over the turns, and the ratio is the median over turns of both sides' times in that turn, which a change of
the machine's load affects least. The raw output has wall times too.

    python -m benchmarks.engine.decode_lengths --shape pocket --points 1000x8 8000x2
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import asyncio

import torch
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from benchmarks.shared.report import publish
from benchmarks.shared.shapes import SHAPES, build_random_model
from tunesmith.config import EngineSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.model.pocket import build_pocket_model, build_pocket_tokenizer
from tunesmith.types import Sampling

PEER = "transformers generate"
DEFAULT_POINTS = [(context, num_sequences) for context in (250, 1000, 4000, 8000) for num_sequences in (1, 2, 8, 16)]
FIRST_ID = 5
"""First token id of the random prompts; lower ids are control tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """CPU seconds of all threads, and wall seconds."""

    processor: float
    clock: float

    @classmethod
    def now(cls) -> Seconds:
        return cls(processor=time.process_time(), clock=time.perf_counter())

    def since(self, before: Seconds) -> Seconds:
        return Seconds(processor=self.processor - before.processor, clock=self.clock - before.clock)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measurement: N sequences of `context` tokens, each decoded `num_new` tokens further."""

    context: int
    num_sequences: int
    num_new: int
    is_shared: bool

    @property
    def num_timed_tokens(self) -> int:
        """The first token of each sequence is sampled from the forward of its prompt and not timed."""
        return self.num_sequences * (self.num_new - 1)

    def build_prompts(self, vocab_size: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.context)
        num_prompts = 1 if self.is_shared else self.num_sequences
        prompts = torch.randint(FIRST_ID, vocab_size, (num_prompts, self.context), generator=generator).tolist()
        return prompts * (self.num_sequences // num_prompts)


def build_model(shape: str) -> PreTrainedModel:
    if shape == "pocket":
        return build_pocket_model(build_pocket_tokenizer()).eval()
    return build_random_model(shape, dtype=torch.float32, device=torch.device("cpu"))


def build_ours(shape: str, point: Point) -> Callable[[], Seconds]:
    model = build_model(shape)
    use_plan_attention(model)
    settings = EngineSection(max_batched_tokens=point.num_sequences * point.context)  # all start in one step
    engine = LocalEngine(model, None, settings, max_model_len=point.context + point.num_new)
    prompts = point.build_prompts(model.config.vocab_size)

    def sample() -> Seconds:
        engine.resume(0)
        is_first = [True] * len(prompts)
        started_at = ended_at = Seconds.now()

        async def generate(index: int) -> None:
            def note(token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
                nonlocal started_at
                if is_first[index]:
                    is_first[index] = False
                    started_at = Seconds.now()

            sampling = Sampling(max_tokens=point.num_new, seed=index, ignore_eos=True)
            completion = await engine.generate(prompts[index], sampling, on_tokens=note)
            assert len(completion.sampled_ids) == point.num_new

        async def generate_all() -> None:
            nonlocal ended_at
            await asyncio.gather(*map(generate, range(len(prompts))))
            ended_at = Seconds.now()

        run_lockstep(generate_all())
        return ended_at.since(started_at)

    return sample


class _FirstToken(StoppingCriteria):
    """Records when the first new token of all rows is sampled; stops nothing."""

    def __init__(self) -> None:
        self.sampled_at: Seconds | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if self.sampled_at is None:
            self.sampled_at = Seconds.now()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def build_generate(shape: str, point: Point) -> Callable[[], Seconds]:
    model = build_model(shape)
    model.set_attn_implementation("sdpa")
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0)
    ids = torch.tensor(point.build_prompts(model.config.vocab_size))

    def sample() -> Seconds:
        first = _FirstToken()
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=point.num_new,
            min_new_tokens=point.num_new,
            stopping_criteria=StoppingCriteriaList([first]),
        )
        assert output.shape[1] == point.context + point.num_new
        assert first.sampled_at is not None
        return Seconds.now().since(first.sampled_at)

    return sample


def measure(sides: dict[str, Callable[[], Seconds]], *, repeats: int) -> dict[str, list[Seconds]]:
    """Seconds of each side, alternating; the first turn of each is a warm-up and is dropped."""
    seconds: dict[str, list[Seconds]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name, sample in sides.items():
            taken = sample()
            if turn:
                seconds[name].append(taken)
    return seconds


def run_point(shape: str, point: Point, repeats: int) -> dict[str, Any]:
    """Medians of both sides, and all measurements."""
    sides = {"tunesmith": build_ours(shape, point), PEER: build_generate(shape, point)}
    seconds = measure(sides, repeats=repeats)
    rates = {
        name: point.num_timed_tokens / statistics.median(taken.processor for taken in times)
        for name, times in seconds.items()
    }
    return {
        **asdict(point),
        "tokens_per_s": rates,
        "ratio": statistics.median(
            peer.processor / ours.processor for ours, peer in zip(seconds["tunesmith"], seconds[PEER], strict=True)
        ),
        "seconds": {name: [asdict(taken) for taken in times] for name, times in seconds.items()},
    }


def parse_point(text: str) -> tuple[int, int]:
    context, num_sequences = text.split("x")
    return int(context), int(num_sequences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["pocket", *SHAPES], default="pocket", help="model, random weights (pocket)")
    parser.add_argument(
        "--points", type=parse_point, nargs="+", default=DEFAULT_POINTS, help="prompt tokens x sequences, e.g. 8000x2"
    )
    parser.add_argument("--new", type=int, default=48, help="tokens sampled per sequence (48)")
    parser.add_argument("--shared", action="store_true", help="use one prompt for all sequences")
    parser.add_argument("--repeats", type=int, default=9, help="measured turns of each side (9)")
    parser.add_argument("--num-threads", type=int, default=1, help="torch threads (1)")
    parser.add_argument("--out", help="JSON file for the result and its environment")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.num_threads)
    table = Table("context", "sequences", "tunesmith", PEER, "ratio", title=f"{arguments.shape}: tokens/s of decoding")
    points: list[dict[str, Any]] = []
    for context, num_sequences in arguments.points:
        point = Point(context=context, num_sequences=num_sequences, num_new=arguments.new, is_shared=arguments.shared)
        points.append(run_point(arguments.shape, point, arguments.repeats))
        rates = points[-1]["tokens_per_s"]
        figures = [f"{rates['tunesmith']:.0f}", f"{rates[PEER]:.0f}", f"{points[-1]['ratio']:.2f}"]
        table.add_row(str(context), str(num_sequences), *figures)
        publish(  # after every point, because the last ones may take long
            name=f"decode_lengths_{arguments.shape}",
            unit=f"tokens/s at {context} x {num_sequences}",
            ours=rates["tunesmith"],
            peers={PEER: rates[PEER]},
            device="cpu",
            details=points,
            out=arguments.out,
        )
    Console().print(table)


if __name__ == "__main__":
    main()
