"""Resident memory of a long run of tiny steps, and what holds it.

Trains the pocket model for `--steps` steps of `--batch-size` x `--group-size` rollouts and, every `--interval` steps,
notes the resident set, what malloc holds in use and free, Arrow's pool, and the number of Python objects. With `--trim`
free memory goes back to the system before each note, so what is left is in use; with `--trace` the Python lines that
hold more than at the first note are listed. Writes JSON.

    python benchmarks/memory.py --steps 2000 --out results/memory_cpu.json
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import tempfile
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa

from tunesmith import AlgorithmConfig, DatasetConfig, JudgeOutput, TunerModelConfig, WorkflowOutput, tune
from tunesmith.model.prepare import prepare_model

MIB = 2**20
LIBC = ctypes.CDLL(None)


class MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


class Probe:
    """Counts judged rollouts, and so steps; notes memory every `interval` steps."""

    def __init__(self, *, rollouts_a_step: int, interval: int, is_trimmed: bool, is_traced: bool) -> None:
        self.rollouts_a_step, self.interval = rollouts_a_step, interval
        self.is_trimmed, self.is_traced = is_trimmed, is_traced
        self.num_judged = 0
        self.notes: list[dict[str, float]] = []
        self.first_objects: Counter[str] = Counter()
        self.first_trace: tracemalloc.Snapshot | None = None

    async def judge(self, task: dict, response: str) -> JudgeOutput:
        self.num_judged += 1
        step, rest = divmod(self.num_judged, self.rollouts_a_step)
        if rest == 0 and step % self.interval == 0:
            self.note(step)
        return JudgeOutput(reward=float(sum(map(ord, response)) % 7))

    def note(self, step: int) -> None:
        gc.collect()
        if self.is_trimmed:
            LIBC.malloc_trim(0)
        LIBC.mallinfo2.restype = MallocInfo
        info = LIBC.mallinfo2()
        self.notes.append(
            {
                "step": step,
                "rss_mib": read_rss_mib(),
                "malloc_in_use_mib": (info.uordblks + info.hblkhd) / MIB,
                "malloc_free_mib": info.fordblks / MIB,
                "arrow_mib": pa.total_allocated_bytes() / MIB,
                "num_objects": len(gc.get_objects()),
            }
        )
        print(self.notes[-1], flush=True)
        objects = Counter(type(each).__qualname__ for each in gc.get_objects())
        if not self.first_objects:
            self.first_objects = objects
        self.last_objects = objects
        if self.is_traced and self.first_trace is None and len(self.notes) > 1:
            self.first_trace = tracemalloc.take_snapshot()

    def compare_traces(self, num_lines: int = 25) -> list[str]:
        if self.first_trace is None:
            return []
        differences = tracemalloc.take_snapshot().compare_to(self.first_trace, "lineno")
        return [str(each) for each in differences[:num_lines]]


def read_rss_mib() -> float:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024


async def ask(task: dict, model: Any) -> WorkflowOutput:
    answer = await model([{"role": "user", "content": task["question"]}])
    if isinstance(answer, dict):  # AgentScope's ChatResponse
        return WorkflowOutput(response="".join(block["text"] for block in answer["content"]))
    return WorkflowOutput(response=answer.choices[0].message.content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--interval", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--chat-model", default="openai")
    parser.add_argument("--trackers", nargs="*", default=["tensorboard"])
    parser.add_argument("--trim", action="store_true")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--set", nargs="*", default=[], dest="overrides")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.trace:
        tracemalloc.start(4)
    probe = Probe(
        rollouts_a_step=options.batch_size * options.group_size,
        interval=options.interval,
        is_trimmed=options.trim,
        is_traced=options.trace,
    )
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        rows = [{"question": f"Tom has {n} apples. How many?", "answer": str(n)} for n in range(64)]
        (place / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        tune(
            workflow_func=ask,
            judge_func=probe.judge,
            train_dataset=DatasetConfig(path=str(place), total_steps=options.steps),
            model=TunerModelConfig(
                model_path=str(prepare_model("pocket", place / "pocket")), max_model_len=128, max_tokens=8
            ),
            algorithm=AlgorithmConfig(group_size=options.group_size, batch_size=options.batch_size, learning_rate=1e-6),
            experiment_name="memory",
            overrides=(
                f"checkpoint_root_dir={place}",
                "model.device=cpu",
                "engine.kv_cache_tokens=4096",
                f"rollout.chat_model={options.chat_model}",
                f"monitor.trackers={json.dumps(options.trackers)}",
                "monitor.log_interval_steps=100",
                f"save_interval_steps={options.steps}",
                *options.overrides,
            ),
        )
    result = {
        "settings": {key: value for key, value in vars(options).items() if key != "out"},
        "notes": probe.notes,
        "grown_objects": dict((probe.last_objects - probe.first_objects).most_common(20)),
        "grown_lines": probe.compare_traces(),
    }
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("grown_objects", "grown_lines")}, indent=1))


if __name__ == "__main__":
    main()
