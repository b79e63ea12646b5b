"""The dispatcher: tasks in, finished groups out. It decides what runs; workers (`workers/`) run it.

Invariants:

- Every started group comes out exactly once: `collect` returns it, or its task runs again because it was dropped.
- No group older than `max_staleness` is trained: a group whose oldest token would be trained more than `max_staleness`
  steps after it was sampled is dropped before the step, while it runs by its worker, afterwards by whoever has it.
- The seed of a rollout follows from its task and its place in the run, never from a worker, another rollout or time.
- Groups come out in the order of their start.

`collect` starts as many groups as the step needs and, with `max_staleness` k, those of the next k steps; it waits until
as many as the step needs have finished. Without staleness these are all groups, so a step waits for its slowest
rollout; with it the others go on under the next weights. On each worker at most `max_concurrency` rollouts run at a
time.

A run with batch_size 2 and max_staleness 1, in which the second group of step 1 is slow:

    collect(2, step=1)   starts groups 0, 1, 2, 3; returns 0 and 2 as soon as they have finished
    collect(2, step=2)   starts groups 4, 5; returns 1 and 3, or 3 and 4 if 1 is still slow
    collect(2, step=3)   drops group 1, which has tokens of version 0, if it was not returned; its task is group 6

Which worker runs a group: by plan worker i modulo the number of workers runs group i; balanced, a group goes to the
worker with the fewest running ones, which gets another whenever it has finished one. The dispatcher waits for workers,
and workers wait for its messages. It never waits for an update: `pause` ends the sampling, and the step then trains.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from tunesmith.errors import RolloutError
from tunesmith.experience.batch import Batch
from tunesmith.experience.finished_group import FinishedGroup
from tunesmith.experience.replay import compute_staleness
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.branching.stats import BranchingStats
from tunesmith.rollout.cancellation import gather_all
from tunesmith.rollout.group import GroupRequest
from tunesmith.rollout.progress import RolloutProgress
from tunesmith.rollout.seeds import derive_seed
from tunesmith.rollout.statistics import check_failures, compute_baseline_metrics, compute_rollout_metrics
from tunesmith.rollout.workers.local import LocalWorker
from tunesmith.rollout.workers.worker import Worker, sum_counters
from tunesmith.tasks.selector import TaskFeed
from tunesmith.types import Group, RunAdvantage, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchPlan:
    """Which groups a run starts, and when."""

    seed: int
    group_size: int
    batch_size: int
    """Groups of a step."""
    total_steps: int
    max_staleness: int = 0
    baseline_sampling: Sampling | None = None
    """Sampling of one more rollout of each task, whose reward is the group's baseline; None makes no such rollout."""
    is_balanced: bool = False
    """As `rollout.assignment: balanced`."""
    max_concurrency: int = 1
    """Rollouts of a worker at a time, which bound the groups that it gets if groups are balanced."""


NO_TRAINING = DispatchPlan(seed=0, group_size=0, batch_size=0, total_steps=0)
"""Groups are evaluated only."""


