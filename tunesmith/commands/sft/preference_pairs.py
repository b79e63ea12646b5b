"""Convert preference rows to samples with advantage 1 (chosen, desirable) or -1 (rejected, undesirable).

A pair (DPO) has `chosen` and `rejected`; a labeled completion (KTO) has `completion` and `label`. Both have a `prompt`
(or `messages`): the user's text, or messages. A completion is text, a message, or messages starting with the
assistant's. Without a prompt, `chosen` and `rejected` may be whole conversations with a shared prefix. Everything is
rendered by the chat template as other conversations are; assistant messages of the prompt are not trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from tunesmith.commands.sft.conversations import ConversationReader
from tunesmith.errors import DataError
from tunesmith.experience.samples import build_samples
from tunesmith.types import Group, Sample, Task, Trajectory

Row = Mapping[str, Any]
Messages = list[dict[str, Any]]
LABELS: Mapping[Any, float] = {True: 1.0, False: -1.0}
PROMPT_KEYS = ("prompt", "messages")


class PreferenceReader:
    """Converts rows to groups of samples: a chosen and a rejected one, or one labeled completion."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        kind: Literal["pairs", "labels"],
        enable_thinking: bool | None = None,
        split_special_tokens: bool = True,
    ) -> None:
        self._reader = ConversationReader(
            tokenizer, enable_thinking=enable_thinking, split_special_tokens=split_special_tokens
        )
        self._kind = kind

    def read(self, rows: Sequence[Row], *, max_model_len: int, drops_long_rows: bool = False) -> list[Sample]:
        """Samples of all rows; `group_index` numbers the rows that are kept.

        Raises DataError for malformed rows, and for rows that are too long unless they are dropped.
        """
        groups, advantages = [], []
        for index, row in enumerate(rows):
            where = f"row {index}"
            conversations = read_pair(row, where) if self._kind == "pairs" else [read_labeled_completion(row, where)]
            task = Task(task_id=f"preferences/{index}", index=index, row=row)
            runs = tuple(
                Trajectory(
                    task=task,
                    run_index=run_index,
                    turns=self._reader.build_turns({**row, "messages": messages}, where=where),
                    reward=label,
                )
                for run_index, (messages, label) in enumerate(conversations)
            )
            if self._reader.fits_context(
                runs, where=where, max_model_len=max_model_len, drops_long_rows=drops_long_rows
            ):
                groups.append(Group(task=task, trajectories=runs))
                advantages.append([run.reward for run in runs])
        return build_samples(groups, advantages)[0]


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
        raise DataError(f"{where} has no {key}")
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
    num_shared = 0
    for one, other in zip(chosen, rejected, strict=False):
        if one != other:
            break
        num_shared += 1
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
