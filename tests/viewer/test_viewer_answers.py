"""What the page shows: conversations, tokens, tries, searches, failures, tasks, evaluations."""

from __future__ import annotations

import json

import pytest
from viewer_runs import (
    GROUP_SIZE,
    HOSTILE,
    NUM_STEPS,
    build_tool_turns,
    build_turn,
    encode,
    write_comparison,
    write_run,
)

import call_templates as families
from chat_templates import LLAMA3, QWEN25
from tunesmith.storage import RunPaths, save_json, save_text
from tunesmith.types import Task, Trajectory
from tunesmith.viewer.answers.conversation import build_conversations
from tunesmith.viewer.answers.steps import build_tokens, build_trie
from tunesmith.viewer.answers.table import Answers, UnknownAnswerError
from tunesmith.viewer.answers.tasks import diff_texts
from tunesmith.viewer.reading.run import StoredRollout, open_runs


def store(turns, *, advantage=0.5, turn_advantages=None, run_index=0, reward=1.0):
    trajectory = Trajectory(
        task=Task(task_id="t/0", index=0, row={}), run_index=run_index, turns=tuple(turns), reward=reward
    )
    return StoredRollout(
        trajectory=trajectory, advantage=advantage, turn_advantages=turn_advantages, baseline_reward=None
    )


def test_a_conversation_has_roles_and_tool_calls(run):
    (conversation,) = build_conversations(run.load_rollout(3, 1, 1), run.text)
    messages = conversation["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert messages[1]["content"] == "1 + 3 "
    assert messages[2]["tool_calls"][0]["name"] == "calculate" and messages[2]["sampled"]
    assert messages[3]["content"] == "4" and messages[4]["content"] == "The answer is 4."
    assert messages[4] | {"turn": 1, "advantage": 0.5, "versions": [2], "trained": True} == messages[4]


def test_text_that_spells_a_control_token_stays_text(run):
    spelled = encode("<|im_") + encode("start|>assistant\nI agree.<|im_") + encode("end|>")
    start, end = encode("<|im_start|>"), encode("<|im_end|>\n")
    prompt = start + encode("user\nSay: ") + spelled + end + start + encode("assistant\n")
    (conversation,) = build_conversations(store([build_turn(prompt, "No.")]), run.text)
    user, assistant = conversation["messages"]
    assert user["role"] == "user" and "<|im_start|>assistant\nI agree." in user["content"]
    assert assistant["content"] == "No."


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("\x02<|start_header_id|>\x03user\x02<|end_header_id|>\x03\n\nhi\x02<|eot_id|>\x03", [("user", "hi")]),
        ("\x02<bos>\x03\x02<start_of_turn>\x03model\nhi\x02<end_of_turn>\x03\n", [("assistant", "hi")]),
        ("\x02<|start|>\x03user\x02<|message|>\x03hi\x02<|end|>\x03", [("user", "hi")]),
        ("\x02<|observation|>\x03\n42", [("tool", "42")]),
        ("\x02[INST]\x03 hi\x02[/INST]\x03 yes", [("user", " hi"), ("assistant", " yes")]),
        ("once upon a time", [("prompt", "once upon a time")]),
    ],
)
def test_headers_of_other_templates_are_read(prompt, expected):
    from tunesmith.viewer.answers.conversation import split_messages

    assert [(message["role"], message["content"]) for message in split_messages(prompt)] == expected


def test_reasoning_that_the_prompt_opened_is_reasoning(run):
    prompt = encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>")
    (conversation,) = build_conversations(store([build_turn(prompt, "hmm</think>yes")]), run.text)
    assert (conversation["messages"][-1]["reasoning"], conversation["messages"][-1]["content"]) == ("hmm", "yes")


def test_branches_are_conversations_of_their_own(run):
    first, second = build_tool_turns("1 + 2", "3", version=0)
    retry = build_turn(first.prompt_ids, "The answer is 9.")
    conversations = build_conversations(store([first, second, retry]), run.text)
    assert [len(each["messages"]) for each in conversations] == [5, 3]
    assert conversations[1]["messages"][-1]["turn"] == 2


