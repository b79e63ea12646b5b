"""Verification of exported files: they are loaded back and compared with the source model.

An hf folder must give the same token ids and bit-identical logits. A GGUF file is read by llama.cpp: token ids must be
equal on difficult text, and next-token distributions may differ from the source in float32 only by rounding. The
divergence KL(source || file) in nats per token measures the cost of quantization and is reported in the model card.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tunesmith.errors import ModelError
from tunesmith.model.load import load_model, load_tokenizer

if TYPE_CHECKING:
    from tunesmith.commands.export.llama_cpp import GgufModel

QUESTIONS = (
    "Hello!",
    "What is 17 * 243? Think step by step, then give the number.",
    "Natalia sold clips to 48 of her friends in April, and then half as many in May. How many did she sell altogether?",
    "Write a Python function that returns the first n prime numbers, and say in one sentence why it is right.",
)
TOKENIZER_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "  two spaces,\ttab\n\n\nthree lines   \n and trailing  ",
    "1234567 + 89.01 = 1,234,656.01; 3rd 2x4 0xFF",
    "I'll can't WE'RE you'd it's 'quoted' don'T",
    "def f(x):\n    return {\"a\": [1, 2], 'b': x**2}  # why\r\n",
    "caf\u00e9 na\u00efve \u00fcber \u0141\u00f3d\u017a \u0130stanbul stra\u00dfe",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u6771\u4eac\u306f\u6674\u308c",
    "\ud55c\uad6d\uc5b4 \u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22",
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440 \u0645\u0631\u062d\u0628\u0627",
    "\u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \u2192 \u221e \u00bd \u2167 \u00b2 \u20ac",
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "(3+4)*5"}}\n</tool_call>',
    "a\u00a0b\u2003c\u3000d\ufeffe ... ---- ==== !!!??",
)
KL_LIMITS: Mapping[str, float] = {"f32": 1e-4, "f16": 1e-2, "q8_0": 0.1, "q4_k_m": math.inf}
"""Largest accepted KL divergence by file type, nats per token, mean over the prompts.

A larger one means that the file is wrong. q4_k_m has no limit, because the cost of 4 bits depends on the model."""


Prompts = Mapping[str, list[int]]
"""Rendered conversations -> their token ids."""


def build_prompts(tokenizer: PreTrainedTokenizerBase) -> Prompts:
    """Render `QUESTIONS` with the chat template."""
    prompts = {}
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts[text] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return prompts


@torch.inference_mode()
def compute_logits(model: PreTrainedModel, prompts: Prompts) -> list[torch.Tensor]:
    """Logits after each token, one [num_tokens, vocab_size] tensor per prompt, in the model's dtype."""
    return [model(input_ids=torch.tensor([ids])).logits[0] for ids in prompts.values()]


def check_hf_folder(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    expected: Sequence[torch.Tensor],
    *,
    trust_remote_code: bool,
) -> dict[str, float]:
    """Raise ModelError unless the folder gives the token ids and bit-identical logits of the source."""
    reloaded = load_tokenizer(str(folder), trust_remote_code=trust_remote_code)
    for text in (*TOKENIZER_TEXTS, *prompts):
        if reloaded(text)["input_ids"] != tokenizer(text)["input_ids"]:
            raise ModelError(f"the exported tokenizer encodes {text!r} differently from the source's")
    model = load_model(
        str(folder), dtype=expected[0].dtype, device=torch.device("cpu"), trust_remote_code=trust_remote_code
    )
    for text, before, after in zip(prompts, expected, compute_logits(model, prompts), strict=True):
        if not torch.equal(before, after):
            largest = (before.double() - after.double()).abs().max().item()
            raise ModelError(f"the exported weights give other logits than the source on {text!r}: by {largest:g}")
    return {"num_tokens": float(sum(map(len, prompts.values()))), "max_logit_difference": 0.0}


def check_gguf_file(
    gguf_model: GgufModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    expected: Sequence[torch.Tensor],
    *,
    file_type: str,
) -> dict[str, float]:
    """Raise ModelError unless llama.cpp gives the same token ids and, within `KL_LIMITS`, the same distributions."""
    for text in (*TOKENIZER_TEXTS, *prompts):
        ids, found_ids = tokenizer(text)["input_ids"], gguf_model.tokenize(text)
        if found_ids != ids:
            raise ModelError(f"llama.cpp encodes {text!r} as {found_ids}, the model's tokenizer as {ids}")
    divergences, num_same = [], 0
    for ids, logits in zip(prompts.values(), expected, strict=True):
        found = torch.from_numpy(gguf_model.compute_logits(ids))
        divergences.append(compute_divergence(logits, found))
        num_same += int((logits.argmax(-1) == found.argmax(-1)).sum())
    divergence = torch.cat(divergences)
    mean = divergence.mean().item()
    if not mean <= KL_LIMITS[file_type]:
        raise ModelError(
            f"the {file_type} file differs from the model: KL divergence {mean:.3g} nats per token, "
            f"rounding explains at most {KL_LIMITS[file_type]:g}"
        )
    return {
        "num_tokens": float(len(divergence)),
        "kl_mean": mean,
        "kl_max": divergence.max().item(),
        "same_top_token": num_same / len(divergence),
    }


def compute_divergence(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """KL(expected || found) of each row of logits, in nats, in float64."""
    log_p, log_q = expected.double().log_softmax(-1), found.double().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)
