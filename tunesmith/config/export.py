"""Every knob of an export (`tunesmith export`)."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, model_validator

from tunesmith.config.section import NumThreads, Section

ExportFormat = Literal["hf", "adapter", "gguf"]
GgufType = Literal["f32", "f16", "q8_0", "q4_k_m"]
FILE_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")


class ExportSection(Section):
    """Which model is exported, into which formats, and what its card says."""

    path: str
    """What to export: a Hugging Face model folder or hub id, a run folder (its last checkpoint), or the folder of a
    PEFT adapter, which is merged into its base for every format but `adapter`."""
    base_path: str | None = None
    """Base of an adapter in `path`; None takes the one that the adapter's config names."""
    formats: tuple[ExportFormat, ...] = Field(default=("hf",), min_length=1)
    """hf: a folder for transformers and vLLM; adapter: the PEFT adapter as it is; gguf: files for llama.cpp and
    Ollama."""
    gguf_types: tuple[GgufType, ...] = Field(default=("f16",), min_length=1)
    """Types of the GGUF files, one file each: f32 is exact, f16 half the size, q8_0 a quarter, q4_k_m about a seventh
    and needs llama-cpp-python."""
    name: str | None = None
    """Name in the card and of the GGUF files; None takes the run's name, or that of the model's folder."""
    license: str = "unknown"
    """License of the weights as the hub spells it, such as apache-2.0; the base model's terms apply."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights in the hf folder; auto keeps the stored one."""
    chat_template: str | None = None
    """Path of a jinja file to export in place of the tokenizer's own chat template."""
    trust_remote_code: bool = False
    """Run code that comes with the model; set only for sources you trust."""
    has_verification: bool = True
    """Load what was written and compare it with the source before it counts as exported; turn off to save minutes on
    large models."""
    num_cpu_threads: NumThreads = 1
    """Threads for the comparison and for quantising."""

    @model_validator(mode="after")
    def _check_names(self) -> ExportSection:
        for key, values in (("formats", self.formats), ("gguf_types", self.gguf_types)):
            if len(set(values)) < len(values):
                raise ValueError(f"{key} names one of them twice: {', '.join(values)}")
        if self.name is not None and not FILE_NAME.fullmatch(self.name):
            raise ValueError(f"name={self.name!r} must be letters, digits, '.', '_', '+' or '-', for it names files")
        if not self.license.strip() or "\n" in self.license:
            raise ValueError(f"license={self.license!r} must be one line, or left out for unknown")
        return self

    @model_validator(mode="after")
    def _check_gguf_types(self) -> ExportSection:
        if "gguf_types" in self.model_fields_set and "gguf" not in self.formats:
            raise ValueError("gguf_types has no effect unless formats holds gguf")
        return self
