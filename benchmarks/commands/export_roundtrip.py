"""Compare exported models with their source token by token, on questions of GSM8K and on tiny models.

The model is exported as a Hugging Face folder and as GGUF files. The logits of the folder must equal the source's bit
for bit. Each GGUF file is opened by llama.cpp alone, which renders each question with the chat template in the file,
tokenizes it and decodes greedily. For f32 and f16, transformers decodes the same questions in float32 with the same
weights (rounded to f16 as in the file); where tokens differ, the gap between the logits of the two candidates is
reported. All types are also scored on transformers' answers: KL divergence of the next-token distributions, and
agreement of the most likely token. The case `families` does the same for the tiny random models of the tests, one for
each family and variant. Needs llama-cpp-python.

    python -m benchmarks.commands.export_roundtrip --model models/smollm2-135m-instruct --prompts gsm8k/test.jsonl
    python -m benchmarks.commands.export_roundtrip --case families
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import llama_cpp
import torch
from llama_cpp.llama_chat_format import Jinja2ChatFormatter
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.shared.report import publish
from tunesmith.commands.export.run import ExportResult, run_export
from tunesmith.config import ExportSection
from tunesmith.config.export import GgufType
from tunesmith.model.checkpoint import hidden_progress_bars
from tunesmith.storage import load_json_lines

TYPES: tuple[GgufType, ...] = ("f32", "f16", "q8_0", "q4_k_m")
ROUNDED = {"f32": torch.float32, "f16": torch.float16}
"""GGUF types whose rounding transformers can reproduce."""
KV_TYPES = {"f32": 0, "f16": 1}
"""Type numbers of ggml; f16 is llama.cpp's default for keys and values."""
CONTEXT = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The rendered and tokenized question, and the sampled answer."""

    prompt: str
    prompt_ids: list[int]
    ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first difference of two greedy answers: both tokens, and the logit gap of transformers between them."""

    prompt: int
    position: int
    transformers: str
    llama_cpp: str
    logit_gap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One file against transformers on all questions."""

    file_type: str
    kv_type: str
    num_prompts: int
    same_prompt_ids: int
    same_answers: int
    same_tokens: int
    num_tokens: int
    """Tokens of transformers' answers; `same_tokens` counts those before the first difference in each answer."""
    differences: list[Difference]


