"""Adapters in decode: microseconds that the adapters of the layers of one input add to these layers' product.

Two kernels apply them (`engine/cuda/kernels/adapters.py`); beside them the products of cuBLAS, one for the first
factors and one for each second factor, which add in place. The layers' own product runs before, so that weights come
from memory as in a step, and its time is subtracted. Calls are replayed as a CUDA graph.

    python -m benchmarks.engine.adapter_kernels --rows 64 256 512 --ranks 16 32 64
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine.decode_attention import time_calls
from benchmarks.shared.report import TimeLimit, add_time_limit, publish
from tunesmith.model.torch_modes import replaced

LAYERS = {
    "1.5B qkv": (1536, (1536, 256, 256)),
    "7B qkv": (3584, (3584, 512, 512)),
    "7B output": (3584, (3584,)),
    "7B gate, up": (3584, (18944, 18944)),
    "7B down": (18944, (3584,)),
}
"""Inputs, and outputs of each layer, of Qwen2.5."""
NUM_COPIES = 8
"""Different weights that are used in turn."""


def measure(num_inputs: int, sizes: Sequence[int], num_rows: int, rank: int, tiles: Sequence[int]) -> dict[str, float]:
    """Seconds of the layers' product, and seconds that adapters add to it, by cuBLAS and by the kernels."""
    from tunesmith.engine.cuda.kernels import adapters  # needs Triton, which only CUDA machines have

    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    inputs = torch.randn(1, num_rows, num_inputs, **options)

    def build_calls(apply: Callable[..., object] | None) -> Iterator[Callable[[], object]]:
        for _ in range(NUM_COPIES):
            weight = torch.randn(sum(sizes), num_inputs, **options)
            downs = torch.randn(len(sizes) * rank, num_inputs, **options).split(rank)
            ups = torch.randn(sum(sizes), rank, **options).split(list(sizes))

            def run(weight: Tensor = weight, downs: Sequence[Tensor] = downs, ups: Sequence[Tensor] = ups) -> object:
                totals = torch.nn.functional.linear(inputs, weight).split(list(sizes), dim=-1)
                return apply(totals, inputs, downs, ups, [2.0] * len(sizes)) if apply is not None else totals

            yield run

    def time_adapters(apply: Callable[..., object] | None) -> float:
        return time_calls(list(build_calls(apply)))

    alone = time_adapters(None)
    seconds = {"product": alone, "cublas": time_adapters(adapters.add_products) - alone}
    for tile in tiles:
        bounds = {"ROWS": tile, "MAX_INPUTS": 2**20, "MAX_UP_ELEMENTS": 2**30}
        with replaced([(vars(adapters), name, value) for name, value in bounds.items()]):
            seconds[f"kernels, {tile} rows"] = time_adapters(adapters.add_adapters) - alone
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 256, 512, 1024], help="sequences that decode")
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--tiles", type=int, nargs="+", default=[16, 32], help="rows of a program of the kernels")
    add_time_limit(parser)
    parser.add_argument("--out", help="JSON file for the result, results/engine/NAME.json")
    arguments = parser.parse_args()
    limit, rows = TimeLimit(arguments.limit_s), []
    for name, (num_inputs, sizes) in LAYERS.items():
        for rank in arguments.ranks:
            for num_rows in arguments.rows:
                if limit.has_room(f"{name}, rank {rank}, {num_rows} rows"):
                    seconds = measure(num_inputs, sizes, num_rows, rank, arguments.tiles)
                    rows.append({"layers": name, "rank": rank, "rows": num_rows, "seconds": seconds})
                    figures = ", ".join(f"{key} {value * 1e6:.1f}" for key, value in seconds.items())
                    print(f"{name}, rank {rank}, {num_rows} rows: {figures} us", flush=True)
    last = rows[-1]["seconds"]
    publish(
        name="adapter_kernels",
        unit=f"microseconds, {rows[-1]['layers']}, rank {rows[-1]['rank']}, {rows[-1]['rows']} rows",
        ours=min(value for key, value in last.items() if key.startswith("kernels")) * 1e6,
        peers={"cublas": last["cublas"] * 1e6},
        device="cuda",
        details={"rows": rows},
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
