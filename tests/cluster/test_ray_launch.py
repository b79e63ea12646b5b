"""Checks before workers start on Ray, and what is said when they fail; Ray itself is not needed."""

from __future__ import annotations

import builtins
import importlib.metadata
from types import SimpleNamespace

import pytest

from tunesmith.cluster import ray_launch
from tunesmith.cluster.ray_launch import (
    check_nodes,
    choose_gpus,
    choose_variables,
    describe_failure,
    import_ray,
)
from tunesmith.cluster.ray_worker import ConsoleReader, FinalError, add_line, copied_console
from tunesmith.config import ClusterSection
from tunesmith.errors import ConfigError, DataError, RankError, StorageError

OWN = {"tunesmith": "0.1.0", "torch": "2.13.0"}


def build_cluster(**resources: float) -> SimpleNamespace:
    return SimpleNamespace(cluster_resources=lambda: resources)


@pytest.mark.parametrize(
    ("resources", "device", "has_gpus"),
    [({"CPU": 4.0}, "auto", False), ({"CPU": 4.0, "GPU": 4.0}, "auto", True), ({"CPU": 4.0, "GPU": 1.0}, "cpu", False)],
)
def test_workers_get_gpus_where_the_cluster_has_them(resources, device, has_gpus):
    assert choose_gpus(build_cluster(**resources), 4, device=device) is has_gpus


@pytest.mark.parametrize(
    ("resources", "device", "message"),
    [
        ({"CPU": 3.0}, "auto", "num_workers=4, but the Ray cluster has 3 CPUs"),
        ({"CPU": 8.0, "GPU": 2.0}, "auto", "num_workers=4, but the Ray cluster has 2 GPUs"),
        ({"CPU": 8.0}, "cuda", "num_workers=4, but the Ray cluster has 0 GPUs"),
    ],
)
def test_a_cluster_that_is_too_small_is_one_sentence(resources, device, message):
    with pytest.raises(ConfigError, match=message):
        choose_gpus(build_cluster(**resources), 4, device=device)


def report(**changes) -> dict:
    return {"host": "two (10.0.0.2)", "versions": OWN, "missing": []} | changes


def test_equal_hosts_are_accepted():
    check_nodes([report(), report()], OWN)


def test_a_host_with_another_package_is_named():
    with pytest.raises(
        ConfigError, match=r"torch is 2\.11\.0 on two \(10\.0\.0\.2\) and 2\.13\.0 here: install the same"
    ):
        check_nodes([report(), report(versions=OWN | {"torch": "2.11.0"})], OWN)


def test_a_path_that_a_host_does_not_see_is_named():
    with pytest.raises(StorageError, match=r"two \(10\.0\.0\.2\) does not have /data/train"):
        check_nodes([report(missing=["/data/train"])], OWN)


def test_ray_is_named_if_it_is_absent(monkeypatch):
    found = builtins.__import__

    def refuse(name, *arguments, **options):
        if name.partition(".")[0] == "ray":
            raise ImportError("No module named 'ray'")
        return found(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"pip install 'tunesmith\[ray\]'"):
        import_ray()


def test_an_old_ray_is_refused(monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.40.0")
    with pytest.raises(ConfigError, match=r"Ray 2\.40\.0 is installed.*2\.60 or later"):
        import_ray()


def test_workers_receive_keys_and_settings_of_libraries_only():
    found = choose_variables(
        {"HF_HOME": "/h", "OPENAI_API_KEY": "k", "PATH": "/bin", "RANK": "1", "NCCL_DEBUG": "INFO"}
    )
    assert found == {"HF_HOME": "/h", "OPENAI_API_KEY": "k", "NCCL_DEBUG": "INFO"}


class ActorDiedError(Exception):
    """As Ray's, by name."""


def failed(**workers: Exception) -> Exception:
    error = Exception("training failed")
    error.worker_failures = {int(name[1:]): each for name, each in workers.items()}
    return error


def test_the_cause_of_a_failed_run_is_the_rank_that_failed_by_itself():
    found = describe_failure(failed(r0=RankError("another rank"), r2=ActorDiedError("gone")), 3)
    assert isinstance(found, RankError)
    assert str(found).startswith(
        "the process of rank 2 has died, by a signal or with its host; it was restarted 3 times"
    )
    assert "rank 1 failed (KeyError: 'x')" in str(describe_failure(failed(r1=KeyError("x")), 0))


def test_a_final_error_keeps_its_class_and_message():
    found = describe_failure(failed(r0=FinalError("DataError", "no rows"), r1=RankError("another rank")), 3)
    assert isinstance(found, DataError) and str(found) == "no rows"


def test_the_console_of_the_first_rank_is_shown_once(tmp_path, capsys):
    reader = ConsoleReader(tmp_path)
    reader.show()
    with copied_console(tmp_path):
        print("step 1/2")
    add_line(tmp_path, "rank 1 has died")
    capsys.readouterr()
    reader.show()
    reader.show()
    assert capsys.readouterr().err == "step 1/2\nrank 1 has died\n"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"launcher": "ray"}, "needs cluster.num_workers"),
        ({"max_restarts": 2, "num_workers": 2}, "max_restarts=2 has no effect with launcher=torchrun"),
        ({"ray_namespace": "x"}, "ray_namespace=x has no effect with launcher=torchrun"),
    ],
)
def test_knobs_of_ray_are_refused_without_it(values, message):
    with pytest.raises(ValueError, match=message):
        ClusterSection(**values)


def test_restarts_are_three_unless_set():
    assert ClusterSection(launcher="ray", num_workers=2).num_restarts == 3
    assert ClusterSection(launcher="ray", num_workers=2, max_restarts=0).num_restarts == 0
    assert ray_launch.OLDEST == (2, 60)
