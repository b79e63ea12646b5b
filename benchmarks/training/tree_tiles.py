"""Times the kernels of tree attention over tiles: forward, gradients of queries, gradients of keys and values.

Works: `row`, one path of 16k tokens; `tries`, eight answers of 2k to a prompt of 4k; `short`, four groups of eight
answers of 512 to prompts of 512. Rates count the products of visible pairs: 2 in the forward, 3 and 4 in the others.
Kernels that do not fit on the GPU with a tile are left out. Processes compile first, side by side.

    python -m benchmarks.training.tree_tiles --out OUT.json
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C._autograd import DeviceType

from benchmarks.shared.report import TimeLimit, add_time_limit, publish
from benchmarks.training.train import build_sample
from tunesmith.experience.samples import Trie, build_trie, concatenate_tries
from tunesmith.trainer.tree_attention.tile_schedule import Tile, Tiling, build_table, pad_trie

HEADS = {64: (32, 8), 128: (16, 8), 256: (8, 4)}
"""Query and key-value heads of a head size."""
KERNELS = {"attention_forward": 2, "backward_query": 3, "backward_key_value": 4}
"""Products of each kernel."""
VOCAB = 2**20
NUM_REPEATS = 3


def build_group(prompt: int, answer: int, num_answers: int, first: int = 0) -> Trie:
    shared = list(range(first, first + prompt))
    answers = [[first + prompt + index] * (answer + 1) for index in range(num_answers)]
    samples = [build_sample(shared + ids, prompt, 0, run, VOCAB) for run, ids in enumerate(answers)]
    return build_trie(samples, range(num_answers))


def build_works() -> dict[str, Trie]:
    groups = [build_group(512, 512, 8, first=1000 * index) for index in range(4)]
    return {
        "row": pad_trie(build_group(1, 16383, 1)),
        "tries": pad_trie(build_group(4096, 2048, 8)),
        "short": pad_trie(concatenate_tries(groups)),
    }


def list_tiles(size: int) -> list[Tile]:
    """Those in which a warp has 16 rows or, for wide heads, fewer; small steps and few stages for wide heads alone."""
    shapes = [(64, 32), (128, 32)] if size > 128 else [(128, 128)]
    stages = (1, 2) if size > 128 else (2, 3, 4)
    shapes = [(64, 64), (128, 64), *shapes]
    warps = {64: (4, 8) if size > 128 else (4,), 128: (8,)}
    return [Tile(*shape, each, number) for shape in shapes for each in warps[shape[0]] for number in stages]


def measure_kernels(trie: Trie, size: int, tile: Tile) -> dict[str, float]:
    """Milliseconds of each kernel with this tile."""
    from triton.runtime.errors import OutOfResources

    from tunesmith.trainer.tree_attention.kernels import tree_attention as operators  # needs Triton

    def draw(num_heads: int) -> Tensor:
        shape = (1, trie.num_tokens, num_heads, size)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()

    num_heads, num_kv_heads = HEADS[size]
    tensors = draw(num_heads), draw(num_kv_heads), draw(num_kv_heads)
    tiling = Tiling(tile, tile, tile)
    table = torch.from_numpy(build_table(trie, None, tiling)).cuda()

    def attend() -> None:
        output = operators.tree_attention(*tensors, table, 0, 0, size**-0.5, 0.0, None)[0]
        torch.autograd.grad(output, tensors, torch.ones_like(output))

    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    with patch.object(operators, "TILINGS", (tiling,)), profile as profiler:
        with suppress(OutOfResources):  # what ran before is measured
            for _ in range(1 + NUM_REPEATS):
                attend()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA and event.name in KERNELS:
            times.setdefault(event.name, []).append(event.device_time / 1e3)
    return {name: min(values) for name, values in times.items()}


def compile_kernels(case: tuple[int, Tile]) -> None:
    """Fill Triton's cache on disk."""
    measure_kernels(pad_trie(build_group(1, 500, 1)), *case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, choices=list(HEADS), default=list(HEADS), help="of heads")
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile")
    add_time_limit(parser)
    parser.add_argument("--out", help="JSON file for the result, results/training/NAME.json")
    arguments = parser.parse_args()
    limit, works, rows = TimeLimit(arguments.limit_s), build_works(), []
    cases = [(size, tile) for size in arguments.sizes for tile in list_tiles(size)]
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
        list(pool.map(compile_kernels, cases))
    for size, tile in cases:
        if not limit.has_room(f"{size}, {tile}"):
            continue
        for work, trie in works.items():
            times = measure_kernels(trie, size, tile)
            flops = 2 * HEADS[size][0] * size * float((trie.depth_T + 1).sum())
            rates = {name: KERNELS[name] * flops / ms / 1e9 for name, ms in times.items()}
            shape: dict[str, Any] = {name: getattr(tile, name) for name in tile.__slots__}
            rows.append({"size": size, "work": work, **shape, "ms": times, "tflops": rates})
            shown = "; ".join(f"{name} {times[name]:.3f} ms {rates[name]:.0f}" for name in times)
            print(f"{size} {work} {' '.join(f'{name}={value}' for name, value in shape.items())}: {shown}", flush=True)
    best = max(rows, key=lambda row: max(row["tflops"].values(), default=0.0))
    publish(
        name="tree_tiles", unit="TFLOP/s of the fastest kernel", ours=max(best["tflops"].values()), peers={},
        device="cuda", details={"rows": rows}, out=arguments.out,
    )  # fmt: skip


if __name__ == "__main__":
    main()
