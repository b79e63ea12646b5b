"""Decode attention over contexts of any lengths: microseconds per layer, and the share of the key-value floor.

The floor is the time to read each cached key and value once (with `--shared`, those of a common prefix once a group) at
the speed that a large copy reaches on this device. Keys and values are random; the blocks of a context lie anywhere in
the cache, and several copies of the batch alternate where one would fit the GPU's cache. Calls are replayed as a CUDA
graph, with the head norm and rotary embedding that models fuse into the kernel.

    python -m benchmarks.engine.decode_attention --heads 8x2x128 4x7x128 --batches 8x2048 64x4096 256x2048
    python -m benchmarks.engine.decode_attention --heads 8x2x128 --batches 128x7168 --shared 8x6144

The last lines are the table of docs/sampling.md. With `--limit-s` the file has what was measured until then.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.engine.rollout import measure_ceilings
from benchmarks.shared.report import TimeLimit, add_time_limit, publish

BLOCK_SIZE = 16
MIN_BYTES = 600e6
"""Read by the calls of a replay: ten times the cache of an H200."""
MAX_BYTES = 90e9
HEADS = ["8x1x128", "8x2x128", "4x7x128", "2x6x128", "8x4x64", "4x8x64", "4x2x256"]
BATCHES = [
    "8x256",
    "32x256",
    "256x256",
    "8x2048",
    "32x2048",
    "64x4096",
    "64x4096-8192",
    "256x2048",
    "8x32768",
    "64x32768",
]
REPLAYS = 7


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of a layer's attention."""

    num_kv_heads: int
    num_groups: int
    size: int

    @property
    def token_bytes(self) -> int:
        return 2 * 2 * self.num_kv_heads * self.size


