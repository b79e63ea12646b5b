"""The leaderboard of function calls: our judge, the splits, questions from a folder, and the package's own data."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import json
import random
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest

from recipes.function_calling.variants import offer_variant, vary
from tunesmith.config import RunConfig
from tunesmith.environments import Reply
from tunesmith.environments.sets import load_set
from tunesmith.environments.sets.bfcl import Services
from tunesmith.environments.sets.bfcl_calls import find_mistake
from tunesmith.environments.transcript import Segment
from tunesmith.errors import ConfigError, DataError
from tunesmith.runs.tasks import load_run_tasks
from tunesmith.types import Task

package = pytest.mark.skipif(importlib.util.find_spec("bfcl_eval") is None, reason="needs the package bfcl-eval")

FUNCTION = {
    "name": "f.g",
    "description": "F.",
    "parameters": {
        "type": "dict",
        "properties": {
            "x": {"type": "float"},
            "s": {"type": "string"},
            "n": {"type": "array", "items": {"type": "float"}},
            "d": {"type": "dict"},
        },
        "required": ["x"],
    },
}
TRUTH = {"f.g": {"x": [2.0], "s": ["New York, NY", ""], "n": [[1.0, 2.5], ""], "d": [{"a": ["B c"], "e": [1, ""]}, ""]}}


@pytest.mark.parametrize(
    ("arguments", "mistake"),
    [
        ({"x": 2}, None),
        ({"x": 2.0, "s": "new york ny"}, None),
        ({"x": "2.0"}, "type"),
        ({"x": True}, "type"),
        ({"x": 3}, "value"),
        ({"x": 2, "z": 1}, "unexpected"),
        ({"s": "new york ny"}, "missing"),
        ({"x": 2, "s": "newyork"}, "value"),
        ({"x": 2, "n": [1.0, 2.5]}, None),
        ({"x": 2, "n": [1.0, "a"]}, "type"),
        ({"x": 2, "n": [2.5, 1.0]}, "value"),
        ({"x": 2, "d": {"a": "b,C"}}, None),
        ({"x": 2, "d": {"a": "b,C", "e": 1}}, None),
        ({"x": 2, "d": {"e": 1}}, "value"),
        ({"x": 2, "d": {"a": "b", "q": 1}}, "value"),
    ],
)
def test_calls_are_compared_by_type_and_value(arguments, mistake):
    truth = {"f.g": {**TRUTH["f.g"], "n": [[1.0, 2.5]] if "n" in arguments else TRUTH["f.g"]["n"]}}
    assert find_mistake([FUNCTION], [("f.g", arguments)], [truth], is_parallel=False) == mistake


def test_names_counts_and_the_order_of_parallel_calls():
    other = {"f.g": {"x": [3.0]}}
    right = [("f.g", {"x": 3}), ("f.g", {"x": 2})]
    assert find_mistake([FUNCTION], [("g", {"x": 2})], [TRUTH], is_parallel=False) == "name"
    assert find_mistake([FUNCTION], [], [TRUTH], is_parallel=False) == "count"
    assert find_mistake([FUNCTION], right, [TRUTH, other], is_parallel=True) is None
    assert find_mistake([FUNCTION], [right[0]] * 2, [TRUTH, other], is_parallel=True) == "value"


def call(name, arguments):
    return Segment(kind="call", text=json.dumps(arguments), tool=name, arguments=arguments, call_id="c")


async def answer(environment, row, *replies):
    async with environment.open(row) as session:
        for reply in replies:
            await environment.step(session, reply)
        return sum(session.rewards), session.metrics, session


def write_rows(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path):
    """Files of the benchmark's form: 40 questions of 20 functions, and one without a fitting function."""
    for category in ("simple_python", "multiple", "parallel", "parallel_multiple", "live_simple", "live_multiple"):
        rows, answers = [], []
        for number in range(40 if category == "simple_python" else 1):
            name = f"{chr(97 + number // 2) * 3}.f"
            question = [[{"role": "system", "content": "S."}, {"role": "user", "content": f"Question {number}"}]]
            identity = f"{category}_{number}"
            rows.append({"id": identity, "question": question, "function": [{**FUNCTION, "name": name}]})
            answers.append({"id": identity, "ground_truth": [{name: {"x": [float(number)]}}]})
        write_rows(tmp_path / f"BFCL_v4_{category}.json", rows)
        write_rows(tmp_path / "possible_answer" / f"BFCL_v4_{category}.json", answers)
    rows[0]["id"] = "irrelevance_0"
    write_rows(tmp_path / "BFCL_v4_irrelevance.json", rows[:1])
    write_rows(tmp_path / "BFCL_v4_live_irrelevance.json", [])
    return str(tmp_path)


