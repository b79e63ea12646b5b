"""cuDNN's attention through torch at lengths that it has not seen: the first calls, which build a plan, and later ones.

16 query heads, 8 key-value heads of size 128, causal, bfloat16. The last column says whether two backward passes give
the same gradients of query, key and value.

    python -m benchmarks.training.cudnn_lengths
    TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1 python -m benchmarks.training.cudnn_lengths
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.training.train import measure

LENGTHS = (6144, 6145, 6200, 7001, 4097, 12000, 12345, 30000, 32768)


def attend(query: Tensor, key: Tensor, value: Tensor, *, has_backward: bool) -> tuple[Tensor, ...]:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        output = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return torch.autograd.grad(output, (query, key, value), torch.ones_like(output)) if has_backward else (output,)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    print("tokens   first forward   first backward   forward ms (TFLOP/s)   both ms (TFLOP/s)   same bits")
    for num_tokens in parser.parse_args().lengths:
        shapes = [(1, num_tokens, heads, 128) for heads in (16, 8, 8)]
        query, key, value = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for shape in shapes
        )
        runs = [partial(attend, query, key, value, has_backward=each) for each in (False, True)]
        firsts = []
        for run in runs:
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            firsts.append(time.perf_counter() - start)
        seconds = [measure(run, num_repeats=5, num_warm_ups=1)[0] for run in runs]
        flops = 4 * 16 * 128 * num_tokens**2 / 2
        rates = [products * flops / each / 1e12 for products, each in zip((1, 3.5), seconds, strict=True)]
        are_equal = [bool((one == other).all()) for one, other in zip(runs[1](), runs[1](), strict=True)]
        print(
            f"{num_tokens:>6}   {1e3 * firsts[0]:>10.0f} ms   {1e3 * firsts[1]:>11.0f} ms   "
            f"{1e3 * seconds[0]:>9.2f} ({rates[0]:.0f})   {1e3 * seconds[1]:>11.2f} ({rates[1]:.0f})   {are_equal}",
            flush=True,
        )


if __name__ == "__main__":
    main()
