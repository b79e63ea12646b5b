"""Tools and seats of environments: calls are run or reach `step`, a seat is a task, and the opponent is not trained."""

from __future__ import annotations

import json

import pytest
from agents import ScriptedModel

from tunesmith import tune
from tunesmith.commands.environments import play_environment
from tunesmith.config import RunConfig
from tunesmith.environments import TaskEnvironment, play
from tunesmith.environments.episode import play_seat
from tunesmith.errors import DataError, ToolUnavailableError
from tunesmith.experience.store import load_rollouts
from tunesmith.rollout.open_sessions import count_open_sessions
from tunesmith.runs.load_config import build_section
from tunesmith.runs.tasks import load_run_tasks
from tunesmith.tools.tool import Tool, ToolInputError


def write_call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Room:
    """A room with a door; leaving by it is worth 1. `open_door` appears when the key was found."""

    async def reset(self, task):
        self.has_key = self.is_open = False
        self.tools = [Tool.from_function(self.look)]
        return [{"role": "system", "content": "Be quick."}, {"role": "user", "content": "Leave the room."}]

    async def look(self, place: str) -> str:
        """Look at a place."""
        if place != "mat":
            raise ToolInputError("there is only a mat")
        self.tools = [*self.tools, Tool.from_function(self.open_door)]
        return "A key."

    async def open_door(self) -> str:
        """Open the door."""
        self.is_open = True
        return "It opens."

    async def step(self, action):
        return ("Out.", 1.0, True) if self.is_open else ("The door is shut.", 0.0, False)

    async def close(self):
        pass


@pytest.mark.anyio
async def test_calls_of_tools_are_run_and_text_reaches_step():
    agent = ScriptedModel(
        write_call("open_door"), write_call("look", place="sky"), write_call("look", place="mat"), "I go.",
        write_call("open_door"), "I go.",
    )  # fmt: skip
    output = await play({"seed": 0}, agent.model, TaskEnvironment(name="room", create=Room, step_reward_key="paid"))
    text = agent.service.recorder.renderer.decode(list(agent.close()[-1].prompt_ids))
    assert (output.reward, output.metrics["invalid_actions"]) == (1.0, 2.0)
    assert [output.metrics[f"paid/{turn}"] for turn in range(6)] == [0.0] * 5 + [1.0]
    seen = ["Be quick.", "there is no tool 'open_door'", "Error: there is only a mat", "A key.", "The door is shut."]
    assert [each for each in [*seen, "It opens."] if each in text] == [*seen, "It opens."]


class Orders:
    """Calls are actions: the number of pizzas that are ordered."""

    schema = {"type": "object", "properties": {"number": {"type": "integer"}}}  # noqa: RUF012
    tools = ({"type": "function", "function": {"name": "order", "description": "Order.", "parameters": schema}},)

    async def reset(self, task):
        return "Order."

    async def step(self, action):
        if not action.calls:
            raise ToolInputError("call order")
        if any(each.arguments is None or "number" not in each.arguments for each in action.calls):
            return "How many?", 0.0, False
        return "Thanks.", float(sum(each.arguments["number"] for each in action.calls)), True

    async def close(self):
        pass


@pytest.mark.anyio
async def test_calls_of_described_tools_are_actions():
    agent = ScriptedModel("Two.", write_call("order"), write_call("order", number=2) + write_call("order", number=3))
    output = await play({"seed": 0}, agent.model, TaskEnvironment(name="orders", create=Orders))
    assert output.reward == 5.0
    text = agent.service.recorder.renderer.decode(list(agent.close()[-1].prompt_ids))
    assert "Error: call order" in text and "<tool_response>\nHow many?" in text


@pytest.mark.anyio
async def test_pictures_are_refused_by_name():
    class Picture(Orders):
        async def reset(self, task):
            return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]

    with pytest.raises(TypeError, match="picture: reset must return text to observe, got a part 'image_url'"):
        await play({"seed": 0}, ScriptedModel("a").model, TaskEnvironment(name="picture", create=Picture))
    assert count_open_sessions() == 0


class Nim:
    """Two players take 1 or 2 of the stones in turn; who takes the last one wins. A wrong move loses."""

    num_players = 2

    async def reset(self, task):
        self.stones, self.player, self.told = 3, 0, ["Take 1 or 2.", "Take 1 or 2."]
        return self.tell()

    def tell(self):
        text, self.told[self.player] = f"{self.told[self.player]} {self.stones} stones.", ""
        return text

    async def step(self, action):
        taken = int(action) if action in ("1", "2") else 9
        self.stones -= taken
        if self.stones <= 0:
            winner = self.player if self.stones == 0 else 1 - self.player
            return "End.", [1.0 if each == winner else -1.0 for each in (0, 1)], True
        self.player = 1 - self.player
        self.told[self.player] += f" The other took {taken}."
        return self.tell(), [0.0, 0.0], False

    async def close(self):
        pass


NIM = TaskEnvironment(name="nim", create=Nim, num_players=2, step_reward_key="paid")


async def play_nim(player, own, other):
    agent, opponent = ScriptedModel(*own), ScriptedModel(*other)
    task = {"seed": 0, "player": player}
    output = await play_seat(task, agent.model, NIM, {"opponent": opponent.model})
    return output, agent, opponent


