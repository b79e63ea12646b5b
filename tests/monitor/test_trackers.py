"""W&B, MLflow and SwanLab in local mode: logged metrics are read back from their own files."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import struct
import subprocess
import sys

import pytest

from tunesmith.config import MonitorSection
from tunesmith.errors import ConfigError
from tunesmith.monitor.metrics_file import load_metrics
from tunesmith.monitor.monitor import Monitor
from tunesmith.monitor.tracker import EXTRAS, check_trackers
from tunesmith.storage import RunPaths

METRICS = {"rollout/reward_mean": 0.25, "eval/test/pass@4": 0.75, "train/loss": -0.5}
SETTINGS_AS_TEXT = {"model.path": "pocket", "seed": "7", "auxiliary_models": "{}"}
SETTINGS = {"model": {"path": "pocket"}, "seed": 7, "auxiliary_models": {}}


def run(root, steps, trackers, *, committed_step=None, error=None):
    settings = MonitorSection(trackers=trackers, has_progress=False)
    with Monitor(
        root, settings, total_steps=9, committed_step=committed_step, run_settings=SETTINGS, stream=io.StringIO()
    ) as monitor:
        for step in steps:
            monitor.log(step, "train", {name: value + step for name, value in METRICS.items()})
        if error is not None:
            raise error


def load_id(root, name):
    return RunPaths(root).tracker_id(name).read_text().strip()


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "project" / "name"


def expected_at(*steps):
    return {(name, step): value + step for step in steps for name, value in METRICS.items()}


@pytest.mark.parametrize("name", EXTRAS)
def test_a_missing_tracker_package_is_an_error_that_names_its_extra(monkeypatch, name):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda each: None if each == name else find(each))
    check_trackers(["tensorboard"])
    with pytest.raises(ConfigError, match=rf"pip install 'tunesmith\[{name}\]'"):
        check_trackers(["tensorboard", name])


def test_a_missing_tracker_package_stops_a_run_before_its_model_loads(tmp_path, pocket_folder, monkeypatch):
    from tunesmith.commands.tune.plan import build_plan
    from tunesmith.config import RunConfig

    (tmp_path / "train.jsonl").write_text('{"question": "1 + 1?"}\n')
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find(name))
    values = {
        "model": {"path": pocket_folder, "max_model_len": 64},
        "train_dataset": {"path": str(tmp_path)},
        "algorithm": {"batch_size": 1},
    }
    build_plan(RunConfig.model_validate(values))
    with pytest.raises(ConfigError, match=r"tunesmith\[wandb\]"):
        build_plan(RunConfig.model_validate(values | {"monitor": {"trackers": ["tensorboard", "wandb"]}}))


def read_wandb(root):
    """The id, project, name and settings of a run, and its values by name and step."""
    from wandb.proto.wandb_internal_pb2 import Record

    parts = []
    for path in sorted(RunPaths(root).monitor.glob("wandb/offline-run-*/*.wandb")):
        values, about = {}, None
        for data in read_leveldb_log(path.read_bytes()):
            record = Record.FromString(data)
            if record.HasField("run"):
                config = {each.key: json.loads(each.value_json) for each in record.run.config.update}
                about = about or (record.run.run_id, record.run.project, record.run.display_name, config)
            for item in record.history.item:
                name = item.key or item.nested_key[0]
                if not name.startswith("_"):
                    values[name, record.history.step.num] = json.loads(item.value_json)
        parts.append((about, values))
    return parts


def read_leveldb_log(data, *, block_size=32768, header=struct.Struct("<IHB")):
    """Records of a log as LevelDB writes it, after the file's own header of 7 bytes."""
    whole, last = 1, 4
    offset, record = 7, b""
    while offset + header.size <= len(data):
        left = block_size - offset % block_size
        if left < header.size:
            offset += left
            continue
        _, length, kind = header.unpack_from(data, offset)
        offset += header.size
        record += data[offset : offset + length]
        offset += length
        if kind in (whole, last):
            yield record
            record = b""


def test_wandb_offline_keeps_metric_names_and_a_resumed_run_keeps_its_id(root, monkeypatch):
    allow_wandb_offline(monkeypatch)
    run(root, [1, 2], ["wandb"])
    run(root, [2, 3], ["wandb"], committed_step=1)
    (first, before), (second, after) = read_wandb(root)
    assert first[:3] == second[:3] == (load_id(root, "wandb"), "project", "name")
    assert first[3] | SETTINGS_AS_TEXT == first[3]
    assert before == expected_at(1, 2)
    assert after == expected_at(2, 3)
    run(root, [1], ["wandb"])
    ids = {about[0] for about, _ in read_wandb(root)}
    assert len(ids) == 2 and ids == {first[0], load_id(root, "wandb")}, "a new run has a new id"


