"""`tunesmith model convert`: a GGUF file as a Hugging Face folder, in which the model can be trained.

transformers reads the file. What it would read wrongly is refused: tensors of the file that are not in the model, and
scaled rotary embeddings. A head that is the embedding matrix, stored a second time in another quantization, is tied to
it again: both take the one with more bits. The tokenizer gets the split rules that the file names.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tunesmith.commands.export.gguf.vocabulary import PRE_TOKENIZERS, SINGLE_DIGITS, SUPERBPE, has_merged_digits
from tunesmith.commands.export.verify import build_prompts, check_hf_folder, compute_logits
from tunesmith.errors import ModelError
from tunesmith.model.checkpoint import SMALL_FILES_BYTES, save_model_files
from tunesmith.model.load import DTYPES, check_vocabulary, load_model, load_tokenizer
from tunesmith.model.source.resolve import check_gguf_reader
from tunesmith.runs.result import Result
from tunesmith.runs.workspace import Workspace
from tunesmith.storage import check_free_space, new_folder

logger = logging.getLogger(__name__)

MIN_COSINE = 0.95
"""Of head and embedding; two quantizations of one matrix have more than 0.99, matrices trained apart less than 0.5."""
HEAD, EMBEDDING, ROPE_FACTORS = "output.weight", "token_embd.weight", "rope_freqs.weight"
NFC = {"qwen2"}
"""Split rules of tokenizers that compose accents first, which a GGUF file cannot say."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ConvertedModel(Result):
    """Result of a conversion."""

    folder: Path
    num_parameters: int
    head: str
    """Where the weights of the output layer come from."""
    num_tokens: int
    """Tokens on which the folder, loaded back, gave the logits of the file bit for bit."""

    @property
    def model_path(self) -> str:
        return str(self.folder)

    def list_facts(self) -> dict[str, str]:
        return {
            "folder": str(self.folder),
            "parameters": f"{self.num_parameters:,}",
            "head": self.head,
            "checked": f"loaded back, equal logits on {self.num_tokens} tokens",
        }


def convert_gguf(
    path: str | Path, *, out_dir: str | Path, dtype: str = "float32", chat_template: str | None = None
) -> ConvertedModel:
    """Write the model of a GGUF file into the new folder `out_dir`; return the report of one that already holds it."""
    file, folder = Path(path).expanduser(), Path(out_dir).expanduser().absolute()
    if file.suffix != ".gguf" or not file.is_file():
        raise ModelError(f"{str(path)!r} is not a .gguf file")
    if dtype not in DTYPES:
        raise ModelError(f"dtype={dtype!r} is not supported; allowed: {', '.join(DTYPES)}")
    check_gguf_reader()
    workspace = Workspace(folder, is_whole=True)
    stat = file.stat()
    source = {"path": str(file.absolute()), "size": stat.st_size, "modified": stat.st_mtime_ns}
    inputs = {"settings": {"dtype": dtype, "chat_template": chat_template}, "source": source}
    record = workspace.find_result(inputs)
    if record is None:
        record = dict(inputs)
        with workspace, new_folder(folder, record) as temporary:
            record["figures"] = write_folder(file, temporary, dtype=DTYPES[dtype], chat_template=chat_template)
    return ConvertedModel(folder=folder, **record["figures"])


def write_folder(file: Path, folder: Path, *, dtype: torch.dtype, chat_template: str | None) -> dict[str, Any]:
    """Convert the file into an empty folder; return the fields of the report."""
    from gguf import GGUFReader  # an optional package

    tokenizer = load_tokenizer(str(file), chat_template=chat_template)
    model = load_model(str(file), dtype=dtype, device=torch.device("cpu"))
    reader = GGUFReader(file)
    check_rotary(reader, model)
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in reader.tensors}
    check_tensors({tensor.name: int(tensor.n_elements) for tensor in reader.tensors}, model)
    correct_tokenizer(tokenizer, reader, model)
    check_vocabulary(model, tokenizer)
    head = tie_head(model, sizes)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    check_free_space(folder, num_parameters * dtype.itemsize + SMALL_FILES_BYTES)
    prompts = build_prompts(tokenizer)
    expected = compute_logits(model, prompts)
    save_model_files(folder, model, tokenizer)
    checks = check_hf_folder(folder, tokenizer, prompts, expected, trust_remote_code=False)
    return {"num_parameters": num_parameters, "head": head, "num_tokens": int(checks["num_tokens"])}


