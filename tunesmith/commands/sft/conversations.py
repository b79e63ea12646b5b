"""Convert conversations and preference rows to samples, tokenized exactly as an agent's rollouts are.

A row has `messages` and optionally `tools`. Each assistant message becomes a turn: its prompt is rendered and bridged
to the previous turn as in a rollout, and the reply with its end-of-turn token takes the place of the sampled tokens. So
training covers the same tokens that the agent samples later. An assistant message of weighted text parts becomes one
turn for each part that is trained; the other parts are context, as the results inside of an agent's reply are.

A row may instead have rendered `text`. It is tokenized as is, control tokens included, and every token but the first is
trained; an end-of-sequence token is appended if the text has no end token.

A preference row becomes samples with advantage 1 (chosen, desirable) or -1 (rejected, undesirable). A pair (DPO) has
`chosen` and `rejected`; a labeled completion (KTO) has `completion` and `label`. Both have a `prompt` (or `messages`):
the user's text, or messages. A completion is text, a message, or messages starting with the assistant's. Without a
prompt, `chosen` and `rejected` may be whole conversations with a shared prefix. Everything is rendered by the chat
template as other conversations are; assistant messages of the prompt are not trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from tunesmith.chat.messages import TEXT_PART_FIELDS, Message, parse_messages, parse_tools
from tunesmith.chat.renderer import Prompt, Renderer
from tunesmith.chat.template import ChatTemplate
from tunesmith.errors import DataError
from tunesmith.experience.samples import build_samples
from tunesmith.storage import clean_text
from tunesmith.types import Distribution, Group, Sample, Task, Trajectory, Turn, count_equal


class ConversationReader:
    """Converts rows of conversations to samples for one tokenizer."""

    task_name = "demonstrations"

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
        if (end_of_turn := self._template.end_of_turn) is None:
            raise DataError(
                "the chat template writes no special token after a reply, so the model cannot learn to end it"
            )
        self._end_of_turn: str = end_of_turn

    def read(
        self, rows: Sequence[Mapping[str, Any]], *, max_model_len: int, drops_long_rows: bool = False
    ) -> list[Sample]:
        """One or more samples per row; `group_index` numbers the rows that are kept.

        Raises DataError for malformed rows, rows without a reply, and rows that are too long unless they are dropped.
        """
        groups, advantages = [], []
        for index, row in enumerate(rows):
            where = f"row {index}"
            task = Task(task_id=f"{self.task_name}/{index}", index=index, row=row)
            runs = tuple(
                Trajectory(task=task, run_index=run_index, turns=turns, reward=advantage)
                for run_index, (turns, advantage) in enumerate(self.build_runs(row, where=where))
            )
            num_tokens = max(len(turn.prompt_ids) + len(turn.sampled_ids) for run in runs for turn in run.turns)
            if num_tokens > max_model_len and not drops_long_rows:
                raise DataError(
                    f"{where} has {num_tokens} tokens, more than model.max_model_len={max_model_len}: raise it, "
                    "or drop long rows with long_rows=drop"
                )
            if num_tokens <= max_model_len:
                groups.append(Group(task=task, trajectories=runs))
                advantages.append([run.reward for run in runs])
        return build_samples(groups, advantages)[0]

    def build_runs(self, row: Mapping[str, Any], *, where: str) -> list[tuple[tuple[Turn, ...], float]]:
        """The turns of each conversation of a row, with the advantage of its tokens."""
        has_text = row.get("messages") is None and row.get("text") is not None
        return [((self.build_text(row["text"], where=where),) if has_text else self.build_turns(row, where=where), 1.0)]

    def build_text(self, text: Any, *, where: str) -> Turn:
        """A text as one turn; every token is trained but the first, which has no prediction."""
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{where}: text must be a non-empty string, got {text!r:.80}")
        if clean_text(text) != text:
            raise DataError(f"{where}: text has lone surrogates, which cannot be encoded as UTF-8")
        tokenizer = self._tokenizer
        has_start = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        ids = tokenizer.encode(text, add_special_tokens=not has_start, split_special_tokens=False)
        has_end = text.rstrip().endswith((tokenizer.eos_token, self._end_of_turn))
        if not has_end and ids[-1] != tokenizer.eos_token_id:
            ids.append(tokenizer.eos_token_id)
        if len(ids) == 1:
            raise DataError(f"{where}: text is one token, {text!r:.80}, and the first token of a text is not trained")
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
                    if not (message.content.strip() or message.tool_calls or message.reasoning):
                        raise ValueError(f"messages[{index}] is an empty assistant message")
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

    def _build_part_turns(self, prompt_ids: tuple[int, ...], parts: Sequence[tuple[str, bool]]) -> list[Turn]:
        """One turn per part; its prompt is everything before it. The end of turn belongs to the last part."""
        turns: list[Turn] = []
        for number, (text, is_trained) in enumerate(parts, start=1):
            ids = self._renderer.encode_content(text)
            ids += self._renderer.encode(self._end_of_turn) if number == len(parts) else ()
            turns.append(_build_turn(prompt_ids, ids, is_trained=is_trained))
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
        if not whole.startswith(before) or self._end_of_turn not in whole[len(before) :]:
            raise DataError(
                f"{where}: the chat template does not render a reply as a continuation of its generation prompt; "
                "set model.chat_template to one that does"
            )
        reply = whole[len(before) :].rpartition(self._end_of_turn)[0] + self._end_of_turn
        return self._renderer.encode(reply)


def read_weight(fields: Mapping[str, Any], where: str) -> bool:
    """Whether an assistant message is trained: all are except those with `weight` 0, as in OpenAI's format."""
    weight = fields.get("weight")
    if weight not in (None, 0, 1):
        raise ValueError(f"{where}.weight must be 0 or 1, got {weight!r}")
    return weight is None or bool(weight)


