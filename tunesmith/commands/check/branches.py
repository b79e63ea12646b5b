"""Calls that start a new training sample, and the message at which each leaves the recorded conversation."""

from __future__ import annotations

from tunesmith.chat.messages import MatchKey
from tunesmith.commands.check.observe import Observation, ObservedConversation
from tunesmith.commands.check.text_difference import quote_difference
from tunesmith.commands.doctor.finding import Evidence, Finding
from tunesmith.rollout.recording.recorder import SessionCall

MAX_SHOWN = 5
CHANGE = (
    "append to the history and send every reply back as it came; each branch is a sample of its own, whose prompt is "
    "computed again. Sub-agents and several samples of one prompt branch by design"
)


def find_branches(run: Observation) -> Finding | None:
    """Calls after the first whose prompt extends no recorded turn."""
    starts = [call for call in run.calls[1:] if not is_extension(call, run)]
    if not starts:
        return None
    return Finding(
        check="branches",
        severity="warning",
        problem=f"{len(starts)} of {len(run.calls)} calls do not extend what was recorded, so each starts a new "
        "training sample",
        evidence=tuple(
            Evidence(source=f"call {call.index + 1}", observed=describe_branch(call, run.conversations))
            for call in starts[:MAX_SHOWN]
        ),
        change=CHANGE,
    )


def is_extension(call: SessionCall, run: Observation) -> bool:
    """Whether the prompt starts with the tokens of a recorded turn."""
    for turn in run.trajectory.turns:
        token_ids = turn.prompt_ids + turn.sampled_ids
        if call.prompt_ids[: len(token_ids)] == token_ids:
            return True
    return False


def describe_branch(call: SessionCall, conversations: tuple[ObservedConversation, ...]) -> str:
    """Why the call extends no recorded conversation: the first message that differs from the closest one."""
    earlier = [each for each in conversations if each.call_index < call.index]
    if not earlier:
        return "no earlier call has a recorded reply"
    closest = max(earlier, key=lambda each: (count_equal(each.keys, call.keys), each.call_index))
    num_equal, recorded = count_equal(closest.keys, call.keys), f"that of call {closest.call_index + 1}"
    if num_equal == len(closest.keys):
        if closest.scope != call.scope:
            return f"its tools or template variables differ from {recorded}"
        return f"its messages extend {recorded}, but the chat template renders the earlier ones differently"
    if num_equal == len(call.keys):
        if num_equal == len(closest.keys) - 1:
            return f"its prompt repeats {recorded}: a retry, or several samples of one prompt"
        return f"it goes back to the first {num_equal} messages of {recorded}"
    before, after = closest.keys[num_equal], call.keys[num_equal]
    shown = quote_difference(describe_key(before), describe_key(after))
    return f"message {num_equal + 1} ({after[0]}) differs from {recorded}: recorded {shown[0]}, sent {shown[1]}"


def count_equal(keys: tuple[MatchKey, ...], others: tuple[MatchKey, ...]) -> int:
    """Number of equal messages at the start of both."""
    for number, (one, other) in enumerate(zip(keys, others, strict=False)):
        if one != other:
            return number
    return min(len(keys), len(others))


def describe_key(key: MatchKey) -> str:
    """A message as text: role, content and tool calls."""
    role, text, extra = key
    calls = " ".join(f"{name}({arguments})" for name, arguments in extra) if role == "assistant" else ""
    return f"{role}: {text} {calls}".rstrip()
