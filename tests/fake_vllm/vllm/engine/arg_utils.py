from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True)
class AsyncEngineArgs:
    model: str
    dtype: str
    load_format: str
    runner: str
    worker_extension_cls: str
    skip_tokenizer_init: bool
    generation_config: str
    max_model_len: int
    max_num_seqs: int
    enable_prefix_caching: bool
    stream_interval: int
    tensor_parallel_size: int
    enforce_eager: bool
    logprobs_mode: str
    max_logprobs: int
    disable_log_stats: bool
    kv_cache_memory_bytes: int
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    # of this fake
    log: str = ""
    """Printed, before the start fails."""
    seconds_per_token: float = 0.001
    last_token: int | None = None
    """The token after which the process dies."""
    additional_config: Any = None
