"""Harbor's task folders without their images: a solution is paid, the model sees no tests, others are refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from agents import ScriptedModel

from sandboxes import require_isolation
from tunesmith.environments import play
from tunesmith.environments.episode import Reply
from tunesmith.environments.sets import load_set
from tunesmith.environments.transcript import Segment
from tunesmith.errors import ConfigError, DataError, ToolUnavailableError
from tunesmith.rollout.open_sessions import count_open_sessions

DOCKERFILE = """
# words to sort
FROM python:3.13-slim
WORKDIR /app
ENV COLOR=blue \\
    SIZE=3
COPY words.txt more/ ./
COPY more/extra.txt /data/
"""
TEST_FILE = "/".join(["tests", "test.sh"])
TEST = """
mkdir -p /logs/verifier
[ -f /tests/expected ] && diff /app/sorted.txt /tests/expected && echo 1 > /logs/verifier/reward.txt \\
    || echo 0 > /logs/verifier/reward.txt
"""


@pytest.fixture
def build(tmp_path):
    """Writes a task folder, with changes of its files."""
    require_isolation("bubblewrap")

    def build_task(name="sort", **changes):
        files = {
            "instruction.md": "Sort words.txt into sorted.txt.",
            "task.toml": 'schema_version = "1.4"\n[task]\nname = "x"\n[verifier]\ntimeout_sec = 20\n',
            "environment/Dockerfile": DOCKERFILE,
            "environment/words.txt": "b\na\n",
            "environment/more/extra.txt": "extra\n",
            TEST_FILE: TEST,
            "tests/expected": "a\nb\n",
            "solution/solve.sh": "sort words.txt > sorted.txt",
        } | changes
        for path, text in files.items():
            if text is not None:
                (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name / path).write_text(text)
        return f"harbor:{tmp_path / name}"

    return build_task


def run(*commands):
    calls = [
        Segment(kind="call", text="", tool="bash", arguments={"command": each}, call_id=f"c{number}")
        for number, each in enumerate(commands)
    ]
    return Reply("", calls)


async def act(environment, *actions, seed=0):
    async with environment.open(environment.find_task(seed)) as session:
        seen = []
        for action in actions:
            await environment.step(session, action)
            seen += [each["content"] for each in session.messages]
        return seen, sum(session.rewards), session.is_done


def test_a_solution_is_paid_and_idling_is_not(build, tmp_path):
    environment = load_set(build(), {})
    before, folders = count_open_sessions(), set(Path("/tmp").glob("tunesmith-harbor-*"))
    seen, reward, is_done = asyncio.run(
        act(
            environment,
            run(
                "pwd; ls /app /data; echo $COLOR$SIZE $HOME",
                "export A=1; cd /tmp; sort /app/words.txt > /app/sorted.txt",
            ),
            run("cat sorted.txt; echo $A; exit 3"),
            "Done.",
        )
    )
    assert seen[0] == "/app\n/app:\nextra.txt\nwords.txt\n\n/data:\nextra.txt\nblue3 /root"
    assert seen[1:] == ["", "a\nb\n[status 3]", ""] and (reward, is_done) == (1.0, True)
    assert asyncio.run(act(environment, "I am done.")) == ([""], 0.0, True)
    assert len(environment.list_rows("train", number=9, seed=0)) == 1
    with pytest.raises(DataError, match=r"has no task of the split test: set eval_datasets=\{\}$"):
        environment.list_rows("test", number=1, seed=0)
    assert count_open_sessions() == before and set(Path("/tmp").glob("tunesmith-harbor-*")) <= folders


def test_the_model_reads_no_tests_and_writes_no_reward(build):
    environment = load_set(build(), {})
    cheat = "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo x > /usr/x; mkdir /tests; cat /tests/*"
    seen, reward, _ = asyncio.run(act(environment, run(cheat), "Done."))
    assert "Read-only file system" in seen[0] and "/tests/*" in seen[0] and reward == 0.0
    for other in ("/newroot/x", "/x"):  # where bubblewrap would mount the tests, and where a command would read them
        link = f"rmdir /tests; mkdir -p {other}; echo 'echo 1 > /logs/verifier/reward.txt' > {other}/test.sh"
        forged = asyncio.run(
            act(
                environment,
                run(f"{link}; ln -s {other} /tests; rm -r /logs; ln -s /tmp /logs; mv /etc /old; ln -s / /etc"),
                "Done.",
            )
        )
        assert forged[1] == 0.0
    seen, _, _ = asyncio.run(
        act(environment, run("cat /etc/shadow; (echo > /dev/tcp/127.0.0.1/22) 2>&1; ps ax || ls /proc"))
    )
    assert "root:" not in seen[0] and "shadow: No such file" in seen[0] and "Connection refused" in seen[0]
    assert asyncio.run(act(environment, Reply("", [Segment(kind="call", text="", tool="sh", arguments={})])))[0] == [
        "Error: the only tool is bash, with a command."
    ]


def test_a_slow_command_and_a_long_output_are_observations(build, monkeypatch):
    from tunesmith.environments.sets import harbor

    monkeypatch.setattr(harbor, "COMMAND_TIMEOUT_S", 0.5)
    seen, _, _ = asyncio.run(act(load_set(build(), {}), run("sleep 60"), run("seq 100000")))
    assert seen[0] == "Error: 'sleep 60' was stopped: the commands of a reply have 0.5 s together"
    assert seen[1].startswith("1\n2\n") and len(seen[1]) < 11_000


def test_slow_commands_of_one_reply_are_observations_within_the_time_limit_of_a_step(build, monkeypatch):
    from tunesmith.environments.sets import harbor

    monkeypatch.setattr(harbor, "COMMAND_TIMEOUT_S", 1.0)
    environment = replace(load_set(build(), {}), step_timeout_s=10.0)
    seen, reward, is_done = asyncio.run(act(environment, run("echo first", *["sleep 60"] * 40)))
    assert seen[0] == "first" and all("was stopped" in each for each in seen[1:]) and len(seen) == 41
    assert (reward, is_done) == (0.0, False)


@pytest.mark.anyio
async def test_tests_run_also_when_the_turns_are_used_up(build):
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "sort words.txt > sorted.txt"}}\n</tool_call>'
    agent, environment = ScriptedModel(call, call), load_set(build(), {})
    output = await play(environment.find_task(0), agent.model, replace(environment, max_turns=2))
    assert (output.reward, output.metrics["finished"], len(agent.close())) == (1.0, 0.0, 2)


def test_numbers_beside_the_reward_are_metrics_and_no_reward_is_a_failure(build):
    tests = """
