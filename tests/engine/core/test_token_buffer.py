"""Buffered tokens are returned in order, slot by slot, for any number of tokens."""

from __future__ import annotations

import numpy as np

from tunesmith.engine.core.output_processor import INITIAL_WIDTH, TokenBuffer


def test_take_returns_each_slots_tokens_once() -> None:
    buffer = TokenBuffer(4)
    buffer.append(np.array([2, 0]), np.array([[1, 5], [2, 6]], np.int32), np.array([[-1, -5], [-2, -6]], np.float32))
    buffer.append(np.array([2]), np.array([[3]], np.int32), np.array([[-3]], np.float32))
    assert buffer.take(2) == ([1, 2, 3], [-1.0, -2.0, -3.0])
    assert buffer.take(2) == ([], [])
    assert buffer.take(0) == ([5, 6], [-5.0, -6.0])
    buffer.append(np.array([2]), np.array([[9]], np.int32), np.array([[-9]], np.float32))
    assert buffer.take(2) == ([9], [-9.0])


def test_a_slot_can_exceed_the_initial_width() -> None:
    buffer, num_tokens = TokenBuffer(2), 3 * INITIAL_WIDTH + 5
    ids = np.arange(num_tokens, dtype=np.int32)[:, None]
    buffer.append(np.array([0]), ids[:7] + 1, -ids[:7].astype(np.float32))
    buffer.append(np.array([1]), ids, -ids.astype(np.float32))
    assert buffer.take(1) == (list(range(num_tokens)), [-float(number) for number in range(num_tokens)])
    assert buffer.take(0)[0] == list(range(1, 8))