class Dispatcher:
    """Hands groups to workers and collects them."""

    def __init__(
        self,
        workers: Sequence[Worker],
        feed: TaskFeed | None = None,
        plan: DispatchPlan = NO_TRAINING,
        *,
        send_weights: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`feed` and `plan`: of a training run; without them groups are evaluated only. `send_weights` sends the
        current weights to workers that sample on ranks of their own."""
        self._workers = workers
        self._given_feed = feed
        self._plan = plan
        self._send_weights = send_weights
        self._waiting: list[GroupRequest] = []
        """Groups that no worker has room for, in order."""
        self._index_of: dict[int, int] = {}
        """Groups in flight: index of the task among the training tasks, by number."""
        self._num_started = 0
        self._fair_share = 1
        self._sampled_version: int | None = None
        """Of the weights that all workers sample with; None while they are paused."""
        self._sent_version: int | None = None
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self._progress = RolloutProgress()
        self._counts = dict.fromkeys(("dropped_groups", "overtaking_groups", "requeued_tasks"), 0)
        self._weights_s = 0.0
        self._idle_at: dict[int, float] = {}
        """When a worker had finished its last group, by its index."""
        self._rollout_s = [0.0] * len(workers)
        self._exchange_s = 0.0

    @property
    def _feed(self) -> TaskFeed:
        assert self._given_feed is not None, "a dispatcher without tasks evaluates only"
        return self._given_feed

    @property
    def max_staleness(self) -> int:
        """Steps that a group may outlast."""
        return self._plan.max_staleness

    @property
    def num_in_flight(self) -> int:
        """Groups that run or wait, and finished ones that no step has taken."""
        return len(self._index_of)

    @property
    def _numbers_finished(self) -> list[int]:
        return sorted(number for worker in self._workers for number in worker.finished)

    async def collect(
        self, num_groups: int, *, step: int, round_index: int = 0, progress: RolloutProgress | None = None
    ) -> list[FinishedGroup]:
        """Wait until this many groups of step 1, 2, ... have finished; returns those that were started first.

        The step samples with version `step - 1`. `round_index` counts the earlier calls of the step, and `progress`
        collects the trajectories that finish.
        """
        await self._open(progress)
        # a later round of the step continues: resuming the engines again would empty their prefix caches
        if self._sampled_version != step - 1:
            self._requeue(await self._set_version(step - 1))
            self._sampled_version = step - 1
        requests = self._draw(num_groups, step=step, round_index=round_index)
        groups = await self._run(requests, num_groups)
        self._feed.add_selected([self._index_of.pop(each.number) for each in groups])
        oldest = min(self._index_of, default=self._num_started)
        self._counts["overtaking_groups"] += sum(each.number > oldest for each in groups)
        if self._plan.baseline_sampling is not None:
            groups = await self._add_baselines(groups, requests)
        return groups

    async def evaluate(
        self,
        requests: Sequence[GroupRequest],
        *,
        policy_version: int = 0,
        max_failure_rate: float = 1.0,
        progress: RolloutProgress | None = None,
    ) -> list[Group]:
        """Run groups that no step trains, while groups in flight wait; returns them in the order of the requests.

        They run on all workers by plan. What they count is not in `compute_metrics`. Raises a RolloutError if more than
        `max_failure_rate` of their rollouts failed.
        """
        await self._open(progress)
        await self.publish(policy_version)
        self._progress.num_expected = self._progress.num_done + sum(request.size for request in requests)
        # also where training groups go to whoever has room: an evaluation must not depend on which worker is faster
        parts = [requests[first :: len(self._workers)] for first in range(len(self._workers))]
        found = await gather_all(
            worker.evaluate(part, policy_version=policy_version)
            for worker, part in zip(self._workers, parts, strict=True)
            if part
        )
        # the workers have paused their engines, so the next step has to set the version even if it is the same
        self._sampled_version = None
        groups = [found[index % len(self._workers)][index // len(self._workers)] for index in range(len(requests))]
        check_failures(groups, max_failure_rate)
        return groups

    def pause(self) -> None:
        """Stop sampling on devices that also train."""
        for worker in self._workers:
            worker.pause()
        self._sampled_version = None

    async def publish(self, policy_version: int) -> None:
        """Let ranks that only sample have the current weights, which are of this version, and sample with them."""
        if self._send_weights is not None:
            self._requeue(await self._set_version(policy_version))

    async def check_failures(
        self, batch: Batch, finished: Sequence[FinishedGroup], progress: RolloutProgress, *, max_failure_rate: float
    ) -> None:
        """Raise a RolloutError if too many rollouts of a step failed; those of all ranks are then in `progress`."""
        try:
            check_failures(batch.collected, max_failure_rate=max_failure_rate)
        except RolloutError:
            for worker in self._workers:
                indices = [i for i, each in enumerate(finished) if not each.has_tokens and each.rank == worker.rank]
                found = await worker.fetch([finished[index].number for index in indices]) if indices else []
                groups = [finished[index].complete(group) for index, group in zip(indices, found, strict=True)]
                batch.complete(dict(zip(indices, groups, strict=True)))
                progress.finished += [run for group in groups for run in group.trajectories]
            raise

    async def compute_metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Metrics of the groups of a step, counters of all workers, and what happened to groups in flight, since the
        last call."""
        counted = [await worker.take_statistics() for worker in self._workers]
        metrics = compute_rollout_metrics(groups)
        for name, total in sum_counters(counted).items():
            metrics[name] = total / len(counted) if name.startswith("perf/") else total  # times as means
        if self._plan.baseline_sampling is not None:
            metrics |= compute_baseline_metrics(groups)
        branched = [each.branching for each in counted if each.branching is not None]
        if branched:
            stats = BranchingStats()
            for part in branched:
                stats.add(part)
            metrics |= stats.compute()
        if self._send_weights is not None:
            weights_s, self._weights_s = self._weights_s, 0.0
            metrics |= {"cluster/num_sampling_ranks": float(len(self._workers)), "perf/weights_s": weights_s}
        return metrics

    def compute_staleness(
        self, groups: Sequence[Group], advantages: Sequence[Sequence[RunAdvantage]], *, policy_version: int
    ) -> dict[str, float]:
        """The age of the tokens that a step trained, and what happened to groups in flight since the last call; nothing
        if groups never outlast a step."""
        if not self.max_staleness:
            return {}
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        numbers = counts | {"in_flight": self.num_in_flight, "waiting_groups": len(self._numbers_finished)}
        metrics = {f"staleness/num_{name}": float(number) for name, number in numbers.items()}
        return metrics | compute_staleness(groups, advantages, policy_version=policy_version)

    def compute_rate(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Sampled tokens per second of a step with these metrics."""
        seconds = metrics["perf/rollout_s"]
        if self._send_weights is not None:  # workers sample during the update too
            seconds += metrics["perf/train_s"]
        if self.max_staleness:  # the groups of the step may have been sampled in earlier ones
            num_tokens = metrics["engine/num_sampled_tokens"]
        else:
            num_tokens = metrics["rollout/num_sampled_tokens"] - metrics.get("rollout/num_inherited_tokens", 0.0)
        return {"perf/sampled_tokens_per_s": num_tokens / seconds}

    def take_times(self) -> dict[str, float]:
        """How long workers have waited for the slowest one, and the seconds of `collect` without any rollout, since the
        last call."""
        rollout_s, exchange_s = self._rollout_s, self._exchange_s
        self._rollout_s, self._exchange_s = [0.0] * len(self._workers), 0.0
        wait_s = max(rollout_s) - sum(rollout_s) / len(rollout_s)
        return {"perf/rollout_wait_s": wait_s, "perf/exchange_s": exchange_s}

    def state_dict(self) -> dict[str, Any]:
        """The tasks in flight, which run again when the run is resumed; their rollouts are not saved."""
        if not self.max_staleness:
            return {}
        indices = [self._index_of[number] for number in sorted(self._index_of)]
        return {"in_flight": {"num_started": self._num_started, "tasks": indices + self._feed.requeued}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.max_staleness:
            self._num_started = state["in_flight"]["num_started"]
            self._counts["requeued_tasks"] = len(state["in_flight"]["tasks"])
            self._feed.requeue(state["in_flight"]["tasks"])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> int:
        """Cancel what runs; returns the number of groups in flight that a resumed run starts again."""
        num_cancelled = self.num_in_flight if self.max_staleness else 0
        self._index_of.clear()
        self._waiting.clear()
        for worker in self._workers:
            await worker.close()
        return num_cancelled

    async def _open(self, progress: RolloutProgress | None) -> None:
        self._progress = progress or RolloutProgress()
        for worker in self._workers:
            await worker.open(self._progress, self._note_change)

    async def _set_version(self, policy_version: int) -> list[int]:
        """Let workers sample with this version; returns the numbers of the groups that were dropped."""
        started = time.perf_counter()
        is_sending = self._send_weights is not None and policy_version != self._sent_version
        # sending is a collective in which the workers take part once they have their message, so neither comes first
        work: list[Awaitable[Any]] = [worker.set_version(policy_version) for worker in self._workers]
        if is_sending:
            assert self._send_weights is not None
            work.append(self._send_weights())
        answers = await gather_all(work)
        if is_sending:
            self._sent_version = policy_version
            self._weights_s += time.perf_counter() - started
        return sorted(number for dropped in answers[: len(self._workers)] for number in dropped)

    def _draw(self, num_groups: int, *, step: int, round_index: int) -> list[GroupRequest]:
        """The groups to start, so that as many are in flight as this step and those after it may take."""
        plan = self._plan
        num_wanted = num_groups + min(plan.max_staleness, plan.total_steps - step) * plan.batch_size
        requests = []
        for position, index in enumerate(self._feed.draw(max(num_wanted - self.num_in_flight, 0))):
            number = self._num_started
            requests.append(
                GroupRequest(
                    number=number,
                    task=self._feed.tasks[index],
                    size=plan.group_size,
                    seed=(plan.seed, "in flight", number)
                    if plan.max_staleness
                    else (derive_seed(plan.seed, "refill", round_index) if round_index else plan.seed, step, position),
                )
            )
            self._index_of[number] = index
            self._num_started += 1
        return requests

    async def _run(self, requests: Sequence[GroupRequest], num_groups: int) -> list[FinishedGroup]:
        """Start groups, wait until `num_groups` have finished, started now or before, and take those."""
        started = time.perf_counter()
        self._idle_at.clear()
        self._waiting += requests
        # a worker that took more while others are busy would have them left over when those have finished
        self._fair_share = max((self._count_unfinished() or 1) // len(self._workers), 1)
        self._hand_out()
        size = requests[0].size if requests else self._plan.group_size
        self._progress.num_expected = self._progress.num_done + self._count_unfinished() * size
        await self._wait_until_finished(num_groups)
        numbers = self._numbers_finished[:num_groups]
        taken = [each for worker in self._workers for each in worker.take([n for n in numbers if n in worker.finished])]
        now = time.perf_counter()
        rollout_s = [self._idle_at.get(index, now) - started for index in range(len(self._workers))]
        self._rollout_s = [sum(pair) for pair in zip(self._rollout_s, rollout_s, strict=True)]
        self._exchange_s += now - started - max(rollout_s)
        return sorted(taken, key=lambda each: each.number)

    def _count_unfinished(self) -> int:
        return len(self._waiting) + sum(worker.num_running for worker in self._workers)

    async def _wait_until_finished(self, num_groups: int) -> None:
        """Wait for this many groups; with windows only at moments at which no worker is within one."""
        if len(self._numbers_finished) >= num_groups:
            return
        for worker in self._workers:
            worker.begin_window()
        try:
            while True:
                for worker in self._workers:
                    worker.raise_error()
                if self._error is not None:
                    raise self._error
                # which groups have finished within a window depends on time, at the ends of windows on seeds alone
                is_between = all(worker.window != "sampling" for worker in self._workers)
                if is_between and len(self._numbers_finished) >= num_groups:
                    return
                for worker in self._workers:
                    if is_between and worker.window == "waiting":
                        worker.begin_window()
                self._changed.clear()
                await self._changed.wait()
        finally:
            for worker in self._workers:
                worker.end_sampling()

    def _note_change(self) -> None:
        """A group has finished, a window has ended, or an error has occurred."""
        try:
            self._hand_out()
        except Exception as error:  # noqa: BLE001 - raised where `collect` waits
            self._error = error
        # the first moment counts: a worker that gets another group is taken out again by `_hand_out`
        for index, worker in enumerate(self._workers):
            if not worker.num_running:
                self._idle_at.setdefault(index, time.perf_counter())
        self._changed.set()

    def _hand_out(self) -> None:
        """Give workers the groups that they have room for, in order."""
        started: list[list[GroupRequest]] = [[] for _ in self._workers]
        while self._waiting:
            index = self._choose_worker(self._waiting[0], [len(each) for each in started])
            if index is None:
                break
            started[index].append(self._waiting.pop(0))
            self._idle_at.pop(index, None)
        for worker, requests in zip(self._workers, started, strict=True):
            if requests:
                worker.start(requests)

    def _choose_worker(self, request: GroupRequest, num_new: Sequence[int]) -> int | None:
        """The worker that runs a group; None: none has room. `num_new`: groups that each gets besides those it runs."""
        plan = self._plan
        if not plan.is_balanced:
            return request.index % len(self._workers)
        loads = [worker.num_running + new for worker, new in zip(self._workers, num_new, strict=True)]
        index = min(range(len(loads)), key=lambda each: (loads[each], each))
        num_groups = min(self._fair_share, -(-plan.max_concurrency // request.size))
        return index if loads[index] < num_groups else None

    async def _add_baselines(
        self, groups: Sequence[FinishedGroup], requests: Sequence[GroupRequest]
    ) -> list[FinishedGroup]:
        """Run one more rollout of each task, and set the groups' baseline rewards."""
        baselines = [
            replace(
                request,
                number=number,
                size=1,
                seed=(derive_seed(request.seed[0], "baseline"), *request.seed[1:]),
                sampling=self._plan.baseline_sampling,
                is_trained=False,
            )
            for number, request in enumerate(requests, start=self._num_started)
        ]
        self._num_started += len(baselines)
        found = await self._run(baselines, len(baselines))
        rewards = [each.group.trajectories[0].reward for each in found]
        return [
            replace(each, group=replace(each.group, baseline_reward=reward))
            for each, reward in zip(groups, rewards, strict=True)
        ]

    def _requeue(self, dropped: Sequence[int]) -> None:
        """Let the tasks of dropped groups run again."""
        if dropped:
            self._feed.requeue([self._index_of.pop(number) for number in dropped])
            self._counts["dropped_groups"] += len(dropped)


def build_evaluator(actors: Actors) -> Dispatcher:
    """A dispatcher that only evaluates, in this process."""
    return Dispatcher([LocalWorker(actors)])


def describe_requeued(feed: TaskFeed, *, num_shown: int = 5) -> str | None:
    """The console line of a resumed run whose last checkpoint had rollouts in flight; None if it had none."""
    names = [feed.tasks[index].task_id for index in feed.requeued]
    if not names:
        return None
    rest = f" and {len(names) - num_shown} more" if len(names) > num_shown else ""
    return f"{len(names)} groups in flight were dropped; their tasks run again: {', '.join(names[:num_shown])}{rest}"