def test_questions_come_from_a_folder_and_splits_share_no_function(folder):
    environment = load_set("bfcl:simple_python", {"path": folder})
    train, test = (environment.list_rows(split, number=100, seed=0) for split in ("train", "test"))
    assert len(train) + len(test) == 40 and min(len(train), len(test)) > 4
    functions = [{next(iter(json.loads(row["answer"])[0])) for row in rows} for rows in (train, test)]
    assert not functions[0] & functions[1]
    row = train[0]
    (truth,) = json.loads(row["answer"])
    ((name, values),) = truth.items()
    right = Reply("", [call(name.replace(".", "_"), {"x": values["x"][0]})])
    reward, metrics, session = asyncio.run(answer(environment, row, right))
    assert (reward, metrics["called"], metrics["right_names"]) == (1.0, 1.0, 1.0)
    schema = session.schemas[0]["function"]
    assert (schema["name"], schema["parameters"]["type"]) == (name.replace(".", "_"), "object")
    assert schema["parameters"]["properties"]["x"]["type"] == "number"
    for wrong in (Reply("x is 2"), Reply("", [call("nothing", {})]), Reply("", [*right.calls, *right.calls])):
        assert asyncio.run(answer(environment, row, wrong))[0] == 0.0
    unreadable = Reply("", [Segment(kind="call", text="{", tool=name, call_id="c")])
    assert asyncio.run(answer(environment, row, unreadable))[:2][0] == 0.0


ATTEMPTS = [
    "<function=aaa_f>\n<parameter=x>Paris</parameter>\n",
    '[TOOL_CALLS]aaa_f{"x": ',
    "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>f",
    "<\uff5ctool\u2581call\u2581begin\uff5c>f",
    "<|python_tag|>f.call(x=2)",
    "<arg_key>x</arg_key>",
    "I call aaa_f(x='Paris').",
    "[aaa.f( x = 2)]",
    'aaa_f.call("Paris")',
    "aaa.f(2.0)",
    "aaa.f([-1])",
]


def test_irrelevance_is_held_out_and_pays_for_no_call(folder):
    environment = load_set("bfcl:irrelevance", {"path": folder})
    with pytest.raises(DataError, match="'bfcl:irrelevance' has no task of the split train"):
        environment.list_rows("train", number=1, seed=0)
    (row,) = environment.list_rows("test", number=5, seed=0)
    assert asyncio.run(answer(environment, row, Reply('No. My "name" is Bo, and I have no "arguments".')))[0] == 1.0
    assert asyncio.run(answer(environment, row, Reply("I cannot call `aaa.f` or aaa_f(x); aaa.f() and f(2) neither.")))[
        0
    ]
    invented = ('<tool_call>\n{"name": "invented"}', 'So {"name": "invented", "arguments": {"x": 0}}')
    for attempt in ("", " \n", *invented, *ATTEMPTS):
        assert asyncio.run(answer(environment, row, Reply(attempt)))[0] == 0.0
    assert asyncio.run(answer(environment, row, Reply("", [call("aaa_f", {"x": 0})])))[0] == 0.0


