"""Knobs of the engine that rollouts sample from."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from tunesmith.config.section import Needs, Section

OWN = Needs("kind", "tunesmith")
VLLM = Needs("kind", "vllm")


class VllmSection(Section):
    """The process of vLLM: where it runs and what it may use."""

    python: str | None = None
    """Interpreter of the environment that has vLLM, such as `/opt/vllm/bin/python`; null is the one of this program.
    Set it if vLLM needs other versions of packages than your agents."""
    devices: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(default=None, min_length=1)
    """GPUs of this host that vLLM uses, as many as `tensor_parallel_size`; null starts with the GPU of training.
    On other GPUs than that it can have all of their memory."""
    gpu_memory_share: float = Field(default=0.4, gt=0, lt=1)
    """Share of each GPU's memory for vLLM's weights and KV cache. Raise it on GPUs that do not train."""
    weight_transfer: Literal["memory", "file"] = "memory"
    """How weights reach vLLM's GPUs: through handles of GPU memory (CUDA IPC), or through a file in the folder for
    temporary files. Set file where containers or drivers do not allow CUDA IPC; a CPU always uses it."""
    start_timeout_s: float = Field(default=900.0, gt=0)
    """Seconds after which a vLLM that is not ready fails the run; compiling takes about a minute."""
    has_eager: bool = False
    """Sample without compiled layers and CUDA graphs: starts sooner and samples slower."""
    has_seeds: bool = False
    """Give each request its seed. vLLM then draws request by request, which is slower, and its numbers still depend on
    what else is in the batch."""
    args: dict[str, Any] = Field(default_factory=dict)
    """More arguments of vLLM's `AsyncEngineArgs`, by their names there."""


class EngineSection(Section):
    """The sampling engine: batch sizes, KV cache and GPU execution."""

    later_knobs: ClassVar[tuple[str, ...]] = ("max_speculating_seqs",)
    kind: Literal["tunesmith", "vllm"] = "tunesmith"
    """Engine that samples. tunesmith: this process, from the weights that the trainer updates; vllm: vLLM in a process
    of its own, for models that one GPU cannot sample from; it receives the weights after every step (extra `vllm`)."""
    tensor_parallel_size: Annotated[int, VLLM] = Field(default=1, ge=1)
    """Number of GPUs that share the weights from which vLLM samples."""
    vllm: Annotated[VllmSection, VLLM] = VllmSection()
    """The vLLM process."""
    page_size: Annotated[int, OWN] = Field(default=16, ge=1, le=65536)
    """Tokens per KV-cache block."""
    max_num_seqs: int = Field(default=256, ge=1, le=65536)
    """Maximum number of requests decoded at once; the others wait."""
    max_batched_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens per forward; longer prompts are prefilled in chunks. null uses 4096 on a CPU and 16384 on a
    GPU."""
    kv_cache_tokens: Annotated[int | None, OWN] = Field(default=None, ge=1)
    """Capacity of the KV cache in tokens; null derives it from `kv_cache_gib`."""
    kv_cache_gib: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Size of the KV cache in GiB, if `kv_cache_tokens` is not set. null uses 2 on a CPU, and on a GPU the memory that
    training leaves free, at most the need of `max_num_seqs` requests with full context."""
    max_waiting: int = Field(default=4096, ge=1)
    """Maximum number of queued requests; further callers wait until the queue has space."""
    has_prefix_cache: bool = True
    """Reuse keys and values of shared prompt prefixes."""
    has_packed_weights: Annotated[bool, OWN] = True
    """On a CPU in float32, sample from a second copy of the weights in a faster layout. Disable it to save memory."""
    cuda_decode: Annotated[Literal["graphs", "compiled", "eager"], OWN] = "compiled"
    """Decoding on a GPU. compiled: fused layers replayed as CUDA graphs; graphs: CUDA graphs without fusion; eager:
    neither, for debugging."""
    decode_block: int = Field(default=16, ge=1, le=64)
    """On a GPU, decode steps per host synchronization; lower it if most answers are very short. With `kind: vllm`,
    tokens of a request that vLLM passes on at a time."""
    weight_format: Annotated[Literal["model", "fp8"], OWN] = "model"
    """Weights that rollouts sample from. fp8: on a GPU, a copy of the decoder's linear weights in 8 bits, made again
    after every step: faster for models of several billion parameters, at the price of a mismatch between sampler and
    trainer, which `algorithm.correction` corrects."""

    max_speculating_seqs: Annotated[int, OWN] = Field(default=0, ge=0, le=65536)
    """While at most this many requests run and none wait, several tokens of a request are drafted from its own text and
    from finished replies of its group, and verified in one forward where that pays; samples stay those of the model.
    0: never."""

    @model_validator(mode="after")
    def _check_knobs(self) -> Self:
        if self.kv_cache_tokens is not None and self.kv_cache_gib is not None:
            raise ValueError("kv_cache_tokens and kv_cache_gib are both given: set only one of them")
        num_devices = len(self.vllm.devices or ())
        if num_devices not in (0, self.tensor_parallel_size):
            raise ValueError(
                f"vllm.devices lists {num_devices} GPUs, and tensor_parallel_size={self.tensor_parallel_size} needs "
                f"{self.tensor_parallel_size}: change one of them"
            )
        if self.weight_format == "fp8" and self.cuda_decode != "compiled":
            raise ValueError(f"weight_format=fp8 needs cuda_decode=compiled, and it is {self.cuda_decode}")
        return self

    @property
    def has_separate_sampler(self) -> bool:
        """Whether rollouts sample from other weights, or by another implementation, than the trainer's."""
        return self.kind != "tunesmith" or self.weight_format != "model"

    def for_auxiliary(self) -> EngineSection:
        """The engine of an untrained model: in this process, on the model's own weights."""
        own = {knob: type(self).model_fields[knob].default for knob in ("kind", "tensor_parallel_size", "vllm")}
        return self.model_copy(update=own | {"weight_format": "model", "max_speculating_seqs": 0})
