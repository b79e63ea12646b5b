"""llama.cpp, through llama-cpp-python: it quantises GGUF files and reads them back. The only file that imports it.

Errors that llama.cpp only logs become exceptions. Everything is computed on the CPU, keys and values in float32, so
that what differs from the source model is the file.
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
"""ggml's log level of errors."""
F32 = 0
"""ggml's number of the type."""


def quantize_file(source: Path, target: Path, *, file_type: str, num_threads: int) -> None:
    """Quantise an f32 or f16 file; raises StorageError with llama.cpp's own words when it fails."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = FILE_TYPES[file_type]
    parameters.nthread = num_threads
    with capture_errors() as errors:
        code = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(parameters))
    if code != 0:
        raise StorageError(f"llama.cpp could not quantise to {target}: {summarize(errors)}")


class GgufModel:
    """A GGUF file as llama.cpp reads it, in memory until `close`."""

    def __init__(self, path: Path, *, context: int, num_threads: int, has_weights: bool = True) -> None:
        with capture_errors() as errors:
            try:
                self._llama = llama_cpp.Llama(
                    str(path),
                    n_ctx=context,
                    n_batch=context,
                    n_ubatch=context,
                    n_threads=num_threads,
                    n_threads_batch=num_threads,
                    logits_all=has_weights,
                    vocab_only=not has_weights,
                    type_k=F32,
                    type_v=F32,
                    verbose=False,
                )
            except ValueError as error:
                raise ModelError(f"llama.cpp cannot load {path}: {summarize(errors)}") from error

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text, with what the file says is added to it; special tokens in it are read as such."""
        ids: list[int] = self._llama.tokenize(text.encode(), add_bos=True, special=True)
        return ids

    def compute_logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits after each of `ids`, float32 [len(ids), vocabulary]."""
        self._llama.reset()
        self._llama.eval(list(ids))
        scores: np.ndarray = np.array(self._llama.scores[: len(ids)])
        return scores

    def generate_greedy(self, ids: Sequence[int], *, max_tokens: int, end_ids: Sequence[int]) -> list[int]:
        """The likeliest continuation, up to and with the first of `end_ids`."""
        self._llama.reset()
        self._llama.eval(list(ids))
        made: list[int] = []
        while len(made) < max_tokens:
            made.append(int(self._llama.scores[self._llama.n_tokens - 1].argmax()))
            if made[-1] in end_ids or self._llama.n_tokens == self._llama.n_ctx():
                break
            self._llama.eval(made[-1:])
        return made

    def close(self) -> None:
        self._llama.close()

    def __enter__(self) -> GgufModel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@contextmanager
def capture_errors() -> Iterator[list[str]]:
    """What llama.cpp logs as errors, in place of its printing anything."""
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
    """Nothing is printed between calls either; a callback must outlive every call into the library."""


def summarize(errors: Sequence[str]) -> str:
    return "; ".join(dict.fromkeys(errors)) or "it does not say why"