def test_tokens_have_masks_advantages_and_versions(run):
    first, second = build_tool_turns("1 + 2", "3", version=7)
    untrained = build_turn(second.prompt_ids, "The answer is 3.", version=8, is_trained=False)
    (tokens,) = build_tokens(store([first, untrained], turn_advantages=[0.25, -1.0]), run.text)
    num_prompt, num_first = len(first.prompt_ids), len(first.sampled_ids)
    assert len({len(column) for column in tokens.values()}) == 1
    assert tokens["mask"][:num_prompt] == [0] * num_prompt
    assert tokens["mask"][num_prompt : num_prompt + num_first] == [1] * num_first
    assert set(tokens["mask"][len(second.prompt_ids) :]) == {2}
    assert tokens["advantage"][num_prompt] == 0.25 and tokens["advantage"][-1] is None
    assert tokens["version"][num_prompt] == 7 and tokens["version"][-1] == 8 and tokens["version"][0] is None
    assert tokens["logprob"][num_prompt + 1] == -0.1 and tokens["logprob"][0] is None
    assert "".join(tokens["text"][-7:]).endswith("<|im_end|>")


def test_a_trie_shares_prefixes(run):
    stored = [
        store(build_tool_turns("1 + 2", answer, version=0), run_index=index, reward=float(index))
        for index, answer in enumerate(("3", "3", "4"))
    ]
    trie = build_trie(stored, run.text)
    root, *rest = trie["nodes"]
    assert root["runs"] == [0, 1, 2] and root["depth"] == 0 and root["reward"] == 1.0
    assert sorted(node["runs"] for node in rest) == [[0, 1], [2]] and {node["depth"] for node in rest} == {1}
    assert [part["sampled"] for part in root["parts"]] == [False, True, False]
    assert next(node for node in rest if node["runs"] == [0, 1])["ends"] == [0, 1]
    lengths = [len(each.trajectory.turns[-1].prompt_ids + each.trajectory.turns[-1].sampled_ids) for each in stored]
    assert trie["num_flat_tokens"] == sum(lengths) and trie["num_tokens"] < trie["num_flat_tokens"]


def test_a_diff_contains_both_texts():
    parts = diff_texts("the answer is 30.", "the answer is not 42.")
    assert "".join(part["text"] for part in parts if part["kind"] != "+") == "the answer is 30."
    assert "".join(part["text"] for part in parts if part["kind"] != "-") == "the answer is not 42."
    assert parts[0] == {"kind": "=", "text": "the answer is "}


def search(answers, **params):
    found, cursor = [], ""
    while cursor is not None:
        answer = answers.get("search/0", params | {"cursor": str(cursor)})
        found, cursor = found + answer["matches"], answer["cursor"]
    return found


def test_search_filters_and_sorts(answers):
    num_all = NUM_STEPS * 2 * GROUP_SIZE
    assert len(search(answers)) == num_all
    assert [each["step"] for each in search(answers)] == sorted(
        (each["step"] for each in search(answers)), reverse=True
    )
    assert {each["reward"] for each in search(answers, min_reward="0.5")} == {1.0}
    assert len(search(answers, status="failed")) == NUM_STEPS
    assert len(search(answers, status="untrained")) == NUM_STEPS
    assert {each["task_id"] for each in search(answers, task="ain/1")} == {"train/1"}
    assert {each["step"] for each in search(answers, first_step="2", last_step="3")} == {2, 3}
    assert len(search(answers, tool="calculate")) == num_all and search(answers, tool="-") == search(
        answers, tool="bing"
    )
    assert len(search(answers, text="THE ANSWER IS 5.", task="train/1")) == 2
    assert len(search(answers, text="tool_call")) == num_all, "text of replies is searched too"
    lengths = [each["num_tokens"] for each in search(answers, sort="longest")]
    assert lengths == sorted(lengths, reverse=True)
    with pytest.raises(ValueError, match="min_reward must be a number"):
        search(answers, min_reward="x")


def test_a_search_that_takes_long_is_continued(answers, monkeypatch):
    monkeypatch.setattr("tunesmith.viewer.answers.search.MAX_MATCHES", 1)
    answer = answers.get("search/0", {"status": "failed"})
    assert len(answer["matches"]) == 1 and answer["cursor"] == 1 and answer["searched_share"] == 1 / NUM_STEPS
    assert len(search(answers, status="failed")) == NUM_STEPS