def forbid_wandb_login(monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    wandb.teardown()  # it reads its environment once


def allow_wandb_offline(monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()


def test_wandb_online_without_a_login_is_an_error(root, monkeypatch):
    forbid_wandb_login(monkeypatch)
    with pytest.raises(ConfigError, match=r"wandb cannot start.*WANDB_MODE=offline"):
        run(root, [1], ["wandb"])


@pytest.fixture(scope="module")
def mlflow_client(tmp_path_factory):
    mlflow = pytest.importorskip("mlflow")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'store.db'}")
        yield mlflow.MlflowClient()


def find_mlflow_run(client, root):
    return client.get_run(load_id(root, "mlflow"))


def read_mlflow(client, root):
    found = find_mlflow_run(client, root)
    return {
        name: [(each.step, each.value) for each in client.get_metric_history(found.info.run_id, name)]
        for name in found.data.metrics
    }


def test_mlflow_uses_a_local_store_and_a_resumed_run_shows_each_step_once(root, mlflow_client):
    run(root, [1, 2], ["mlflow"])
    begun = find_mlflow_run(mlflow_client, root)
    run(root, [2, 3], ["mlflow"], committed_step=1)
    found = find_mlflow_run(mlflow_client, root)
    assert found.info.run_id == begun.info.run_id
    assert (found.info.run_name, found.info.status) == ("name", "FINISHED")
    assert mlflow_client.get_experiment(found.info.experiment_id).name == "project"
    assert found.data.params == SETTINGS_AS_TEXT
    assert read_mlflow(mlflow_client, root) == {
        name.replace("@", "_at_"): [(step, value + step) for step in (1, 2, 3)] for name, value in METRICS.items()
    }


def test_mlflow_marks_a_failed_run(root, mlflow_client):
    with pytest.raises(RuntimeError):
        run(root, [1], ["mlflow"], error=RuntimeError("the run broke"))
    assert find_mlflow_run(mlflow_client, root).info.status == "FAILED"


def test_mlflow_resends_metrics_after_a_server_error(root, mlflow_client, monkeypatch, caplog):
    from mlflow import MlflowClient, MlflowException

    take, refusals = MlflowClient.log_batch, iter([True, False])

    def log_batch(self, *args, **kwargs):
        if "metrics" in kwargs and next(refusals, False):
            raise MlflowException("the server is away")
        return take(self, *args, **kwargs)

    monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
    run(root, [1, 2], ["mlflow"])
    assert "the server is away" in caplog.text
    assert [step for step, _ in read_mlflow(mlflow_client, root)["train/loss"]] == [1, 2]


def test_mlflow_without_its_server_is_an_error(root, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ConfigError, match=r"mlflow cannot start.*MLFLOW_TRACKING_URI"):
        run(root, [1], ["mlflow"])


def read_swanlab(root):
    """The id of an experiment, and its values by name and step."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    parts = []
    for path in sorted(RunPaths(root).monitor.glob("swanlab/run-*/*.swanlab")):
        records = [Record.FromString(data) for data in read_leveldb_log(path.read_bytes())]
        scalars = [record.scalar for record in records if record.HasField("scalar")]
        parts.append((path.stem.removeprefix("run-"), {(each.key, each.step): each.value.number for each in scalars}))
    return parts


@pytest.mark.parametrize("mode", ["local", "offline"])
def test_swanlab_keeps_metric_names_and_a_resumed_run_keeps_its_id(root, monkeypatch, mode):
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", mode)
    run(root, [1, 2], ["swanlab"])
    run(root, [2, 3], ["swanlab"], committed_step=1)
    parts = read_swanlab(root)
    assert {run_id for run_id, _ in parts} == {load_id(root, "swanlab")}
    assert sorted(parts[0][1].items()) == sorted(expected_at(1, 2).items())
    assert expected_at(2, 3).items() <= {key: value for _, part in parts for key, value in part.items()}.items()


def test_swanlab_online_without_a_login_is_an_error(root, monkeypatch):
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "online")
    monkeypatch.setenv("SWANLAB_INTERACTIVE", "false")
    monkeypatch.delenv("SWANLAB_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"swanlab cannot start.*SWANLAB_MODE=local"):
        run(root, [1], ["swanlab"])


def test_several_trackers_get_the_same_metrics(root, monkeypatch, mlflow_client):
    allow_wandb_offline(monkeypatch)
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    run(root, [1], ["tensorboard", "wandb", "mlflow", "swanlab"])
    (record,) = load_metrics(RunPaths(root).metrics)
    written = {(name, 1): value for name, value in record.items() if name in METRICS}
    assert list(RunPaths(root).tensorboard.iterdir())
    assert read_wandb(root)[0][1] == read_swanlab(root)[0][1] == written == expected_at(1)
    assert {name: values[0][1] for name, values in read_mlflow(mlflow_client, root).items()} == {
        name.replace("@", "_at_"): value for (name, _), value in written.items()
    }


def test_a_tracker_that_cannot_start_closes_the_others(root, monkeypatch, mlflow_client):
    forbid_wandb_login(monkeypatch)
    with pytest.raises(ConfigError, match="wandb cannot start"):
        run(root, [1], ["mlflow", "wandb"])
    assert find_mlflow_run(mlflow_client, root).info.status == "FAILED"


def test_non_finite_numbers_reach_trackers(root, mlflow_client):
    settings = MonitorSection(trackers=["mlflow"], has_progress=False)
    with Monitor(root, settings, total_steps=1, stream=io.StringIO()) as monitor:
        monitor.log(1, "train", {"train/loss": math.nan})
    ((_, value),) = read_mlflow(mlflow_client, root)["train/loss"]
    assert math.isnan(value)


def test_optional_trackers_are_imported_only_when_configured(tmp_path):
    code = (
        "import sys, tunesmith.monitor.monitor; "
        "sys.exit(sorted({'wandb', 'mlflow', 'swanlab'} & sys.modules.keys()) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
