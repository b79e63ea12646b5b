"""Knobs of runs on several ranks."""

from __future__ import annotations

from pydantic import Field

from tunesmith.config.section import Section


class ClusterSection(Section):
    """Ranks: processes with one GPU each, or CPU processes, that run and train the tasks of a step together."""

    num_workers: int | None = Field(default=None, ge=1)
    """Number of ranks. `tunesmith tune` starts them on this host; null is one, or as many as torchrun has started."""
    timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds that a rank waits for the others before the run stops. Raise it if rollouts of one rank may take that
    much longer than those of another."""
    has_sharded_gradients: bool | None = None
    """On several ranks, sum gradients while the backward pass makes them, so that no GPU holds those of all weights in
    float32, at the price of more communication. null does it where they would take more than a tenth of the GPU's
    memory."""
