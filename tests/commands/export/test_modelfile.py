"""The Modelfile of GGUF files: what Ollama reads, and a TEMPLATE only where it renders as the model's own."""

from __future__ import annotations

import pytest

from chat_templates import LLAMA3, QWEN25
from exported_models import build_tokenizer, save_tiny
from tunesmith.commands.export.gguf.files import write_template
from tunesmith.commands.export.run import run_export
from tunesmith.config import ExportSection
from tunesmith.storage import check_complete, load_json

CHATML = "{{ range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}<|im_start|>assistant\n"
DEFAULT_SYSTEM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_modelfile_names_the_files_the_template_the_stops_and_the_context(tmp_path):
    pytest.importorskip("gguf")
    folder = save_tiny("smollm", tmp_path / "tiny")
    settings = ExportSection(path=str(folder), formats=("gguf",), gguf_types=("q8_0", "f32"))
    report = run_export(settings, out_dir=tmp_path / "out")
    assert (report.folder / "gguf" / "Modelfile").read_text() == (
        "# ollama create tiny -f Modelfile\n"
        "FROM ./tiny-q8_0.gguf\n"
        "# FROM ./tiny-f32.gguf\n"
        f'TEMPLATE """{CHATML}"""\n'
        'PARAMETER stop "<|im_end|>"\n'
        "PARAMETER num_ctx 512\n"
    )
    assert "gguf/Modelfile" in load_json(report.folder / "DONE.json")["crc32"]
    check_complete(report.folder)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, CHATML),
        (
            DEFAULT_SYSTEM,
            '{{ if ne (index .Messages 0).Role "system" }}<|im_start|>system\nBe brief.<|im_end|>\n{{ end }}' + CHATML,
        ),
        (DEFAULT_SYSTEM.replace("['content'] }}", "['content'] | trim }}"), None),  # Ollama strips nothing
        (DEFAULT_SYSTEM.replace("Be brief.", "Say {{ '{{ x }}' }}."), None),
        (DEFAULT_SYSTEM + "{% if tools %}{{ tools }}{% endif %}", None),
        (QWEN25, None),
        (LLAMA3, None),
        ("{{ raise_exception('no') }}", None),
    ],
)  # fmt: skip
def test_a_template_is_written_only_if_it_renders_as_the_models_own(template, expected):
    tokenizer = build_tokenizer("qwen2")
    if template is not None:
        tokenizer.chat_template = template
    assert write_template(tokenizer, has_bos=False) == expected


def test_the_server_adds_the_beginning_of_sequence_token():
    tokenizer = build_tokenizer("llama-bpe")
    assert write_template(tokenizer, has_bos=True) is None  # the template writes none
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    assert write_template(tokenizer, has_bos=True) == CHATML
    assert write_template(tokenizer, has_bos=False) is None
