"""Chat templates that write tool calls in the formats of model families, and a tokenizer with their special tokens.

Each is a short template of its own that writes calls, results and ends of turns as the family's template does.
"""

from __future__ import annotations

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from fakes import build_chat_tokenizer

_DS = {name: f"<\uff5c{name.replace('_', chr(0x2581))}\uff5c>" for name in (
    "User", "Assistant", "end_of_sentence", "tool_calls_begin", "tool_calls_end", "tool_call_begin", "tool_call_end",
    "tool_sep", "tool_outputs_begin", "tool_outputs_end", "tool_output_begin", "tool_output_end",
)}  # fmt: skip

QWEN3_CODER = """{%- for m in messages %}
{%- if m.role == 'system' or m.role == 'user' %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if loop.first and tools %}{{ tools | tojson }}{{ '\\n' }}{% endif %}{{ m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant' }}
{%- if m.content | trim | length > 0 %}{{ '\\n' + m.content | trim + '\\n' }}{% endif %}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter=' + key + '>\\n' }}
{{- value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}
{{- '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.previtem and loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>\\n' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

GLM = """[gMASK]<sop>
{%- if tools %}{{ '<|system|>\\n# Tools\\n<tools>\\n' }}{{ tools | tojson }}
{{- '\\n</tools>\\n<tool_call>{function-name}\\n<arg_key>{key}</arg_key>\\n...\\n</tool_call>' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|user|>\\n' + m.content }}
{%- elif m.role == 'system' %}{{ '<|system|>\\n' + m.content }}
{%- elif m.role == 'assistant' %}{{ '<|assistant|>\\n<think></think>' }}
{%- if m.content.strip() %}{{ '\\n' + m.content.strip() }}{% endif %}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>' + call.function.name + '\\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}{{ value if value is string else value | tojson }}
{{- '</arg_value>\\n' }}
{%- endfor %}
{{- '</tool_call>' }}
{%- endfor %}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
"""As GLM-4.6: no token ends a turn, the header of the next message does."""

_MISTRAL_START = """{{- bos_token }}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and m == users[-1] %}{{ '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}
{%- elif m.tool_calls %}"""

_MISTRAL_ID = """{%- if not call.id is defined or call.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
{%- endif %}"""

_MISTRAL_END = """{%- elif m.role == 'assistant' %}{{ m.content + '</s>' }}
{%- elif m.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}"""

MISTRAL_LIST = (
    _MISTRAL_START
    + "{{ '[TOOL_CALLS] [' }}{%- for call in m.tool_calls %}"
    + _MISTRAL_ID
    + """{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
{{- ', ' if not loop.last else ']</s>' }}
{%- endfor %}"""
    + _MISTRAL_END
)
"""As Mistral Small 3.1: one list of calls with ids; content next to calls is left out."""

MISTRAL_ARGS = (
    _MISTRAL_START
    + """{{- m.content }}{%- for call in m.tool_calls %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
{%- endfor %}{{ '</s>' }}"""
    + _MISTRAL_END
)
"""As Ministral 3 and Devstral 2."""

MISTRAL_NAME = MISTRAL_ARGS.replace("[ARGS]", "").replace("{{- bos_token }}", "{{- bos_token }}{# [THINK][/THINK] #}")
"""As Magistral: the name right before the arguments, and reasoning in [THINK]."""

_DEEPSEEK = """{{- bos_token }}{% set ns = namespace(is_tool=false) %}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ m.content }}
{%- elif m.role == 'user' %}{% set ns.is_tool = false %}{{ 'USER' + m.content + 'ASSISTANT' }}
{%- elif m.role == 'assistant' %}{% set ns.is_tool = false %}
{{- m.content }}
{%- if m.tool_calls is defined and m.tool_calls is not none %}
{{- 'CALLS_BEGIN' }}
{%- for call in m.tool_calls %}CALL{% endfor %}
{{- 'CALLS_END' }}
{%- endif %}
{{- 'EOS' }}
{%- elif m.role == 'tool' %}{% set ns.is_tool = true %}{{ 'OUTPUT_BEGIN' + m.content + 'OUTPUT_END' }}
{%- endif %}
{%- endfor %}"""


def _fill(template: str, call: str) -> str:
    names = {
        "USER": "User", "ASSISTANT": "Assistant", "CALLS_BEGIN": "tool_calls_begin", "CALLS_END": "tool_calls_end",
        "CALL_BEGIN": "tool_call_begin", "CALL_END": "tool_call_end", "SEP": "tool_sep", "EOS": "end_of_sentence",
        "OUTPUT_BEGIN": "tool_output_begin", "OUTPUT_END": "tool_output_end",
    }  # fmt: skip
    text = template.replace("%}CALL{%", "%}" + call + "{%")
    for short, name in names.items():
        text = text.replace(f"'{short}'", f"'{_DS[name]}'")
    return text


DEEPSEEK_V3 = _fill(
    _DEEPSEEK,
    "{{ 'CALL_BEGIN' + call.type + 'SEP' + call.function.name + '\\n```json\\n' + call.function.arguments }}"
    "{{ '\\n```' + 'CALL_END' }}",
)
"""As DeepSeek-V3 and R1: arguments as text, in a fenced block."""

DEEPSEEK_V31 = _fill(
    _DEEPSEEK, "{{ 'CALL_BEGIN' + call.function.name + 'SEP' + call.function.arguments + 'CALL_END' }}"
)

HARMONY = """{{- '<|start|>system<|message|>Valid channels: analysis, commentary, final.<|end|>' }}
{%- set ns = namespace(name=none) %}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ '<|start|>developer<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'user' %}
{%- if tools and loop.first %}{{ '<|start|>developer<|message|>' }}{{ tools | tojson }}{{ '<|end|>' }}{% endif %}
{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'assistant' and m.tool_calls %}
{%- if m.content and m.thinking %}{{ raise_exception('Cannot pass both content and thinking') }}
{%- elif m.content %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.content + '<|end|>' }}
{%- elif m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
{%- endif %}
{%- set call = m.tool_calls[0].function %}{% set ns.name = call.name %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{ '<|call|>' }}
{%- elif m.role == 'assistant' and loop.last and not add_generation_prompt %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
{%- elif m.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'tool' %}
{%- if ns.name is none %}{{ raise_exception('no previous assistant message with a tool call') }}{% endif %}
{{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- m.content | tojson }}{{ '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
"""As gpt-oss: one call for each message, reasoning in messages of its own, which only tool calls keep."""

SPECIALS = {
    "glm": ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
    "mistral": [
        "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
        "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[THINK]", "[/THINK]",
    ],
    "deepseek": list(_DS.values()),
    "harmony": ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"],
    "llama": ["<|python_tag|>", "<|eom_id|>"],
}  # fmt: skip
"""Special tokens of each family, besides those of `build_chat_tokenizer`."""


def build_family_tokenizer(template: str, *, eos_token: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with the special tokens of all families."""
    tokenizer = build_chat_tokenizer(template)
    specials = [text for texts in SPECIALS.values() for text in texts]
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in specials], special_tokens=True)
    tokenizer.eos_token = eos_token
    return tokenizer
