"""`tunesmith model convert`: a GGUF file as a Hugging Face folder, in which the model can be trained.

transformers reads the file; what it would read wrongly is refused, as wherever a file is loaded. A head that is the
embedding matrix, stored a second time in another quantization, is tied to it again: both take the one with more bits.
The tokenizer gets the split rules that the file names.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tunesmith.commands.export.gguf.vocabulary import PRE_TOKENIZERS, SUPERBPE, has_merged_digits
from tunesmith.commands.export.verify import build_prompts, check_hf_folder, compute_logits
from tunesmith.errors import ModelError
from tunesmith.model.checkpoint import SMALL_FILES_BYTES, save_model_files
from tunesmith.model.load import DTYPES, check_vocabulary, load_model, load_tokenizer, read_gguf_text
from tunesmith.runs.workspace import Workspace
from tunesmith.storage import check_free_space, renamed_folder

logger = logging.getLogger(__name__)

MIN_COSINE = 0.95
"""Of the rows of head and embedding; two quantizations of one matrix have more than 0.99, matrices trained apart less
than 0.5."""
HEAD, EMBEDDING = "output.weight", "token_embd.weight"
NFC = {"qwen2"}
"""Split rules of tokenizers that compose accents first, which a GGUF file cannot say."""


def convert_gguf(
    path: str | Path, *, out_dir: str | Path, dtype: str = "float32", chat_template: str | None = None
) -> Path:
    """Write the model of a GGUF file into the new folder `out_dir`, and return it.

    Loaded back, the folder gives the logits of the model that was read, bit for bit.
    """
    file, folder = Path(path).expanduser(), Path(out_dir).expanduser().absolute()
    if file.suffix != ".gguf" or not file.is_file():
        raise ModelError(f"{str(path)!r} is not a .gguf file")
    if dtype not in DTYPES:
        raise ModelError(f"dtype={dtype!r} is not supported; allowed: {', '.join(DTYPES)}")
    workspace = Workspace(folder, is_whole=True)
    workspace.check_unused()
    tokenizer = load_tokenizer(str(file), chat_template=chat_template)
    model = load_model(str(file), dtype=DTYPES[dtype], device=torch.device("cpu"))
    from gguf import GGUFReader  # an optional package, which loading has found

    reader = GGUFReader(file)
    correct_tokenizer(tokenizer, reader, model)
    check_vocabulary(model, tokenizer)
    tie_head(model, {tensor.name: int(tensor.n_bytes) for tensor in reader.tensors})
    prompts = build_prompts(tokenizer)
    expected = compute_logits(model, prompts)
    with workspace, renamed_folder(folder) as temporary:
        check_free_space(temporary, model.num_parameters() * DTYPES[dtype].itemsize + SMALL_FILES_BYTES)
        save_model_files(temporary, model, tokenizer)
        check_hf_folder(temporary, tokenizer, prompts, expected, trust_remote_code=False)
    return folder


def tie_head(model: PreTrainedModel, sizes: dict[str, int]) -> None:
    """Tie a head that is the embedding matrix, stored twice."""
    head, embedding = model.get_output_embeddings().weight.data, model.get_input_embeddings().weight.data
    if HEAD not in sizes or head.shape != embedding.shape:
        return
    # of each token's row: a sum over the whole matrix, in float32, is off by several percent for large vocabularies
    cosine = torch.cosine_similarity(head.float(), embedding.float(), dim=1).median().item()
    if cosine > MIN_COSINE:
        kept = HEAD if sizes[HEAD] >= sizes[EMBEDDING] else EMBEDDING
        embedding.copy_(head if kept == HEAD else embedding)
        model.config.tie_word_embeddings = True
        model.tie_weights()
        logger.warning("head and embedding are one matrix stored twice (cosine %.4f): tied, both take %s", cosine, kept)


def correct_tokenizer(tokenizer: PreTrainedTokenizerBase, reader: Any, model: PreTrainedModel) -> None:
    """Give a byte-level tokenizer the split rules that the file names, and the model's length."""
    tokenizer.model_max_length = model.config.get_text_config().max_position_embeddings
    if read_gguf_text(reader, "tokenizer.ggml.model") != "gpt2":
        return
    backend, named = tokenizer.backend_tokenizer, read_gguf_text(reader, "tokenizer.ggml.pre")
    rules = next((rules for rules, name in PRE_TOKENIZERS.items() if name == named), None)
    if named == SUPERBPE and has_merged_digits(json.loads(backend.to_str())["model"]["merges"]):
        rules = None
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
