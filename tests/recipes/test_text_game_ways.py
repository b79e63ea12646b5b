"""Demonstrations of the game lead around the holes, by all shortest ways."""

from __future__ import annotations

import random

from recipes.text_game.ways import find_move, read_board

BOARD = """
+-----+-----+-----+
|  P  |     |  H  |
+-----+-----+-----+
|     |     |     |
+-----+-----+-----+
|  H  |     |  G  |
+-----+-----+-----+
"""


def test_moves_are_those_of_shortest_ways_around_holes() -> None:
    board = read_board(BOARD)
    assert board[0, 0] == "P" and board[0, 2] == "H" and board[2, 2] == "G" and board[1, 1] == ""
    assert {find_move(board, random.Random(seed)) for seed in range(20)} == {"right", "down"}
    below = board | {(0, 0): "", (1, 0): "P"}
    assert {find_move(below, random.Random(seed)) for seed in range(20)} == {"right"}
    # the only way is longer than the distance
    walled = {(0, 0): "P", (0, 1): "H", (0, 2): "G", (1, 0): "", (1, 1): "", (1, 2): ""}
    assert find_move(walled, random.Random(0)) == "down"