class Batch:
    """Requests that decode one token each, in one layer."""

    def __init__(self, heads: Heads, lengths: NDArray[np.int64], *, group: int, num_shared: int) -> None:
        """Each `group` requests share their first `num_shared` tokens."""
        from tunesmith.model.kernels.prologue import Prologue  # needs Triton, which only CUDA machines have

        self.heads, self.lengths = heads, lengths
        num_rows, num_columns = len(lengths), int(lengths.max()) // BLOCK_SIZE + 2
        num_groups = -(-num_rows // group)
        num_read = int(lengths.sum()) - num_shared * (num_rows - num_groups)
        self.num_bytes = num_read * heads.token_bytes
        table_bytes = num_rows * num_columns * BLOCK_SIZE * heads.token_bytes
        num_layers = int(max(1, min(16, -(-MIN_BYTES // self.num_bytes), MAX_BYTES // table_bytes)))
        shape = (num_layers * num_rows * num_columns, heads.num_kv_heads, BLOCK_SIZE, heads.size)
        self.keys, self.values = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        for part in (*self.keys.split(2**14), *self.values.split(2**14)):
            part.normal_()
        self.tables = np.random.default_rng(0).permutation(shape[0]).astype(np.int32)
        self.tables = self.tables.reshape(num_layers, num_rows, num_columns)
        for first in range(0, num_rows, group):
            shared = slice(0, num_shared // BLOCK_SIZE)
            self.tables[:, first : first + group, shared] = self.tables[:, first : first + 1, shared]
        self.positions = torch.from_numpy(lengths).to("cuda")
        counts = (heads.num_kv_heads * heads.num_groups, heads.num_kv_heads, heads.num_kv_heads)
        merged = torch.randn(1, num_rows, sum(counts), heads.size, dtype=torch.bfloat16, device="cuda")
        self.query_key_value = merged.transpose(1, 2).split(counts, dim=1)
        angles = torch.randn(2, num_rows, heads.size, dtype=torch.bfloat16, device="cuda")
        weights = torch.rand(2, heads.size, dtype=torch.bfloat16, device="cuda")
        self.prologue = Prologue(
            cos_1TD=angles[:1], sin_1TD=angles[1:], query_norm_D=weights[0], key_norm_D=weights[1], epsilon=1e-6
        )

    def build_calls(self) -> tuple[str, list[Callable[[], Tensor]]]:
        """How the batch is divided, and the call of each layer."""
        from tunesmith.engine.cuda.decode_work import DecodeWork, Divider, get_num_sms
        from tunesmith.engine.cuda.kernels.paged_decode import list_items, run_paged_decode

        heads, num_sms = self.heads, get_num_sms(self.positions.device)
        divider = Divider(
            block_size=BLOCK_SIZE, num_kv_heads=heads.num_kv_heads, num_heads=heads.num_kv_heads * heads.num_groups,
            head_size=heads.size, num_sms=num_sms, window=0,
        )  # fmt: skip
        division = divider.divide(self.tables[0], self.lengths, num_steps=1)
        division_7S = np.zeros((7, len(self.lengths)), dtype=np.int32)
        division.fill(division_7S)
        work = DecodeWork.allocate(divider, division.kind, self.positions, torch.from_numpy(division_7S).to("cuda"))
        list_items(work)
        query, key, value = self.query_key_value

        def attend(table: Tensor) -> Tensor:
            return run_paged_decode(
                query, key, value, self.keys, self.values, table, self.positions, work.items_2WF, work.parts_2R2,
                0.1, 0, 0.0, None, self.prologue,
            )  # fmt: skip

        tables = [torch.from_numpy(table).to("cuda") for table in self.tables]
        return division.kind.name.lower(), [partial(attend, table) for table in tables]


def time_calls(calls: Sequence[Callable[[], Any]]) -> float:
    """Seconds of one call, the median of several replays of all."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    seconds = []
    for _ in range(REPLAYS):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        graph.replay()
        events[1].record()
        events[1].synchronize()
        seconds.append(events[0].elapsed_time(events[1]) / 1e3 / len(calls))
    return statistics.median(seconds[1:])


def draw_lengths(batch: str) -> NDArray[np.int64]:
    """Lengths of `64x4096`, or of `64x4096-8192`: uniform between the bounds."""
    count, _, bounds = batch.partition("x")
    low, _, high = bounds.partition("-")
    return np.random.default_rng(0).integers(int(low), int(high or low) + 1, int(count))


def print_table(rows: Sequence[dict[str, Any]], batches: Sequence[str]) -> None:
    """Microseconds of a layer, and the share of the floor: a line for each kind of heads."""
    cells = {(row["heads"], row["batch"]): row for row in rows}
    print("| " + " | ".join(["heads", *batches]) + " |\n" + "|---" * (1 + len(batches)) + "|")
    for name in dict.fromkeys(row["heads"] for row in rows):
        found = [cells.get((name, batch)) for batch in batches]
        texts = [f"{r['seconds'] * 1e6:,.1f} ({r['floor_s'] / r['seconds']:.0%})" if r else "" for r in found]
        print("| " + " | ".join([name, *texts]) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", default=HEADS, help="key-value heads x queries of each x head size")
    parser.add_argument("--batches", nargs="+", default=BATCHES, help="requests x tokens, or x a range of tokens")
    parser.add_argument("--shared", default="1x0", help="requests of a group x tokens that they share (1x0: none)")
    add_time_limit(parser)
    parser.add_argument("--out", help="JSON file for the result, results/engine/NAME.json")
    arguments = parser.parse_args()
    limit = TimeLimit(arguments.limit_s)
    ceilings = measure_ceilings("cuda")
    group, num_shared = map(int, arguments.shared.split("x"))
    rows: list[dict[str, Any]] = []
    print(f"copy: {ceilings.bytes_per_s / 1e12:.2f} TB/s")
    for name in arguments.heads:
        heads = Heads(*map(int, name.split("x")))
        for batch_name in arguments.batches:
            if not limit.has_room(f"{name}, {batch_name}"):
                continue
            batch = Batch(heads, draw_lengths(batch_name), group=group, num_shared=num_shared)
            kind, calls = batch.build_calls()
            seconds, floor_s = time_calls(calls), batch.num_bytes / ceilings.bytes_per_s
            rows.append({"heads": name, "batch": batch_name, "kind": kind, "seconds": seconds, "floor_s": floor_s})
            share = floor_s / seconds
            print(
                f"{name:<10}{batch_name:<14}{kind:<8}{seconds * 1e6:>9.1f} us{floor_s * 1e6:>9.1f} floor{share:>6.0%}",
                flush=True,
            )
            del batch, calls
    print_table(rows, arguments.batches)
    publish(
        name="decode_attention",
        unit="lowest share of the floor",
        ours=min(row["floor_s"] / row["seconds"] for row in rows),
        peers={},
        device="cuda",
        details={"shared": arguments.shared, "rows": rows, "bytes_per_s": ceilings.bytes_per_s},
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
