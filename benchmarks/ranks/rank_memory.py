"""GPU memory of training all weights of larger shapes on several GPUs, computed from what `ranks.py` measured on one.

Weights, gradients, masters and moments follow from the number of parameters and of ranks R, with sharded gradients:

    bytes = 2 N + 12 N / R + 4 (N - E) / R + 4 E,    E parameters of embeddings and head, whose gradients stay whole

The rest of what was measured is the KV cache, as large as `--kv-cache-gib` said, and activations with their work space.
These are scaled by layers x hidden size, which is how checkpointed activations grow; so the sums are estimates.

    python -m benchmarks.ranks.rank_memory results/ranks/ranks_cuda/qwen2.5-7b.json \\
        --out results/ranks/ranks_cuda/memory.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.shared.shapes import SHAPES, count_parameters

GIB = 2**30
CAPACITY_GIB = 139.8
"""Of an H200, as torch reports it."""
SPARE_GIB = 2
"""Left by the largest model, for the driver and NCCL."""


def compute_state_bytes(shape: str, num_gpus: int, num_layers: int | None = None) -> float:
    """Bytes a GPU of weights, gradients, masters and moments."""
    config, num_parameters = SHAPES[shape], count_parameters(shape, num_layers)
    ends = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    return (2 + 12 / num_gpus) * num_parameters + 4 * (num_parameters - ends) / num_gpus + 4 * ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="file that ranks.py wrote, with --kv-cache-gib and --checkpointing")
    parser.add_argument("--shapes", default="qwen2.5-7b,qwen2.5-14b,qwen2.5-32b", help="with commas")
    parser.add_argument("--gpus", default="2,4,8", help="numbers of GPUs, with commas")
    parser.add_argument("--out", type=Path, help="JSON file of the table")
    arguments = parser.parse_args()
    record = json.loads(arguments.result.read_text())
    settings, measured = record["arguments"], record["results"][-1]
    if settings["kv_cache_gib"] is None or not settings["checkpointing"]:
        parser.error(f"{arguments.result}: measure with --kv-cache-gib and --checkpointing")
    base, kv_cache = settings["shape"], settings["kv_cache_gib"]
    memory = max(rank["memory_gib"] for rank in measured["ranks"])
    activations = memory - kv_cache - compute_state_bytes(base, measured["num_ranks"]) / GIB
    print(f"measured {base} on {measured['num_ranks']} GPUs: {memory:.1f} GiB, of which activations {activations:.1f}")
    numbers, rows = [int(number) for number in arguments.gpus.split(",")], []
    print("| shape | parameters | " + " | ".join(f"{number} GPUs" for number in numbers) + " |")
    print("|---|---:|" + "---:|" * len(numbers))
    for shape in arguments.shapes.split(","):
        size, base_size = (SHAPES[each].num_hidden_layers * SHAPES[each].hidden_size for each in (shape, base))
        rest = kv_cache + activations * size / base_size
        total = {number: compute_state_bytes(shape, number) / GIB + rest for number in numbers}
        cells = [f"{gib:.0f}" if gib <= CAPACITY_GIB else f"({gib:.0f})" for gib in total.values()]
        print(f"| {shape} | {count_parameters(shape) / 1e9:.1f}e9 | " + " | ".join(cells) + " |")
        rows.append({"shape": shape, "gib": total, "activations_gib": activations * size / base_size})
    for layers in range(SHAPES[shape].num_hidden_layers, 0, -1):
        rest = kv_cache + activations * layers * SHAPES[shape].hidden_size / base_size
        gib = compute_state_bytes(shape, numbers[-1], layers) / GIB + rest
        if gib <= CAPACITY_GIB - SPARE_GIB:
            break
    parameters = count_parameters(shape, layers)
    largest = {"gpus": numbers[-1], "layers": layers, "parameters": parameters, "gib": gib}
    print(f"largest on {numbers[-1]} GPUs: {shape} with {layers} layers, {parameters / 1e9:.1f}e9, {gib:.0f} GiB")
    print(f"GiB of each GPU; in brackets: more than the {CAPACITY_GIB} of an H200")
    if arguments.out is not None:
        computed = {"measured_gib": memory, "kv_cache_gib": kv_cache, "capacity_gib": CAPACITY_GIB, "shapes": rows}
        computed["largest"] = largest
        arguments.out.write_text(json.dumps(computed, indent=1) + "\n")


if __name__ == "__main__":
    main()
