"""Equal logprobs of sampler and trainer, to the last bit, in 16 bits on a GPU (`model.numerics=exact`).

The logprob of a token becomes a function of its context and the weights alone: of neither the batch, nor how a prompt
was cut for prefill, nor whether the token was decoded, prefilled or trained, nor its place in a packed row. Each source
of differences is closed:

- Matrix products: cuBLAS splits the sum over K when there are few rows. With the smallest workspaces, cuBLASLt and the
  flags of `EXACT_PRODUCTS` it does not, and a row's result is the same for every number of rows.
- Attention: sampler and trainer use one kernel with one order of additions (`model/kernels/span_attention.py`).
- Means of the norms: torch divides a row among threads by the number of rows, so `aten::mean` over the last axis is
  replaced by a kernel with one program a row.
- Everything else is elementwise, as the modeling code of transformers writes it: neither the sampler's fused layers nor
  the trainer's compiled ones are used, since each rounds at other places.
- The log-softmax: the sampler records the logprob that the trainer's kernel computes.

The mode belongs to the process, as cuBLAS' variables do: it is switched on before the first product and stays on.
"""

from __future__ import annotations

import math
import os
import warnings

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from tunesmith.errors import ModelError
from tunesmith.model.adapters.adapter import build_meta_model
from tunesmith.model.forward.recurrence import is_recurrent

EXACT_PRODUCTS = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
"""Environment variables that cuBLAS and torch read once, at the first product."""
_libraries: list[torch.library.Library] = []
"""Replaced operators; an operator is replaced as long as its library lives."""


def is_exact() -> bool:
    """Whether models of this process compute with exact numerics."""
    return bool(_libraries)


def check_exact(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Raise a ModelError unless `use_exact_numerics` covers everything that this model computes."""
    text = config.get_text_config()
    scalings = ("logit_scale", "lm_head_multiplier", "logits_scaling", "final_logit_softcapping")
    reasons = {
        f"it needs a GPU, and model.device is {device.type}": device.type != "cuda",
        f"it needs weights of 16 bits, and model.dtype is {dtype}".replace("torch.", ""): dtype.itemsize != 2,
        "sizes that are not multiples of 8 take other products for other numbers of rows": any(
            size % 8
            for each in ("vocab_size", "hidden_size", "intermediate_size")
            for size in np.atleast_1d(getattr(text, each, 0))  # some families have one for each layer
        ),
        "routing among experts has no exact kernel": bool(
            getattr(text, "num_experts", None)
            or getattr(text, "num_local_experts", None)
            or getattr(text, "n_routed_experts", None)
        ),
        "attention with sinks has no exact backward": any(
            hasattr(each, "sinks") for each in build_meta_model(config).modules()
        ),
        "recurrent layers have no exact form": is_recurrent(config),
        "logits that are scaled or capped have no exact kernel": any(getattr(text, each, None) for each in scalings),
    }
    if reason := next((each for each, is_so in reasons.items() if is_so), None):
        raise ModelError(f"model.numerics=exact: {reason}; leave it at fast")


def use_exact_numerics() -> None:
    """Switch the process to exact numerics; before the first matrix product on its GPU."""
    if is_exact():
        return
    os.environ.update(EXACT_PRODUCTS)
    torch.backends.cuda.preferred_blas_library("cublaslt")
    products = torch.backends.cuda.matmul
    # the second flag forbids sums over K that are split among programs
    products.allow_bf16_reduced_precision_reduction = (False, False)
    products.allow_fp16_reduced_precision_reduction = (False, False)
    from tunesmith.model.kernels.row_mean import compute_row_means  # needs Triton, which is on CUDA machines only

    def mean(x: Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
        if dim is not None and [each % x.dim() for each in dim] == [x.dim() - 1]:
            means = compute_row_means(x if dtype is None else x.to(dtype))
            return means.unsqueeze(-1) if keepdim else means
        axes = dim or list(range(x.dim()))
        return torch.sum(x, axes, keepdim, dtype=dtype) / math.prod(x.shape[each] for each in axes)

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that an operator is replaced
        library.impl("mean.dim", mean, "CUDA")
    _libraries.append(library)
