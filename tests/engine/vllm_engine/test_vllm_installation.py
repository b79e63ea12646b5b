"""Checks before weights load: whether vLLM is installed in a version that the engine knows, and what it can run on."""

from __future__ import annotations

import json
import sys
from importlib import metadata

import pytest
from pydantic import ValidationError
from transformers import LlamaConfig

from tunesmith.cluster.rank_info import RankInfo
from tunesmith.config import ClusterSection, EngineSection, LoraSection, ModelSection, RunConfig
from tunesmith.engine.vllm import support
from tunesmith.engine.vllm.process import VllmProcess, explain_log
from tunesmith.errors import ConfigError
from tunesmith.runs.placement import check_workers
from tunesmith.runs.policy import check_engine

CPU = ModelSection(path="x", max_model_len=64, device="cpu")


def set_version(monkeypatch, version):
    def find(name):
        if version is None or name != "vllm":
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(support.metadata, "version", find)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, r"engine.kind=vllm needs the package vllm: pip install 'tunesmith\[vllm\]'"),
        ("0.20.2", "engine.kind=vllm has vLLM 0.20.2, and the engine supports 0.26 to 0.33"),
        ("1.0.0", "has vLLM 1.0.0"),
    ],
)
def test_a_missing_or_unknown_vllm_is_refused(monkeypatch, version, message):
    set_version(monkeypatch, version)
    with pytest.raises(ConfigError, match=message):
        check_engine(EngineSection(kind="vllm"), CPU)


def test_a_known_vllm_passes(monkeypatch, tmp_path):
    set_version(monkeypatch, "0.26.0")
    LlamaConfig().save_pretrained(tmp_path)
    check_engine(EngineSection(kind="vllm"), CPU.model_copy(update={"path": str(tmp_path)}))


def test_an_interpreter_without_vllm_is_refused(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(ConfigError, match=r"engine.vllm.python='.*' needs the package vllm"):
        check_engine(EngineSection(kind="vllm", vllm={"python": str(python)}), CPU)
    with pytest.raises(ConfigError, match=r"engine.vllm.python='/no/such' cannot be run"):
        check_engine(EngineSection(kind="vllm", vllm={"python": "/no/such"}), CPU)


@pytest.mark.parametrize(
    ("engine", "model", "message"),
    [
        ({"tensor_parallel_size": 2}, {}, "choose GPUs, and model.device is the CPU"),
        ({"vllm": {"has_seeds": True}}, {}, "engine.vllm.has_seeds needs GPUs"),
        ({}, {"temperature": 0.001}, "engine.kind=vllm does not support a temperature between 0 and 0.01"),
        ({}, {"lora": LoraSection(quantization="nf4")}, "cannot merge an adapter into nf4 weights"),
    ],
)
def test_what_cannot_run_here_is_refused(monkeypatch, engine, model, message):
    set_version(monkeypatch, "0.26.0")
    with pytest.raises(ConfigError, match=message):
        check_engine(EngineSection(kind="vllm", **engine), CPU.model_copy(update=model))


def test_routing_replay_is_refused():
    config = {"model": {"path": "x", "max_model_len": 64}, "engine": {"kind": "vllm"}}
    with pytest.raises(
        ValidationError, match="trainer.routing_replay needs engine.kind=tunesmith: vLLM returns no exp"
    ):
        RunConfig.model_validate(config | {"trainer": {"routing_replay": True}})


def test_branching_is_refused():
    rollout = {"branching": {"initial_rollouts": 2}}
    config = {"model": {"path": "x", "max_model_len": 64}, "engine": {"kind": "vllm"}, "rollout": rollout}
    with pytest.raises(ValidationError, match="rollout.branching needs entropies"):
        RunConfig.model_validate(config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 has no effect with kind=tunesmith"),
        ({"vllm": {"has_eager": True}}, "vllm has no effect with kind=tunesmith"),
        ({"kind": "vllm", "page_size": 8}, "page_size=8 has no effect with kind=vllm"),
        ({"kind": "vllm", "weight_format": "fp8"}, "weight_format=fp8 has no effect with kind=vllm"),
        ({"kind": "vllm", "kv_cache_tokens": 100}, "kv_cache_tokens=100 has no effect with kind=vllm"),
        ({"kind": "vllm", "vllm": {"devices": [0, 1]}}, "vllm.devices lists 2 GPUs, and tensor_parallel_size=1"),
    ],
)
def test_knobs_of_the_other_engine_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        EngineSection(**settings)


def test_the_engine_of_an_auxiliary_model_is_in_this_process():
    section = EngineSection(kind="vllm", tensor_parallel_size=2, max_num_seqs=7, vllm={"gpu_memory_share": 0.9})
    assert section.for_auxiliary() == EngineSection(max_num_seqs=7)


def test_vllm_is_a_separate_sampler_whose_correction_may_be_set():
    config = {"model": {"path": "x", "max_model_len": 64}, "algorithm": {"correction": {"cap": 3.0}}}
    with pytest.raises(ValidationError, match="algorithm.correction.cap=3 has no effect"):
        RunConfig.model_validate(config)
    assert RunConfig.model_validate(config | {"engine": {"kind": "vllm"}}).engine.has_separate_sampler


def test_ranks_do_not_share_a_split_vllm():
    config = RunConfig.model_validate(
        {"model": {"path": "x", "max_model_len": 64}, "engine": {"kind": "vllm", "tensor_parallel_size": 2}}
    )
    place = RankInfo(rank=0, world_size=2, local_rank=0, local_size=2)
    with pytest.raises(ConfigError, match="with 2 ranks each has a vLLM of its own"):
        check_workers(config, place)
    check_workers(config.model_copy(update={"cluster": ClusterSection(has_sharded_weights=True)}), place)


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("a\nValueError: No available memory for the cache blocks. Try\nb", "raise engine.vllm.gpu_memory_share"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried", "lower engine.vllm.gpu_memory_share"),
        ("RuntimeError: [Errno 98] Address already in use", "another process took a port"),
        ("KeyError: 1\nRuntimeError: See root cause above.", "KeyError: 1"),
        ("", "its log is empty"),
    ],
)
def test_the_log_names_the_cause(log, expected):
    assert expected in explain_log(log)


def test_ranks_of_vllm_do_not_join_those_of_training(tmp_path, monkeypatch):
    server = tmp_path / "server.py"
    server.write_text(
        "import json, os, pathlib\n"
        "pathlib.Path(__file__).with_suffix('.json').write_text(json.dumps(dict(os.environ)))\n"
    )
    for name in ("RANK", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "1")
    process = VllmProcess(tmp_path, {}, python=None, devices=None, server=server)
    process.has_failed = True  # keeps the folder
    process.stop()
    found = json.loads(server.with_suffix(".json").read_text())
    assert not found.keys() & {"RANK", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"}
    assert "VLLM_NO_USAGE_STATS" in found
