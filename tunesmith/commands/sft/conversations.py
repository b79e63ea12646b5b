"""Convert conversations to samples, tokenized exactly as an agent's rollouts are.

A row has `messages` and optionally `tools`. Each assistant message becomes a turn: its prompt is rendered and bridged
to the previous turn as in a rollout, and the reply with its end-of-turn token takes the place of the sampled tokens. So
training covers the same tokens that the agent samples later. An assistant message of weighted text parts becomes one
turn for each part that is trained; the other parts are context, as the results inside of an agent's reply are.

A row may instead have rendered `text`. It is tokenized as is, control tokens included, and every token but the first is
trained; an end-of-sequence token is appended if the text has no end token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from tunesmith.chat.messages import Message, parse_messages, parse_tools
from tunesmith.chat.renderer import Prompt, Renderer
from tunesmith.chat.template import ChatTemplate
from tunesmith.errors import DataError
from tunesmith.experience.samples import build_samples
from tunesmith.types import Distribution, Group, Sample, Task, Trajectory, Turn


class ConversationReader:
    """Converts rows of conversations to samples for one tokenizer."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        enable_thinking: bool | None = None,
        split_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._renderer = Renderer(tokenizer, enable_thinking=enable_thinking, split_special_tokens=split_special_tokens)
        self._variables = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._template = ChatTemplate(tokenizer, split_special_tokens=split_special_tokens)
        if self._template.end_of_turn is None:
            raise DataError(
                "the chat template writes no special token after a reply, so the model cannot learn to end it"
            )

    def read(
        self, rows: Sequence[Mapping[str, Any]], *, max_model_len: int, drops_long_rows: bool = False
    ) -> list[Sample]:
        """One or more samples per row; `group_index` numbers the rows that are kept.

        Raises DataError for malformed rows, rows without a reply, and rows that are too long unless they are dropped.
        """
        groups = []
        for index, row in enumerate(rows):
            where = f"row {index}"
            task = Task(task_id=f"demonstrations/{index}", index=index, row=row)
            has_text = row.get("messages") is None and row.get("text") is not None
            turns = (self.build_text(row["text"], where=where),) if has_text else self.build_turns(row, where=where)
            runs = (Trajectory(task=task, run_index=0, turns=turns, reward=1.0),)
            if self.fits_context(runs, where=where, max_model_len=max_model_len, drops_long_rows=drops_long_rows):
                groups.append(Group(task=task, trajectories=runs))
        samples, _ = build_samples(groups, [[1.0]] * len(groups))
        return samples

    @staticmethod
    def fits_context(runs: Sequence[Trajectory], *, where: str, max_model_len: int, drops_long_rows: bool) -> bool:
        """Whether a row's runs fit the context; raises if they do not, unless long rows are dropped."""
        num_tokens = max(len(turn.prompt_ids) + len(turn.sampled_ids) for run in runs for turn in run.turns)
        if num_tokens > max_model_len and not drops_long_rows:
            raise DataError(
                f"{where} has {num_tokens} tokens, more than model.max_model_len={max_model_len}: raise it, "
                "or drop long rows with long_rows=drop"
            )
        return num_tokens <= max_model_len

    def build_text(self, text: Any, *, where: str) -> Turn:
        """A text as one turn; every token is trained but the first, which has no prediction."""
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{where}: text must be a non-empty string, got {text!r:.80}")
        tokenizer, end_of_turn = self._tokenizer, self._template.end_of_turn
        assert end_of_turn is not None
        has_start = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        ids = tokenizer.encode(text, add_special_tokens=not has_start, split_special_tokens=False)
        has_end = text.rstrip().endswith((tokenizer.eos_token, end_of_turn))
        if not has_end and ids[-1] != tokenizer.eos_token_id:
            ids.append(tokenizer.eos_token_id)
        return _build_turn(tuple(ids[:1]), tuple(ids[1:]), is_trained=True)

    def build_turns(self, row: Mapping[str, Any], *, where: str) -> tuple[Turn, ...]:
        """One turn per assistant message; its prompt is bridged to the previous turn, as in a rollout."""
        if row.get("messages") is None:
            raise DataError(f"{where} has neither messages nor text; its fields are {', '.join(map(str, row))}")
        try:
            messages, tools = parse_messages(row.get("messages")), parse_tools(row.get("tools"))
            turns: list[Turn] = []
            num_seen = 0
            for index, message in enumerate(messages):
                if message.role == "assistant":
                    check_reply(message, f"messages[{index}]")
                    prompt_ids = self._build_prompt(messages[:index], tools, num_seen, turns)
                    parts = read_parts(row["messages"][index], f"messages[{index}]")
                    if parts is None:
                        reply_ids = self._encode_reply(messages[: index + 1], tools, where)
                        is_trained = read_weight(row["messages"][index], f"messages[{index}]")
                        turns.append(_build_turn(prompt_ids, reply_ids, is_trained=is_trained))
                    else:
                        turns += self._build_part_turns(prompt_ids, parts)
                    num_seen = index + 1
        except DataError:
            raise
        except ValueError as error:
            raise DataError(f"{where}: {error}") from error
        if not any(turn.is_trained for turn in turns):
            raise DataError(f"{where} has no assistant message to train on")
        return tuple(turns)

    def _build_part_turns(self, prompt_ids: tuple[int, ...], parts: Sequence[MessagePart]) -> list[Turn]:
        """One turn per part; its prompt is everything before it. The end of turn belongs to the last part."""
        end_of_turn = self._template.end_of_turn
        assert end_of_turn is not None
        turns: list[Turn] = []
        for number, part in enumerate(parts, start=1):
            ids = self._renderer.encode_content(part.text)
            ids += self._renderer.encode(end_of_turn) if number == len(parts) else ()
            turns.append(_build_turn(prompt_ids, ids, is_trained=part.is_trained))
            prompt_ids += ids
        return turns

    def _build_prompt(
        self, messages: tuple[Message, ...], tools: tuple[dict[str, Any], ...], num_old: int, turns: Sequence[Turn]
    ) -> tuple[int, ...]:
        prompt = Prompt(messages=messages, tools=tools)
        bridged = None
        if turns:
            bridged = self._renderer.extend(
                prompt,
                num_old=num_old,
                prompt_ids=turns[-1].prompt_ids,
                sampled_ids=turns[-1].sampled_ids,
                is_ended=True,
            )
        return self._renderer.render(prompt) if bridged is None else bridged

    def _encode_reply(
        self, messages: tuple[Message, ...], tools: tuple[dict[str, Any], ...], where: str
    ) -> tuple[int, ...]:
        """Token ids of the last message as the template renders it after its prompt, with the end-of-turn token."""
        variables = self._variables
        before = self._template.render(messages[:-1], tools=tools, variables=variables)
        whole = self._template.render(messages, tools=tools, variables=variables, has_generation_prompt=False)
        end_of_turn = self._template.end_of_turn
        assert end_of_turn is not None
        if not whole.startswith(before) or end_of_turn not in whole[len(before) :]:
            raise DataError(
                f"{where}: the chat template does not render a reply as a continuation of its generation prompt; "
                "set model.chat_template to one that does"
            )
        reply = whole[len(before) :].rpartition(end_of_turn)[0] + end_of_turn
        return self._renderer.encode(reply)


