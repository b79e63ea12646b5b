"""Questions of about 60 tokens, the same in every process; no imports, so that any interpreter can ask them."""

from __future__ import annotations

import random

NAMES = ("apples", "books", "coins", "tickets", "stamps")


def list_questions(number: int) -> list[str]:
    rng = random.Random(0)
    return [
        f"Question {index}: Tom has {rng.randrange(100)} {rng.choice(NAMES)} and gives {rng.randrange(20)} of them to "
        f"each of {rng.randrange(2, 9)} friends, then buys {rng.randrange(50)} more for {rng.randrange(9)} dollars "
        "each. How many does he have now, and how much did he pay? Think step by step."
        for index in range(number)
    ]