def test_questions_that_no_function_answers_are_split_by_their_functions(folder, tmp_path):
    sets = [load_set("bfcl", {"path": folder}).rows[split] for split in ("train", "test")]
    train, test = (next(iter(json.loads(rows[0]["answer"])[0])) for rows in sets)
    for category, offered in {
        "irrelevance": [[train], [test]],
        "live_irrelevance": [[test, train], [], [test]],
    }.items():
        write_rows(
            tmp_path / f"BFCL_v4_{category}.json",
            [
                {
                    "id": f"{category}_{number}",
                    "question": [[{"role": "user", "content": "Why?"}]],
                    "function": [{**FUNCTION, "name": name} for name in names],
                }
                for number, names in enumerate(offered)
            ],
        )
    environment = load_set("bfcl", {"path": folder, "irrelevance": 5})
    added = [
        {row["id"] for row in environment.rows[split]} - {row["id"] for row in rows}
        for split, rows in zip(("train", "test"), sets, strict=True)
    ]
    assert added == [{"irrelevance_0"}, {"irrelevance_1", "live_irrelevance_2"}]
    tested = load_set("bfcl", {"path": folder, "irrelevance": 0})
    assert [len(tested.rows[split]) for split in ("train", "test")] == [len(sets[0]), len(sets[1]) + 2]
    row = next(row for row in environment.rows["train"] if row["id"] == "irrelevance_0")
    assert asyncio.run(answer(environment, row, Reply("No.")))[0] == 1.0
    assert asyncio.run(answer(environment, row, Reply("", [call(train.replace(".", "_"), {"x": 0})])))[0] == 0.0
    with pytest.raises(ConfigError, match="environment.args.irrelevance has no effect with bfcl:multiple$"):
        load_set("bfcl:multiple", {"path": folder, "irrelevance": 5})
    with pytest.raises(
        ConfigError, match="irrelevance=0.1 in environment.args of bfcl: Input should be a valid integer"
    ):
        load_set("bfcl", {"path": folder, "irrelevance": 0.1})


def test_validation_tasks_are_training_tasks_of_functions_of_their_own(folder):
    plain, split = (load_set("bfcl", {"path": folder} | each).rows for each in ({}, {"validation": 40}))
    assert set(plain) == {"train", "test"} and split["test"] == plain["test"]
    seeds = {each["seed"]: each for each in plain["train"]}
    assert {each["seed"]: each for each in [*split["train"], *split["validation"]]} == seeds
    functions = [{name for row in split[each] for call in json.loads(row["answer"]) for name in call} for each in split]
    assert all(functions) and sum(map(len, functions)) == len(set.union(*functions))
    with pytest.raises(ConfigError, match="args.validation has no effect with bfcl:irrelevance"):
        load_set("bfcl:irrelevance", {"path": folder, "validation": 5})
    with pytest.raises(ConfigError, match="validation=70 in environment.args of bfcl: Input should be less than 70"):
        load_set("bfcl", {"path": folder, "validation": 70})


def test_a_run_is_evaluated_on_the_splits_that_its_environment_has(folder):
    values = {
        "model": {"path": "none"},
        "environment": {"name": "bfcl", "args": {"path": folder, "validation": 40}, "num_test": 3},
        "eval_datasets": {"chosen_on": {"path": "environment", "split": "validation"}},
    }
    config = RunConfig.model_validate(values)
    tasks = load_run_tasks(config, config.eval_datasets["chosen_on"], name="chosen_on")
    found = load_set("bfcl", {"path": folder, "validation": 40}).rows["validation"]
    assert [each.row["id"] for each in tasks] == [each["id"] for each in found[:3]]
    values["environment"]["args"].pop("validation")
    with pytest.raises(ConfigError, match="split='validation': the splits of environment 'bfcl' are train, test$"):
        load_run_tasks(RunConfig.model_validate(values), config.eval_datasets["chosen_on"], name="chosen_on")


