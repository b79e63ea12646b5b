"""Stop strings are found in the text independently of token boundaries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import build_chat_tokenizer
from tunesmith.engine.core.request import Request
from tunesmith.engine.core.stopping import StopConditions, StopMatcher
from tunesmith.types import Sampling

TOKENIZER = build_chat_tokenizer("{{ messages }}")


def find_first_stop(ids: list[int], stop: tuple[str, ...]) -> int | None:
    """How many tokens the matcher reads until it finds a stop string."""
    matcher = StopMatcher(TOKENIZER, stop)
    return next((count for count, token_id in enumerate(ids, start=1) if matcher.add(token_id)), None)


def encode_bytes(text: str) -> list[int]:
    """One token a byte."""
    return [token_id for character in text for token_id in TOKENIZER.encode(character, add_special_tokens=False)]


def test_a_stop_string_within_one_token_is_found() -> None:
    ids = TOKENIZER.encode("call the function now", add_special_tokens=False)
    count = find_first_stop(ids, ("unct",))
    assert count is not None
    assert "unct" in TOKENIZER.decode(ids[:count])
    assert "unct" not in TOKENIZER.decode(ids[: count - 1])


@pytest.mark.parametrize("stop", ["Wörld", "€", "d\n", "日本"])
def test_a_stop_string_of_many_bytes_is_found_at_its_last_byte(stop: str) -> None:
    ids = encode_bytes("Hello Wörld\n costs 5€ in 日本!")
    count = find_first_stop(ids, (stop,))
    assert count is not None
    assert stop in TOKENIZER.decode(ids[:count])
    assert stop not in TOKENIZER.decode(ids[: count - 1])


def test_invalid_bytes_do_not_hide_the_text_after_them() -> None:
    broken = encode_bytes("日")[:1] * 30
    assert find_first_stop([*broken, *encode_bytes("stop")], ("stop",)) == 34


@pytest.mark.parametrize("stop", ["日", "😀", "é"])
def test_a_stop_string_directly_after_invalid_bytes_is_found_at_its_last_byte(stop: str) -> None:
    for num_broken in range(30):
        for broken in (encode_bytes("日")[:1], encode_bytes("日")[1:2], encode_bytes("😀")[:3]):
            ids = [*broken * num_broken, *encode_bytes(stop)]
            assert find_first_stop(ids, (stop,)) == len(ids), (broken, num_broken)


def test_the_text_of_a_special_token_can_stop() -> None:
    ids = [*encode_bytes("abc"), TOKENIZER.eos_token_id]
    assert find_first_stop(ids, ("<|im_end|>",)) == 4


@given(st.text(alphabet="ab c€", min_size=1, max_size=30), st.text(alphabet="ab c€", min_size=1, max_size=4))
def test_the_matcher_stops_where_the_whole_text_first_contains_the_string(text: str, stop: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    texts = [TOKENIZER.decode(ids[:count]) for count in range(1, len(ids) + 1)]
    expected = next((count for count, prefix in enumerate(texts, start=1) if stop in prefix), None)
    assert find_first_stop(ids, (stop,)) == expected


@pytest.mark.parametrize(
    ("fields", "token_ids", "expected"),
    [
        ({}, [5, 6, 2, 7], (3, "eos")),
        ({"ignore_eos": True}, [5, 6, 2, 7], (4, None)),
        ({"stop_token_ids": (6,)}, [5, 6, 2, 7], (2, "stop")),
        ({"stop_token_ids": (7,)}, [5, 6, 2, 7], (3, "eos")),
        ({"max_tokens": 2}, [5, 6, 2, 7], (2, "length")),
        ({"max_tokens": 3}, [5, 6, 2, 7], (3, "eos")),
        ({}, [5, 6, 7, 8, 9, 5, 6, 7], (7, "context")),
    ],
)
def test_a_known_end_of_sequence_token_ends_a_reply_where_a_search_finds_it(fields, token_ids, expected):
    sampling = Sampling(**({"max_tokens": 50} | fields))
    request = Request(request_id=0, prompt_ids=(1, 1, 1), sampling=sampling, max_model_len=10)
    conditions = StopConditions(request, None, eos_ids={2})
    num_to_eos = token_ids.index(2) + 1 if 2 in token_ids else 10**9
    assert conditions.find_end(token_ids) == conditions.find_end(token_ids, num_to_eos=num_to_eos) == expected
