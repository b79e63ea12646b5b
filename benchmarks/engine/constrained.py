"""Sampling under a grammar, penalties or top logprobs against free sampling, in tokens per second.

    python -m benchmarks.engine.constrained --out results/engine/constrained_cpu.json
    python -m benchmarks.engine.constrained --device cuda --model FOLDER --sequences 8 64 256 --out OUT.json

All requests run at once and sample the same number of tokens, with logprobs; prompts share nothing. The grammar is a
JSON schema of an array that is longer than any reply. Without `--model` it is the pocket model with random weights.
`mixed` constrains one request in eight. `masks_us` is the time that the masks alone take per constrained token. On
a CPU, seconds are CPU time of the process, so that other load on the machine changes little.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.shared.report import publish
from tunesmith.config import EngineSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.grammar.grammars import build_json_grammar
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.model.load import load_model
from tunesmith.model.pocket import build_pocket_model, build_pocket_tokenizer
from tunesmith.types import Completion, Distribution, Sampling

SCHEMA = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "kind": {"enum": ["cat", "dog", "bird"]},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": False,
    },
}
FREE = Distribution()
MIXED_EVERY = 8


def build_settings() -> dict[str, tuple[Distribution, dict[str, Any]]]:
    """The distribution and further sampling parameters of each row of the table."""
    return {
        "free": (FREE, {}),
        "entropies": (FREE, {"return_entropy": True}),
        "top_logprobs": (FREE, {"top_logprobs": 5}),
        "penalties": (Distribution(repetition_penalty=1.1, frequency_penalty=0.1), {}),
        "grammar": (Distribution(grammar=build_json_grammar(SCHEMA)), {}),
        "mixed": (Distribution(grammar=build_json_grammar(SCHEMA)), {}),
    }


def load(arguments: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    device = torch.device(arguments.device)
    if arguments.model is not None:
        dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
        return load_model(arguments.model, dtype=dtype, device=device), AutoTokenizer.from_pretrained(arguments.model)
    tokenizer = build_pocket_tokenizer()
    model = build_pocket_model(tokenizer).to(device)
    use_plan_attention(model)
    return model, tokenizer


def run(engine: LocalEngine, prompts: Sequence[list[int]], samplings: Sequence[Sampling], *, device: str) -> float:
    """Seconds in which all requests are answered."""
    clock = time.process_time if device == "cpu" else time.perf_counter

    async def generate() -> list[Completion]:
        calls = zip(prompts, samplings, strict=True)
        return await asyncio.gather(*(engine.generate(prompt, sampling) for prompt, sampling in calls))

    started = clock()
    completions = run_lockstep(generate())
    seconds = clock() - started
    assert all(each.stop_reason == "length" for each in completions), "all requests sample equally many tokens"
    return seconds


def measure_masks(engine: LocalEngine, grammar: str, num_sequences: int, num_tokens: int) -> float:
    """Microseconds per token that masks of a batch of random replies take, without a model."""
    generator = torch.Generator().manual_seed(0)
    matchers = [engine.grammars.open(grammar) for _ in range(num_sequences)]
    seconds = 0.0
    for _ in range(num_tokens):
        started = time.perf_counter()
        masks = engine.grammars.fill_masks(matchers)
        seconds += time.perf_counter() - started
        for matcher, mask in zip(matchers, masks, strict=True):
            bits = (torch.from_numpy(mask)[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
            allowed = bits.flatten().nonzero()[:, 0]
            matcher.accept(int(allowed[torch.randint(len(allowed), (1,), generator=generator)]))
    return 1e6 * seconds / (num_sequences * num_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", help="folder of a model with a fast tokenizer; default: the pocket model")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens sampled by each request")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    torch.set_num_threads(1 if arguments.device == "cpu" else torch.get_num_threads())
    model, tokenizer = load(arguments)
    most, length = max(arguments.sequences), arguments.prompt + arguments.tokens
    settings = EngineSection(max_num_seqs=most, kv_cache_tokens=most * (length + 64))
    engine = LocalEngine(model, tokenizer, settings, max_model_len=length + 1)
    generator = torch.Generator().manual_seed(0)
    table: dict[str, dict[str, float]] = {}
    for num_sequences in arguments.sequences:
        shape = (num_sequences, arguments.prompt)
        seconds_of: dict[str, list[float]] = {name: [] for name in build_settings()}
        for repeat in range(arguments.repeats + 1):
            for name, (distribution, options) in build_settings().items():
                prompts = torch.randint(10, len(tokenizer) - 10, shape, generator=generator).tolist()
                samplings = [
                    Sampling(
                        max_tokens=arguments.tokens,
                        distribution=FREE if name == "mixed" and row % MIXED_EVERY else distribution,
                        seed=1000 * repeat + row,
                        ignore_eos=name != "grammar" and not (name == "mixed" and row % MIXED_EVERY == 0),
                        **options,
                    )
                    for row in range(num_sequences)
                ]
                gc.collect()
                seconds_of[name].append(run(engine, prompts, samplings, device=arguments.device))
        num_tokens = num_sequences * arguments.tokens
        rates = {name: round(num_tokens / statistics.median(each[1:]), 1) for name, each in seconds_of.items()}
        masks_us = measure_masks(engine, build_json_grammar(SCHEMA), num_sequences, min(arguments.tokens, 64))
        table[str(num_sequences)] = rates | {"masks_us": round(masks_us, 1)}
    last = table[str(most)]
    publish(
        name=f"sampling under a JSON schema, {most} sequences, beside free sampling", unit="tokens/s",
        ours=last["grammar"], peers={"free": last["free"]}, device=arguments.device, out=arguments.out,
        details={"model": arguments.model or "pocket", "prompt": arguments.prompt, "tokens": arguments.tokens,
                 "tokens_per_s": table},
    )  # fmt: skip
    names = list(last)
    print(f"{'sequences':>10}" + "".join(f"{name:>14}" for name in names))
    for num_sequences, row in table.items():
        print(f"{num_sequences:>10}" + "".join(f"{row[name]:>14,.1f}" for name in names))


if __name__ == "__main__":
    main()
