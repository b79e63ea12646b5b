"""llama.cpp encodes text to the same ids and decodes greedily to the same tokens as transformers, for every family."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

gguf = pytest.importorskip("gguf")
llama_cpp = pytest.importorskip("llama_cpp")

from llama_cpp.llama_chat_format import Jinja2ChatFormatter  # noqa: E402

from exported_models import CONFIGS, build_random_model, build_tokenizer, save_tiny  # noqa: E402
from gguf_files import build_gguf_plan, write_tiny_gguf  # noqa: E402
from tunesmith.commands.export.gguf.writer import write_gguf  # noqa: E402
from tunesmith.commands.export.llama_cpp import GgufModel, quantize_file  # noqa: E402
from tunesmith.commands.export.run import run_export  # noqa: E402
from tunesmith.config import ExportSection  # noqa: E402
from tunesmith.errors import ModelError, StorageError  # noqa: E402
from tunesmith.model.prepare import prepare_model  # noqa: E402
from tunesmith.tasks.arithmetic import build_problems  # noqa: E402

MESSAGES = [{"role": "user", "content": "The farmer's 12 hens laid 345 eggs; how many are left?"}]


@pytest.mark.parametrize("name", list(CONFIGS))
def test_greedy_tokens_are_those_of_transformers(name, tmp_path):
    folder = save_tiny(name, tmp_path / "hf")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text)["input_ids"]
    prompt = torch.tensor([ids])
    generated = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False, eos_token_id=2
    )[0, len(ids) :].tolist()
    write_tiny_gguf(name, tmp_path / "m.gguf")
    with GgufModel(tmp_path / "m.gguf", context=512, num_threads=1) as gguf_model:
        assert gguf_model.tokenize(text) == ids
        logits = gguf_model.compute_logits([*ids, *generated[:-1]])
        assert logits[len(ids) - 1 :].argmax(1).tolist() == generated


def test_the_chat_template_in_the_file_renders_like_the_tokenizers(tmp_path):
    write_tiny_gguf("qwen2", tmp_path / "m.gguf")
    llama = llama_cpp.Llama(str(tmp_path / "m.gguf"), vocab_only=True, verbose=False)
    formatter = Jinja2ChatFormatter(llama.metadata["tokenizer.chat_template"], eos_token="<|im_end|>", bos_token="")
    tokenizer = build_tokenizer("qwen2")
    expected = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert formatter(messages=MESSAGES).prompt == expected


def test_q8_0_equals_that_of_llama_cpp_bit_for_bit(tmp_path):
    write_tiny_gguf("qwen3", tmp_path / "f32.gguf")
    write_tiny_gguf("qwen3", tmp_path / "ours.gguf", file_type="q8_0")
    quantize_file(tmp_path / "f32.gguf", tmp_path / "theirs.gguf", file_type="q8_0", num_threads=1)
    ours = gguf.GGUFReader(tmp_path / "ours.gguf").tensors
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "theirs.gguf").tensors}
    assert {tensor.name for tensor in ours} == theirs.keys()
    for tensor in ours:
        assert tensor.tensor_type == theirs[tensor.name].tensor_type
        assert np.array_equal(tensor.data, theirs[tensor.name].data)


def test_q4_k_m_loads_and_computes_logits(tmp_path):
    config = CONFIGS["qwen2"]
    config.hidden_size, config.intermediate_size = 256, 512
    model = build_random_model(config, std=0.05)
    write_gguf(tmp_path / "f32.gguf", model, build_gguf_plan(model), file_type="f32")
    quantize_file(tmp_path / "f32.gguf", tmp_path / "q4.gguf", file_type="q4_k_m", num_threads=1)
    types = {tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "q4.gguf").tensors}
    assert {"Q4_K", "Q6_K"} <= types
    ids = list(range(20))
    with GgufModel(tmp_path / "q4.gguf", context=64, num_threads=1) as gguf_model:
        found = torch.from_numpy(gguf_model.compute_logits(ids))
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([ids])).logits[0]
    divergence = torch.nn.functional.kl_div(
        found.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert 1e-6 < divergence < 0.5


def test_errors_of_llama_cpp_are_raised_with_its_messages(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_text("no model", encoding="utf-8")
    with pytest.raises(ModelError, match="llama.cpp cannot load .*broken.gguf: .*invalid magic"):
        GgufModel(broken, context=64, num_threads=1)
    with pytest.raises(StorageError, match="llama.cpp could not quantize to .*invalid magic"):
        quantize_file(broken, tmp_path / "out.gguf", file_type="q4_k_m", num_threads=1)


def test_the_exported_pocket_model_encodes_text_like_its_tokenizer(tmp_path):
    folder = prepare_model("pocket-gguf", tmp_path / "pocket-gguf")
    settings = ExportSection(path=str(folder), formats=("gguf",), gguf_types=("f32",))
    file = run_export(settings, out_dir=tmp_path / "out").gguf["f32"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rng = random.Random(0)
    texts = [
        "".join(rng.choices("abc XYZ 0159 {}\"':,.$(+*\n\t<\u00e9\u00df\u00bd\u00b2\u0663\u4f60 ", k=40))
        for _ in range(200)
    ]
    texts += [problem.question for problem in build_problems("train", num_problems=100, seed=1)]
    with GgufModel(file, context=64, num_threads=1) as gguf_model:
        assert [gguf_model.tokenize(text) for text in texts] == [tokenizer(text)["input_ids"] for text in texts]