def test_variants_of_a_task_offer_further_functions_and_are_judged_alike(folder):
    environment = load_set("bfcl", {"path": folder})
    rows = environment.list_rows("train", number=100, seed=0)
    tasks = [Task(task_id=f"train/{index}", index=index, row=row) for index, row in enumerate(rows)]
    variants, metrics = vary(tasks, num_variants=3, max_added=2, path=folder)
    assert variants == vary(tasks, num_variants=3, max_added=2, path=folder)[0]
    assert len({each.task_id for each in variants}) == len(variants) == 3 * len(tasks) == metrics["num_variants"]
    called = {name for row in rows for each in json.loads(row["answer"]) for name in each}
    for each in variants:
        own = next(iter(json.loads(each.row["answer"])[0]))
        names = [function["name"] for function in each.row["line"]["function"]]
        assert own in names and len(names) == len(set(names)) <= 3 and set(names) <= called
    assert metrics["added_mean"] > 0.3
    functions = [each.row["line"]["function"] for each in variants]
    assert len({tuple(one["parameters"]["properties"]) for each in functions for one in each}) > 5
    assert any(each[0]["name"] not in task.row["answer"] for each, task in zip(functions, variants, strict=True))

    task = next(each for each in variants if len(each.row["line"]["function"]) == 3)
    ((name, values),) = json.loads(task.row["answer"])[0].items()
    right = Reply("", [call(name.replace(".", "_"), {"x": values["x"][0]})])
    reward, _, session = asyncio.run(answer(offer_variant(task.row, environment), task.row, right))
    assert (reward, len(session.schemas)) == (1.0, 3)
    other = next(
        each["function"]["name"] for each in session.schemas if each["function"]["name"] != right.calls[0].tool
    )
    wrong = Reply("", [call(other, {"x": values["x"][0]})])
    assert asyncio.run(answer(offer_variant(task.row, environment), task.row, wrong))[0] == 0.0
    assert offer_variant(rows[0], environment) is environment


def test_the_response_of_an_episode_has_the_calls_of_the_reply():
    assert Reply("No.").response == "No."
    unreadable = Segment(kind="call", text="{", tool="g", call_id="c")
    written = Reply("I look.", [call("f", {"x": "\u00e9"}), unreadable]).response
    assert written == 'I look.\n{"name": "f", "arguments": {"x": "\u00e9"}}\n{"name": "g", "arguments": "{"}'


def test_what_is_missing_is_named(tmp_path, folder):
    with pytest.raises(ConfigError, match=r"args.path='.*' has no file BFCL_v4_simple_python.json"):
        load_set("bfcl:multiple", {"path": f"{tmp_path}/no"})
    with pytest.raises(ConfigError, match="unknown argument 'size' in environment.args of bfcl:multiple: known: path"):
        load_set("bfcl:multiple", {"path": folder, "size": 3})
    with pytest.raises(ConfigError, match=r"did you mean bfcl:multiple\?"):
        load_set("bfcl:mutiple", {"path": folder})


@package
def test_the_splits_have_the_sizes_that_were_counted_once():
    sizes = {
        name: tuple(len(load_set(f"bfcl:{name}".removesuffix(":"), {}).rows[split]) for split in ("train", "test"))
        for name in ("simple_python", "multiple", "parallel", "parallel_multiple", "live_simple", "live_multiple", "")
    }
    assert sizes == {
        "simple_python": (302, 98), "multiple": (144, 56), "parallel": (147, 53), "parallel_multiple": (144, 56),
        "live_simple": (167, 91), "live_multiple": (756, 297), "": (1660, 651),
    }  # fmt: skip


