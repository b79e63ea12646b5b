"""Equal logprobs of sampler and trainer, to the last bit, in 16 bits on a GPU (`model.numerics=exact`).

The logprob of a token becomes a function of its context and the weights alone: of neither the batch, nor how a prompt
was cut for prefill, nor whether the token was decoded, prefilled or trained, nor its place in a packed row. Each source
of differences is closed:

- Matrix products: cuBLAS splits the sum over K when there are few rows. With the smallest workspaces, cuBLASLt and the
  flags of `EXACT_PRODUCTS` it does not, and a row's result is the same for every number of rows.
- Attention: sampler and trainer use one kernel with one order of additions (`model/kernels/span_attention.py`).
- The layers of both run in the same operations, those of the sampler's fused layers: norms take one program a row. What
  fusion leaves runs as the modeling code writes it, or is refused if it adds up a row. Gradients of fused operations
  are those of their formulas (`model/kernels/layer_gradients.py`).
- The log-softmax: the sampler records the logprob that the trainer's kernel computes.

Two runs also give the same bits: updates use deterministic algorithms, and nothing is chosen by its time.

The mode belongs to the process, as cuBLAS' variables do: it is switched on before the first product and stays on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from transformers import PretrainedConfig

from tunesmith.errors import ModelError
from tunesmith.model.adapters.adapter import build_meta_model
from tunesmith.model.forward.recurrence import is_recurrent
from tunesmith.model.torch_modes import is_exact, set_exact

EXACT_PRODUCTS = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
"""Environment variables that cuBLAS and torch read once, at the first product."""


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """With exact numerics: within, torch adds gradients of rows that were read several times in a fixed order."""
    if not is_exact():
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


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
        "layers that read the keys and values of others have no exact form": bool(
            getattr(text, "num_kv_shared_layers", 0)
        ),
        "attention with sinks has no exact form": any(
            hasattr(each, "sinks") for each in build_meta_model(config).modules()
        ),
        "recurrent layers have no exact form": is_recurrent(config),
        "logits that are scaled or capped have no exact kernel": any(getattr(text, each, None) for each in scalings),
    }
    if reason := next((each for each, is_so in reasons.items() if is_so), None):
        raise ModelError(f"model.numerics=exact: {reason}; leave it at fast")


def use_exact_numerics() -> None:
    """Switch the process to exact numerics; before the first matrix product on its GPU."""
    import torch._inductor.config  # takes a second

    set_exact()
    os.environ.update(EXACT_PRODUCTS)
    torch._inductor.config.deterministic = True  # kernels are not chosen by their time
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.preferred_blas_library("cublaslt")
    products = torch.backends.cuda.matmul
    # the second flag forbids sums over K that are split among programs
    products.allow_bf16_reduced_precision_reduction = (False, False)
    products.allow_fp16_reduced_precision_reduction = (False, False)
