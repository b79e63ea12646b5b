"""Sources of the mismatch between sampler and trainer in bfloat16, on a real model with plain transformers.

The sampler computes one token at a time over a KV cache, the trainer one forward of the whole sequence; both round to
bfloat16, at different places of the same sums. Their logprobs of the sampled tokens are compared (k3: mean of exp(d) -
1 - d), with logits rounded to bfloat16 or not, and with the residual stream in bfloat16 or, through autocast, in
float32. "exact" is a float32 forward with the same bfloat16 weights. With `--shape` Tunesmith's engine and trainer are
compared on random weights instead, with both values of `model.residual_dtype` or with exact numerics, and the cost of
each (`own_mismatch.py`).

    python -m benchmarks.training.mismatch --model models/smollm2-135m-instruct --questions gsm8k/train.jsonl
    python -m benchmarks.training.mismatch --shape qwen3-0.6b --device cuda \\
        --out results/training/train_cuda/mismatch_qwen3-0.6b.json
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from benchmarks.shared.report import publish
from benchmarks.shared.shapes import SHAPES
from benchmarks.training.own_mismatch import describe, measure_shape
from tunesmith.storage import load_json_lines


def compute_k3(sampler_N: Tensor, trainer_N: Tensor) -> dict[str, float]:
    difference_N = (trainer_N - sampler_N).double()
    return {"k3": (difference_N.expm1() - difference_N).mean().item(), "max": difference_N.abs().max().item()}


def run_body(model: PreTrainedModel, ids: Tensor, cache: DynamicCache | None, *, is_wide: bool) -> Tensor:
    """Hidden states in the dtype of the model; `is_wide` keeps the residual stream in float32."""
    embedded = model.get_input_embeddings()(ids)
    with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=is_wide):
        outputs = model.get_decoder()(
            inputs_embeds=embedded.float() if is_wide else embedded, past_key_values=cache, use_cache=cache is not None
        )
    return outputs.last_hidden_state.to(model.dtype)


def sample(
    model: PreTrainedModel, prompts: Tensor, *, num_tokens: int, is_wide: bool, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Sequences, and the hidden states [R, N, C] from which their last tokens were sampled."""
    cache, ids, sequences, hiddens = DynamicCache(), prompts, prompts, []
    for _ in range(num_tokens):
        hiddens.append(run_body(model, ids, cache, is_wide=is_wide)[:, -1])
        probs = (hiddens[-1].float() @ model.lm_head.weight.float().T).softmax(-1)
        ids = torch.multinomial(probs, 1, generator=generator)
        sequences = torch.cat([sequences, ids], 1)
    return sequences, torch.stack(hiddens, 1)


def score(model: PreTrainedModel, hidden_RNC: Tensor, targets_RN: Tensor, *, has_narrow_logits: bool) -> Tensor:
    logits = hidden_RNC.float() @ model.lm_head.weight.float().T
    if has_narrow_logits:
        logits = logits.bfloat16().float()
    return logits.log_softmax(-1).gather(-1, targets_RN[..., None])[..., 0]


@torch.no_grad()
def compare(
    model: PreTrainedModel, exact: PreTrainedModel, prompts: Tensor, *, num_tokens: int, is_wide: bool
) -> dict[str, dict[str, float]]:
    generator = torch.Generator(prompts.device).manual_seed(0)
    sequences, sampled = sample(model, prompts, num_tokens=num_tokens, is_wide=is_wide, generator=generator)
    start = prompts.shape[1] - 1
    trained, truth = (
        torch.cat([run_body(one, row[None, :-1], None, is_wide=wide)[:, start:] for row in sequences])
        for one, wide in ((model, is_wide), (exact, False))
    )
    targets = sequences[:, prompts.shape[1] :]
    found: dict[str, dict[str, float]] = {}
    for name, is_narrow in (("bfloat16", True), ("float32", False)):
        ours = score(model, sampled, targets, has_narrow_logits=is_narrow)
        found[f"{name} logits"] = compute_k3(ours, score(model, trained, targets, has_narrow_logits=is_narrow))
    exact_N = score(model, truth, targets, has_narrow_logits=False)
    for name, hidden in (("sampler", sampled), ("trainer", trained)):
        found[f"exact against {name}, float32 logits"] = compute_k3(
            score(model, hidden, targets, has_narrow_logits=False), exact_N
        )
    return found


