"""The Modelfile of an export's GGUF files, for `ollama create`.

Ollama renders a conversation with the chat template that the GGUF file holds, unless the Modelfile has a TEMPLATE. One
is written for ChatML without tools, which Ollama's language of templates says exactly; older versions of Ollama, which
cannot run the template in the file, then render it too. A template that differs from ChatML in any probe has none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from tunesmith.commands.export.gguf.files import GgufPlan

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
