"""GPU memory that is still allocated after each stage of a pipeline, in one process.

A small run of a recipe, or any other pipeline with `--set`:

    export MODEL=FOLDER LARGE=FOLDER GSM8K=gsm8k
    python -m benchmarks.et_agent.stage_memory recipes/et_agent/mathematics.yaml --set folder=/tmp/small \\
        --set stages.questions.args.num_train=60 --set variables.engine.kv_cache_gib=4
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from tunesmith import run_pipeline
from tunesmith.commands.run import run

GIB = 2**30


def watch_memory() -> None:
    """Print what each stage leaves, before and after the pipeline releases memory."""
    names = vars(run)
    run_stage, release, kinds = names["run_stage"], names["release_memory"], list[str]()

    def named(kind: Any, *arguments: Any, **options: Any) -> Any:
        kinds.append(str(kind))
        return run_stage(kind, *arguments, **options)

    def measured() -> None:
        before = torch.cuda.memory_allocated()
        release()
        after, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        figures = f"allocated {before / GIB:.2f} -> {after / GIB:.2f} GiB, reserved {reserved / GIB:.2f}"
        print(f"after {kinds[-1]}: {figures}", flush=True)

    names |= {"run_stage": named, "release_memory": measured}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", help="pipeline file")
    parser.add_argument("--set", action="append", default=[], help="change of the file, as in tunesmith run")
    arguments = parser.parse_args()
    watch_memory()
    run_pipeline(arguments.pipeline, overrides=arguments.set)


if __name__ == "__main__":
    main()
