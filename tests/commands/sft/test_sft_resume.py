"""A killed supervised fine-tuning resumes to the same metrics and weights, bit for bit on a CPU."""

from __future__ import annotations

import functools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from conditions import wait_until
from conversation_examples import ROW
from killed_runs import Zygote, count_metrics, read_metrics
from small_pocket import write_small_pocket
from tunesmith.runs.record import RunRecord

WEIGHTS = {"full": "model.safetensors", "adapter": "adapter_model.safetensors"}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetune")
    write_small_pocket(folder / "pocket")
    rows = [
        ROW | {"messages": [*ROW["messages"][:4], {"role": "assistant", "content": f"{n} it is."}]} for n in range(16)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "model": {"path": "pocket", "max_model_len": 256, "device": "cpu"},
        "train_dataset": {"path": "rows.jsonl"},
        "eval_fraction": 0.2,
        "num_epochs": 2,
        "max_tokens_per_batch": 300,
        "evaluation_interval_steps": 3,
        "save_interval_steps": 2,
        "trainer": {"learning_rate": 3e-3, "warmup_steps": 2},
        "monitor": {"trackers": []},
    }
    (folder / "full.yaml").write_text(json.dumps(config))
    config["model"]["lora"] = {"r": 4, "dropout": 0.2}
    config["max_steps"] = 10
    (folder / "adapter.yaml").write_text(json.dumps(config))
    zygote = Zygote(folder)
    yield folder, zygote
    zygote.close()


KILLS: dict[str, tuple[Callable[[Path], bool], ...]] = {
    "full": (
        lambda run: run.exists(),
        lambda run: count_metrics(run) >= 1,
        lambda run: bool(list(run.glob("global_step_2*"))),
        lambda run: count_metrics(run) >= 5,
        lambda run: (run / "model").exists(),
    ),
    "adapter": (lambda run: count_metrics(run) >= 3,),
}
"""Points of a training, in their order, at which it is killed once: while the model loads, before the first checkpoint,
in the middle of one, between later ones, and while the model is written."""


@pytest.mark.parametrize("kind", KILLS)
def test_killed_runs_end_like_an_uninterrupted_one(workplace, kind):
    folder, zygote = workplace
    whole, killed = folder / f"{kind}-whole", folder / f"{kind}-killed"
    assert zygote.run(["sft", f"{kind}.yaml", "--out", whole.name]) == 0, (folder / "zygote.log").read_text()
    for is_reached in KILLS[kind]:
        zygote.kill(["sft", f"{kind}.yaml", "--out", killed.name], when=functools.partial(is_reached, killed))
    assert zygote.run(["sft", f"{kind}.yaml", "--out", killed.name]) == 0, (folder / "zygote.log").read_text()
    assert_same(whole, killed, WEIGHTS[kind])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_saves_the_step(workplace, number):
    folder, zygote = workplace
    whole, cut = folder / "full-whole", folder / f"cut-{number.name}"
    assert zygote.run(["sft", "full.yaml", "--out", whole.name]) == 0, (folder / "zygote.log").read_text()
    arguments = ["sft", "full.yaml", "--out", cut.name, "--set", "save_interval_steps=1000"]
    pid = zygote.start(arguments)
    wait_until(lambda: count_metrics(cut) >= 1, interval_s=0.001)
    os.kill(pid, number)
    printed = (folder / "zygote.log").read_text
    assert zygote.wait() in (128 + number, -number), printed()
    assert f"{number.name}: finishing and saving this step" in printed() and "repeat the command to resume" in printed()
    last_step = read_metrics(cut)[-1]["step"]
    assert (cut / f"global_step_{last_step}").exists() and RunRecord(cut).state == "interrupted"
    assert zygote.run(arguments) == 0
    assert_same(whole, cut, WEIGHTS["full"])


def test_checkpoints_by_time_change_nothing(workplace):
    folder, zygote = workplace
    whole, timed = folder / "full-whole", folder / "timed"
    assert zygote.run(["sft", "full.yaml", "--out", whole.name]) == 0, (folder / "zygote.log").read_text()
    arguments = ["sft", "full.yaml", "--out", timed.name, "--set", "save_interval_s=1e-9"]
    zygote.kill([*arguments, "--set", "save_interval_steps=1000"], when=lambda: (timed / "global_step_2").exists())
    assert zygote.run(arguments) == 0
    assert_same(whole, timed, WEIGHTS["full"])


def assert_same(whole, killed, weights):
    assert read_metrics(killed) == read_metrics(whole)
    one, other = (json.loads((run / "model" / "DONE.json").read_text())["figures"] for run in (whole, killed))
    assert one == other
    expected, found = (load_file(run / "model" / weights) for run in (whole, killed))
    assert expected.keys() == found.keys()
    assert all((expected[name] == found[name]).all() for name in expected)
    assert {path.name for path in killed.iterdir()} == {path.name for path in whole.iterdir()}
