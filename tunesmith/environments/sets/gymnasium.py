"""Gymnasium: four games in text, and every environment whose observations and actions a wrapper makes text.

A wrapper (`args.wrapper`, as `file.py:name`) is called with the environment and returns a Gymnasium environment whose
observations are text and whose `step` takes the model's reply. It raises `ToolInputError` for
a reply that is no action.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from tunesmith.environments.episode import TaskEnvironment
from tunesmith.environments.sets import arguments_checked
from tunesmith.errors import ConfigError
from tunesmith.tools.tool import ToolInputError

Wrapper = Callable[[gymnasium.Env[Any, Any]], Any]
END = "End your reply with one of these words: {actions}."


class WordActions(gymnasium.Wrapper[str, str, Any, Any]):
    """Actions as words, of which the last one in the reply counts, and observations as sentences."""

    actions: tuple[str, ...]
    """Words of the actions 0, 1, ..."""
    rules: str
    pays_success: bool = False
    """The reward is 1 for reaching the goal, and the package's own rewards only add up to the metric `return`."""

    def describe(self, observation: Any) -> str:
        raise NotImplementedError

    def reset(self, **options: Any) -> tuple[str, dict[str, Any]]:
        observation, information = self.env.reset(**options)
        self.metrics = {"return": 0.0}
        rules = f"{self.rules} {END.format(actions=', '.join(self.actions))}"
        return f"{rules}\n\n{self.describe(observation)}", information

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        words = re.findall("|".join(rf"\b{each}\b" for each in self.actions), action.lower())
        if not words:
            raise ToolInputError(f"the reply has none of the words {', '.join(self.actions)}")
        observation, reward, is_terminated, is_truncated, more = self.env.step(self.actions.index(words[-1]))
        self.metrics["return"] += float(reward)
        value = float(is_terminated) if self.pays_success else float(reward)
        return self.describe(observation), value, is_terminated, is_truncated, more


def draw(rows: list[list[str]], index: int) -> str:
    """A grid with the player in a cell."""
    row, column = divmod(index, len(rows[0]))
    rows[row][column] = "P"
    return "\n".join("".join(row) for row in rows)


class FrozenLake(WordActions):
    actions = ("left", "down", "right", "up")
    rules = "Walk from S to G over the frozen lake. P is you, F is ice, H is a hole: falling into it ends the walk."

    def describe(self, observation: int) -> str:
        return draw([[cell.decode() for cell in row] for row in self.unwrapped.desc], observation)


class CliffWalking(WordActions):
    actions = ("up", "right", "down", "left")
    rules = "Walk to G. P is you, C is the cliff: stepping onto it puts you back to the start."
    pays_success = True

    def describe(self, observation: int) -> str:
        rows = [["."] * 12 for _ in range(3)] + [["."] + ["C"] * 10 + ["G"]]
        return draw(rows, observation)


class Taxi(WordActions):
    actions = ("south", "north", "east", "west", "pickup", "dropoff")
    rules = (
        "Drive the taxi to the passenger, pick them up, drive to the destination and drop them off. On the map, rows "
        "count from 0 at the top, columns from 0 at the left; the taxi passes ':' but not '|'."
    )
    pays_success = True

    def describe(self, observation: int) -> str:
        taxi = self.unwrapped
        row, column, passenger, destination = taxi.decode(observation)
        grid = "\n".join(b"".join(line).decode() for line in taxi.desc[1:-1])
        where = "in the taxi" if passenger == 4 else f"at {self._name(passenger)}"
        return (
            f"{grid}\nThe taxi is at row {row}, column {column}. The passenger is {where}. "
            f"The destination is {self._name(destination)}."
        )

    def _name(self, place: int) -> str:
        row, column = self.unwrapped.locs[place]
        return f"{'RGYB'[place]} (row {row}, column {column})"


class Blackjack(WordActions):
    actions = ("stick", "hit")
    rules = "Play blackjack against the dealer: hit for another card, or stick. A sum above 21 loses."

    def describe(self, observation: tuple[int, int, int]) -> str:
        own, dealer, has_ace = observation
        return f"Your sum is {own}{' with an ace as 11' if has_ace else ''}. The dealer shows {dealer}."


GAMES: Mapping[str, tuple[Wrapper, dict[str, Any]]] = {
    "FrozenLake-v1": (FrozenLake, {"is_slippery": False}),
    "CliffWalking-v1": (CliffWalking, {}),
    "Taxi-v4": (Taxi, {}),
    "Blackjack-v1": (Blackjack, {}),
}
"""Wrapper and arguments, which a file may override. The lakes are random maps, one of each seed, unless the file has
`desc` or `map_name`."""


def list_names() -> list[str]:
    return sorted(GAMES)


def load(member: str, args: dict[str, Any]) -> TaskEnvironment:
    wrapper, defaults = GAMES.get(member, (args.pop("wrapper", None), {}))
    wrapper = args.pop("wrapper", wrapper)
    if wrapper is None:
        raise ConfigError(
            f"environment='gymnasium:{member}' needs args.wrapper, file.py:name of a wrapper to text actions and "
            f"observations; {', '.join(GAMES)} have one"
        )
    create = partial(Episode, partial(make, member, wrapper, {**defaults, **args}))
    episode = create()
    with arguments_checked(f"gymnasium:{member}"):  # or an unknown id
        first = episode.reset({"seed": 0})
        episode.close()
    if not isinstance(first, str):
        raise ConfigError(f"environment.args.wrapper of gymnasium:{member} observes {type(first).__name__}, not text")
    return TaskEnvironment(name=f"gymnasium:{member}", create=create)


def make(name: str, wrapper: Wrapper, args: Mapping[str, Any], seed: int) -> Any:
    """The wrapped environment."""
    given = dict(args)
    if wrapper is FrozenLake and not given.keys() & {"desc", "map_name"}:
        given["desc"] = generate_random_map(given.pop("size", 4), seed=seed)
    return wrapper(gymnasium.make(name, **given))


class Episode:
    """One episode; its plain methods run in threads, so a slow environment holds up no other rollout."""

    is_deterministic = True

    def __init__(self, make_environment: Callable[[int], Any]) -> None:
        self._make = make_environment
        self._environment: Any = None

    @property
    def metrics(self) -> Mapping[str, float]:
        return getattr(self._environment, "metrics", {})

    def reset(self, task: Mapping[str, Any]) -> Any:
        seed = int(task["seed"])
        self._environment = self._make(seed)
        return self._environment.reset(seed=seed)[0]

    def step(self, action: str) -> tuple[str, float, bool]:
        observation, reward, is_terminated, is_truncated, _ = self._environment.step(action)
        return observation, float(reward), bool(is_terminated or is_truncated)

    def close(self) -> None:
        if self._environment is not None:
            self._environment.close()