async def talk(environment, row, *, is_oracle):
    async with environment.open(row) as session:
        for turn in json.loads(row["answer"]):
            for text in turn if is_oracle else ():
                parsed = ast.parse(text, mode="eval").body
                schemas = {each["function"]["name"]: each["function"] for each in session.schemas}
                names = schemas[parsed.func.id]["parameters"]["properties"] if parsed.args else ()
                arguments = {each.arg: ast.literal_eval(each.value) for each in parsed.keywords}
                arguments |= dict(zip(names, map(ast.literal_eval, parsed.args), strict=False))
                await environment.step(session, Reply("", [call(parsed.func.id, arguments)]))
            if not session.is_done:
                await environment.step(session, Reply("Done."))
        return sum(session.rewards), session.metrics["right_turns"]


@package
@pytest.mark.parametrize("category", ["base", "miss_func", "miss_param", "long_context"])
def test_accepted_calls_are_right_in_every_turn_and_silence_is_not(category):
    environment = load_set(f"bfcl:multi_turn_{category}", {})
    for row in environment.list_rows("test", number=20, seed=0):
        assert asyncio.run(talk(environment, row, is_oracle=True)) == (1.0, 1.0)
        assert asyncio.run(talk(environment, row, is_oracle=False))[0] < 1


@package
def test_a_bad_conversation_spoils_no_other_and_runs_no_code():
    environment = load_set("bfcl:multi_turn_base", {"pay_turns": True})
    (row,) = environment.list_rows("train", number=1, seed=0)

    async def spoil():
        async with environment.open(row) as session:
            for name, arguments in [("__import__", {"name": "os"}), ("_load_scenario", {}), ("cd", None)]:
                await environment.step(session, Reply("", [call(name, arguments)]))
                assert "Error" in session.observation[0]["content"]
            for schema in session.schemas:
                await environment.step(session, Reply("", [call(schema["function"]["name"], {})]))

    asyncio.run(spoil())
    assert asyncio.run(talk(environment, row, is_oracle=True)) == (pytest.approx(1.0), 1.0)


ENDLESS = [
    ("power", {"exponent": 10**12, "base": 3}),
    ("power", {"base": 3, "exponent": 10**12}),
    ("logarithm", {"precision": 10**12, "value": 10, "base": 3}),
    ("logarithm", {"value": 10, "base": 3, "precision": "1000000000000"}),
    ("logarithm", {"value": 10, "base": [3], "precision": 10**12}),
    ("round_number", {"number": 5, "decimal_places": -(10**12)}),
]


@package
@pytest.mark.parametrize(("name", "arguments"), ENDLESS)
def test_numbers_of_any_length_are_refused_in_any_order_of_the_arguments(name, arguments):
    answered = Services({"involved_classes": ["MathAPI"], "initial_config": {}, "id": "x"}).answer(name, arguments)
    assert answered.startswith(f"Error: {name} takes no ") and answered.endswith(" above 300 here.")


@package
def test_ordinary_numbers_and_wrong_names_are_answered_by_the_service():
    services = Services({"involved_classes": ["MathAPI"], "initial_config": {}, "id": "x"})
    assert json.loads(services.answer("power", {"exponent": 2, "base": 1000})) == {"result": 10**6}
    assert json.loads(services.answer("round_number", {"number": 1234, "decimal_places": -2})) == {"result": 1200}
    assert "unexpected keyword" in services.answer("power", {"exponents": 10**12, "base": 3})
    assert services.answer("power", {"base": 3, "exponent": [2]}) == '{"error": "Both inputs must be numbers"}'


@package
def test_services_answer_in_one_thread_and_not_on_the_event_loop(monkeypatch):
    environment, threads = load_set("bfcl:multi_turn_base", {}), set()
    plain = Services.answer
    monkeypatch.setattr(Services, "answer", lambda *given: threads.add(threading.get_ident()) or plain(*given))
    rows = environment.list_rows("train", number=4, seed=0)

    async def ask_all():
        loop = threading.get_ident()
        await asyncio.gather(*(talk(environment, row, is_oracle=True) for row in rows))
        assert len(threads) == 1 and loop not in threads

    asyncio.run(ask_all())