mkdir -p /logs/verifier; [ -f /app/sorted.txt ] && x=1 || x=0
[ -f /app/break ] || echo "{\\"reward\\": $x, \\"style\\": 0.5}" > /logs/verifier/reward.json
"""
    environment = load_set(build(**{TEST_FILE: tests, "solution/solve.sh": "touch sorted.txt"}), {})

    async def play_one(command):
        async with environment.open(environment.find_task(0)) as session:
            await environment.step(session, run(command))
            await environment.step(session, "Done.")
            return sum(session.rewards), session.metrics["style"]

    assert asyncio.run(play_one("touch sorted.txt")) == (1.0, 0.5)
    with pytest.raises(ToolUnavailableError, match=r"the tests of sort wrote no reward \(.*No such file"):
        asyncio.run(play_one("touch break"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"environment/Dockerfile": "FROM x\nWORKDIR /app\nRUN apt-get install gcc"},
            "'RUN apt-get install gcc' in its Dock",
        ),
        ({"environment/Dockerfile": "FROM x AS y\nWORKDIR /app"}, "'FROM x AS y' in its Dockerfile"),
        ({"environment/Dockerfile": "FROM x\nWORKDIR /usr/app"}, "cannot be copied: mkdir: .*Read-only"),
        ({"environment/Dockerfile": "FROM x\nWORKDIR /app\nCOPY no.txt ."}, "cannot be copied: cp: .*no.txt"),
        ({"task.toml": '[environment]\ndocker_image = "x/y"'}, "environment.docker_image in its task.toml"),
        ({"task.toml": "[[steps]]\nname = 'a'"}, "steps in its task.toml"),
        ({"task.toml": "[environment"}, "Expected"),
        ({"instruction.md": None}, "No such file or directory: .*instruction.md"),
        ({"solution/solve.sh": "true"}, "its solution is paid 0"),
        ({TEST_FILE: "mkdir /logs/verifier; echo 1 > /logs/verifier/reward.txt"}, "doing nothing is paid 1"),
        ({TEST_FILE: "echo no"}, "the tests of sort wrote no reward"),
    ],
)
def test_tasks_that_need_more_are_refused_by_what_they_need(build, changes, sentence):
    with pytest.raises(ConfigError, match=f"the task 'sort' cannot run here, without its image: .*{sentence}"):
        load_set(build(**changes), {})


def test_a_folder_of_tasks_is_split_by_name_and_other_folders_are_refused(build, tmp_path):
    for number in range(6):
        build(f"task{number}")
    environment = load_set(f"harbor:{tmp_path}", {})
    names = {split: {row["id"] for row in rows} for split, rows in environment.rows.items()}
    assert len(names["train"] | names["test"]) == 6 and not names["train"] & names["test"]
    with pytest.raises(ConfigError, match="neither the folder nor a folder in it has a task.toml"):
        load_set(f"harbor:{tmp_path / 'no'}", {})
    with pytest.raises(ConfigError, match="'image' in environment.args of harbor:.*: it takes none"):
        load_set(f"harbor:{tmp_path}", {"image": "x"})
