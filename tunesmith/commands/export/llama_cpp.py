"""Wrapper around llama.cpp (llama-cpp-python): quantizes GGUF files and runs them. The only file that imports it.

Errors that llama.cpp only logs are raised as exceptions. Inference runs on the CPU with float32 keys and values, so
that differences from the source model come from the file alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import llama_cpp
import numpy as np

from tunesmith.errors import ModelError, StorageError

FILE_TYPES = {"q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M}
ERROR_LEVEL = 4
"""ggml's log level for errors."""
F32 = 0
"""ggml's number for the type f32."""


def quantize_file(source: Path, target: Path, *, file_type: str, num_threads: int) -> None:
    """Quantise an f32 or f16 file; raises StorageError with llama.cpp's messages on failure."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = FILE_TYPES[file_type]
    parameters.nthread = num_threads
    with capture_errors() as errors:
        code = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(parameters))
    if code != 0:
        raise StorageError(f"llama.cpp could not quantize to {target}: {summarize(errors)}")


class GgufModel:
    """A GGUF file loaded by llama.cpp; freed by `close`."""

    def __init__(self, path: Path, *, context: int, num_threads: int) -> None:
        with capture_errors() as errors:
            try:
                self._llama = llama_cpp.Llama(
                    str(path),
                    n_ctx=context,
                    n_batch=context,
                    n_ubatch=context,
                    n_threads=num_threads,
                    n_threads_batch=num_threads,
                    logits_all=True,
                    type_k=F32,
                    type_v=F32,
                    verbose=False,
                )
            except ValueError as error:
                raise ModelError(f"llama.cpp cannot load {path}: {summarize(errors)}") from error

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, with BOS and EOS as set in the file; special tokens in the text are parsed."""
        ids: list[int] = self._llama.tokenize(text.encode(), add_bos=True, special=True)
        return ids

    def compute_logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits after each of `ids`, float32 [len(ids), vocab_size]."""
        self._llama.reset()
        self._llama.eval(list(ids))
        scores: np.ndarray = np.array(self._llama.scores[: len(ids)])
        return scores

    def close(self) -> None:
        self._llama.close()

    def __enter__(self) -> GgufModel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@contextmanager
def capture_errors() -> Iterator[list[str]]:
    """Collect the errors that llama.cpp logs; nothing is printed."""
    errors: list[str] = []

    @llama_cpp.llama_log_callback
    def collect(level: int, text: bytes, _: ctypes.c_void_p) -> None:
        if level == ERROR_LEVEL:
            errors.append(text.decode(errors="replace").strip())

    llama_cpp.llama_log_set(collect, ctypes.c_void_p(0))
    try:
        yield errors
    finally:
        llama_cpp.llama_log_set(silence, ctypes.c_void_p(0))


@llama_cpp.llama_log_callback
def silence(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    """Discard log messages between calls. A module-level callback, because it must outlive every call."""


def summarize(errors: Sequence[str]) -> str:
    return "; ".join(dict.fromkeys(errors)) or "llama.cpp logged no reason"
