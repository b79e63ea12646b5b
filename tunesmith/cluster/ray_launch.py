"""Run the ranks of a run as workers of Ray Train, on any hosts of a Ray cluster.

Ray places the workers, forwards their console, and restarts all of them when one dies; a rank then resumes from the
last checkpoint. Errors that a restart would meet again end the run at once.

Before workers start, one task on each host reports capacity, packages and paths. The function that runs there is sent
by value and needs only Python, so that a host without Tunesmith can say so.
"""

from __future__ import annotations

import importlib.metadata
import os
import pickle
import shutil
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tunesmith import errors
from tunesmith.cluster.ray_worker import ConsoleReader, FinalError, RayJob, add_line, run_worker
from tunesmith.errors import ConfigError, RankError, StorageError, TunesmithError, first_line
from tunesmith.storage import storage_errors

T = TypeVar("T")

OLDEST = (2, 60)
"""The oldest release of Ray whose Train is known to work."""
FORWARDED_PREFIXES = (
    "HF_", "TRANSFORMERS_", "TOKENIZERS_", "TUNESMITH_", "NCCL_", "GLOO_", "TORCH_", "WANDB_", "MLFLOW_", "SWANLAB_",
)  # fmt: skip
FORWARDED_SUFFIXES = ("_API_KEY", "_BASE_URL", "_TOKEN")
"""Variables of the launcher that workers receive if their host has not set them."""
TRAIN_SETTINGS = {
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # it would show each printed line twice
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
}
"""Variables of Ray Train, unless the user has set them."""
WAIT_S = 0.5
DEATHS = ("WorkerHealthCheckFailedError", "ActorDiedError", "RayActorError", "WorkerCrashedError", "NodeDiedError")
"""Errors of Ray in place of a worker's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayLaunch:
    """How a run is started on a Ray cluster."""

    num_workers: int
    max_restarts: int
    namespace: str | None
    device: str
    """The value of `model.device`."""
    root: Path
    """Folder of run folders; all hosts see it."""
    paths: Sequence[str]
    """Absolute paths that all hosts need."""


def launch_on_ray(launch: RayLaunch, work: Callable[[bool], T]) -> T:
    """Run `work(is_restart)` on every rank; returns the result of the first.

    Raises ConfigError or StorageError before workers start if the cluster cannot run it, the error of a rank, and
    RankError if workers died more than `max_restarts` times.
    """
    ray = import_ray()
    payload = pickle_work(ray, work)
    for name, value in TRAIN_SETTINGS.items():
        os.environ.setdefault(name, value)
    has_console = not ray.is_initialized()
    with connected(ray, launch.namespace), shared_folder(launch.root) as folder:
        has_gpus = choose_gpus(ray, launch.num_workers, device=launch.device)
        check_nodes(inspect_nodes(ray, [str(Path.cwd()), str(folder), *launch.paths]), list_versions())
        addresses = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        job = RayJob(
            work=payload,
            directory=str(Path.cwd()),
            environment=choose_variables(os.environ),
            import_paths=[str(Path(path).absolute()) for path in sys.path if path],
            shared_folder=str(folder),
            is_one_host=len(addresses) == 1,
            has_console=has_console,
        )
        trainer = build_trainer(job, launch, has_gpus=has_gpus)
        result: T = pickle.loads(fit(ray, trainer, launch.max_restarts, folder))
        return result


def import_ray() -> Any:
    """The module `ray`; raise ConfigError if it is absent or too old."""
    try:
        found = importlib.metadata.version("ray")
        import ray
        import ray.exceptions
        import ray.train
    except ImportError as error:
        raise ConfigError(
            f"cluster.launcher=ray needs Ray ({error}): install it with `pip install 'tunesmith[ray]'`"
        ) from error
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        raise ConfigError(
            f"Ray {found} is installed, and cluster.launcher=ray needs {OLDEST[0]}.{OLDEST[1]} or later: install it on "
            "all hosts with `pip install -U 'tunesmith[ray]'`"
        )
    return ray


def pickle_work(ray: Any, work: Callable[[bool], Any]) -> bytes:
    """The function for workers; functions and objects of the user's program go with it by value."""
    try:
        pickled: bytes = ray.cloudpickle.dumps(work)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise ConfigError(
            f"the functions and objects given to tune() cannot be sent to Ray's workers ({first_line(error)}): create "
            "clients, locks and open files inside of the workflow, or name functions as module:function"
        ) from error
    return pickled


def choose_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that workers receive."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(FORWARDED_PREFIXES) or name.endswith(FORWARDED_SUFFIXES)
    }