@pytest.mark.anyio
async def test_each_seat_is_told_and_paid_its_own():
    output, agent, opponent = await play_nim(0, ["1", "1"], ["1"])
    assert (output.reward, output.response, output.metrics["paid/0"], output.metrics["paid/1"]) == (1.0, "1", 0.0, 1.0)
    text = agent.service.recorder.renderer.decode(list(agent.close()[-1].prompt_ids))
    assert text.count("assistant") == 2 and "The other took 1. 1 stones." in text
    (turn,) = opponent.close()
    assert "Take 1 or 2. The other took 1. 2 stones." in opponent.service.recorder.renderer.decode(
        list(turn.prompt_ids)
    )
    assert (await play_nim(1, ["2"], ["1"]))[0].reward == 1.0
    assert (await play_nim(1, ["1"], ["1", "1"]))[0].reward == -1.0


@pytest.mark.anyio
async def test_a_game_that_ends_before_the_first_turn_of_the_seat_is_begun_again():
    output, _, _ = await play_nim(1, ["2"], ["nonsense", "9", "1"])
    assert output.reward == 1.0
    with pytest.raises(ToolUnavailableError, match="nim: 5 games ended before the first turn of the rollout"):
        await play_nim(1, [], ["nonsense"] * 5)
    assert count_open_sessions() == 0


def test_seats_of_a_game_are_tasks_of_one_split():
    train = NIM.list_rows("train", number=5, seed=0)
    assert [row["player"] for row in train] == [0, 1, 0, 1, 0]
    test = NIM.list_rows("test", number=6, seed=0)
    assert not {row["seed"] for row in train} & {row["seed"] for row in test}
    assert NIM.find_task(3) == {"environment": "nim", "seed": 3, "player": 0}


LETTERS = """
class Letters:
    "Who writes the longer reply wins."
    num_players = 2

    async def reset(self, task):
        self.player, self.lengths = 0, []
        return "Write."

    async def step(self, action):
        self.lengths.append(len(action))
        self.player = 1 - self.player
        return "Write.", [self.lengths[-1] / 100 if each != self.player else 0.0 for each in (0, 1)], \
len(self.lengths) == 4

    async def close(self):
        pass

class One:
    async def reset(self, task):
        return "Write."

    async def step(self, action):
        return "", float(len(action)), True

    async def close(self):
        pass
"""


@pytest.fixture
def values(tmp_path, monkeypatch, pocket_folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "letters.py").write_text(LETTERS)
    return {
        "name": "x",
        "environment": {"name": "letters.py:Letters", "num_train": 4, "num_test": 2},
        "model": {"path": pocket_folder, "max_model_len": 256, "max_tokens": 8, "device": "cpu"},
        "total_steps": 1,
        "algorithm": {"batch_size": 2, "group_size": 2},
        "engine": {"kv_cache_tokens": 4096},
        "rollout": {"chat_model": "openai"},
        "monitor": {"has_progress": False, "trackers": []},
    }


def load_groups(result):
    (file,) = (result.folder / "rollouts").glob("*.parquet")
    return load_rollouts(file)


def test_the_policy_plays_itself_and_groups_compare_one_seat(values):
    groups = load_groups(tune(build_section(RunConfig, values)))
    assert sorted(group.task.row["player"] for group in groups) == [0, 1]
    for group in groups:
        for run in group.trajectories:
            assert run.failure is None and len(run.turns) == 2
            assert run.reward > 0
    again = load_groups(tune(build_section(RunConfig, {**values, "name": "y"})))
    assert [[run.reward for run in group.trajectories] for group in again] == [
        [run.reward for run in group.trajectories] for group in groups
    ]


def test_a_fixed_model_plays_the_other_seats(values, pocket_folder):
    opponent = {"path": pocket_folder, "max_model_len": 256, "max_tokens": 1, "temperature": 0}
    groups = load_groups(tune(build_section(RunConfig, values | {"auxiliary_models": {"opponent": opponent}})))
    assert all(run.failure is None and len(run.turns) == 2 for group in groups for run in group.trajectories)


def test_rows_name_tools_of_the_environment(values, tmp_path):
    rows = [
        {"question": "1 + 1?", "answer": "2", "tools": ["calculator"]},
        {"question": "2?", "answer": "2", "tools": []},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    agent = {
        "workflow": "tunesmith.environments:tool_agent",
        "judge": "tunesmith.judges.composite:squad_judge",
        "train_dataset": {"path": "rows.jsonl"},
    }
    config = build_section(
        RunConfig, values | agent | {"environment": {"tools": ["calculator"], "max_tokens": 8, "prompt": "brief"}}
    )
    first, second = sorted(load_groups(tune(config)), key=lambda group: group.task.index)
    assert b"calculator" in read_prompt(config, first) and b"calculator" not in read_prompt(config, second)
    for wrong in ("calc", {"name": "calc"}):
        (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "1?", "answer": "2", "tools": [wrong]}))
        with pytest.raises(DataError, match=r"row 0 of 'rows.jsonl': tools of a task must be a list of names .*'calc'"):
            load_run_tasks(config, config.train_dataset, name="train")


def read_prompt(config, group):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    return tokenizer.decode(list(group.trajectories[0].turns[0].prompt_ids)).encode()


def test_a_user_plays_in_the_terminal(values, capsys):
    lines = iter(["a", "bb", "ccc", "d"])
    shown = play_environment("letters.py:Letters", read=lambda prompt: next(lines))
    assert shown.startswith("Write.\nreward 0.04,")
    assert capsys.readouterr().out.count("Write.") == 4


def test_a_model_plays_with_tokens_and_reward_shown(values, pocket_folder):
    checked = play_environment(
        "letters.py:One",
        model=pocket_folder,
        overrides=["model.max_tokens=8", "model.max_model_len=256", "model.device=cpu"],
    )
    assert "reward" in str(checked) and "Write." in str(checked)
