"""A synchronous engine step: schedule, run one forward, wait for it, process its tokens.

Each scheduled request gets its next token. On devices that decode in bursts, `tunesmith.engine.worker.async_step`
replaces this stepper.
"""

from __future__ import annotations

from collections.abc import Sequence

from tunesmith.engine.core.output_processor import OutputProcessor, RequestState
from tunesmith.engine.core.scheduler import ScheduledChunk
from tunesmith.engine.worker.model_runner import ModelRunner
from tunesmith.types import TokenDetails


class SyncStepper:
    """One forward per step."""

    def __init__(self, runner: ModelRunner, output_processor: OutputProcessor) -> None:
        self._runner = runner
        self._output_processor = output_processor

    @property
    def has_inflight(self) -> bool:
        """Whether the device's queue holds work of a request that still runs."""
        return False

    def step(self) -> None:
        scheduled = self._output_processor.scheduler.schedule()
        self._output_processor.record_schedule(scheduled)
        if scheduled.chunks:
            self._output_processor.counts["steps"] += 1
            self._run(scheduled.chunks)

    def drain(self) -> None:
        """Wait for work in flight and process its tokens."""

    def _run(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Compute the chunks and process the tokens sampled from them."""
        sampling, sampled = self._runner.run(chunks)
        self._output_processor.scheduler.commit(chunks)
        rows = zip(sampling, sampled.token_ids, sampled.logprobs, sampled.is_finite, strict=True)
        for row, (chunk, token_id, logprob, is_finite) in enumerate(rows):
            state = self._output_processor.states[chunk.request.request_id]
            if is_finite:
                self._process_token(state, token_id, logprob, sampled.get_details(row, chunk.request.sampling))
            else:
                self._fail(state)

    def _process_token(
        self, state: RequestState, token_id: int, logprob: float, details: TokenDetails | None = None
    ) -> None:
        """Append a sampled token; it may end the request."""
        if state.request.token_matcher is not None:
            try:
                state.request.token_matcher.accept(token_id)
            except ValueError as error:
                self._output_processor.fail(state, str(error))
                return
        _, stop_reason = state.stops.find_end([token_id])
        self._output_processor.add_tokens(state, [token_id], [logprob], details)
        if stop_reason is not None:
            self._output_processor.finish(state, stop_reason)

    def _fail(self, state: RequestState) -> None:
        """Fail a request whose logits are not finite, and zero the blocks that it alone holds.

        The next holder of these blocks would read their values. Shared blocks stay, since other requests use them; if
        their values are not finite those requests fail too, and the last of them zeroes the blocks.
        """
        self._runner.cache.clear(self._output_processor.scheduler.pool.select_unshared(state.request.blocks))
        self._output_processor.fail(state)