class LlamaCpp:
    """A GGUF file opened by llama.cpp, without any other source of the model."""

    def __init__(self, path: Path, *, kv_type: str) -> None:
        self.llama = llama_cpp.Llama(
            str(path), n_ctx=CONTEXT, n_batch=CONTEXT, n_ubatch=CONTEXT, n_threads=1, n_threads_batch=1,
            logits_all=True, type_k=KV_TYPES[kv_type], type_v=KV_TYPES[kv_type], verbose=False,
        )  # fmt: skip
        self.vocabulary = llama_cpp.llama_model_get_vocab(self.llama.model)
        self.formatter = Jinja2ChatFormatter(
            template=self.llama.metadata["tokenizer.chat_template"],
            eos_token=self.read_token(self.llama.token_eos()),
            bos_token=self.read_token(self.llama.token_bos()),
        )

    def read_token(self, index: int) -> str:
        return llama_cpp.llama_vocab_get_text(self.vocabulary, index).decode()

    def answer(self, question: str, *, max_tokens: int) -> Answer:
        """Render, tokenize and decode greedily until an end-of-generation token."""
        prompt = self.formatter(messages=[{"role": "user", "content": question}]).prompt
        prompt_ids = self.llama.tokenize(prompt.encode(), add_bos=False, special=True)
        self.llama.reset()
        self.llama.eval(prompt_ids)
        ids: list[int] = []
        while len(ids) < max_tokens:
            ids.append(int(self.llama.scores[self.llama.n_tokens - 1].argmax()))
            if llama_cpp.llama_vocab_is_eog(self.vocabulary, ids[-1]):
                break
            self.llama.eval(ids[-1:])
        return Answer(prompt=prompt, prompt_ids=prompt_ids, ids=ids)

    def score(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits after each token, [tokens, vocabulary]."""
        self.llama.reset()
        self.llama.eval(list(ids))
        return torch.from_numpy(self.llama.scores[: len(ids)].copy())


@torch.inference_mode()
def answer_with_transformers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str, *, max_tokens: int
) -> Answer:
    """Render, tokenize and decode greedily with transformers."""
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    inputs = torch.tensor([prompt_ids])
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Answer(prompt=prompt, prompt_ids=prompt_ids, ids=output[0, len(prompt_ids) :].tolist())


@torch.inference_mode()
def score_with_transformers(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """Logits after each token, [tokens, vocabulary]."""
    return model(input_ids=torch.tensor([list(ids)])).logits[0]


def load_rounded(folder: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model in float32 with its matrices rounded to `dtype`, as in the file."""
    with hidden_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(parameter.to(dtype))
    return model


def compare_answers(
    file_type: str,
    kv_type: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    expected: Sequence[Answer],
    found: Sequence[Answer],
) -> Comparison:
    """Count equal answers and tokens; record transformers' logit gap at the first difference of each answer."""
    differences, num_same = [], 0
    for number, (ours, theirs) in enumerate(zip(expected, found, strict=True)):
        pairs = enumerate(zip(ours.ids, theirs.ids, strict=False))
        position = next((at for at, (a, b) in pairs if a != b), min(len(ours.ids), len(theirs.ids)))
        num_same += position
        if ours.ids == theirs.ids:
            continue
        a, b = (ids[position] if position < len(ids) else tokenizer.eos_token_id for ids in (ours.ids, theirs.ids))
        logits = score_with_transformers(model, ours.prompt_ids + ours.ids[:position])[-1]
        differences.append(
            Difference(
                prompt=number,
                position=position,
                transformers=tokenizer.decode([a]),
                llama_cpp=tokenizer.decode([b]),
                logit_gap=(logits[a] - logits[b]).item(),
            )
        )
    return Comparison(
        file_type=file_type,
        kv_type=kv_type,
        num_prompts=len(expected),
        same_prompt_ids=sum(a.prompt_ids == b.prompt_ids for a, b in zip(expected, found, strict=True)),
        same_answers=sum(a.ids == b.ids for a, b in zip(expected, found, strict=True)),
        same_tokens=num_same,
        num_tokens=sum(len(answer.ids) for answer in expected),
        differences=differences,
    )


def measure_divergence(opened: LlamaCpp, model: PreTrainedModel, answers: Sequence[Answer]) -> dict[str, float]:
    """On transformers' answers: mean and maximum KL(model || file) in nats per token, and agreement of the argmax."""
    divergences, same = [], []
    for answer in answers:
        ids, start = answer.prompt_ids + answer.ids, len(answer.prompt_ids) - 1
        ours, theirs = score_with_transformers(model, ids)[start:], opened.score(ids)[start:]
        log_p, log_q = ours.double().log_softmax(-1), theirs.double().log_softmax(-1)
        divergences.append((log_p.exp() * (log_p - log_q)).sum(-1))
        same.append(ours.argmax(-1) == theirs.argmax(-1))
    divergence, agreement = torch.cat(divergences), torch.cat(same)
    return {
        "num_tokens": len(divergence),
        "kl_mean": divergence.mean().item(),
        "kl_max": divergence.max().item(),
        "same_top_token": agreement.double().mean().item(),
    }


def compare_folders(source: str, folder: Path, answers: Sequence[Answer]) -> float:
    """Largest logit difference between the source and the exported folder, each in its stored type."""
    with hidden_progress_bars():
        models = [AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval() for path in (source, folder)]
    largest = 0.0
    for answer in answers:
        one, other = (score_with_transformers(model, answer.prompt_ids + answer.ids) for model in models)
        largest = max(largest, (one - other).abs().max().item())
    return largest


def run_questions(arguments: argparse.Namespace, report: ExportResult, console: Console) -> dict[str, Any]:
    """Compare all GGUF types of the model on the questions."""
    folder = report.hf
    assert folder is not None, "formats has hf"
    questions = [row["question"] for row in load_json_lines(Path(arguments.prompts))[: arguments.num_prompts]]
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    comparisons: list[Comparison] = []
    divergences: dict[str, dict[str, float]] = {}
    reference: list[Answer] = []
    for kind in TYPES:
        model = load_rounded(arguments.model, ROUNDED.get(kind, torch.float32))
        if kind in ROUNDED:
            reference = [
                answer_with_transformers(model, tokenizer, question, max_tokens=arguments.max_tokens)
                for question in track(questions, f"transformers {kind}", console=console)
            ]
        for kv_type in ("f32", "f16") if kind == "f16" else ("f32",):
            opened = LlamaCpp(report.gguf[kind], kv_type=kv_type)
            found = [
                opened.answer(question, max_tokens=arguments.max_tokens)
                for question in track(questions, f"llama.cpp {kind}, {kv_type} keys", console=console)
            ]
            comparisons.append(compare_answers(kind, kv_type, model, tokenizer, reference, found))
            if kv_type == "f32":
                divergences[kind] = measure_divergence(opened, model, reference)
            if kind == "q4_k_m":
                console.print(f"[bold]{kind} answers:[/] {tokenizer.decode(found[0].ids)!r}")
            opened.llama.close()
    return {
        "max_logit_difference_of_folder": compare_folders(arguments.model, folder, reference),
        "comparisons": [asdict(comparison) for comparison in comparisons],
        "divergences": divergences,
        "num_bytes": {kind: path.stat().st_size for kind, path in report.gguf.items()},
    }


def run_families(work: Path, console: Console) -> list[dict[str, Any]]:
    """Tiny random models of the tests: every family, tied and untied, biases, grouped queries, scaled positions."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
    from exported_models import CONFIGS, CORPUS, save_tiny  # tests/ is not a package

    rows = []
    for name in CONFIGS:
        folder = save_tiny(name, work / name)
        settings = ExportSection(path=str(folder), formats=("gguf",), gguf_types=TYPES)
        report = run_export(settings, out_dir=work / f"{name}-export")
        tokenizer, model = AutoTokenizer.from_pretrained(folder), load_rounded(folder, torch.float32)
        expected = [answer_with_transformers(model, tokenizer, text, max_tokens=64) for text in CORPUS]
        opened = LlamaCpp(report.gguf["f32"], kv_type="f32")
        found = [opened.answer(text, max_tokens=64) for text in CORPUS]
        compared = compare_answers("f32", "f32", model, tokenizer, expected, found)
        opened.llama.close()
        checks = {path.rpartition("-")[2]: figures["kl_mean"] for path, figures in report.checks.items()}
        rows.append({"family": name, "greedy_f32": asdict(compared), "kl_mean": checks})
        console.print(f"{name}: {compared.same_tokens} of {compared.num_tokens} greedy tokens equal")
    return rows


def print_comparisons(
    comparisons: Sequence[dict[str, Any]], divergences: dict[str, dict[str, float]], console: Console
) -> None:
    """Print the table, and every difference of the types that transformers can reproduce."""
    table = Table("file", "keys", "same prompt ids", "same answers", "same tokens", "KL mean", "same top token")
    for row in comparisons:
        scored = divergences[row["file_type"]] if row["kv_type"] == "f32" else None
        table.add_row(
            row["file_type"],
            row["kv_type"],
            f"{row['same_prompt_ids']}/{row['num_prompts']}",
            f"{row['same_answers']}/{row['num_prompts']}",
            f"{row['same_tokens']}/{row['num_tokens']}",
            f"{scored['kl_mean']:.3g}" if scored else "",
            f"{scored['same_top_token']:.2%}" if scored else "",
        )
        for difference in row["differences"] if row["file_type"] in ROUNDED else ():
            console.print(f"{row['file_type']}, {row['kv_type']} keys: {difference}")
    console.print(table)


def measure_questions(arguments: argparse.Namespace, work: Path, console: Console) -> tuple[float, dict[str, Any]]:
    """Share of questions with equal f16 answers, and all figures."""
    started = time.perf_counter()
    settings = ExportSection(path=arguments.model, formats=("hf", "gguf"), gguf_types=TYPES)
    report = run_export(settings, out_dir=work / "export")
    details = {
        "model": Path(arguments.model).name,
        "max_tokens": arguments.max_tokens,
        "export_s": time.perf_counter() - started,
        "checks_of_the_export": report.checks,
        **run_questions(arguments, report, console),
    }
    print_comparisons(details["comparisons"], details["divergences"], console)
    f16 = next(row for row in details["comparisons"] if row["file_type"] == "f16")
    return f16["same_answers"] / f16["num_prompts"], details


def measure_families(work: Path, console: Console) -> tuple[float, dict[str, Any]]:
    """Share of equal greedy tokens over all families, and all figures."""
    rows = run_families(work, console)
    num_same = sum(row["greedy_f32"]["same_tokens"] for row in rows)
    num_tokens = sum(row["greedy_f32"]["num_tokens"] for row in rows)
    return num_same / num_tokens, {"families": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=("questions", "families"), default="questions", help="what to compare")
    parser.add_argument("--model", help="questions: Hugging Face folder of a Llama, Qwen2 or Qwen3 model")
    parser.add_argument("--prompts", help="questions: JSON lines file with a field question")
    parser.add_argument("--num-prompts", type=int, default=50, help="questions: number of questions")
    parser.add_argument("--max-tokens", type=int, default=128, help="questions: tokens per answer")
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    if arguments.case == "questions" and not (arguments.model and arguments.prompts):
        parser.error("the case questions needs --model and --prompts")
    torch.set_num_threads(1)
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as work:
        if arguments.case == "questions":
            share, details = measure_questions(arguments, Path(work), console)
        else:
            share, details = measure_families(Path(work), console)
    publish(
        name=f"export_roundtrip_{arguments.case}",
        unit="share of prompts answered equally" if arguments.case == "questions" else "share of equal greedy tokens",
        ours=share,
        peers={},
        device="cpu",
        details={"llama_cpp_python": llama_cpp.__version__} | details,
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