def read_parts(fields: Mapping[str, Any], where: str) -> list[tuple[str, bool]] | None:
    """The texts of an assistant message whose content is a list of text parts with weights, each with whether it is
    trained; None for other content."""
    content = fields.get("content")
    if not isinstance(content, list) or not any("weight" in part for part in content):
        return None
    if fields.get("weight") is not None or fields.get("tool_calls") or fields.get("reasoning_content"):
        raise ValueError(f"{where} has weighted parts, so it can have no weight, tool calls or reasoning of its own")
    parts = [
        (text, read_weight(part, f"{where}.content[{index}]"))
        for index, part in enumerate(content)
        if (text := part.get(TEXT_PART_FIELDS[part["type"]]))
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


Row = Mapping[str, Any]
Messages = list[dict[str, Any]]
LABELS: Mapping[Any, float] = {True: 1.0, False: -1.0}
PROMPT_KEYS = ("prompt", "messages")


class PreferenceReader(ConversationReader):
    """Converts rows to groups of samples: a chosen and a rejected one, or one labeled completion."""

    task_name = "preferences"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, kind: Literal["pairs", "labels"], **options: Any) -> None:
        super().__init__(tokenizer, **options)
        self._kind = kind

    def build_runs(self, row: Row, *, where: str) -> list[tuple[tuple[Turn, ...], float]]:
        conversations = read_pair(row, where) if self._kind == "pairs" else [read_labeled_completion(row, where)]
        return [
            (self.build_turns({**row, "messages": messages}, where=where), label) for messages, label in conversations
        ]


def read_pair(row: Row, where: str) -> list[tuple[Messages, float]]:
    """The chosen conversation with 1, and the rejected one with -1."""
    chosen, rejected = (read_completion(row, key, where) for key in ("chosen", "rejected"))
    prompt = read_prompt(row, where)
    if chosen == rejected:
        raise DataError(f"{where}: chosen and rejected are equal")
    if chosen[0].get("role") != "assistant":
        prompt, chosen, rejected = split_conversations(prompt, chosen, rejected, where)
    if prompt is None:
        raise DataError(f"{where} has no prompt, and chosen is not a whole conversation")
    return [(exclude_replies(prompt) + chosen, LABELS[True]), (exclude_replies(prompt) + rejected, LABELS[False])]