def read_text(reader: Any, key: str) -> str | None:
    field = reader.get_field(key)
    return None if field is None else str(field.contents())


def check_rotary(reader: Any, model: PreTrainedModel) -> None:
    """Refuse rotary scaling of the file that the model does not have."""
    scaling = read_text(reader, f"{read_text(reader, 'general.architecture')}.rope.scaling.type")
    if scaling in (None, "none") and any(tensor.name == ROPE_FACTORS for tensor in reader.tensors):
        scaling = "llama3"
    found = (getattr(model.config, "rope_parameters", None) or {}).get("rope_type", "default")
    if scaling not in (None, "none", found):
        raise ModelError(
            f"the file scales its rotary embeddings ({scaling}) and transformers reads none from it: the folder would "
            "answer differently. Take the model that the file was converted from"
        )


def check_tensors(counts: dict[str, int], model: PreTrainedModel) -> None:
    """Refuse a file with more or fewer numbers than the model."""
    num_found = sum(count for name, count in counts.items() if name != ROPE_FACTORS)
    weights = {weight.data_ptr(): weight.numel() for weight in model.state_dict().values()}
    if num_found != sum(weights.values()):
        raise ModelError(
            f"the file has {num_found:,} numbers and the {model.config.model_type} model that transformers reads from "
            f"it {sum(weights.values()):,}: it leaves out tensors, such as biases, or the file is one of several parts"
        )


def tie_head(model: PreTrainedModel, sizes: dict[str, int]) -> str:
    """Tie a head that is the embedding matrix, stored twice; return where the head comes from."""
    if HEAD not in sizes:
        return f"tied to the embedding ({EMBEDDING})"
    head, embedding = model.get_output_embeddings().weight.data, model.get_input_embeddings().weight.data
    if head.shape != embedding.shape:
        return HEAD
    products = [
        torch.tensordot(a.float(), b.float(), 2) for a, b in ((head, embedding), (head, head), (embedding,) * 2)
    ]
    cosine = (products[0] / (products[1] * products[2]).sqrt()).item()
    if not cosine > MIN_COSINE:
        return HEAD
    kept = HEAD if sizes[HEAD] >= sizes[EMBEDDING] else EMBEDDING
    embedding.copy_(head if kept == HEAD else embedding)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return f"tied to the embedding: one matrix stored twice (cosine {cosine:.4f}), both take {kept}"


def correct_tokenizer(tokenizer: PreTrainedTokenizerBase, reader: Any, model: PreTrainedModel) -> None:
    """Give a byte-level tokenizer the split rules that the file names, and the model's length."""
    tokenizer.model_max_length = model.config.get_text_config().max_position_embeddings
    if read_text(reader, "tokenizer.ggml.model") != "gpt2":
        return
    backend, named = tokenizer.backend_tokenizer, read_text(reader, "tokenizer.ggml.pre")
    rules = next((rules for rules, name in PRE_TOKENIZERS.items() if name == named), None)
    if named == SUPERBPE and not has_merged_digits(json.loads(backend.to_str())["model"]["merges"]):
        rules = SINGLE_DIGITS
    if rules is None:
        logger.warning(
            "the split rules of the tokenizer were not checked (the file %s): compare how it encodes digits and spaces",
            "names none" if named is None else f"names {named!r}",
        )
        return
    splits = [Split(Regex(pattern), behavior="isolated") for pattern in rules.patterns]
    backend.pre_tokenizer = PreTokenizers([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.model.ignore_merges = rules.ignore_merges
    if named in NFC and backend.normalizer is None:
        backend.normalizer = normalizers.NFC()
