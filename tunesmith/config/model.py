"""Knobs of models: the trained one, its adapter, and auxiliary models."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from tunesmith.config.section import Needs, Section, Temperature
from tunesmith.types import MAX_COUNT

ToolCallParser = Literal[
    "auto", "harmony", "deepseek", "mistral", "qwen3_coder", "glm", "hermes", "llama3_json", "json", "none"
]
ReasoningParser = Literal["auto", "deepseek_r1", "mistral", "harmony", "none"]


class LoraSection(Section):
    """A low-rank adapter (LoRA; Hu et al., 2021) trained on frozen base weights."""

    r: int = Field(default=16, ge=1, le=65536)
    """Rank; raise it if the adapter underfits. A loaded adapter keeps its own."""
    alpha: float = Field(default=32.0, gt=0, allow_inf_nan=False)
    """The adapter's output is scaled by alpha / r. A loaded adapter keeps its own."""
    target_modules: Literal["attention", "all-linear"] | tuple[str, ...] = "attention"
    """Layers to adapt: attention (its projections), all-linear (all linear layers but the head, and the weights of
    experts), or a list of names of layers or of weights of experts (`experts.gate_up_proj`, `experts.down_proj`)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability on the adapter's inputs; raise it (0.05) against overfitting. Supervised fine-tuning only:
    reinforcement learning must train the function that it samples from."""
    quantization: Literal["none", "nf4"] = "none"
    """Storage of the base weights: nf4 uses 4 bits each with double quantization (QLoRA; Dettmers et al., 2023). Set it
    if the base does not fit in memory."""
    seed: int = Field(default=0, ge=0)
    """Seed of a new adapter's initialization. A new adapter's output is zero."""


def refuse_dropout(lora: LoraSection | None, reason: str) -> None:
    """Raise ValueError if dropout is set for training whose forward must match forwards outside of it."""
    if lora is not None and lora.dropout > 0:
        raise ValueError(f"model.lora.dropout={lora.dropout:g} is for supervised fine-tuning: {reason}; set it to 0")


class ServedModelSection(Section):
    """Loading and sampling of a local model."""

    later_knobs: ClassVar[tuple[str, ...]] = ("numerics",)
    max_model_len: int = Field(default=4096, ge=2)
    """Maximum context length in tokens, prompt and completion together; lower it to save memory. A model with LongRoPE
    (Phi-3 and Phi-4 with long contexts) uses its long frequencies for all sequences, short ones too, if this exceeds
    its original context."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of the parameters; auto is float32 on a CPU and bfloat16 on a GPU."""
    residual_dtype: Literal["model", "float32"] = "model"
    """Data type of the residual stream. float32 reduces the mismatch between sampler and trainer of a bfloat16 model,
    at some cost in time and memory."""
    numerics: Literal["fast", "exact"] = "fast"
    """exact makes the logprobs of sampler and trainer equal to the bit in 16 bits on a GPU, and those of two runs, at
    a cost in time: one order of sums in attention and products. Needs temperature 1 and no top_p, top_k or min_p."""
    device: str = "auto"
    """Device of the model: cpu, cuda, cuda:1; auto uses a GPU if available."""
    temperature: Temperature = 1.0
    """Sampling temperature of rollouts; 0 is greedy, which makes all rollouts of a group identical."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: keep the most likely tokens up to this cumulative probability; 1 keeps all."""
    top_k: int = Field(default=0, ge=0, le=MAX_COUNT)
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Drop tokens less likely than this fraction of the most likely token's probability; 0 keeps all."""
    max_tokens: int = Field(default=8192, ge=1)
    """Maximum number of tokens per model call; the remaining context also limits it."""
    enable_thinking: bool | None = None
    """Passed to the chat template as `enable_thinking`; null keeps the template's default."""
    chat_template: str | None = None
    """Path of a Jinja file that replaces the tokenizer's chat template."""
    split_special_tokens: bool = True
    """Encode strings of special tokens in messages, tool results and tools as plain text. false encodes them as special
    tokens, so a tool result could end its turn."""
    tool_call_parser: ToolCallParser = "auto"
    """Format of tool calls in sampled text: auto is the one that the model's chat template writes, and hermes
    (<tool_call>{json}</tool_call>) if that is none of these. Set it if the template is not the one the model was
    trained with. json also reads fenced and bare JSON objects with the name of a listed tool, which Qwen2.5-Coder
    writes; none leaves calls in the text."""
    reasoning_parser: ReasoningParser = "auto"
    """Format of reasoning in sampled text: deepseek_r1 (<think>...</think>), mistral ([THINK]...[/THINK]) or harmony
    (channel analysis); auto is the one that the chat template mentions, else deepseek_r1. none leaves reasoning in the
    text; the harmony parser of tool calls always separates it."""
    trust_remote_code: bool = False
    """Execute Python code that comes with the model. Enable it only for sources you trust."""


class ModelSection(ServedModelSection):
    """A trained or local model: path, adapter, loading and sampling."""

    path: str
    """Folder or hub id of a Hugging Face causal language model, a `.gguf` file, or the folder of a PEFT adapter, which
    is merged into its base unless `lora` is set."""
    base_path: str | None = None
    """Base model of an adapter in `path`; null uses the one in the adapter's config. Set it if the base has moved."""
    lora: LoraSection | None = None
    """Train an adapter: a new one, or the one in `path`. null trains all weights."""

    def with_path(self, path: str) -> ModelSection:
        """The section of another model that is loaded as this one; `base_path` describes the model at `path` alone."""
        return self if path == self.path else self.model_copy(update={"path": path, "base_path": None})


LOCAL_ONLY = Needs("base_url", None, reason="the server parses its model's output")


class AuxiliaryModelSection(Section):
    """A model that workflow and judge may call and that is never trained: local, or at an OpenAI-compatible URL."""

    path: str
    """Folder, hub id or `.gguf` file of a local model; with `base_url`, the model name on that server."""
    base_url: str | None = None
    """URL of an OpenAI-compatible server; null loads the model locally."""
    api_key_env: Annotated[str | None, Needs("base_url", reason="the model is loaded locally")] = None
    """Environment variable with the server's API key; null sends a placeholder."""
    max_model_len: int = Field(default=4096, ge=2)
    """Maximum context length of a local model, in tokens; ignored for a server."""
    temperature: Temperature = 1.0
    """Default sampling temperature of requests."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Default top_p of requests."""
    max_tokens: int = Field(default=8192, ge=1)
    """Default maximum number of tokens per call."""
    enable_thinking: bool | None = None
    """Passed to the chat template as `enable_thinking`; null keeps the template's default."""
    tool_call_parser: Annotated[ToolCallParser, LOCAL_ONLY] = "auto"
    """Format of tool calls, as for the trained model."""
    reasoning_parser: Annotated[ReasoningParser, LOCAL_ONLY] = "auto"
    """Format of reasoning, as for the trained model."""

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if self.base_url is not None and not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url={self.base_url!r} is not a URL: it must begin with http:// or https://")
        return self
