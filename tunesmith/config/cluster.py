"""Knobs of runs on several ranks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tunesmith.config.section import Needs, Section

RAY = Needs("launcher", "ray")
SHARDED = Needs("has_sharded_weights", False, reason="they shard the gradients too")


class ClusterSection(Section):
    """Ranks: processes with one GPU each, or CPU processes, that run and train the tasks of a step together."""

    num_workers: int | None = Field(default=None, ge=1)
    """Number of ranks. `tunesmith tune` starts them on this host; null is one, or as many as torchrun has started."""
    launcher: Literal["torchrun", "ray"] = "torchrun"
    """What starts the ranks. `ray` (the extra `ray`) runs one worker for each rank in a Ray cluster, on any of its
    hosts, and needs `num_workers`; use it for several hosts, or for restarts."""
    max_restarts: Annotated[int | None, RAY] = Field(default=None, ge=0)
    """How often the run may be restarted from its last checkpoint after a worker or a host has
    died; null is 3."""
    ray_namespace: Annotated[str | None, RAY] = Field(default=None, min_length=1)
    """Namespace of the run's actors; null is an anonymous one."""
    timeout_s: float = Field(default=3600.0, gt=0, le=1e9)
    """Seconds without a sign of life of another rank, or without its part of an update, after which the run stops.
    Raise it if saving a checkpoint or a callback may take that long."""
    has_sharded_gradients: Annotated[bool | None, SHARDED] = None
    """On several ranks, sum gradients while the backward pass makes them, so that no GPU holds those of all weights in
    float32, at the price of more communication. null does it where they would take more than a tenth of the GPU's
    memory."""
    has_sharded_weights: bool = False
    """On several ranks with `engine.kind: vllm`, divide the weights of the decoder layers by the number of ranks too
    (FSDP2), at the price of gathering each layer for its forward and its backward. One vLLM then samples for all ranks,
    from the first one. Set it for models whose training does not fit otherwise."""

    sampling_ranks: int = Field(default=0, ge=0)
    """The last ranks of the run, which only sample while the others train; needs `rollout.max_staleness` above 0. Raise
    it if the update takes long and agents wait for slow tools. 0: all ranks sample, and then train."""

    @model_validator(mode="after")
    def _check_launcher(self) -> ClusterSection:
        if self.launcher == "ray" and self.num_workers is None:
            raise ValueError(
                "cluster.launcher=ray needs cluster.num_workers, the number of workers (one per GPU): set it"
            )
        return self

    @property
    def num_restarts(self) -> int:
        """How often Ray restarts the run."""
        return 3 if self.max_restarts is None else self.max_restarts