def check_reply(message: Message, where: str) -> None:
    """Raise for an assistant message without content, tool call or reasoning: it would train empty replies."""
    if not (message.content.strip() or message.tool_calls or message.reasoning):
        raise ValueError(f"{where} is an empty assistant message")


def read_weight(fields: Mapping[str, Any], where: str) -> bool:
    """Whether an assistant message is trained: all are except those with `weight` 0, as in OpenAI's format."""
    weight = fields.get("weight")
    if weight not in (None, 0, 1):
        raise ValueError(f"{where}.weight must be 0 or 1, got {weight!r}")
    return weight is None or bool(weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagePart:
    """A piece of an assistant message."""

    text: str
    is_trained: bool


def read_parts(fields: Mapping[str, Any], where: str) -> list[MessagePart] | None:
    """The parts of an assistant message whose content is a list of text parts with weights; None for other content."""
    content = fields.get("content")
    if not isinstance(content, list) or not any("weight" in part for part in content):
        return None
    if fields.get("weight") is not None or fields.get("tool_calls") or fields.get("reasoning_content"):
        raise ValueError(f"{where} has weighted parts, so it can have no weight, tool calls or reasoning of its own")
    parts = [
        MessagePart(text=part["text"], is_trained=read_weight(part, f"{where}.content[{index}]"))
        for index, part in enumerate(content)
        if part["text"]
    ]
    if not parts:
        raise ValueError(f"{where} is an empty assistant message")
    return parts


def _build_turn(prompt_ids: tuple[int, ...], reply_ids: tuple[int, ...], *, is_trained: bool) -> Turn:
    return Turn(
        prompt_ids=prompt_ids,
        sampled_ids=reply_ids,
        logprobs=(0.0,) * len(reply_ids),
        policy_versions=(0,) * len(reply_ids),
        distribution=Distribution(),
        stop_reason="eos",
        is_trained=is_trained,
    )
