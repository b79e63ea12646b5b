"""Does a matrix product give a token the same bits whatever else is in the batch, and what do cuBLAS settings cost?

For each weight of a shape, row 0 of the product is compared between batches of different numbers of rows, whose other
rows are random. cuBLAS chooses its kernel by the number of rows; a kernel that splits the sum over K adds in another
order. `plain` is torch as it starts. `fixed` sets what vLLM sets for batch invariance on Hopper: small workspaces, the
cuBLASLt library, and no reductions in bfloat16 or over split sums. Both run in processes of their own, since cuBLAS
reads the variables once. `added` is a product that adds to the residual stream in its last step. Weights that share
their input (q, k, v; gate, up) are multiplied merged: the last figures are rows of a part whose bits differ from the
same rows of the merged product.

    python -m benchmarks.engine.batch_invariance --shapes qwen3-0.6b qwen2.5-7b --out FILE
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.shared.report import publish
from benchmarks.shared.shapes import SHAPES

ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 255, 256, 512, 1024, 4096]
TIMED = [8, 64, 256, 4096]
FIXED = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
REPLAYS = 20


def list_weights(shape: str) -> dict[str, tuple[int, int]]:
    """Rows and columns of each linear weight."""
    config = SHAPES[shape]
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    query, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "q": (query, hidden),
        "k or v": (keys, hidden),
        "q, k, v merged": (query + 2 * keys, hidden),
        "o": (hidden, query),
        "gate or up": (inner, hidden),
        "gate, up merged": (2 * inner, hidden),
        "down": (hidden, inner),
        "head": (config.vocab_size, hidden),
        "o, added": (hidden, query),
        "down, added": (hidden, inner),
    }


def multiply(rows: Tensor, weight: Tensor, total: Tensor | None) -> Tensor:
    return torch.mm(rows, weight.T) if total is None else torch.addmm(total, rows, weight.T)


def time_product(rows: Tensor, weight: Tensor, total: Tensor | None) -> float:
    """Microseconds, as a CUDA graph replays it."""
    graph = torch.cuda.CUDAGraph()
    multiply(rows, weight, total)
    with torch.cuda.graph(graph):
        multiply(rows, weight, total)
    times = []
    for _ in range(REPLAYS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(1000 * start.elapsed_time(stop))
    return statistics.median(times)


def sweep(shape: str) -> list[dict[str, Any]]:
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(num_rows: int, num_columns: int) -> Tensor:
        return torch.randn(num_rows, num_columns, generator=generator, device="cuda", dtype=torch.bfloat16)

    results = []
    for name, (num_rows, num_columns) in list_weights(shape).items():
        weight, row = draw(num_rows, num_columns) * num_columns**-0.5, draw(1, num_columns)
        first = draw(1, num_rows)
        outputs, times = {}, {}
        for count in ROWS:
            batch = torch.cat([row, draw(count - 1, num_columns)])
            total = first.expand(count, -1).contiguous() if name.endswith("added") else None
            outputs[count] = multiply(batch, weight, total)[0].clone()
            if total is not None:  # in place, as the sampler adds
                assert torch.equal(total.addmm_(batch, weight.T)[0], outputs[count])
            if count in TIMED:
                times[count] = time_product(batch, weight, total)
        reference = outputs[ROWS[-1]]
        unequal = {count: int((each != reference).sum()) for count, each in outputs.items()}
        results.append({"weight": name, "size": [num_rows, num_columns], "unequal": unequal, "us": times})
    for name, first_name in (("q, k, v", "q"), ("gate, up", "gate or up")):
        sizes = list_weights(shape)
        (num_rows, num_columns), (part, _) = sizes[f"{name} merged"], sizes[first_name]
        weight = draw(num_rows, num_columns) * num_columns**-0.5
        unequal = {}
        for count in ROWS:
            batch = draw(count, num_columns)
            merged = torch.mm(batch, weight.T)[:, :part]
            unequal[count] = int((merged != torch.mm(batch, weight[:part].T)).any(dim=1).sum())
        results.append({"weight": f"{name} parts", "size": [part, num_columns], "unequal": unequal, "us": {}})
    return results


def run_child(shapes: list[str], *, is_fixed: bool) -> dict[str, Any]:
    environment = {**os.environ, **(FIXED if is_fixed else {})}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [
            sys.executable,
            "-m",
            "benchmarks.engine.batch_invariance",
            "--worker",
            str(out),
            "--shapes",
            *shapes,
        ]
        subprocess.run([*command, *(["--fixed"] if is_fixed else [])], check=True, env=environment)
        return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["qwen3-0.6b", "qwen2.5-1.5b"])
    parser.add_argument("--fixed", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    if arguments.worker is not None:
        if arguments.fixed:
            torch.backends.cuda.preferred_blas_library("cublaslt")
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
        arguments.worker.write_text(json.dumps({shape: sweep(shape) for shape in arguments.shapes}))
        return
    found = {name: run_child(arguments.shapes, is_fixed=name == "fixed") for name in ("plain", "fixed")}
    counts = dict.fromkeys(found, 0)
    print(f"{'shape':14}{'weight':18}{'size':>14}  rows whose row 0 differs from that of {ROWS[-1]}: plain | fixed")
    for shape in arguments.shapes:
        for plain, fixed in zip(found["plain"][shape], found["fixed"][shape], strict=True):
            unequal = {name: [k for k, v in each["unequal"].items() if v] for name, each in
                       (("plain", plain), ("fixed", fixed))}  # fmt: skip
            for name, each in unequal.items():
                counts[name] += len(each)
            ratios = " ".join(f"{k}: {fixed['us'][k] / plain['us'][k]:.2f}" for k in plain["us"])
            size = "x".join(map(str, plain["size"]))
            line = f"{','.join(unequal['plain']) or '-'} | {','.join(unequal['fixed']) or '-'}"
            print(f"{shape:14}{plain['weight']:18}{size:>14}  {line}   time fixed/plain {ratios}")
    num = sum(len(each["unequal"]) for shape in arguments.shapes for each in found["plain"][shape])
    print(f"unequal: plain {counts['plain']} of {num}, fixed {counts['fixed']} of {num}")
    publish(
        name="batch_invariance",
        unit="share of batches with equal bits, fixed settings",
        ours=1 - counts["fixed"] / num,
        peers={"torch as it starts": 1 - counts["plain"] / num},
        device="cuda",
        details=found,
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