def load_checker(monkeypatch):
    """The package's own checker; its module of models, which needs many packages, is replaced by an empty one."""
    names = SimpleNamespace(underscore_to_dot=False)
    for name, attributes in {
        "constants.model_config": {"MODEL_CONFIG_MAPPING": {"m": names}},
        "eval_checker.ast_eval.type_convertor.java_type_converter": {"java_type_converter": None},
        "eval_checker.ast_eval.type_convertor.js_type_converter": {"js_type_converter": None},
    }.items():
        module = ModuleType(f"bfcl_eval.{name}")
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    from bfcl_eval.constants.enums import Language
    from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker

    return lambda functions, calls, truth, category: ast_checker(
        functions, [{name: dict(each)} for name, each in calls], truth, Language.PYTHON, category, "m"
    )["valid"]


@package
@pytest.mark.parametrize("category", ["simple_python", "parallel_multiple", "live_multiple"])
def test_our_judge_is_that_of_the_package(category, monkeypatch):
    from tunesmith.environments.sets.bfcl import find_data, load_rows

    is_valid, rng, verdicts = load_checker(monkeypatch), random.Random(1), []
    for row in list(load_rows(find_data(None), category).values())[:150]:
        for _ in range(4):
            calls = []
            for truth in row.line["accepted"]:
                ((name, values),) = truth.items()
                arguments = {key: rng.choice(each) for key, each in values.items() if each and each[0] != ""}
                for key in list(arguments):
                    if rng.random() < 0.1:
                        arguments[key] = rng.choice([str(arguments[key]), [arguments[key]], True, 1, 2.5, "x", {}])
                    elif arguments[key] == "" or rng.random() < 0.02:
                        del arguments[key]
                calls.append((name, arguments))
            given = is_valid(row.line["function"], calls, row.line["accepted"], category)
            found = find_mistake(row.line["function"], calls, row.line["accepted"], is_parallel="parallel" in category)
            assert (found is None) == given, (row.line["id"], calls, row.line["accepted"])
            verdicts.append(given)
    assert 0.2 < sum(verdicts) / len(verdicts) < 0.95


async def talk_with(environment, row, turns):
    """The reward of a conversation with given calls in each turn."""
    async with environment.open(row) as session:
        for calls in turns:
            for name, arguments in calls:
                await environment.step(session, Reply("", [call(name, arguments)]))
            if not session.is_done:
                await environment.step(session, Reply("Done."))
        return sum(session.rewards)


@package
def test_conversations_are_judged_as_by_the_package():
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

    environment, rng, verdicts = load_set("bfcl:multi_turn_base", {}), random.Random(2), []
    settings = environment.create.args[0]
    for row in environment.list_rows("train", number=60, seed=0):
        turns = []
        for texts in json.loads(row["answer"]):
            parsed = [ast.parse(text, mode="eval").body for text in texts]
            if any(each.args for each in parsed):
                break
            turns.append([(e.func.id, {k.arg: ast.literal_eval(k.value) for k in e.keywords}) for e in parsed])
        else:
            changed, index = rng.choice(turns), rng.randrange(6)
            if index == 0:
                changed.pop()
            elif index == 1:
                changed.append(rng.choice(changed))
            elif index == 2:
                rng.shuffle(changed)
            elif index == 3:
                changed.insert(0, rng.choice(turns[-1]) if turns[-1] else changed[0])
            elif index == 4 and changed[-1][1]:
                arguments = changed[-1][1]
                arguments[next(iter(arguments))] = rng.choice(["x", 3, None])
            whole = settings[row["id"]].line
            decoded = [
                [[f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls]]
                for calls in turns
            ]
            name = f"fresh{row['seed']}"
            expected = multi_turn_checker(decoded, whole["accepted"], whole, "multi_turn_base", name)["valid"]
            assert asyncio.run(talk_with(environment, row, turns)) == float(expected), (row["id"], turns)
            verdicts.append(expected)
    assert 0 < sum(verdicts) < len(verdicts) > 30
