"""Products of tokens with the weights of their experts in a decode step, beside torch's grouped product.

For each shape the two products of a layer, and the sort of its pairs. Experts are chosen at random. The rate counts the
weights of the experts that have a token, each once, and is followed by its share of the rate of a large copy. Calls are
replayed as a CUDA graph, whose launch is part of the time.

    python -m benchmarks.engine.grouped_products --out results/engine/rollout_cuda/grouped_products.json
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.engine.decode_attention import time_calls
from benchmarks.engine.rollout import measure_ceilings
from benchmarks.shared.report import TimeLimit, add_time_limit, publish

TOKENS = (16, 64, 256, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    num_experts: int
    num_chosen: int
    hidden: int
    inner: int
    is_transposed: bool = False
    """Weights are [E, C, O]."""

    @property
    def products(self) -> tuple[tuple[str, int, int], ...]:
        return ("gate, up", self.hidden, 2 * self.inner), ("down", self.inner, self.hidden)


SHAPES = {
    "qwen3-30b-a3b": Shape(num_experts=128, num_chosen=8, hidden=2048, inner=768),
    "qwen3.5-35b-a3b": Shape(num_experts=256, num_chosen=8, hidden=2048, inner=512),
    "gpt-oss-20b": Shape(num_experts=32, num_chosen=4, hidden=2880, inner=2880, is_transposed=True),
}


def draw_weight(shape: Shape, size_c: int, size_o: int) -> Tensor:
    """Random weights [E, C, O] in the layout of the shape."""
    sizes = (size_c, size_o) if shape.is_transposed else (size_o, size_c)
    weight = torch.randn(shape.num_experts, *sizes, device="cuda", dtype=torch.bfloat16) * 0.02
    return weight if shape.is_transposed else weight.transpose(1, 2)


def measure(shape: Shape, weight_ECO: Tensor, num_tokens: int) -> dict[str, Any]:
    from tunesmith.model.experts import sort_many_pairs
    from tunesmith.model.kernels.expert_pairs import multiply_groups, sort_pairs  # needs Triton

    num_experts, size_c, size_o = weight_ECO.shape
    experts = torch.rand(num_tokens, num_experts, device="cuda").topk(shape.num_chosen).indices.flatten()
    _, _, ends = sort_pairs(experts, num_experts)
    inputs = torch.randn(len(experts), size_c, device="cuda", dtype=torch.bfloat16)
    ours = multiply_groups(inputs, weight_ECO, ends)
    seconds = {
        "product": time_calls([lambda: multiply_groups(inputs, weight_ECO, ends)]),
        "torch": time_calls([lambda: functional.grouped_mm(inputs, weight_ECO, offs=ends)]),
        "sort": time_calls([lambda: sort_pairs(experts, num_experts)]),
        "torch_sort": time_calls([lambda: sort_many_pairs(experts, num_experts)]),
    }
    num_bytes = len(experts.unique()) * size_c * size_o * weight_ECO.element_size()
    difference = (ours - functional.grouped_mm(inputs, weight_ECO, offs=ends)).abs().max().item()
    return {"seconds": seconds, "bytes_per_s": num_bytes / seconds["product"], "largest_difference": difference}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help="tokens of a step")
    add_time_limit(parser)
    parser.add_argument("--out", help="JSON file for the result, results/engine/NAME.json")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    limit, rows, copy_rate = TimeLimit(arguments.limit_s), [], measure_ceilings("cuda").bytes_per_s
    print(f"a copy: {copy_rate / 1e12:.2f} TB/s")
    names = ("us", "TB/s", "share", "torch us", "sort us", "torch us")
    print(f"{'shape':<17}{'tokens':>7}  {'product':<10}" + "".join(f"{each:>9}" for each in names))
    for name in arguments.shapes:
        for product, size_c, size_o in SHAPES[name].products:
            weight_ECO = draw_weight(SHAPES[name], size_c, size_o)
            for num_tokens in arguments.tokens:
                if not limit.has_room(f"{name}, {product}, {num_tokens}"):
                    continue
                found = measure(SHAPES[name], weight_ECO, num_tokens)
                rows.append({"shape": name, "product": product, "tokens": num_tokens} | found)
                rate, (us, *others) = found["bytes_per_s"], [1e6 * each for each in found["seconds"].values()]
                print(
                    f"{name:<17}{num_tokens:>7}  {product:<10}{us:>9.1f}{rate / 1e12:>9.2f}"
                    f"{100 * rate / copy_rate:>7.0f} %" + "".join(f"{each:>9.1f}" for each in others),
                    flush=True,
                )
    last = rows[-1]
    publish(
        name="grouped_products",
        unit=f"TB/s of weights, {last['shape']}, {last['product']}, {last['tokens']} tokens",
        ours=last["bytes_per_s"] / 1e12,
        peers={"torch": last["bytes_per_s"] * last["seconds"]["product"] / last["seconds"]["torch"] / 1e12},
        device="cuda",
        details={"rows": rows, "copy_bytes_per_s": copy_rate},
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