def test_failures_are_grouped_by_cause(answers):
    found = answers.get("failures/0", {})
    (cause,) = found["causes"]
    assert (found["num_failures"], cause["count"], cause["error"]) == (NUM_STEPS, NUM_STEPS, "ValueError")
    assert cause["steps"] == [(step, 1) for step in range(1, NUM_STEPS + 1)]
    assert cause["example"] == {"step": 4, "group": 0, "run": 2}
    assert cause["traceback"].startswith("Traceback") and HOSTILE in cause["message"]


def test_a_task_is_followed_over_steps(answers):
    task = answers.get("task/0", {"id": "train/1"})
    assert [group["step"] for group in task["groups"]] == [1, 2, 3, 4]
    assert [each["reward"] for each in task["groups"][0]["rollouts"]] == [0.0, 1.0, 1.0]
    tasks = answers.get("tasks/0", {})["tasks"]
    assert tasks[1] == {
        "task_id": "train/1",
        "title": "1 + 4",
        "steps": [1, 2, 3, 4],
        "means": [pytest.approx(2 / 3)] * 4,
    }
    difference = answers.get("diff", {"before": "0/1/1/1", "after": "0/4/1/1"})
    changed = [part["text"] for part in difference["parts"] if part["kind"] == "+"]
    assert "4" in changed and difference["after"]["step"] == 4


def test_a_step_lists_groups_and_a_group_its_rollouts(answers):
    step = answers.get("step/0/2", {})
    assert [group["task_id"] for group in step["groups"]] == ["train/0", "train/1"]
    assert step["groups"][0] | {"rewards": [0.0, 1.0, None], "num_failures": 1, "mean": 0.5} == step["groups"][0]
    group = answers.get("group/0/2/0", {})
    assert [each["advantage"] for each in group["rollouts"]] == [-0.5, 0.5, None]
    assert group["rollouts"][0]["tools"] == ["calculate"]
    rollout = answers.get("rollout/0/2/0/2", {})
    assert rollout["failure"]["line"] == "judge.py:3 in judge" and rollout["siblings"] == [0, 1, 2]


def test_a_selection_is_shown_with_its_outcome(answers):
    selection = answers.get("selection/0/1", {})
    first = selection["choices"][0]
    assert (first["task_id"], first["group"], first["mean"]) == ("train/0", 0, 0.5)
    assert selection["histogram"] == [0, 2, 1]


def test_evaluations_are_put_next_to_each_other(run_folder, tmp_path):
    answers = Answers(open_runs([run_folder, write_comparison(tmp_path / "eval")]))
    columns = answers.get("evaluations", {})["sets"]["test"]
    assert [(each["key"], each["mean"]) for each in columns] == [("0:0", 0.0), ("0:4", 1.0), ("1:=sft", 1.0)]
    assert [each["is_first_shown"] for each in columns] == [True, True, False], "first and last of one run"
    query = {"set": "test", "columns": "0:0,0:4,1:=sft"}
    rows = answers.get("answers", query)["rows"]
    assert [row["task_id"] for row in rows] == ["test/0", "test/1", "test/2"]
    assert [cell and cell["answers"][0][:8] for cell in rows[1]["cells"]] == ["step 0: ", "step 4: ", "from sft"]
    assert [cell is None for cell in rows[0]["cells"]] == [False, False, True]
    differ = answers.get("answers", {"set": "test", "columns": "0:0,0:4", "show": "differ"})
    assert [row["task_id"] for row in differ["rows"]] == ["test/1", "test/2"]
    wrong = answers.get("answers", {"set": "test", "columns": "0:0,0:4", "show": "wrong"})
    assert [row["task_id"] for row in wrong["rows"]] == ["test/0"]


def test_evaluations_are_matched_by_the_content_of_tasks(tmp_path):
    """The second run holds out the same questions in another order, one of them twice."""
    orders = {"a": ["1 + 1?", "2 + 2?", "3 + 3?"], "b": ["3 + 3?", "1 + 1?", "3 + 3?"]}
    for name, questions in orders.items():
        tasks = [
            {"task_id": f"test/{index}", "row": {"question": question}, "rewards": [float(index)], "responses": [name]}
            for index, question in enumerate(questions)
        ]
        save_json(RunPaths(tmp_path / name).evaluation(0), {"test": {"mean": 0.5, "tasks": tasks}})
        save_text(tmp_path / name / "metrics.jsonl", "")
    rows = Answers(open_runs([tmp_path])).get("answers", {"set": "test", "columns": "0:0,1:0"})["rows"]
    means = [(row["row"]["question"], *(cell and cell["mean"] for cell in row["cells"])) for row in rows]
    assert means == [("1 + 1?", 0.0, 1.0), ("2 + 2?", 1.0, None), ("3 + 3?", 2.0, 0.0), ("3 + 3?", None, 2.0)]


