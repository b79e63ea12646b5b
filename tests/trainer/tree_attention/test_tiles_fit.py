"""The kernels of tree attention compile for GPUs of each kind, and their tiles fit in shared memory. Needs no GPU."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tunesmith.trainer.tree_attention.kernels import tree_kernels  # noqa: E402
from tunesmith.trainer.tree_attention.tile_schedule import TILINGS, choose_tiling  # noqa: E402

SHARED_MEMORY = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes that a program may use, by compute capability times ten."""
POINTERS = ("query", "key", "value", "output", "grad", "grad_query", "grad_key", "grad_value")
FLOATS = ("log_sums", "deltas", "sums", "sinks")


def count_bytes(kernel, capability: int, tile, constants: dict[str, object], dtype: str) -> int:
    signature, attributes, given = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], given[index,] = "constexpr", constants[name]
            continue
        kinds = dict.fromkeys(POINTERS, f"*{dtype}") | dict.fromkeys(FLOATS, "*fp32")
        kinds |= {"table": "*i32", "scaling": "fp32", "softcap": "fp32"}
        signature[name] = kinds.get(name, "i32")
        if signature[name] != "fp32" and name != "window":
            attributes[index,] = [["tt.divisibility", 16]]
    source, options = ASTSource(kernel, signature, given, attributes), {"num_warps": tile.num_warps}
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=options | {"num_stages": tile.num_stages}).metadata.shared


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize(("size", "dtype"), [(64, "bf16"), (128, "bf16"), (256, "bf16"), (512, "bf16"), (256, "fp32")])
def test_tiles_fit_in_shared_memory(capability, size, dtype):
    tiling = TILINGS[choose_tiling(size, is_wide=dtype == "fp32", is_hopper=capability == 90)]
    options = {"GROUPS": 2, "SIZE": size, "SIZE_PAD": size, "HAS_SOFTCAP": True, "HAS_WINDOW": True}
    options["PRECISION"] = "ieee" if dtype == "fp32" else "tf32"
    forward, query, key_value = tiling.forward, tiling.backward_query, tiling.backward_key_value
    cases = {
        "attention_forward": (forward, {"TILE_M": forward.rows, "TILE_N": forward.steps, "HAS_SINKS": True}),
        "backward_query": (query, {"TILE_M": query.rows, "TILE_N": query.steps}),
        "backward_key_value": (
            key_value,
            {"TILE_M": key_value.steps, "TILE_N": key_value.rows, "QUERY_ROWS": forward.rows, "KV_HEADS": 8},
        ),
    }
    for name, (tile, constants) in cases.items():
        num_bytes = count_bytes(
            getattr(tree_kernels, name), capability, tile, {"HEADS": 16} | options | constants, dtype
        )
        assert num_bytes <= SHARED_MEMORY[capability], (name, num_bytes)