def read_prompts(arguments: argparse.Namespace) -> Tensor:
    """The last tokens of a few rendered questions, cut to one length, four times each."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    rows = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": row["question"]}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for row in load_json_lines(Path(arguments.questions))[: arguments.prompts]
    ]
    length = min(len(row) for row in rows)
    return torch.tensor([row[-length:] for row in rows], device=arguments.device).repeat_interleave(4, 0)


def compare_modes(arguments: argparse.Namespace) -> None:
    """Plain transformers on a real model, with logits and residuals in both dtypes."""
    prompts = read_prompts(arguments)
    model, exact = (
        AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16).to(arguments.device, dtype).eval()
        for dtype in (torch.bfloat16, torch.float32)
    )
    details: dict[str, Any] = {}
    for name, is_wide in (("bfloat16 residuals", False), ("float32 residuals", True)):
        details[name] = compare(model, exact, prompts, num_tokens=arguments.tokens, is_wide=is_wide)
        for what, found in details[name].items():
            print(f"{name:<20}{what:<42}k3 {found['k3']:.2e}   largest log-ratio {found['max']:.3f}", flush=True)
    publish(
        name="mismatch",
        unit="1 / k3, logits in float32",
        ours=1 / details["bfloat16 residuals"]["float32 logits"]["k3"],
        peers={"logits in bfloat16": 1 / details["bfloat16 residuals"]["bfloat16 logits"]["k3"]},
        device=arguments.device,
        details={"model": Path(arguments.model).name, "prompts": arguments.prompts, "tokens": arguments.tokens}
        | details,
        out=arguments.out,
    )


def compare_own(arguments: argparse.Namespace) -> None:
    """Tunesmith's engine and trainer on random weights, with residuals in both dtypes."""
    found = measure_shape(arguments)
    rates = {name: figures.step_s for name, figures in found.items()}
    publish(
        name=f"mismatch_{arguments.shape}",
        unit="seconds of the trainer's step, last line",
        ours=list(rates.values())[-1],
        peers={},
        device=arguments.device,
        details=describe(arguments) | {name: dataclasses.asdict(figures) for name, figures in found.items()},
        out=arguments.out,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="device of the model")
    parser.add_argument("--model", help="folder of the model")
    parser.add_argument("--questions", help="JSON lines file with a field question")
    parser.add_argument("--prompts", type=int, default=4, help="number of questions")
    parser.add_argument("--tokens", type=int, default=48, help="tokens sampled after each prompt")
    parser.add_argument(
        "--shape", choices=list(SHAPES), help="compare engine and trainer on random weights of this shape"
    )
    parser.add_argument(
        "--numerics",
        choices=["fast", "exact", "both"],
        default="fast",
        help="with --shape: exact measures that mode alone, both compares it with bfloat16 residuals",
    )
    parser.add_argument("--sequences", type=int, default=128, help="with --shape: number of sequences")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="with --shape: prompt tokens per sequence")
    parser.add_argument("--new-tokens", type=int, default=128, help="with --shape: sampled tokens per sequence")
    parser.add_argument("--repeats", type=int, default=3, help="with --shape: timed repeats")
    parser.add_argument("--kernels", type=int, default=0, help="with --shape, on a GPU: kernels to list")
    parser.add_argument("--out", help="JSON file for the result, results/training/NAME.json")
    arguments = parser.parse_args()
    files = (arguments.model, arguments.questions)
    if any(files) if arguments.shape is not None else not all(files):
        parser.error("give --model and --questions, or --shape")
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    (compare_modes if arguments.shape is None else compare_own)(arguments)


if __name__ == "__main__":
    main()
