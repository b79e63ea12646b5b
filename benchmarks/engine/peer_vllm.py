"""vLLM's offline `LLM.generate` as a peer: tokens per second on the shapes, prompts and lengths of `rollout.py`.

`rollout.py --vllm` starts this file in a process of its own, because vLLM keeps its share of the GPU memory until its
process ends. Weights are random, in bfloat16. Three ways to ask for the logprob of the sampled token are measured: as
one dictionary a token (`dict`), in flat lists (`flat`), and not at all (`none`); the first two do what Tunesmith does.
A figure is the median of whole calls, prefill included, after one warm-up call; the prefix cache is emptied before each
call, and Python's garbage collector is paused during it. The last line is one JSON object.

`long_contexts.py --vllm` starts it with `--requests`, a file of prompts and of the length of each reply; these have
flat logprobs, and at most 256 run at once.

    python -m benchmarks.engine.peer_vllm --shape qwen3-0.6b --sequences 256 512
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
}
LOGPROBS = {"dict": {"logprobs": 0}, "flat": {"logprobs": 0, "flat_logprobs": True}, "none": {}}
MAX_PLACES = 256
"""Requests that run at once with `--requests`, as in `long_contexts.CASES`."""
CAPTURE_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]


def run_vllm(shape: str, *options: str, limit_s: float = math.inf) -> dict[str, Any]:
    """Run this file and return its JSON object, as far as it is written after `limit_s`; its other output is shown."""
    command = [sys.executable, "-m", "benchmarks.engine.peer_vllm", "--shape", shape, *options]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        timeout = None if math.isinf(limit_s) else max(limit_s, 1)
        try:
            subprocess.run([*command, "--out", str(out)], check=True, timeout=timeout)
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            if timeout is None:
                raise
            print(f"vLLM: {error}", flush=True)
        return json.loads(out.read_text()) if out.exists() else {}


def build_prompts(vocab_size: int, num_sequences: int, num_tokens: int, group: int) -> list[list[int]]:
    """The prompts of `rollout.build_prompts`."""
    rng = random.Random(0)
    prompts = [[rng.randrange(vocab_size) for _ in range(num_tokens)] for _ in range(-(-num_sequences // group))]
    return [prompts[index // group] for index in range(num_sequences)]


def build_engine(shape: str, folder: Path, *, max_model_len: int, max_num_seqs: int, memory: float) -> tuple[Any, int]:
    """vLLM's engine with random weights, and the size of the vocabulary."""
    import torch
    from vllm import LLM

    from benchmarks.shared.shapes import SHAPES

    config, states = copy.deepcopy(SHAPES[shape]), {}
    if config.model_type == "qwen3_5_text":
        register_text_model()
        # states as of the published checkpoints; the other prefill needs FlashInfer
        states = {"mamba_ssm_cache_dtype": "float32", "gdn_prefill_backend": "triton"}
    config.architectures = [ARCHITECTURES[config.model_type]]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    engine = LLM(
        model=str(folder),
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=16384,
        gpu_memory_utilization=memory,
        compilation_config={"cudagraph_capture_sizes": [size for size in CAPTURE_SIZES if size <= max_num_seqs]},
        seed=0,
        **states,
    )
    return engine, config.vocab_size


