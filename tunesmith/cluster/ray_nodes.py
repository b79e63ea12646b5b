"""Checks of the hosts of a Ray cluster before workers start: capacity, packages, and paths.

One task on each host reports what it finds; the function that runs there is sent by value and needs only Python, so
that a host without Tunesmith can say so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunesmith.errors import ConfigError, StorageError

PACKAGES = ("torch", "transformers", "peft")
"""Besides Tunesmith itself: packages whose version must be the same on all hosts."""
REPORT_TIMEOUT_S = 180.0
NOT_FOUND = "not installed"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What a host has."""

    host: str
    versions: Mapping[str, str]
    missing_paths: Sequence[str]
    """Paths that exist where the run is started, and not here."""


def choose_gpus(ray: Any, num_workers: int, *, device: str) -> bool:
    """Whether workers get a GPU each; raise ConfigError if the cluster has too few GPUs, or CPUs without them.

    `device`: as `model.device`.
    """
    resources = ray.cluster_resources()
    num_gpus, num_cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    has_gpus = device != "cpu" and (num_gpus > 0 or device.startswith("cuda"))
    if has_gpus and num_gpus < num_workers:
        raise ConfigError(
            f"cluster.num_workers={num_workers}, but the Ray cluster has {num_gpus} GPUs: lower it, start Ray on more "
            "hosts, or set model.device=cpu"
        )
    if num_cpus < num_workers:
        raise ConfigError(
            f"cluster.num_workers={num_workers}, but the Ray cluster has {num_cpus} CPUs, and a worker takes one: "
            "lower it, or start Ray on more hosts (or with more --num-cpus)"
        )
    return has_gpus


def build_inspection(paths: Sequence[str]) -> Callable[[], dict[str, Any]]:
    """The function that reports on a host; Ray sends it by value."""
    packages, not_found = PACKAGES, NOT_FOUND

    def inspect() -> dict[str, Any]:  # sent by value: it must not use names of this module
        import socket
        from importlib.metadata import PackageNotFoundError, version
        from pathlib import Path

        versions = {}
        for name in packages:
            try:
                versions[name] = version(name)
            except PackageNotFoundError:
                versions[name] = not_found
        try:
            from tunesmith.version import __version__ as own
        except ImportError:
            own = not_found
        missing = [path for path in paths if not Path(path).exists()]
        return {"host": socket.gethostname(), "versions": {"tunesmith": own, **versions}, "missing": missing}

    return inspect


def inspect_nodes(ray: Any, paths: Sequence[str]) -> list[NodeReport]:
    """The reports of all hosts on which workers can run."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # optional

    nodes = [node for node in ray.nodes() if node["Alive"] and {"CPU", "GPU"} & node["Resources"].keys()]

    task = ray.remote(num_cpus=0, max_retries=0)(build_inspection(paths))
    pending = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote()
        for node in nodes
    ]
    try:
        found = ray.get(pending, timeout=REPORT_TIMEOUT_S)
    except ray.exceptions.RayError as error:
        raise ConfigError(
            f"a host of the Ray cluster does not answer ({first_line(error)}): `ray status` lists the hosts"
        ) from error
    return [
        NodeReport(
            host=f"{each['host']} ({node['NodeManagerAddress']})",
            versions=each["versions"],
            missing_paths=each["missing"],
        )
        for each, node in zip(found, nodes, strict=True)
    ]


def check_nodes(reports: Sequence[NodeReport], own: Mapping[str, str]) -> None:
    """Raise if a host has other packages than this one (`own`), or does not see a path."""
    for report in reports:
        differing = [
            f"{name} is {report.versions.get(name)} on {report.host} and {expected} here"
            for name, expected in own.items()
            if report.versions.get(name) != expected
        ]
        if differing:
            raise ConfigError(f"{'; '.join(differing)}: install the same versions on all hosts of the Ray cluster")
        if report.missing_paths:
            raise StorageError(
                f"{report.host} does not have {', '.join(report.missing_paths)}: every host of the Ray cluster needs "
                "the same folders, for example on a shared file system"
            )


def list_versions() -> dict[str, str]:
    """Versions of the packages that must be the same everywhere, here."""
    versions: dict[str, str] = build_inspection([])()["versions"]
    return versions


def first_line(error: BaseException) -> str:
    """The first line of a message that is not empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
