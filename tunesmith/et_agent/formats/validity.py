"""The two format checks of ET-Agent's code on the text of a trajectory: of its reward, and of fine-tuning data.

They exist so that results can be compared with the original. The check of the reward accepts text after the answer and
results that the model wrote; `find_format_error` of `tunesmith.environments.transcript` is the check to train with.
"""

from __future__ import annotations

TOOLS = ("search", "python")
BOXED = "\\boxed{"


def find_reward_error(text: str, *, tools: tuple[str, ...] = TOOLS) -> str | None:
    """What the format check of the reward finds wrong; None if the format counts as valid.

    Equal numbers of opening and closing think tags, at least one; exactly one answer pair in order; every tool tag
    followed, in order, by its closing tag, `<result>` and `</result>`; a `\\boxed{` in the answer.
    """
    num_open, num_close = text.count("<think>"), text.count("</think>")
    if num_open != num_close or not num_open:
        return f"{num_open} opening and {num_close} closing think tags"
    if text.count("<answer>") != 1 or text.count("</answer>") != 1:
        return f"{text.count('<answer>')} opening and {text.count('</answer>')} closing answer tags"
    for tool in tools:
        if not _has_results(text, tool):
            return f"a <{tool}> is not followed by </{tool}>, <result> and </result>"
    start, end = text.find("<answer>"), text.find("</answer>")
    if start > end:
        return "the answer is closed before it is opened"
    if BOXED not in text[start:end]:
        return "the answer has no \\boxed{}"
    return None


def find_sft_error(text: str, *, tools: tuple[str, ...] = TOOLS) -> str | None:
    """What the stricter check of fine-tuning data finds wrong; None if the format counts as valid.

    Beside the check of the reward: the text begins with `<think>` and ends with `</answer>`, the answer has exactly one
    `\\boxed{` and no tags of thoughts and tools.
    """
    stripped = text.strip()
    if not stripped.startswith("<think>"):
        return "the text does not begin with <think>"
    if not stripped.endswith("</answer>"):
        return "the text does not end with </answer>"
    if (error := find_reward_error(text, tools=tools)) is not None:
        return error
    answer = text[text.find("<answer>") : text.find("</answer>")]
    if answer.count(BOXED) != 1:
        return f"the answer has {answer.count(BOXED)} \\boxed{{}}"
    tags = [f"<{slash}{name}>" for name in ("think", "result", *tools) for slash in ("", "/")]
    found = next((tag for tag in tags if tag in answer), None)
    return None if found is None else f"the answer contains {found}"


def _has_results(text: str, tool: str) -> bool:
    """Whether every opening tag of the tool is followed, in order, by its closing tag and a result."""
    position = text.find(f"<{tool}>")
    while position >= 0:
        for tag in (f"</{tool}>", "<result>", "</result>"):
            position = text.find(tag, position)
            if position < 0:
                return False
            position += len(tag)
        position = text.find(f"<{tool}>", position)
    return True
