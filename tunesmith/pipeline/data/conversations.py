"""Conversations to learn from, as the turns an agent would have made.

A demonstration is a row with `messages` and perhaps `tools`. Each assistant message becomes a turn whose prompt is
rendered, and bridged to the turn before, exactly as a rollout's is; the reply with its end-of-turn token takes the
place of what would have been sampled. So the tokens that fine-tuning trains are those that the agent will sample.

A row may instead have `text` that is already rendered. It is tokenized as it is, control tokens included, and all of it
trains, up to an end-of-sequence token that is appended where the text does not end with one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from tunesmith.chat.messages import Message, parse_messages, parse_tools
from tunesmith.chat.renderer import Prompt, Renderer
from tunesmith.chat.template import ChatTemplate
from tunesmith.errors import DataError
from tunesmith.experience.samples import build_samples
from tunesmith.types import Distribution, Group, Sample, Task, Trajectory, Turn


class DemonstrationReader:
    """Turns rows of messages into samples for one tokenizer."""

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
        self._template = ChatTemplate(tokenizer, has_hermes_parser=True, split_special_tokens=split_special_tokens)
        if self._template.end_of_turn is None:
            raise DataError("the chat template writes no special token after a reply, so its end cannot be learned")

    def read(
        self, rows: Sequence[Mapping[str, Any]], *, max_model_len: int, drops_long_rows: bool = False
    ) -> list[Sample]:
        """One sample or more a row, whose `group_index` counts the rows that are kept.

        A row that is malformed or without a reply is an error, and one that is too long unless those are dropped.
        """
        groups = []
        for index, row in enumerate(rows):
            where = f"row {index}"
            task = Task(task_id=f"demonstrations/{index}", index=index, row=row)
            has_text = row.get("messages") is None and row.get("text") is not None
            turns = (self.build_text(row["text"], where=where),) if has_text else self.build_turns(row, where=where)
            runs = (Trajectory(task=task, run_index=0, turns=turns, reward=1.0),)
            if self.has_room(runs, where=where, max_model_len=max_model_len, drops_long_rows=drops_long_rows):
                groups.append(Group(task=task, trajectories=runs))
        samples, _ = build_samples(groups, [[1.0]] * len(groups))
        return samples

    @staticmethod
    def has_room(runs: Sequence[Trajectory], *, where: str, max_model_len: int, drops_long_rows: bool) -> bool:
        """Whether a row's runs fit the context; one that does not is an error unless such rows are dropped."""
        num_tokens = max(len(turn.prompt_ids) + len(turn.sampled_ids) for run in runs for turn in run.turns)
        if num_tokens > max_model_len and not drops_long_rows:
            raise DataError(
                f"{where} has {num_tokens} tokens, more than model.max_model_len={max_model_len}: raise that, "
                "or leave such rows out by long_rows=drop"
            )
        return num_tokens <= max_model_len

    def build_text(self, text: Any, *, where: str) -> Turn:
        """A text as one turn in which every token trains but the first, which nothing predicts."""
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{where}: text must be text that is not empty, got {text!r:.80}")
        tokenizer, end_of_turn = self._tokenizer, self._template.end_of_turn
        assert end_of_turn is not None
        has_start = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        ids = tokenizer.encode(text, add_special_tokens=not has_start, split_special_tokens=False)
        has_end = text.rstrip().endswith((tokenizer.eos_token, end_of_turn))
        if not has_end and ids[-1] != tokenizer.eos_token_id:
            ids.append(tokenizer.eos_token_id)
        return _build_turn(tuple(ids[:1]), tuple(ids[1:]), is_trained=True)

    def build_turns(self, row: Mapping[str, Any], *, where: str) -> tuple[Turn, ...]:
        """One turn for each assistant message; its prompt is bridged to the turn before as a rollout's is."""
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
                    reply_ids = self._encode_reply(messages[: index + 1], tools, where)
                    is_trained = read_weight(row["messages"][index], f"messages[{index}]")
                    turns.append(_build_turn(prompt_ids, reply_ids, is_trained=is_trained))
                    num_seen = index + 1
        except DataError:
            raise
        except ValueError as error:
            raise DataError(f"{where}: {error}") from error
        if not any(turn.is_trained for turn in turns):
            raise DataError(f"{where} has no assistant message to learn from")
        return tuple(turns)

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
        """Ids of the last message as the template writes it after its prompt, with the end-of-turn token."""
        variables = self._variables
        before = self._template.render(messages[:-1], tools=tools, variables=variables)
        whole = self._template.render(messages, tools=tools, variables=variables, has_generation_prompt=False)
        end_of_turn = self._template.end_of_turn
        assert end_of_turn is not None
        if not whole.startswith(before) or end_of_turn not in whole[len(before) :]:
            raise DataError(
                f"{where}: the chat template does not write a reply after its own generation prompt; "
                "set model.chat_template to one that does"
            )
        reply = whole[len(before) :].rpartition(end_of_turn)[0] + end_of_turn
        return self._renderer.encode(reply)


def check_reply(message: Message, where: str) -> None:
    """Refuse an assistant turn that says and calls nothing: it would teach the model to fall silent."""
    if not (message.content.strip() or message.tool_calls or message.reasoning):
        raise ValueError(f"{where} is an empty assistant turn")


def read_weight(fields: Mapping[str, Any], where: str) -> bool:
    """Whether an assistant message trains: all do but those with `weight` 0, as in OpenAI's format."""
    weight = fields.get("weight")
    if weight not in (None, 0, 1):
        raise ValueError(f"{where}.weight must be 0 or 1, got {weight!r}")
    return weight is None or bool(weight)


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
