"""GGUF files of an export: checks before weights load, comparison in llama.cpp, and the Modelfile; `writer.py` writes.

The packages `gguf` (writing) and `llama-cpp-python` (q4_k_m, and comparison) are optional. A package that is needed and
missing is an error before weights load. Without llama-cpp-python the other types are written with a warning that they
are not compared, or refused if the settings ask for the comparison.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from tunesmith.commands.export.gguf.architecture import GgufArchitecture, describe_architecture
from tunesmith.commands.export.gguf.vocabulary import GgufVocabulary, describe_vocabulary
from tunesmith.commands.export.verify import Prompts, check_gguf_file
from tunesmith.config import ExportSection
from tunesmith.errors import ModelError
from tunesmith.runs.trained_model import ExportSource

logger = logging.getLogger(__name__)

QUANTIZED_BY_LLAMA_CPP = {"q4_k_m"}
MISREAD_NAMES = ("phi3", "phi-3")
"""llama.cpp treats a model whose name contains one of these as a Phi-3: other special tokens, or a failing load."""
BYTES = {"f32": 4.0, "f16": 2.0, "q8_0": 1.07, "q4_k_m": 0.8}
"""Upper bound of the bytes per parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufPlan:
    """Everything about the files that is known before weights load."""

    name: str
    license: str | None
    types: tuple[str, ...]
    architecture: GgufArchitecture
    vocabulary: GgufVocabulary
    num_threads: int

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of all files and of the temporary f32 file for quantization."""
        has_temporary = not QUANTIZED_BY_LLAMA_CPP.isdisjoint(self.types) and "f32" not in self.types
        return BYTES["f32"] * has_temporary + sum(BYTES[kind] for kind in self.types)

    def file_name(self, kind: str) -> str:
        return f"{self.name}-{kind}.gguf"


def plan_gguf(
    settings: ExportSection, source: ExportSource, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> GgufPlan:
    """Plan the files; raises ModelError for a missing package, and for a model or tokenizer that cannot be written."""
    if any(word in source.name.lower() for word in MISREAD_NAMES):
        raise ModelError(f"llama.cpp treats a model named {source.name!r} as a Phi-3; set another name")
    plan = GgufPlan(
        name=source.name,
        license=None if settings.license == "unknown" else settings.license,
        types=settings.gguf_types,
        architecture=describe_architecture(config),
        vocabulary=describe_vocabulary(tokenizer, config, end_ids=load_end_ids(source, config)),
        num_threads=settings.num_cpu_threads,
    )
    check_packages(settings)
    return plan


def check_packages(settings: ExportSection) -> None:
    """Raise ModelError if a package is missing that the settings ask for; warn of a verification that it prevents."""
    if "gguf" not in settings.formats:
        return
    if importlib.util.find_spec("gguf") is None:
        raise ModelError("writing GGUF needs the package gguf: pip install 'tunesmith[gguf]'")
    if has_llama_cpp():
        return
    install = "pip install 'tunesmith[llama-cpp]' (compiles for minutes)"
    if not QUANTIZED_BY_LLAMA_CPP.isdisjoint(settings.gguf_types):
        raise ModelError(f"the type q4_k_m needs llama.cpp's quantizer: {install}, or remove q4_k_m from gguf_types")
    if settings.has_verification and "has_verification" in settings.model_fields_set:
        raise ModelError(
            f"has_verification=true compares GGUF files in llama.cpp: {install}, or leave has_verification out to "
            "verify only the other formats"
        )
    if settings.has_verification:
        logger.warning("GGUF files will not be verified, because llama-cpp-python is not installed: %s", install)


def has_llama_cpp() -> bool:
    return importlib.util.find_spec("llama_cpp") is not None


def load_end_ids(source: ExportSource, config: PretrainedConfig) -> tuple[int, ...]:
    """Ids that end a generation, from the generation config or the model config."""
    try:
        end_ids = GenerationConfig.from_pretrained(source.base).eos_token_id
    except OSError:  # a model without generation_config.json
        end_ids = config.eos_token_id
    if end_ids is None:
        return ()
    return tuple(end_ids) if isinstance(end_ids, list | tuple) else (end_ids,)


def check_gguf_files(
    plan: GgufPlan,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    expected: Sequence[torch.Tensor],
) -> Mapping[str, dict[str, float]]:
    """Compare each file with the float32 logits `expected`; returns nothing if llama.cpp is not installed."""
    if not has_llama_cpp():
        return {}
    from tunesmith.commands.export.llama_cpp import GgufModel  # needs an optional package

    checks = {}
    context = max(map(len, prompts.values())) + 1
    for kind in plan.types:
        path = folder / plan.file_name(kind)
        with GgufModel(path, context=context, num_threads=plan.num_threads) as gguf_model:
            checks[f"gguf/{path.name}"] = check_gguf_file(gguf_model, tokenizer, prompts, expected, file_type=kind)
    return checks


MODELFILE = "Modelfile"
CHATML = "<|im_start|>{role}\n{content}<|im_end|>\n"
REPLY_START = "<|im_start|>assistant\n"
GO_CHATML = CHATML.format(role="{{ .Role }}", content="{{ .Content }}")
GO_DEFAULT_SYSTEM = '{{{{ if ne (index .Messages 0).Role "system" }}}}{text}{{{{ end }}}}'
PROBES: Sequence[Sequence[tuple[str, str]]] = (
    [("user", " a\n")],
    [("system", " s "), ("user", "a")],
    [("user", "a"), ("assistant", "<think>\nt\n</think>\n\nb "), ("user", "c"), ("assistant", "d"), ("user", "e")],
    [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "")],
)
"""Conversations with spaces that some templates strip, and reasoning that some leave out."""
PROBE_TOOL = {"type": "function", "function": {"name": "probe_tool", "description": "d", "parameters": {}}}


def build_modelfile(
    plan: GgufPlan, tokenizer: PreTrainedTokenizerBase, *, files: Mapping[str, str], num_ctx: int | None
) -> str:
    """The text of a Modelfile for the first of `files`; the others are named in comments.

    `num_ctx`: the context of the training; if it is unknown, the model's number of positions.
    """
    first, *others = files.values()
    ends = [plan.vocabulary.special_ids[role] for role in ("eos", "eot", "eom") if role in plan.vocabulary.special_ids]
    template = write_template(tokenizer, has_bos=plan.vocabulary.has_bos)
    lines = [
        f"# ollama create {plan.name} -f Modelfile",
        f"FROM ./{first}",
        *(f"# FROM ./{name}" for name in others),
        *([] if template is None else [f'TEMPLATE """{template}"""']),
        *(f'PARAMETER stop "{plan.vocabulary.tokens[index]}"' for index in ends),
        f"PARAMETER num_ctx {num_ctx or plan.architecture.fields['context_length']}",
    ]
    return "\n".join(lines) + "\n"


def write_template(tokenizer: PreTrainedTokenizerBase, *, has_bos: bool) -> str | None:
    """The chat template in Ollama's language; None unless it is ChatML without tools in every probe.

    Ollama renders a conversation with the chat template that the GGUF file holds, unless the Modelfile has a TEMPLATE.
    ChatML without tools is what Ollama's language of templates says exactly; older versions of Ollama, which cannot run
    the template in the file, then render it too.

    `has_bos`: the server adds the beginning-of-sequence token, so that the template must not.
    """
    bos = str(tokenizer.bos_token) if has_bos else ""
    try:
        start = render(tokenizer, PROBES[0])
        found = re.fullmatch(rf"{re.escape(bos)}(.*?){re.escape(render_chatml(PROBES[0]))}", start, re.DOTALL)
        default = "" if found is None else found[1]
        for probe in PROBES:
            before = bos if probe[0][0] == "system" else bos + default
            if render(tokenizer, probe) != before + render_chatml(probe):
                return None
        if "probe_tool" in render(tokenizer, PROBES[1], tools=[PROBE_TOOL]):
            return None
    except Exception:  # noqa: BLE001 - a template may refuse a conversation with any exception
        return None
    if "{{" in default or '"""' in default:
        return None
    system = GO_DEFAULT_SYSTEM.format(text=default) if default else ""
    return f"{system}{{{{ range .Messages }}}}{GO_CHATML}{{{{ end }}}}{REPLY_START}"


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[tuple[str, str]], **options: object) -> str:
    conversation = [{"role": role, "content": content} for role, content in messages]
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True, **options)
    assert isinstance(text, str)
    return text


def render_chatml(messages: Sequence[tuple[str, str]]) -> str:
    return "".join(CHATML.format(role=role, content=content) for role, content in messages) + REPLY_START
