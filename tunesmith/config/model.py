"""Every knob of a model: the trained one, and auxiliary models."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from tunesmith.config.lora import LoraSection
from tunesmith.config.section import Section, Temperature


class ServedModelSection(Section):
    """How a model is loaded and sampled, whichever it is."""

    max_model_len: int = Field(default=4096, ge=2)
    """Longest context in tokens, prompt and answer together; lower it to save memory."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the parameters; auto is float32 on a CPU and bfloat16 on a GPU."""
    residual_dtype: Literal["model", "float32"] = "model"
    """Type of the stream of residuals; float32 brings sampler and trainer of a bfloat16 model closer together, for some
    time and memory."""
    device: str = "auto"
    """Where the model lives: cpu, cuda, cuda:1; auto takes a GPU when there is one."""
    temperature: Temperature = 1.0
    """Sampling temperature of rollouts; 0 is greedy, which gives a group no variance to learn from."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the likeliest tokens up to this mass."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k likeliest tokens; 0 keeps all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Drop tokens less likely than this share of the likeliest one."""
    max_tokens: int = Field(default=8192, ge=1)
    """Most tokens one model call may sample; what the context has left also bounds it."""
    enable_thinking: bool | None = None
    """Passed to the chat template as `enable_thinking`; None leaves the template's default."""
    chat_template: str | None = None
    """Path of a jinja file to use in place of the tokenizer's own chat template."""
    split_special_tokens: bool = True
    """Keep the strings of special tokens in messages, tool results and tools as plain text; False reads them as those
    tokens, which lets a tool result end its turn."""
    tool_call_parser: Literal["hermes", "none"] = "hermes"
    """How tool calls are read from sampled text: hermes reads <tool_call>{json}</tool_call>."""
    reasoning_parser: Literal["deepseek_r1", "none"] = "deepseek_r1"
    """How reasoning is split from sampled text: deepseek_r1 reads <think>...</think>."""
    trust_remote_code: bool = False
    """Run code that comes with the model; set only for sources you trust."""


class ModelSection(ServedModelSection):
    """The model that is trained, or a local model beside it, and how it is sampled."""

    path: str
    """Folder or hub id of a Hugging Face causal language model, a `.gguf` file, or the folder of a PEFT adapter, which
    is merged into its base unless `lora` is given."""
    base_path: str | None = None
    """Base of an adapter in `path`; None takes the one that the adapter's config names."""
    lora: LoraSection | None = None
    """Train an adapter: a new one, or the one in `path`. None trains all weights."""


class AuxiliaryModelSection(Section):
    """A model that helps, and is never trained: a second local model, or any OpenAI-compatible URL."""

    path: str
    """Folder, hub id or `.gguf` of a local model; with `base_url`, the model's name at that server."""
    base_url: str | None = None
    """URL of an OpenAI-compatible server; None loads the model here."""
    api_key_env: str | None = None
    """Environment variable that holds the server's key; None sends a placeholder."""
    max_model_len: int = Field(default=4096, ge=2)
    """Longest context in tokens of a local model; a server knows its own."""
    temperature: Temperature = 1.0
    """Sampling temperature of requests that name none."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass of requests that name none."""
    max_tokens: int = Field(default=8192, ge=1)
    """Most tokens one call may sample when the request names no limit."""
    enable_thinking: bool | None = None
    """Passed to the chat template as `enable_thinking`."""
    tool_call_parser: Literal["hermes", "none"] = "hermes"
    """As for the trained model; local models only."""
    reasoning_parser: Literal["deepseek_r1", "none"] = "deepseek_r1"
    """As for the trained model; local models only."""

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if self.base_url is None and self.api_key_env is not None:
            raise ValueError("api_key_env has no effect without base_url: the model is loaded here")
        for key in ("tool_call_parser", "reasoning_parser"):
            if self.base_url is not None and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} has no effect with base_url: that server reads what its model says")
        return self