def read_labeled_completion(row: Row, where: str) -> tuple[Messages, float]:
    """The conversation, with 1 or -1."""
    completion, prompt, label = read_completion(row, "completion", where), read_prompt(row, where), row.get("label")
    if prompt is None:
        raise DataError(f"{where} has no prompt")
    if not isinstance(label, int) or label not in LABELS:
        raise DataError(f"{where}.label must be true or false, got {label!r}")
    return exclude_replies(prompt) + completion, LABELS[label]


def read_prompt(row: Row, where: str) -> Messages | None:
    """The messages before the completion, None if there are none."""
    given = [key for key in PROMPT_KEYS if row.get(key) is not None]
    if len(given) > 1:
        raise DataError(f"{where} has both {' and '.join(given)}: keep one of them")
    return read_messages(row[given[0]], f"{where}.{given[0]}", role="user") if given else None


def read_completion(row: Row, key: str, where: str) -> Messages:
    if row.get(key) is None:
        raise DataError(f"{where} has no {key}; its fields are {', '.join(map(str, row))}")
    return read_messages(row[key], f"{where}.{key}", role="assistant")


def read_messages(value: Any, where: str, *, role: str) -> Messages:
    """Text, a message or a list of messages as a list; message fields are validated later, when rendered."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    messages = [value] if isinstance(value, Mapping) else value
    if not isinstance(messages, Sequence) or not messages or not all(isinstance(each, Mapping) for each in messages):
        raise DataError(f"{where} must be text, a message or a list of messages, got {value!r:.80}")
    return [dict(message) for message in messages]


def split_conversations(
    prompt: Messages | None, chosen: Messages, rejected: Messages, where: str
) -> tuple[Messages, Messages, Messages]:
    """Split two conversations into shared prefix and completions; a `prompt` must match the prefix's last message."""
    num_shared = count_equal(chosen, rejected)
    tails = chosen[num_shared:], rejected[num_shared:]
    if not num_shared or any(not tail or tail[0].get("role") != "assistant" for tail in tails):
        raise DataError(f"{where}: chosen and rejected must share a prefix and differ from an assistant message on")
    if prompt is not None and prompt[-1].get("content") != chosen[num_shared - 1].get("content"):
        raise DataError(f"{where}: chosen is a whole conversation that does not continue the prompt")
    return chosen[:num_shared], *tails


def exclude_replies(messages: Messages) -> Messages:
    """The messages, with assistant messages excluded from training (`weight` 0)."""
    return [{**message, "weight": 0} if message.get("role") == "assistant" else message for message in messages]


def add_probes(samples: Sequence[Sample], *, max_model_len: int) -> list[Sample]:
    """The samples of a KTO batch, then probes: mismatched pairs of each row's prompt and the next row's completion.

    The loss estimates the KL from them (KTO; Ethayarajh et al., 2024). The last prompt gets the first completion.
    Probes have advantage 0 and the group of their prompt; probes longer than the context are dropped, and a single row
    has none.
    """
    firsts = list({sample.group_index: sample for sample in reversed(samples)}.values())[::-1]
    next_trajectory = 1 + max((sample.trajectory_index for sample in samples), default=-1)
    probes = [] if len(firsts) < 2 else map(join_prompt, firsts, [*firsts[1:], firsts[0]])
    kept = [probe for probe in probes if len(probe.token_ids) <= max_model_len]
    return [*samples, *(replace(probe, trajectory_index=next_trajectory + i) for i, probe in enumerate(kept))]


def join_prompt(prompt: Sample, completion: Sample) -> Sample:
    """The prompt tokens of one sample followed by the completion tokens of another."""
    end, start = prompt.is_sampled.index(True), completion.is_sampled.index(True)
    num_tokens = end + len(completion.token_ids) - start
    return Sample(
        token_ids=prompt.token_ids[:end] + completion.token_ids[start:],
        is_sampled=prompt.is_sampled[:end] + completion.is_sampled[start:],
        logprobs=(0.0,) * num_tokens,
        advantages=(0.0,) * num_tokens,
        policy_versions=prompt.policy_versions[:end] + completion.policy_versions[start:],
        distribution_spans=tuple(
            replace(span, start=span.start + end - start, end=span.end + end - start)
            for span in completion.distribution_spans
        ),
        group_index=prompt.group_index,
        trajectory_index=prompt.trajectory_index,
    )
