"""Work of the host while the device computes: once a step, and garbage collected at that moment."""

from __future__ import annotations

import gc

import pytest
import torch
from test_gradients import build_samples
from test_trainer import build_trainer, score

from trainable_models import build_trainable
from tunesmith import garbage
from tunesmith.errors import TrainingError
from tunesmith.garbage import frozen_objects
from tunesmith.trainer.sharding.sharded_adamw import COMMUNICATION, WAITING, CollectiveTimes
from tunesmith.trainer.trainer import FREEZE_CALL, FULL_INTERVAL, HostWork


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_work_beside_the_device_is_done_once_before_the_first_update(num_minibatches):
    model = build_trainable(dtype=torch.float32)
    trainer, samples, calls = build_trainer(model, num_minibatches=num_minibatches), score(model, build_samples()), []
    before = model.get_input_embeddings().weight.clone()
    embeddings = model.get_input_embeddings().weight
    pieces = [lambda number=number: calls.append((number, bool((embeddings == before).all()))) for number in range(9)]
    trainer.step(samples, host_work=pieces)
    assert calls == [(number, True) for number in range(9)], "more pieces than rows"
    calls.clear()
    trainer.step([], host_work=pieces[:2])
    assert calls == [(0, False), (1, False)], "also in a step without samples"


def test_pieces_of_work_are_spread_over_rows():
    model, seen = build_trainable(dtype=torch.float32), []
    trainer = build_trainer(model, max_tokens_per_row=8)

    def note() -> None:
        gradient = next(parameter.grad for parameter in model.parameters())
        seen.append(float(gradient.norm()))

    trainer.step(score(model, build_samples()), host_work=[note, note])
    assert len(set(seen)) == 2, "a row was added in between"


def test_an_error_of_the_work_beside_the_device_is_that_of_the_step():
    def fail() -> None:
        raise TrainingError("a rank has ended")

    model = build_trainable(dtype=torch.float32)
    with pytest.raises(TrainingError, match="a rank has ended"):
        build_trainer(model).step(score(model, build_samples()), host_work=[fail])


@pytest.fixture
def collections(monkeypatch):
    """Generations that were collected; no objects are frozen."""
    monkeypatch.setattr(garbage, "_frozen_by", set())
    seen: list[int] = []
    num_frozen = gc.get_freeze_count()
    gc.unfreeze()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            seen.append(info["generation"])

    gc.disable()
    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)
    if num_frozen:
        gc.freeze()
    else:
        gc.unfreeze()
    gc.enable()


def test_all_generations_are_collected_at_times_and_objects_of_the_start_are_exempt(collections):
    with frozen_objects():
        num_frozen, work = gc.get_freeze_count(), HostWork(torch.device("cpu"))
        kept = [[] for _ in range(1000)]
        for call in range(1, FULL_INTERVAL + 1):
            work.collect_garbage()
            if call <= FREEZE_CALL:  # later, frozen objects may have been freed
                assert (gc.get_freeze_count() > num_frozen) == (call == FREEZE_CALL)
    full = [call for call, generation in enumerate(collections, start=1) if generation == 2]
    assert full == [FREEZE_CALL, FULL_INTERVAL] and len(collections) == FULL_INTERVAL
    assert len(kept) == 1000


def test_the_collector_is_left_alone_where_it_would_read_the_objects_of_libraries(collections):
    HostWork(torch.device("cpu")).collect_garbage()
    work = HostWork(torch.device("cpu"))
    with frozen_objects():
        work.begin([])
        work.finish()
    assert collections == [], "on a CPU nothing hides it"


class Event:
    """A CUDA event whose work has ended, or not yet."""

    def __init__(self, seconds: float, *, has_ended: bool = True) -> None:
        self.seconds, self.has_ended = seconds, has_ended

    def query(self) -> bool:
        return self.has_ended

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.seconds - self.seconds)


def test_an_interval_that_has_not_ended_on_the_device_is_reported_later(monkeypatch):
    times, last = CollectiveTimes("cuda"), Event(7.0, has_ended=False)
    marks = iter([Event(1.0), Event(2.5), Event(4.0), last])
    monkeypatch.setattr(times, "_mark", lambda: next(marks))
    with times.measured(WAITING):
        pass
    with times.measured(COMMUNICATION):
        pass
    assert times.take() == {"perf/train_wait_s": 1.5, "perf/communication_s": 0.0}
    assert times.take() == {"perf/train_wait_s": 0.0, "perf/communication_s": 0.0}
    last.has_ended = True
    assert times.take() == {"perf/train_wait_s": 0.0, "perf/communication_s": 3.0}
