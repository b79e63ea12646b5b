"""One step of the engine: the scheduler's choice through the model, and what came out to the desk.

It computes a forward and waits for it: each request gets its next token. Where the device decodes blocks of tokens,
`tunesmith.engine.worker.async_step` takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence

from tunesmith.engine.core.output_processor import Call, Desk, find_first_stop
from tunesmith.engine.core.scheduler import Work
from tunesmith.engine.worker.model_runner import Runner


class TokenStepper:
    """A forward a step."""

    def __init__(self, runner: Runner, desk: Desk) -> None:
        self._runner = runner
        self._desk = desk

    @property
    def has_flight(self) -> bool:
        """Whether somebody waits for what the device was told to do."""
        return False

    def step(self) -> None:
        schedule = self._desk.scheduler.schedule()
        self._desk.note_schedule(schedule)
        if schedule.work:
            self._desk.counts["steps"] += 1
            self._run(schedule.work)

    def drain(self) -> None:
        """Read what is in flight."""

    def _run(self, work: Sequence[Work]) -> None:
        """Compute the work, and enter what it sampled."""
        sampling, draws = self._runner.run(work)
        self._desk.scheduler.commit(work)
        rows = zip(sampling, draws.token_ids, draws.logprobs, draws.is_finite, strict=True)
        for item, token_id, logprob, is_finite in rows:
            call = self._desk.calls[item.request.request_id]
            if is_finite:
                self._enter(call, [token_id], [logprob])
            else:
                self._fail(call)

    def _enter(self, call: Call, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Take the next tokens of a call up to the one that ends it."""
        num_kept, stop_reason = find_first_stop(call, token_ids, eos_ids=self._desk.eos_ids)
        self._desk.add_tokens(call, token_ids[:num_kept], logprobs[:num_kept])
        if stop_reason is not None:
            self._desk.end(call, stop_reason)

    def _fail(self, call: Call) -> None:
        """Wipe the pages that nobody but the request holds, for the next holder would read them, and end it.

        What it shares is what others compute with: if that is not finite they fail too, and the last of them wipes it.
        """
        self._runner.cache.clear(self._desk.scheduler.pool.select_unshared(call.request.pages))
        self._desk.fail(call)
