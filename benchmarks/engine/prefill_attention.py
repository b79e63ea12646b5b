"""Prefill attention over a paged cache: microseconds per layer and TFLOP/s, beside torch's on the same prompts.

Prompts are new and causal; operations count the products below the diagonal. torch's FlashAttention and cuDNN get keys
and values that are not paged, the peer of what a sampler without pages would do. Calls are replayed as a CUDA graph.

    python -m benchmarks.engine.prefill_attention --heads 8x2x128 4x7x128 --prompts 64x512 8x6144 2x32768
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.engine.decode_attention import BLOCK_SIZE, Heads, time_calls
from benchmarks.shared.report import TimeLimit, add_time_limit, publish

HEADS = ["8x2x128", "2x6x128", "4x7x128", "8x4x64", "4x2x256"]
PROMPTS = ["128x128", "32x1024", "8x6144", "2x32768"]
PEERS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def draw_heads(heads: Heads, num_rows: int, num_tokens: int) -> list[Tensor]:
    """Random query, key and value [R, H, T, D]."""
    counts = (heads.num_kv_heads * heads.num_groups, heads.num_kv_heads, heads.num_kv_heads)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    return [torch.randn(num_rows, num_tokens, count, heads.size, **options).transpose(1, 2) for count in counts]


def build_call(heads: Heads, tensors: list[Tensor]) -> Callable[[], Tensor]:
    """Our kernels over all prompts as one row, which also write keys and values to the cache."""
    from tunesmith.engine.batch.kv_cache import KVCache, LayerShape
    from tunesmith.engine.core.span import Span
    from tunesmith.engine.cuda.attention_plans import build_prefill_plan
    from tunesmith.model.kernels.paged_prefill import run_paged_prefill  # needs Triton, which only CUDA machines have
    from tunesmith.model.kernels.span_attention import count_tile_rows, get_tile_tokens

    num_rows, _, num_tokens, size = tensors[0].shape
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    device = torch.device("cuda")
    cache = KVCache(
        [LayerShape(heads.num_kv_heads, size)], num_blocks=num_rows * num_blocks, block_size=BLOCK_SIZE,
        dtype=torch.bfloat16, device=device,
    )  # fmt: skip
    blocks = torch.randperm(num_rows * num_blocks).view(num_rows, num_blocks).tolist()
    spans = [Span(row * num_tokens, 0, num_tokens, mine) for row, mine in enumerate(blocks)]
    tile_tokens = get_tile_tokens(heads.num_groups, count_tile_rows(size, torch.bfloat16))
    plan = build_prefill_plan(cache, spans, tile_tokens=tile_tokens, device=device)
    keys, values, slot_mapping, block_table, spans_3R, tiles = plan.layers[0].tensors
    query, key, value = (each.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for each in tensors)
    return lambda: run_paged_prefill(
        query, key, value, keys, values, slot_mapping, block_table, spans_3R, tiles, 0.1, 0, 0.0
    )


def measure_peer(backend: SDPBackend, tensors: list[Tensor]) -> float | None:
    """Seconds of torch's attention; None if the backend refuses the sizes."""
    query, key, value = tensors

    def attend() -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.1, enable_gqa=True)

    try:
        with sdpa_kernel(backend):
            return time_calls([attend])
    except RuntimeError as error:
        print(f"{backend.name}: {str(error).splitlines()[0][:100]}", flush=True)
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", default=HEADS, help="key-value heads x queries of each x head size")
    parser.add_argument("--prompts", nargs="+", default=PROMPTS, help="requests x tokens")
    add_time_limit(parser)
    parser.add_argument("--out", help="JSON file for the result, results/engine/NAME.json")
    arguments = parser.parse_args()
    limit, rows = TimeLimit(arguments.limit_s), []
    print(f"{'heads':<10}{'prompts':<12}{'us':>10}{'TFLOP/s':>9}" + "".join(f"{name:>9}" for name in PEERS))
    for name in arguments.heads:
        heads = Heads(*map(int, name.split("x")))
        for prompts in arguments.prompts:
            if not limit.has_room(f"{name}, {prompts}"):
                continue
            num_rows, num_tokens = map(int, prompts.split("x"))
            tensors = draw_heads(heads, num_rows, num_tokens)
            flops = 2 * num_rows * num_tokens * (num_tokens + 1) * heads.num_kv_heads * heads.num_groups * heads.size
            seconds = time_calls([build_call(heads, tensors)])
            peers = {peer: measure_peer(backend, tensors) for peer, backend in PEERS.items()}
            rows.append({"heads": name, "prompts": prompts, "flops": flops, "seconds": seconds, "peer_seconds": peers})
            rates = "".join(f"{flops / s / 1e12:>9.0f}" if s else f"{'-':>9}" for s in (seconds, *peers.values()))
            print(f"{name:<10}{prompts:<12}{seconds * 1e6:>10.1f}{rates}", flush=True)
    last = rows[-1]
    publish(
        name="prefill_attention",
        unit=f"TFLOP/s, {last['heads']}, {last['prompts']}",
        ours=last["flops"] / last["seconds"] / 1e12,
        peers={peer: last["flops"] / s / 1e12 for peer, s in last["peer_seconds"].items() if s},
        device="cuda",
        details={"rows": rows},
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
