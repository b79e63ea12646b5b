"""Mismatch of FP8 sampling on a real model, emulated on a CPU.

The sampler multiplies matrices rounded to e4m3 as `engine.weight_format=fp8` does (weights with one scale per output,
inputs with one per token); the trainer uses the weights themselves. Both compute in float32, so what is measured is the
rounding to FP8 alone. Answers are sampled from the rounded model.

    python -m benchmarks.engine.fp8_emulated --model models/smollm2-135m-instruct --questions gsm8k/train.jsonl
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.shared.report import publish
from tunesmith.storage import load_json_lines


def round_rows(x: Tensor) -> Tensor:
    """Each row as e4m3 numbers times its scale."""
    scale = x.abs().amax(-1, keepdim=True) / 448
    scale = torch.where(scale > 0, scale, 1.0)
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


@torch.no_grad()
def build_rounded(model: PreTrainedModel) -> PreTrainedModel:
    """The model with weights and inputs of the decoder's linear layers rounded."""
    rounded = copy.deepcopy(model)
    for layer in rounded.get_decoder().modules():
        if type(layer) is nn.Linear:
            layer.weight.copy_(round_rows(layer.weight))
            layer.register_forward_pre_hook(lambda _, inputs: (round_rows(inputs[0]),))
    return rounded


@torch.no_grad()
def compute_log_ratios(
    sampler: PreTrainedModel, trainer: PreTrainedModel, prompt: Tensor, *, num_tokens: int, num_answers: int
) -> Tensor:
    """log trainer - log sampler of the tokens of answers that the sampler draws."""
    sequences = sampler.generate(
        prompt.repeat(num_answers, 1), do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0,
        max_new_tokens=num_tokens, min_new_tokens=num_tokens,
    )  # fmt: skip
    first = prompt.shape[1]
    ours, theirs = (
        model(sequences).logits[:, first - 1 : -1].double().log_softmax(-1).gather(-1, sequences[:, first:, None])
        for model in (sampler, trainer)
    )
    return (theirs - ours).flatten()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--questions", required=True, help="JSON lines file with a field question")
    parser.add_argument("--prompts", type=int, default=16, help="number of questions")
    parser.add_argument("--answers", type=int, default=4, help="answers to each question")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--out", help="JSON file for the result, results/engine/NAME.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16).float().eval()
    rounded, found = build_rounded(model), []
    for row in load_json_lines(Path(arguments.questions))[: arguments.prompts]:
        messages = [{"role": "user", "content": row["question"]}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        found.append(
            compute_log_ratios(rounded, model, prompt, num_tokens=arguments.tokens, num_answers=arguments.answers)
        )
    log_ratio = torch.cat(found)
    ratio = log_ratio.exp()
    k3 = (ratio - 1 - log_ratio).mean().item()
    details = {
        "model": Path(arguments.model).name,
        "num_tokens": len(ratio),
        "k3": k3,
        "max_log_ratio": log_ratio.abs().max().item(),
        "mean_weight": ratio.clamp(max=2.0).mean().item(),
        "truncated_share": (ratio > 2.0).double().mean().item(),
        "outside_clip_0.2": ((ratio - 1).abs() > 0.2).double().mean().item(),
    }
    print(details)
    publish(
        name="fp8_mismatch_emulated", unit="1 / k3", ours=1 / k3, peers={}, device="cpu", details=details,
        out=arguments.out,
    )  # fmt: skip


if __name__ == "__main__":
    main()
