"""TextArena: its games for one, two and three players.

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
from tunesmith.environments.sets import Stateless, arguments_checked
from tunesmith.environments.sets.random_state import ONE_THREAD, OwnRandomState

GAMES = {
    1: """
    2048 Bandit Blackjack Countdown Crosswords Cryptarithm FifteenPuzzle FrozenLake GuessTheNumber LightsOut
    LogicPuzzle MarketEntryGame Mastermind Minesweeper PegJump PublicGoodsGame QuantumTicTacToe RushHour Secretary
    Set Slitherlink Sokoban SpiteAndMalice Sudoku ThreeCardMonte TowerOfHanoi
    """.split(),  # noqa: SIM905
    2: """
    Alquerque Battleship Breakthrough Briscola Chopsticks ColonelBlotto ConnectFour Crusade GameOfPureStrategy
    GermanWhist Golf HighSociety IndianPoker IteratedMatchingPennies IteratedPrisonersDilemma
    IteratedRockPaperScissors IteratedTwoThirdsAverage IteratedUltimatumGame KuhnPoker LiarsDice LinesOfAction
    MemoryGame NewRecruit Nim Othello PigDice Poker SantoriniBaseFixed SimpleBlindAuction SimpleNegotiation
    SimpleTak Snake Stratego Surround Tak TicTacToe TruthAndDeception TwoDollar UltimateTicTacToe WildTicTacToe
    """.split(),  # noqa: SIM905
    3: """
    ThreePlayerGOPS ThreePlayerIPD ThreePlayerTicTacToe
    """.split(),  # noqa: SIM905
}
"""Families of games by their number of players, as far as they run without a network on Python 3.11. The other ones
need another model, data of nltk, which they try to download, a later Python, or files that the release lacks."""
RAW = "-raw"
PLAYERS = {name: number for number, names in GAMES.items() for name in names}


def list_names() -> list[str]:
    return sorted(
        name for name in ENV_REGISTRY if f"{name}{RAW}" in ENV_REGISTRY and name.partition("-v")[0] in PLAYERS
    )


def load(member: str, args: dict[str, Any]) -> TaskEnvironment:
    num_players = PLAYERS[member.partition("-v")[0]]
    create = partial(Game, member, args, num_players)
    with arguments_checked(f"textarena:{member}"):
        create().reset({"seed": 0})
    return TaskEnvironment(name=f"textarena:{member}", create=create, num_players=num_players, executor=ONE_THREAD)


class Game(Stateless):
    """One game."""

    def __init__(self, name: str, args: Mapping[str, Any], num_players: int) -> None:
        self._name = name
        self._args = args
        self._num_players = num_players
        self.player = 0
        self.metrics: dict[str, float] = {}

    def reset(self, task: Mapping[str, Any]) -> str:
        seed = int(task["seed"])
        self._seat = int(task.get("player", 0))
        self._random = OwnRandomState(seed)
        with self._random.installed():
            game = textarena.make(f"{self._name}{RAW}", **self._args)
            is_formatted = ActionFormattingWrapper in (ENV_REGISTRY[self._name].default_wrappers or ())
            self._game = ActionFormattingWrapper(game) if is_formatted else game
            self._game.reset(num_players=self._num_players, seed=seed)
            return self._read()

    def step(self, action: str) -> tuple[str, Any, bool]:
        with self._random.installed():
            is_done, _ = self._game.step(action=str(action))
            if not is_done:
                return self._read(), self._pay({}), False
            rewards, information = self._game.close()
        own = information[self._seat]
        self.metrics = {"invalid_move": float(own["invalid_move"])}
        return str(own.get("reason", "")), self._pay(rewards), True

    def _pay(self, rewards: Mapping[int, float]) -> float | list[float]:
        values = [float(rewards.get(player, 0.0)) for player in range(self._num_players)]
        return values if self._num_players > 1 else values[0]

    def _read(self) -> str:
        """The messages to the next player since that player's last action, without the action itself."""
        self.player, messages = self._game.get_observation()
        return "\n".join(text.strip("\n") for sender, text, *_ in messages if sender != self.player)
