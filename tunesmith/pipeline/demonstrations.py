"""Conversations to learn from, as the turns an agent would have made.

A demonstration is a row with `messages` and perhaps `tools`. Each assistant message becomes a turn whose prompt is
rendered, and bridged to the turn before, exactly as a rollout's is; the reply with its end-of-turn token takes the
place of what would have been sampled. So the tokens that fine-tuning trains are those that the agent will sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from tunesmith.errors import DataError
from tunesmith.experience.samples import build_samples
from tunesmith.model.messages import Message, parse_messages, parse_tools
from tunesmith.model.render import Prompt, Renderer
from tunesmith.model.template import ChatTemplate
from tunesmith.types import Distribution, Group, Sample, Task, Trajectory, Turn


class DemonstrationReader:
    """Turns rows of messages into samples for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._renderer = Renderer(tokenizer)
        self._template = ChatTemplate(tokenizer, has_hermes_parser=True)
        if self._template.end_of_turn is None:
            raise DataError("the chat template writes no special token after a reply, so its end cannot be learned")

    def read(self, rows: Sequence[Mapping[str, Any]], *, max_model_len: int) -> list[Sample]:
        """One sample or more a row; a row that is malformed, too long or without a reply is an error."""
        groups = []
        for index, row in enumerate(rows):
            turns = self._build_turns(row, where=f"row {index}")
            num_tokens = max(len(turn.prompt_ids) + len(turn.sampled_ids) for turn in turns)
            if num_tokens > max_model_len:
                raise DataError(f"row {index} has {num_tokens} tokens, more than model.max_model_len={max_model_len}")
            task = Task(task_id=f"demonstrations/{index}", index=index, row=row)
            run = Trajectory(task=task, run_index=0, turns=turns, reward=1.0)
            groups.append(Group(task=task, trajectories=(run,)))
        samples, _ = build_samples(groups, [[1.0]] * len(groups))
        return samples

    def _build_turns(self, row: Mapping[str, Any], *, where: str) -> tuple[Turn, ...]:
        try:
            messages, tools = parse_messages(row.get("messages")), parse_tools(row.get("tools"))
            turns: list[Turn] = []
            num_seen = 0
            for index, message in enumerate(messages):
                if message.role == "assistant":
                    prompt_ids = self._build_prompt(messages[:index], tools, num_seen, turns)
                    turns.append(_build_turn(prompt_ids, self._encode_reply(messages[: index + 1], tools, where)))
                    num_seen = index + 1
        except DataError:
            raise
        except ValueError as error:
            raise DataError(f"{where}: {error}") from error
        if not turns:
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
        before = self._template.render(messages[:-1], tools=tools)
        whole = self._template.render(messages, tools=tools, has_generation_prompt=False)
        end_of_turn = self._template.end_of_turn
        assert end_of_turn is not None
        if not whole.startswith(before) or end_of_turn not in whole[len(before) :]:
            raise DataError(
                f"{where}: the chat template does not write a reply after its own generation prompt; "
                "set model.chat_template to one that does"
            )
        reply = whole[len(before) :].rpartition(end_of_turn)[0] + end_of_turn
        return tuple(self._tokenizer.encode(reply, add_special_tokens=False))


def _build_turn(prompt_ids: tuple[int, ...], reply_ids: tuple[int, ...]) -> Turn:
    return Turn(
        prompt_ids=prompt_ids,
        sampled_ids=reply_ids,
        logprobs=(0.0,) * len(reply_ids),
        policy_versions=(0,) * len(reply_ids),
        distribution=Distribution(),
        stop_reason="eos",
    )
