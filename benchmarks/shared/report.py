"""Output of benchmarks: one JSON line to parse, and a result file with the environment."""

from __future__ import annotations

import argparse
import json
import lzma
import platform
import time
from collections.abc import Collection, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate", "tokenizers", "openai", "agentscope",
    "uvicorn", "httptools",
)  # fmt: skip


class TimeLimit:
    """Seconds from now on in which a benchmark begins further measurements."""

    def __init__(self, seconds: float) -> None:
        self.ends_at = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        return self.ends_at - time.monotonic()

    def has_room(self, name: str) -> bool:
        """Whether there is time left; prints what is left out."""
        if self.seconds_left <= 0:
            print(f"no time left for {name}", flush=True)
        return self.seconds_left > 0


def add_time_limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--limit-s", type=float, default=float("inf"), help="seconds after which no further measurement begins"
    )


def describe_environment(device: str) -> dict[str, Any]:
    """Versions and hardware, needed to reproduce the figures."""
    import torch

    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    hardware = platform.processor() or platform.machine()
    if device != "cpu":
        hardware = torch.cuda.get_device_name()
    elif Path("/proc/cpuinfo").exists():
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        hardware = names[0].split(":")[1].strip() if names else hardware
    return {
        "python": platform.python_version(),
        "versions": versions,
        "device": device,
        "hardware": hardware,
        "num_threads": torch.get_num_threads(),
    }


def publish(
    *, name: str, unit: str, ours: float, peers: Mapping[str, float], device: str, details: Any, out: str | None
) -> None:
    """Print the final JSON line and write it with the environment and details; higher figures are better."""
    ratio = ours / max(peers.values()) if peers and max(peers.values()) else None
    line = {"name": name, "unit": unit, "ours": ours, "peers": dict(peers), "ratio": ratio}
    if out is not None:
        save_record(out, line | {"environment": describe_environment(device), "details": details})
    print(json.dumps(line))


def save_record(out: str, record: Mapping[str, Any]) -> None:
    """Write a result file, and the folder that it is in."""
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def read_text(path: Path) -> str | None:
    """The text of a result, which may be compressed (`.xz`); None if there is none."""
    packed = path.with_name(f"{path.name}.xz")
    if packed.exists():
        return lzma.decompress(packed.read_bytes()).decode()
    return path.read_text() if path.exists() else None


def describe_settings(arguments: argparse.Namespace, *, hidden: Collection[str] = ()) -> dict[str, Any]:
    """The options of a run as its result file names them: without files of this machine, and without `hidden`."""
    left_out = {"out", "model", "worker", "run", *hidden}
    return {name: value for name, value in vars(arguments).items() if name not in left_out}
