"""Ways around the holes as conversations to fine-tune on: shortest ways of training maps, one of them at random.

python -m recipes.text_game.ways --out ways.jsonl --number 400
MODEL=path/to/model ROWS=ways.jsonl tunesmith sft recipes/text_game/sft.yaml --out sft_ways
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import deque
from pathlib import Path
from typing import Any

from tunesmith.commands.settings import load_run_file
from tunesmith.environments.episode import TaskEnvironment
from tunesmith.runs.load_function import load_task_environment

GAME = Path(__file__).with_name("run.yaml")
MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


def read_board(text: str) -> dict[tuple[int, int], str]:
    """The letter of each field by row and column, empty for ice."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return {(row, column): cell.strip() for row, cells in enumerate(rows) for column, cell in enumerate(cells)}


def find_move(board: dict[tuple[int, int], str], rng: random.Random) -> str:
    """The first move of a shortest way from P to G that leads over no hole."""
    (goal,) = (place for place, letter in board.items() if letter == "G")
    (start,) = (place for place, letter in board.items() if letter == "P")
    distances, waiting = {goal: 0}, deque([goal])
    while waiting:
        row, column = waiting.popleft()
        for down, right in MOVES.values():
            place = (row + down, column + right)
            if place not in distances and board.get(place, "H") != "H":
                distances[place] = distances[row, column] + 1
                waiting.append(place)
    after = {move: distances.get((start[0] + down, start[1] + right)) for move, (down, right) in MOVES.items()}
    return rng.choice([move for move, distance in after.items() if distance == distances[start] - 1])


async def write_way(environment: TaskEnvironment, task: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The conversation of an episode that reaches the goal."""
    chat = [{"role": "system", "content": environment.system_prompt}]
    async with environment.open(task) as session:
        while not session.is_done:
            chat += session.messages
            move = find_move(read_board(chat[-1]["content"]), rng)
            chat.append({"role": "assistant", "content": f"[{move}]"})
            await environment.step(session, f"[{move}]")
        assert sum(session.rewards) == 1.0, f"map {task['seed']}: reward {sum(session.rewards)}"
    return {"messages": chat}


async def write_ways(number: int, seed: int) -> list[dict[str, Any]]:
    environment, rng = load_task_environment(load_run_file(str(GAME), [])), random.Random(seed)
    tasks = environment.list_rows("train", number=number, seed=0)
    return [await write_way(environment, task, rng) for task in tasks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines file for the conversations")
    parser.add_argument("--number", type=int, default=400, help="maps")
    parser.add_argument("--seed", type=int, default=0, help="of the choice among shortest ways")
    arguments = parser.parse_args()
    rows = asyncio.run(write_ways(arguments.number, arguments.seed))
    arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} ways, {sum(len(row['messages']) // 2 for row in rows) / len(rows):.1f} moves each")


if __name__ == "__main__":
    main()