def register_text_model() -> None:
    """Let vLLM run the text decoder of Qwen3.5, which it has with the vision tower only."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.interfaces import IsHybrid
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

    class TextModel(Qwen3_5ForCausalLM, IsHybrid):
        get_mamba_state_dtype_from_config = Qwen3_5ForConditionalGeneration.get_mamba_state_dtype_from_config
        get_mamba_state_shape_from_config = Qwen3_5ForConditionalGeneration.get_mamba_state_shape_from_config
        get_mamba_state_copy_func = Qwen3_5ForConditionalGeneration.get_mamba_state_copy_func

    ModelRegistry.register_model("Qwen3_5ForCausalLM", TextModel)


def run_once(engine: Any, prompts: Sequence[list[int]], num_new: Sequence[int], logprobs: dict[str, Any]) -> float:
    """Seconds of one call; checks that every request got all its tokens, with logprobs where these were asked for."""
    from vllm import SamplingParams

    samplings = [
        SamplingParams(temperature=1.0, max_tokens=each, ignore_eos=True, detokenize=False, **logprobs)
        for each in num_new
    ]
    while not engine.reset_prefix_cache():
        engine.llm_engine.step()  # blocks of the last call are freed one step later
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    gc.collect()
    gc.disable()
    try:
        started = time.perf_counter()
        outputs = engine.generate(requests, samplings, use_tqdm=False)
        seconds = time.perf_counter() - started
    finally:
        gc.enable()
    for output, each in zip(outputs, num_new, strict=True):
        (completion,) = output.outputs
        assert len(completion.token_ids) == each
        assert not logprobs or len(completion.logprobs) == each
    return seconds


def run_requests(shape: str, file: Path, *, memory: float, repeats: int, report: Callable[[Any], None]) -> Any:
    """The calls of a file of `long_contexts.write_requests`, each case after a short call that compiles; `report`
    receives the figures so far."""
    cases = json.loads(file.read_text())
    longest = max(len(case["prompts"][index]) + num for case in cases.values() for index, num in case["requests"])
    folder = Path(tempfile.mkdtemp())
    engine, _ = build_engine(shape, folder, max_model_len=longest, max_num_seqs=MAX_PLACES, memory=memory)
    figures = {}
    for name, case in cases.items():
        prompts, num_new = [case["prompts"][index] for index, _ in case["requests"]], [n for _, n in case["requests"]]
        run_once(engine, prompts, [16] * len(prompts), LOGPROBS["flat"])
        seconds = [run_once(engine, prompts, num_new, LOGPROBS["flat"]) for _ in range(repeats)]
        figures[name] = {"seconds": seconds, "tokens_per_s": sum(num_new) / statistics.median(seconds)}
        print(f"vLLM, {name:<12}{figures[name]['tokens_per_s']:>10,.0f} tokens/s", flush=True)
        report({"cases": figures})
    return {"cases": figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, help="a name of shapes.SHAPES")
    parser.add_argument("--sequences", type=int, nargs="+", default=[256, 512, 1024], help="requests per call")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="tokens per prompt")
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens sampled per request")
    parser.add_argument("--group", type=int, default=1, help="number of requests that share a prompt")
    parser.add_argument("--repeats", type=int, default=3, help="measured calls")
    parser.add_argument("--gpu-memory", type=float, default=0.6, help="as gpu_memory_utilization of vLLM")
    parser.add_argument("--requests", type=Path, help="file of prompts and lengths, in place of the options above")
    parser.add_argument("--out", type=Path, help="file for the JSON object")
    arguments = parser.parse_args()
    os.environ.update(SETTINGS)
    import vllm

    result: dict[str, Any] = {"version": vllm.__version__, "shape": arguments.shape}

    def report(found: dict[str, Any]) -> None:
        result.update(found)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(result))

    if arguments.requests is None:
        report(run_sizes(arguments))
    else:
        options = {"memory": arguments.gpu_memory, "repeats": arguments.repeats, "report": report}
        run_requests(arguments.shape, arguments.requests, **options)
    print(json.dumps(result), flush=True)
    sys.stderr.flush()
    os._exit(0)  # the engine's own shutdown takes seconds and prints warnings


def run_sizes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every number of requests with every way to ask for logprobs."""
    started = time.perf_counter()
    folder = Path(tempfile.mkdtemp())
    longest = max(1024, arguments.prompt_tokens + arguments.new_tokens)
    engine, vocab_size = build_engine(
        arguments.shape, folder, max_model_len=longest, max_num_seqs=max(CAPTURE_SIZES), memory=arguments.gpu_memory
    )
    ready_s, cells = time.perf_counter() - started, []
    for num_sequences in arguments.sequences:
        prompts = build_prompts(vocab_size, num_sequences, arguments.prompt_tokens, arguments.group)
        num_new = [arguments.new_tokens] * num_sequences
        for name, logprobs in LOGPROBS.items():
            seconds = [run_once(engine, prompts, num_new, logprobs) for _ in range(arguments.repeats + 1)][1:]
            rate = sum(num_new) / statistics.median(seconds)
            cells.append({"sequences": num_sequences, "logprobs": name, "tokens_per_s": rate, "seconds": seconds})
            print(f"vLLM, logprobs {name:<5}{num_sequences:>6} sequences{rate:>12,.0f} tok/s", flush=True)
    return {"ready_s": ready_s, "cells": cells}


if __name__ == "__main__":
    main()
