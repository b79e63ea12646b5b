"""TextArena: its games for one player.

Games draw from the process-wide random generators, so each has a state of its own. A game is made without TextArena's
observation wrappers, which repeat the whole game in each observation: the conversation holds it already.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import textarena
from textarena.envs.registration import ENV_REGISTRY
from textarena.wrappers import ActionFormattingWrapper

from tunesmith.environments.episode import TaskEnvironment
from tunesmith.environments.sets.random_state import OwnRandomState
from tunesmith.errors import ConfigError

RAW = "-raw"
ONE_PLAYER = frozenset(
    {
        "2048", "Bandit", "Blackjack", "Countdown", "Crosswords", "Cryptarithm", "FifteenPuzzle", "FrozenLake",
        "GuessTheNumber", "LightsOut", "LogicPuzzle", "MarketEntryGame", "Mastermind", "Minesweeper", "PegJump",
        "PublicGoodsGame", "QuantumTicTacToe", "RushHour", "Secretary", "Set", "Slitherlink", "Sokoban",
        "SpiteAndMalice", "Sudoku", "ThreeCardMonte", "TowerOfHanoi",
    }
)  # fmt: skip
"""Families of games that one player can play without a network. The other ones need more players, another model, data
of nltk, which they try to download, or files that the release lacks."""


def list_names() -> list[str]:
    return sorted(
        name for name in ENV_REGISTRY if f"{name}{RAW}" in ENV_REGISTRY and name.partition("-v")[0] in ONE_PLAYER
    )


def load(member: str, args: dict[str, Any]) -> TaskEnvironment:
    create = partial(Game, member, args)
    try:
        create().begin(0)
    except Exception as error:  # the game's own checks of its arguments, of any type
        raise ConfigError(f"environment.args of textarena:{member}: {type(error).__name__}: {error}") from error
    return TaskEnvironment(name=f"textarena:{member}", create=create)


class Game:
    """One game."""

    def __init__(self, name: str, args: Mapping[str, Any]) -> None:
        self._name = name
        self._args = args
        self.metrics: dict[str, float] = {}

    def begin(self, seed: int) -> str:
        self._random = OwnRandomState(seed)
        with self._random.installed():
            game = textarena.make(f"{self._name}{RAW}", **self._args)
            is_formatted = ActionFormattingWrapper in (ENV_REGISTRY[self._name].default_wrappers or ())
            self._game = ActionFormattingWrapper(game) if is_formatted else game
            self._game.reset(num_players=1, seed=seed)
            return self._read()

    async def reset(self, task: Mapping[str, Any]) -> str:
        return self.begin(int(task["seed"]))

    async def step(self, action: str) -> tuple[str, float, bool]:
        with self._random.installed():
            is_done, _ = self._game.step(action=action)
            if not is_done:
                return self._read(), 0.0, False
            rewards, information = self._game.close()
        self.metrics = {"invalid_move": float(information[0]["invalid_move"])}
        return str(information[0].get("reason", "")), float(rewards[0]), True

    async def close(self) -> None:
        pass

    def _read(self) -> str:
        """The messages since the last action, without the action itself."""
        player, messages = self._game.get_observation()
        return "\n".join(text.strip("\n") for sender, text, *_ in messages if sender != player)