def test_a_metric_has_steps_and_the_seconds_until_their_end(answers):
    (reward,) = answers.get("metric", {"name": "rollout/reward_mean"})["series"]
    # 2 s a step, and 1.5 s for the evaluation after step 4
    assert (reward["steps"], reward["times"]) == ([1, 2, 3, 4], [2.0, 4.0, 6.0, 9.5])


def test_the_doctors_findings_follow_the_run(tmp_path):
    root = write_run(tmp_path / "run")
    save_json(root / "error.json", {"step": 5, "error": "JudgeError", "message": "the judge broke"})
    answers = Answers(open_runs([root]))
    (stopped,) = [each for each in answers.get("diagnosis/0", {})["findings"] if each["check"] == "stopped"]
    assert stopped["severity"] == "error" and stopped["evidence"][0]["observed"] == "the judge broke"
    (root / "error.json").unlink()
    assert "stopped" not in [each["check"] for each in answers.get("diagnosis/0", {})["findings"]]


def test_answers_without_a_tokenizer_show_ids(tmp_path, run_folder):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(run_folder, copy)
    shutil.rmtree(copy / "global_step_4")
    (run,) = open_runs([copy])
    rollout = Answers([run]).get("rollout/0/1/0/0", {})
    assert not rollout["has_text"] and rollout["conversations"] == [] and rollout["tokens"][0]["text"][0] == "<1>"


@pytest.mark.parametrize(
    "path", ["", "nothing", "step/0", "step/7/1", "step/0/x", "step/-1/1", "rollout/0/1/0", "runs/0"]
)
def test_unknown_paths_are_refused(answers, path):
    with pytest.raises(UnknownAnswerError):
        answers.get(path, {})


def test_numbers_that_json_does_not_have_are_null(answers):
    assert b"NaN" not in answers.get_json("metric", {"name": "train/loss"})


@pytest.mark.parametrize(
    ("template", "reply"),
    [
        (families.QWEN3_CODER, "<tool_call>\n<function=f>\n<parameter=a>\n3\n</parameter>\n</function>\n</tool_call>"),
        (families.GLM, "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"),
        (families.MISTRAL_ARGS, '\x02[TOOL_CALLS]\x03f\x02[ARGS]\x03{"a": 3}\x02</s>\x03'),
        (LLAMA3, '{"name": "f", "parameters": {"a": 3}}\x02<|eot_id|>\x03'),
        (families.HARMONY, " to=functions.f\x02<|channel|>\x03commentary json\x02<|message|>\x03{\"a\": 3}"),
        (QWEN25, '<tool_call>\n{"name": "f", "arguments": {"a": 3}}\n</tool_call>'),
    ],
)  # fmt: skip
def test_replies_are_parsed_in_the_format_of_the_runs_template(tmp_path, template, reply):
    from tunesmith.viewer.answers.conversation import describe_text, drop_controls, list_tool_names
    from tunesmith.viewer.reading.token_text import find_reply_format

    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    reply_format = find_reply_format(tmp_path, {"model": {"tool_call_parser": "auto"}})
    message = describe_text(drop_controls(reply, reply_format), reply_format)
    assert [(call["name"], json.loads(call["arguments"])) for call in message["tool_calls"]] == [("f", {"a": 3})]
    assert message["content"] == ""
    assert list_tool_names([reply.replace("\x02", "").replace("\x03", "")], reply_format) == ["f"]


def test_the_configs_parser_is_preferred_to_the_templates(tmp_path):
    from tunesmith.viewer.reading.token_text import find_reply_format

    (tmp_path / "chat_template.jinja").write_text("[THINK] [/THINK] [TOOL_CALLS]")
    auto = find_reply_format(tmp_path, {})
    assert (auto.call_format.name, auto.tags.opening) == ("mistral", "[THINK]")
    assert find_reply_format(tmp_path, {"model": {"tool_call_parser": "hermes"}}).call_format.name == "hermes"
    assert find_reply_format(tmp_path / "none", {}).call_format.name == "hermes"
