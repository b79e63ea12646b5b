"""Time and peak memory of generating worlds of several sizes, each in a process of its own.

python -m benchmarks.tasks.world --sizes 1000 100000 1000000 --out results/tasks/world.json
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from recipes.world import World, WorldConfig, generate


def measure(num_documents: int, num_train: int, num_test: int) -> dict[str, Any]:
    """One world written to a temporary folder, by this process."""
    import_mib = read_peak_mib()
    with tempfile.TemporaryDirectory() as folder:
        knobs = {"num_documents": num_documents, "num_train": num_train, "num_test": num_test}
        start, cpu = time.perf_counter(), time.process_time()
        figures = generate(Path(folder), **knobs)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
        sizes = {path.name: path.stat().st_size for path in sorted(Path(folder).iterdir())}
    world = World(config=WorldConfig(num_documents=num_documents, num_train=num_train, num_test=num_test))
    start = time.perf_counter()
    num_questions = sum(1 for _ in world.iter_questions("train"))
    question_seconds = time.perf_counter() - start
    start = time.perf_counter()
    for number in range(0, num_documents, num_documents // 100):
        world.build_document(number)
    return {
        **figures,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_seconds, 2),
        "documents_per_second": round(num_documents / seconds),
        "train_questions_per_second": round(num_questions / question_seconds),
        "peak_mib": round(read_peak_mib(), 1),
        "peak_mib_before": round(import_mib, 1),
        "bytes": sizes,
        "ms_to_rebuild_a_document": round((time.perf_counter() - start) * 10, 3),
    }


def read_peak_mib() -> float:
    """Peak resident memory of this process, in KiB on Linux; at least that of the process that started it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 100_000, 1_000_000])
    parser.add_argument("--num-train", type=int, default=5000)
    parser.add_argument("--num-test", type=int, default=500)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.sizes[0], arguments.num_train, arguments.num_test)))
        return
    rows = []
    for size in arguments.sizes:
        command = [sys.executable, "-m", "benchmarks.tasks.world", "--child", "--sizes", str(size)]
        command += ["--num-train", str(arguments.num_train), "--num-test", str(arguments.num_test)]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        print(json.dumps(rows[-1]), flush=True)
    if arguments.out:
        report = {"name": "world", "python": platform.python_version(), "machine": platform.machine(), "worlds": rows}
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