@contextmanager
def connected(ray: Any, namespace: str | None) -> Iterator[None]:
    """Connect to the cluster of this host, of RAY_ADDRESS, or to a new one on this host alone."""
    if ray.is_initialized():
        yield
        return
    variables = {"PYTHONPATH": os.environ["PYTHONPATH"]} if os.environ.get("PYTHONPATH") else {}
    try:
        ray.init(namespace=namespace, logging_level="ERROR", log_to_driver=False, runtime_env={"env_vars": variables})
    except (RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"cannot join the Ray cluster at {os.environ.get('RAY_ADDRESS', 'this host')} ({first_line(error)}): start "
            "it with `ray start --head`, with the same versions of Ray and Python on all hosts"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def shared_folder(root: Path) -> Iterator[Path]:
    """A folder of this launch, for what Ray Train saves; it is removed at the end."""
    folder = root / f".ray-{uuid.uuid4().hex[:12]}"
    with storage_errors(folder, "write"):
        folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def build_trainer(job: RayJob, launch: RayLaunch, *, has_gpus: bool) -> Any:
    """A trainer of Ray whose workers run the job."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig  # optional
    from ray.train.backend import Backend, BackendConfig
    from ray.train.v2.api.callback import UserCallback
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    class SharedDevices(Backend):
        """The ranks of a host see all of its GPUs, as under torchrun."""

        share_cuda_visible_devices = True

    class RankBackend(BackendConfig):
        @property
        def backend_cls(self) -> type:
            return SharedDevices

    class StopOnFinalErrors(UserCallback):
        """Ends the run without a restart; shows why it restarts after other errors."""

        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            if (final := find_final_error(worker_exceptions.values())) is not None:
                raise final
            causes = [describe_cause(rank, error) for rank, error in list_lost(worker_exceptions).items()]
            add_line(Path(job.shared_folder), f"tunesmith: {'; '.join(causes)}: all ranks are stopped")

    def run_rank() -> bytes | None:
        return run_worker(job)

    return DataParallelTrainer(
        run_rank,
        backend_config=RankBackend(),
        scaling_config=ScalingConfig(num_workers=launch.num_workers, use_gpu=has_gpus),
        run_config=RunConfig(
            name="train",
            storage_path=job.shared_folder,
            failure_config=FailureConfig(max_failures=launch.max_restarts),
            callbacks=[StopOnFinalErrors()],
        ),
    )


def fit(ray: Any, trainer: Any, max_restarts: int, folder: Path) -> bytes:
    """Train; in a thread, because Ray would replace this thread's handler of Ctrl-C."""
    outcome: Future[bytes] = Future()

    def run() -> None:
        try:
            outcome.set_result(trainer.fit().return_value)
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            outcome.set_exception(error)

    threading.Thread(target=run, name="ray-train", daemon=True).start()
    console = ConsoleReader(folder)
    try:
        while not wait([outcome], WAIT_S).done:
            console.show()
    finally:
        console.show()
    try:
        return outcome.result()
    except (ray.train.TrainingFailedError, ray.exceptions.RayError) as error:
        raise describe_failure(error, max_restarts) from error


def describe_failure(error: BaseException, max_restarts: int) -> TunesmithError:
    """The cause of a failed run as an error of ours."""
    workers: Mapping[int, BaseException] = getattr(error, "worker_failures", {})
    final = find_final_error([getattr(error, "controller_failure", error), *workers.values()])
    if final is not None:
        kind = getattr(errors, final.kind, ConfigError)
        found: TunesmithError = kind(final.message)
        return found
    advice = (
        f"it was restarted {max_restarts} times (cluster.max_restarts): to resume from the last checkpoint, repeat the "
        "command with --resume"
    )
    causes = [describe_cause(rank, each) for rank, each in list_lost(workers).items()]
    return RankError(f"{'; '.join(causes) or f'Ray could not run the workers ({first_line(error)})'}; {advice}")


def list_lost(workers: Mapping[int, BaseException]) -> dict[int, BaseException]:
    """Ranks that failed by themselves; all of them if each has only lost another."""
    own = {rank: each for rank, each in sorted(workers.items()) if not isinstance(unwrap(each), RankError)}
    return own or dict(sorted(workers.items()))


def describe_cause(rank: int, error: BaseException) -> str:
    """Why a rank failed, as part of a sentence."""
    cause = unwrap(error)
    if type(cause).__name__ in DEATHS:
        return f"the process of rank {rank} has died, by a signal or with its host"
    return f"rank {rank} failed ({type(cause).__name__}: {first_line(cause)})"


def find_final_error(found: Any) -> FinalError | None:
    """The first final error among those of workers."""
    return next((each for each in map(unwrap, found) if isinstance(each, FinalError)), None)


def unwrap(error: BaseException) -> BaseException:
    """The error that a worker raised; Ray Train wraps it to keep its traceback."""
    inner = getattr(error, "_base_exc", error)
    assert isinstance(inner, BaseException)
    return inner


PACKAGES = ("torch", "transformers", "peft")
"""Besides Tunesmith itself: packages whose version must be the same on all hosts."""
REPORT_TIMEOUT_S = 180.0
NOT_FOUND = "not installed"


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
    """The function that reports a host's name, the versions of its packages, and which paths it lacks; Ray sends it by
    value."""
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


def inspect_nodes(ray: Any, paths: Sequence[str]) -> list[dict[str, Any]]:
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
        each | {"host": f"{each['host']} ({node['NodeManagerAddress']})"}
        for each, node in zip(found, nodes, strict=True)
    ]


def check_nodes(reports: Sequence[Mapping[str, Any]], own: Mapping[str, str]) -> None:
    """Raise if a host has other packages than this one (`own`), or does not see a path."""
    for report in reports:
        differing = [
            f"{name} is {report['versions'].get(name)} on {report['host']} and {expected} here"
            for name, expected in own.items()
            if report["versions"].get(name) != expected
        ]
        if differing:
            raise ConfigError(f"{'; '.join(differing)}: install the same versions on all hosts of the Ray cluster")
        if report["missing"]:
            raise StorageError(
                f"{report['host']} does not have {', '.join(report['missing'])}: every host of the Ray cluster needs "
                "the same folders, for example on a shared file system"
            )


def list_versions() -> dict[str, str]:
    """Versions of the packages that must be the same everywhere, here."""
    versions: dict[str, str] = build_inspection([])()["versions"]
    return versions
