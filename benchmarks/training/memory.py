"""Resident memory of a long run of tiny steps, and what allocates it.

Trains the pocket model for `--steps` steps of `--batch-size` x `--group-size` rollouts. Every `--interval` steps it
records the resident set, the used and free memory of malloc, Arrow's pool, and the number of Python objects. With
`--trim` free memory is returned to the system before each record, so the rest is in use; with `--trace` the Python
lines whose allocations have grown since the first record are listed. Writes JSON.

    python -m benchmarks.training.memory --steps 2000 --out results/training/memory_cpu_equal.json
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import random
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
    """A judge that counts rollouts, and so steps, and records memory every `interval` steps."""

    def __init__(self, *, rollouts_per_step: int, interval: int, is_trimmed: bool, is_traced: bool) -> None:
        self.rollouts_per_step, self.interval = rollouts_per_step, interval
        self.is_trimmed, self.is_traced = is_trimmed, is_traced
        self.num_judged = 0
        self.records: list[dict[str, float]] = []
        self.first_objects: Counter[str] = Counter()
        self.first_trace: tracemalloc.Snapshot | None = None

    async def judge(self, task: dict, response: str) -> JudgeOutput:
        if task["split"] == "train":
            self.num_judged += 1
            step, rest = divmod(self.num_judged, self.rollouts_per_step)
            if rest == 0 and step % self.interval == 0:
                self.record(step)
        return JudgeOutput(reward=float(sum(map(ord, response)) % 7))

    def record(self, step: int) -> None:
        gc.collect()
        if self.is_trimmed:
            LIBC.malloc_trim(0)
        LIBC.mallinfo2.restype = MallocInfo
        info = LIBC.mallinfo2()
        self.records.append(
            {
                "step": step,
                "rss_mib": read_rss_mib(),
                "malloc_in_use_mib": (info.uordblks + info.hblkhd) / MIB,
                "malloc_free_mib": info.fordblks / MIB,
                "arrow_mib": pa.total_allocated_bytes() / MIB,
                "num_objects": len(gc.get_objects()),
            }
        )
        print(self.records[-1], flush=True)
        objects = Counter(type(each).__qualname__ for each in gc.get_objects())
        if not self.first_objects:
            self.first_objects = objects
        self.last_objects = objects
        if self.is_traced and self.first_trace is None and len(self.records) > 1:
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
    return WorkflowOutput(response=await get_text(model, [{"role": "user", "content": task["question"]}]))


async def converse(task: dict, model: Any) -> WorkflowOutput:
    """One to four turns with user messages of random lengths, so that shapes differ between steps."""
    rng = random.Random(task["question"])
    messages: list[dict[str, str]] = []
    text = ""
    for _ in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": task["question"] + " So?" * rng.randint(0, 20)})
        text = await get_text(model, messages)
        messages.append({"role": "assistant", "content": text})
    return WorkflowOutput(response=text)


async def get_text(model: Any, messages: list[dict[str, str]]) -> str:
    answer = await model(messages)
    if isinstance(answer, dict):  # AgentScope's ChatResponse
        return "".join(block["text"] for block in answer["content"])
    return str(answer.choices[0].message.content)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="training steps")
    parser.add_argument("--interval", type=int, default=50, help="steps between records")
    parser.add_argument("--batch-size", type=int, default=2, help="tasks per step")
    parser.add_argument("--group-size", type=int, default=4, help="rollouts per task")
    parser.add_argument("--chat-model", default="openai", help="as rollout.chat_model")
    parser.add_argument("--trackers", nargs="*", default=["tensorboard"], help="as monitor.trackers")
    parser.add_argument("--max-model-len", type=int, default=128, help="as model.max_model_len")
    parser.add_argument("--max-tokens", type=int, default=8, help="tokens per model call")
    parser.add_argument("--varied", action="store_true", help="one to four turns with messages of random lengths")
    parser.add_argument("--save-interval", type=int, help="steps between checkpoints and evaluations; default: none")
    parser.add_argument("--trim", action="store_true", help="return free memory before each record")
    parser.add_argument("--trace", action="store_true", help="list Python lines whose allocations grow")
    parser.add_argument("--set", nargs="*", default=[], dest="overrides", metavar="KEY=VALUE", help="override keys")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    return parser.parse_args()


def main() -> None:
    options = read_options()
    if options.trace:
        tracemalloc.start(4)
    probe = Probe(
        rollouts_per_step=options.batch_size * options.group_size,
        interval=options.interval,
        is_trimmed=options.trim,
        is_traced=options.trace,
    )
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for split in ("train", "test"):
            rows = [{"question": f"Tom has {n} apples. How many?", "split": split} for n in range(4096)]
            (place / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        save_interval = options.save_interval or options.steps
        tune(
            workflow_func=converse if options.varied else ask,
            judge_func=probe.judge,
            train_dataset=DatasetConfig(path=str(place), total_steps=options.steps),
            eval_dataset=DatasetConfig(path=str(place), split="test") if options.save_interval else None,
            model=TunerModelConfig(
                model_path=str(prepare_model("pocket", place / "pocket")),
                max_model_len=options.max_model_len,
                max_tokens=options.max_tokens,
            ),
            algorithm=AlgorithmConfig(group_size=options.group_size, batch_size=options.batch_size, learning_rate=1e-6),
            experiment_name="memory",
            overrides=(
                f"checkpoint_root_dir={place}",
                "model.device=cpu",
                "engine.kv_cache_tokens=65536",
                f"rollout.chat_model={options.chat_model}",
                f"monitor.trackers={json.dumps(options.trackers)}",
                "monitor.log_interval_steps=100",
                f"save_interval_steps={save_interval}",
                f"evaluation.interval_steps={save_interval}",
                "evaluation.max_tasks=16",
                "keep_checkpoints=1",
                "trainer.mismatch_stop=100",
                *options.overrides,
            ),
        )
    result = {
        "settings": {key: value for key, value in vars(options).items() if key != "out"},
        "notes": probe.records,
        "grown_objects": dict((probe.last_objects - probe.first_objects).most_common(20)),
        "grown_lines": probe.compare_traces(),
    }
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("grown_objects", "grown_lines")}, indent=1))


if __name__ == "__main__":
    main()
