"""Knobs of an export (`tunesmith export`)."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tunesmith.config.section import Needs, NumThreads, Section

ExportFormat = Literal["hf", "adapter", "gguf"]
GgufType = Literal["f32", "f16", "q8_0", "q4_k_m"]
FILE_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")


class ExportSection(Section):
    """Model, output formats and model card of an export."""

    path: str
    """Model to export: a Hugging Face model folder or hub id, a run folder (its last checkpoint), or the folder of a
    PEFT adapter, which is merged into its base for every format but `adapter`."""
    base_path: str | None = None
    """Base model of an adapter in `path`; null uses the one in the adapter's config. Set it if the base has moved."""
    formats: tuple[ExportFormat, ...] = Field(default=("hf",), min_length=1)
    """Output formats. hf: a folder for transformers and vLLM; adapter: the PEFT adapter, unmerged; gguf: files for
    llama.cpp and Ollama."""
    gguf_types: Annotated[tuple[GgufType, ...], Needs("formats", "gguf")] = Field(default=("f16",), min_length=1)
    """Data types of the GGUF files, one file each. f32 is exact; f16 has half its size, q8_0 a quarter, q4_k_m about a
    seventh (needs llama-cpp-python)."""
    name: str | None = None
    """Name in the model card and of the GGUF files; null uses the name of the run or of the model folder."""
    license: str = "unknown"
    """License of the weights as a hub identifier, such as apache-2.0; the base model's terms apply."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the weights in the hf folder; auto keeps the stored one."""
    chat_template: str | None = None
    """Path of a Jinja file that replaces the tokenizer's chat template in the export."""
    trust_remote_code: bool = False
    """Execute Python code that comes with the model. Enable it only for sources you trust."""
    has_verification: bool = True
    """Load the exported files and compare them with the source before finishing. Disable it to save minutes on large
    models."""
    num_cpu_threads: NumThreads = 1
    """CPU threads of verification and quantization."""

    @model_validator(mode="after")
    def _check_names(self) -> ExportSection:
        for key, values in (("formats", self.formats), ("gguf_types", self.gguf_types)):
            if len(set(values)) < len(values):
                raise ValueError(f"{key} has a duplicate: {', '.join(values)}")
        if self.name is not None and not FILE_NAME.fullmatch(self.name):
            raise ValueError(
                f"name={self.name!r} must consist of letters, digits, '.', '_', '+' or '-': it is used in file names"
            )
        if not self.license.strip() or "\n" in self.license:
            raise ValueError(f"license={self.license!r} must be one non-empty line")
        return self
