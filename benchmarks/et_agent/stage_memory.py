"""GPU memory that is still allocated after each stage of a pipeline, in one process, and where it was allocated.

A small run of a recipe, or any other pipeline with `--set`:

    export MODEL=FOLDER LARGE=FOLDER GSM8K=gsm8k
    python -m benchmarks.et_agent.stage_memory recipes/et_agent/mathematics.yaml --set folder=/tmp/small \\
        --set stages.questions.args.num_train=60 --set variables.engine.kv_cache_gib=4

Each stage has the largest allocation while it ran, what is left before and after the pipeline releases memory, and the
lines of Tunesmith that allocated what is left, with the types of objects that refer to the largest tensors.
"""

from __future__ import annotations

import argparse
import gc
from collections import Counter
from typing import Any

import torch

from tunesmith import run_pipeline
from tunesmith.commands.run import run

GIB = 2**30
MIN_BYTES = 2**24
DEPTH = 6


def find_lines() -> Counter[str]:
    """Bytes of the allocated blocks of at least `MIN_BYTES` by the innermost lines of Tunesmith."""
    lines = Counter[str]()
    for segment in torch.cuda.memory._snapshot()["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and block["size"] >= MIN_BYTES:
                frames = [each for each in block.get("frames", ()) if "tunesmith" in each["filename"]]
                where = " < ".join(f"{each['filename'].rsplit('/', 1)[-1]}:{each['line']}" for each in frames[:4])
                lines[where or "elsewhere"] += block["size"]
    return lines


def describe_referrers(found: object, depth: int = DEPTH) -> str:
    """Types of objects that refer to the object, one chain."""
    names, seen = [type(found).__name__], {id(found)}
    for _ in range(depth):
        referrers = [
            each for each in gc.get_referrers(found) if id(each) not in seen and type(each).__name__ != "frame"
        ]
        if not referrers:
            break
        found = referrers[0]
        seen.add(id(found))
        keys = f"[{', '.join(map(str, list(found)[:3]))}]" if isinstance(found, dict) else ""
        names.append(type(found).__qualname__ + keys[:80])
    return " < ".join(names)


def watch_memory() -> None:
    """Print what each stage leaves."""
    names = vars(run)
    run_stage, release, kinds = names["run_stage"], names["release_memory"], list[str]()

    def named(kind: Any, *arguments: Any, **options: Any) -> Any:
        kinds.append(str(kind))
        torch.cuda.reset_peak_memory_stats()
        return run_stage(kind, *arguments, **options)

    def measured() -> None:
        before, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        release()
        after, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        left = f"allocated {before / GIB:.2f} -> {after / GIB:.2f} GiB, reserved {reserved / GIB:.2f}"
        print(f"after {kinds[-1]}: peak {peak / GIB:.2f} GiB, {left}", flush=True)
        for line, size in find_lines().most_common(8):
            print(f"   {size / GIB:.2f} GiB  {line}", flush=True)
        tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and each.is_cuda]
        for each in sorted(tensors, key=lambda tensor: -tensor.nbytes)[:3]:
            if each.nbytes >= MIN_BYTES:
                print(f"   {tuple(each.shape)} {describe_referrers(each)}", flush=True)

    names |= {"run_stage": named, "release_memory": measured}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", help="pipeline file")
    parser.add_argument("--set", action="append", default=[], help="change of the file, as in tunesmith run")
    arguments = parser.parse_args()
    torch.cuda.memory._record_memory_history(enabled="state", context="state", stacks="python")
    watch_memory()
    run_pipeline(arguments.pipeline, overrides=arguments.set)


if __name__ == "__main__":
    main()
