"""Run AgentScope's tuner programs with their imports changed, on small models, and say how far each one comes.

    python -m benchmarks.compat.agentscope_programs EXAMPLES SAMPLES --model FOLDER --gsm8k FOLDER --out OUT.txt

EXAMPLES is `examples/tuner` of AgentScope 1.0.21, SAMPLES the folder `tuner` of its repository of samples, `--gsm8k` a
folder with `train.jsonl` and `test.jsonl`. A program is copied, and in the copy only the lines of imports from
`agentscope.tuner` and `trinity` are changed. Sizes, models and paths of data come from the variable TUNESMITH_SET, data
sets from the program's own script or from a few rows made here. DashScope's service is replaced by a server in this
process, through the variables in which its clients look for its URL. There the models in RIGHT answer each question of
the data rightly, `qwen-flash` only under a prompt that the server proposed, the others with one letter. `--set` adds
overrides, `--programs` chooses. It needs AgentScope, and the extra `prompt`, sacrebleu and Gymnasium.

Random weights show that a program runs. A trained model, given as `--model` with longer replies by `--set`, shows that
its steps train: the output has the gradient norm of each step, and how the saved weights differ from the first ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvicorn
from safetensors import safe_open
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tunesmith.experience.store import load_rollouts
from tunesmith.monitor.metrics_file import load_metrics

ROOT = Path(__file__).parent.parent.parent
IMPORTS = (
    (re.compile(r"^(\s*)from agentscope\.tuner\b", re.MULTILINE), r"\1from tunesmith.compat.agentscope"),
    (re.compile(r"^(\s*)from trinity\.common\.rewards\.\w+ import", re.MULTILINE),
     r"\1from tunesmith.compat.trinity_rewards import"),
)  # fmt: skip
SMALL = [
    "total_steps=1", "total_epochs=1", "algorithm.group_size=2", "algorithm.batch_size=4", "model.max_tokens=24",
    "monitor.trackers=[]",
]  # fmt: skip
SAID = ("step ", "warning: ", "Selected", "Metrics", "Optimized")
"""First words of the lines with a program's outcome."""
RIGHT = {"qwen3-max-2025-09-23"}
PROPOSED = "Solve the problem; give the answer in \\boxed{}."


@dataclass(frozen=True)
class Inputs:
    """What the user of this script gives, and the copy of the program."""

    copy: Path
    model: Path
    gsm8k: list[dict[str, Any]]


@dataclass(frozen=True)
class Program:
    folder: str
    """Below EXAMPLES or SAMPLES."""
    file: str = "main.py"
    arguments: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    """Overrides of this program beside SMALL, and `model.path`; MODEL is the model's folder."""
    prepare: Callable[[Inputs], str] = lambda inputs: ""
    """Makes what the program reads, and says so."""
    environment: Mapping[str, str] = field(default_factory=dict)
    is_tuned: bool = True
    """Whether it calls `tune`."""


def write_rows(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prepare_gsm8k(inputs: Inputs) -> str:
    for split in ("train", "test"):
        write_rows(inputs.copy / f"openai/gsm8k/{split}.jsonl", inputs.gsm8k)
    files = "".join(f"  - {{split: {split}, path: {split}.jsonl}}\n" for split in ("train", "test"))
    card = f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n"
    (inputs.copy / "openai/gsm8k/README.md").write_text(card)
    return f"{len(inputs.gsm8k)} rows of GSM8K in ./openai/gsm8k"


def prepare_parquet(inputs: Inputs) -> str:
    import pandas

    for split in ("train", "test"):
        pandas.DataFrame(inputs.gsm8k).to_parquet(inputs.copy / f"{split}.parquet")
    return f"{len(inputs.gsm8k)} rows of GSM8K in train.parquet and test.parquet"


def prepare_pass_rates(inputs: Inputs) -> str:
    rows = [
        row | {"qwen2.5_7b_pass_rate": i / len(inputs.gsm8k), "qwen3_30b_pass_rate": i / len(inputs.gsm8k)}
        for i, row in enumerate(inputs.gsm8k)
    ]
    for split in ("train", "test"):
        write_rows(inputs.copy / f"rows/{split}.jsonl", rows)
    return f"{len(rows)} rows of GSM8K with invented pass rates"


def prepare_conversations(inputs: Inputs) -> str:
    messages = [{"role": "user", "content": "I have a headache."}]
    rows = [{"messages": messages, "decision_truth": t, "info_truth": "duration"} for t in ("continue", "stop") * 4]
    write_rows(inputs.copy / "data/train.jsonl", rows)
    return f"{len(rows)} invented conversations"


def run_script(inputs: Inputs, *words: str) -> str:
    subprocess.run([sys.executable, *words], cwd=inputs.copy, check=True, capture_output=True)
    return f"python {' '.join(words)}"


def prepare_emails(inputs: Inputs) -> str:
    """The database of the program's own schema, with two emails, and four questions about them."""
    text = (inputs.copy / "prepare_data.py").read_text()
    schema = dict(re.findall(r'^(SQL_\w+) = """(.*?)"""', text, re.MULTILINE | re.DOTALL))
    connection = sqlite3.connect(inputs.copy / "emails.db")
    connection.executescript(schema["SQL_CREATE_TABLES"])
    for number, body in enumerate(["The meeting is at 9.", "The budget is 400."], 1):
        connection.execute(
            "INSERT INTO emails (message_id, subject, from_address, date, body, file_name) VALUES (?, ?, ?, ?, ?, ?)",
            (f"m{number}", "News", "ann@example.org", "2001-05-01 10:00:00", body, f"{number}."),
        )
        connection.execute("INSERT INTO recipients VALUES (?, ?, ?)", (number, "bob@example.org", "to"))
    connection.commit()
    connection.executescript(schema["SQL_CREATE_INDEXES_TRIGGERS"])
    connection.close()
    asked = [("When is the meeting?", "9", "m1"), ("What is the budget?", "400", "m2")] * 2
    rows = [
        {"id": number, "question": question, "answer": answer, "message_ids": [message], "how_realistic": 1.0,
         "inbox_address": "bob@example.org", "query_date": "2001-05-02"}
        for number, (question, answer, message) in enumerate(asked)
    ]  # fmt: skip
    write_rows(inputs.copy / "rows/train.jsonl", rows)
    return "a database of two emails in the program's schema, and four questions"


def small_maps(inputs: Inputs) -> str:
    return run_script(inputs, "get_frozenlake_data.py", "--local_dir", "rows", "--train_size", "8", "--test_size", "2")


DASHSCOPE = {
    "DASHSCOPE_API_KEY": "EMPTY", "DASHSCOPE_HTTP_BASE_URL": "URL/api/v1", "DASHSCOPE_API_BASE": "URL/v1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True", "DSPY_CACHEDIR": "dspy",
}  # fmt: skip
WEREWOLVES = Program(
    "werewolves", prepare=lambda inputs: run_script(inputs, "prepare_data.py", "--num_seeds", "4"),
    settings=("cluster.node_num=1", "cluster.num_workers=null", "algorithm.batch_size=2", "model.max_model_len=16384",
              "auxiliary_models.participant.path=MODEL", "auxiliary_models.participant.max_model_len=16384",
              "auxiliary_models.participant.max_tokens=24"),
)  # fmt: skip
PROGRAMS = {
    "model_tuning": Program("model_tuning", settings=("model.max_model_len=2048",), prepare=prepare_gsm8k),
    "model_selection (BLEU)": Program(
        "model_selection", "example_bleu.py", environment=DASHSCOPE, is_tuned=False,
    ),
    "model_selection (tokens)": Program(
        "model_selection", "example_token_usage.py", environment=DASHSCOPE, is_tuned=False, prepare=prepare_gsm8k,
    ),
    "prompt_tuning": Program(
        "prompt_tuning", "example.py", environment=DASHSCOPE, is_tuned=False, prepare=prepare_parquet,
    ),
    "math_agent": Program("math_agent", settings=("model.max_model_len=2048",), prepare=prepare_gsm8k),
    "data_augment (random)": Program(
        "data_augment", arguments=("--config", "config_random.yaml"), prepare=prepare_pass_rates,
        settings=("model.max_model_len=2048", "train_dataset.path=rows", "eval_datasets={}"),
    ),
    "data_augment (difficulty)": Program(
        "data_augment", arguments=("--config", "config_difficulty.yaml"), prepare=prepare_pass_rates,
        settings=("model.max_model_len=2048", "train_dataset.path=rows", "eval_datasets={}"),
    ),
    "learn_to_ask": Program(
        "learn_to_ask", prepare=prepare_conversations,
        settings=("model.max_model_len=6000", "auxiliary_models.auxiliary_model.path=MODEL",
                  "auxiliary_models.auxiliary_model.max_model_len=6000"),
    ),
    "werewolves": WEREWOLVES,
    "werewolves, prefix cache": replace(
        WEREWOLVES, settings=(*WEREWOLVES.settings, "engine.has_prefix_cache=true")
    ),
    "frozen_lake": Program(
        "frozen_lake", prepare=small_maps,
        settings=("cluster.num_workers=null", "model.max_model_len=6000", "train_dataset.path=rows"),
    ),
    "email_search": Program(
        "email_search", prepare=prepare_emails, environment={"DEFAULT_EMAIL_DB_PATH": "emails.db"},
        settings=("model.max_model_len=6000", "train_dataset.path=rows", "auxiliary_models.judge.path=MODEL",
                  "auxiliary_models.judge.max_model_len=6000", "auxiliary_models.judge.max_tokens=24"),
    ),
}  # fmt: skip


class StandIn:
    """DashScope's service: its own protocol, which AgentScope's chat model speaks, and OpenAI's, which LiteLLM does."""

    def __init__(self, answers: Mapping[str, str]) -> None:
        self.answers = answers
        self.calls: Counter[str] = Counter()
        routes = [
            Route("/api/v1/services/aigc/text-generation/generation", self.generate, methods=["POST"]),
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
        ]
        config = uvicorn.Config(Starlette(routes=routes), port=0, log_level="warning")
        self.server = uvicorn.Server(config)
        threading.Thread(target=lambda: asyncio.run(self.server.serve()), daemon=True).start()
        while not self.server.started:
            time.sleep(0.05)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"

    def reply(self, model: str, messages: Sequence[Mapping[str, Any]]) -> str:
        self.calls[model] += 1
        asked = "\n".join(read_text(each) for each in messages)
        if "[[ ##" in asked:  # DSPy asks for fields by name
            wanted = str(messages[-1]["content"]).rpartition("Respond with")[2]
            fields = [name for name in re.findall(r"\[\[ ## (\w+) ## \]\]", wanted) if name != "completed"]
            return "\n".join([*(f"[[ ## {name} ## ]]\n{PROPOSED}" for name in fields), "[[ ## completed ## ]]"])
        found = [answer for question, answer in self.answers.items() if question in asked]
        is_right = model in RIGHT or (model == "qwen-flash" and PROPOSED in asked)
        return found[-1] if found and is_right else "x"

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        reply = self.reply(body["model"], body["input"]["messages"])
        answer = {
            "request_id": "1",
            "output": {"choices": [{"finish_reason": "stop", "message": {"role": "assistant", "content": reply}}]},
            "usage": {"input_tokens": 10, "output_tokens": len(reply), "total_tokens": 10 + len(reply)},
        }
        if "text/event-stream" not in request.headers.get("accept", "") + request.headers.get("x-dashscope-sse", ""):
            return JSONResponse(answer)
        event = f"id:1\nevent:result\n:HTTP_STATUS/200\ndata:{json.dumps(answer)}\n\n"
        return StreamingResponse(iter([event]), media_type="text/event-stream")

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        message = {"role": "assistant", "content": self.reply(body["model"], body["messages"])}
        return JSONResponse(
            {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"],
             "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
             "usage": {"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11}}
        )  # fmt: skip


def copy_program(source: Path, copy: Path) -> list[str]:
    """The changed lines of imports."""
    shutil.copytree(source, copy)
    changed = []
    for file in sorted(copy.rglob("*.py")):
        before = text = file.read_text(encoding="utf-8")
        for pattern, replacement in IMPORTS:
            text = pattern.sub(replacement, text)
        file.write_text(text, encoding="utf-8")
        changed += [new.strip() for old, new in zip(before.split("\n"), text.split("\n"), strict=True) if old != new]
    return changed


def describe_run(copy: Path, model: Path) -> Iterator[str]:
    """What the run folder records, and how the saved weights differ from those of `model`."""
    for metrics in sorted(copy.rglob("metrics.jsonl")):
        steps = load_metrics(metrics)
        if not steps:
            yield "no step"
            continue
        groups = [group for file in sorted(metrics.parent.glob("rollouts/*.parquet")) for group in load_rollouts(file)]
        rollouts = [each for group in groups for each in group.trajectories]
        rewards = [round(each.reward, 3) for each in rollouts if each.reward is not None]
        failed = sum(each.failure is not None for each in rollouts)
        yield f"steps {len(steps)}, rollouts {len(rollouts)}, failed {failed}"
        yield f"calls of each rollout {[len(each.turns) for each in rollouts]}, rewards {rewards}"
        norms = ", ".join(f"{step.get('train/grad_norm', 0.0):.3g}" for step in steps)
        rates = ", ".join(f"{step.get('train/learning_rate', 0.0):.3g}" for step in steps)
        yield f"gradient norm of each step {norms}; learning rate {rates}"
        seconds = ("perf/step_s", "perf/rollout_s", "perf/train_s")
        times = "; ".join(" / ".join(f"{step.get(key, 0.0):.0f}" for key in seconds) for step in steps)
        yield f"seconds of each step / of its rollouts / of its training: {times}"
        saved = sorted(metrics.parent.glob("global_step_*"), key=lambda folder: int(folder.name.rpartition("_")[2]))
        if saved:
            yield f"{saved[-1].name}: {compare_weights(model, saved[-1])}"


def compare_weights(first: Path, saved: Path) -> str:
    """How many of the numbers in the safetensors files of `saved` are not those of `first`."""
    total = differing = 0
    largest = 0.0
    with ExitStack() as stack:
        old: dict[str, Any] = {}
        new: dict[str, Any] = {}
        for folder, tensors in ((first, old), (saved, new)):
            for path in folder.glob("*.safetensors"):
                file = stack.enter_context(safe_open(path, "pt"))
                tensors.update(dict.fromkeys(file.keys(), file))
        for name, file in new.items():
            change = (file.get_tensor(name).float() - old[name].get_tensor(name).float()).abs()
            total += change.numel()
            differing += int(change.count_nonzero())
            largest = max(largest, float(change.max()))
    return f"{differing:,} of {total:,} saved weights differ from the first ones, by at most {largest:.3g}"


def read_text(message: Mapping[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def count_cpu_s() -> float:
    """CPU time of the programs so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", type=Path)
    parser.add_argument("samples", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="NAME")
    parser.add_argument("--set", nargs="+", default=[])
    parser.add_argument("--timeout-s", type=float, default=1800.0)
    parser.add_argument("--work", type=Path, help="a folder in which the copies are kept")
    args = parser.parse_args()
    rows = [json.loads(line) for line in (args.gsm8k / "train.jsonl").read_text().splitlines()[:8]]
    answers = {row["question"]: f"It is \\boxed{{{row['answer'].rpartition('####')[2].strip()}}}." for row in rows}
    for row in json.loads((args.examples / "model_selection/translate_data/test.json").read_text()):
        answers[row["question"]] = row["answer"]
    server = StandIn(answers)
    work = args.work or Path(tempfile.mkdtemp())
    parts = []
    for name in args.programs:
        program = PROGRAMS[name]
        source = next(path for base in (args.examples, args.samples) if (path := base / program.folder).is_dir())
        copy = work / re.sub(r"\W+", "_", name).strip("_")
        shutil.rmtree(copy, ignore_errors=True)
        changed = copy_program(source, copy)
        made = program.prepare(Inputs(copy, args.model, rows))
        settings = [each.replace("MODEL", str(args.model)) for each in (*SMALL, "model.path=MODEL", *program.settings)]
        environment = {key: value.replace("URL", server.url) for key, value in program.environment.items()}
        if program.is_tuned:
            environment["TUNESMITH_SET"] = " ".join([*settings, *args.set])
        server.calls.clear()
        start, cpu = time.monotonic(), count_cpu_s()
        with (copy / "out.log").open("w") as file:
            try:
                done: int | str = subprocess.run(
                    [sys.executable, program.file, *program.arguments], cwd=copy, stdout=file, stderr=subprocess.STDOUT,
                    env=os.environ | {"PYTHONPATH": str(ROOT)} | environment, timeout=args.timeout_s, check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                done = f"stopped after {args.timeout_s:.0f} s"
        lines = [
            f"exit {done} after {time.monotonic() - start:.0f} s, {count_cpu_s() - cpu:.0f} s of CPU",
            "changed: " + "; ".join(changed),
        ]
        lines += [f"data: {made}"] * bool(made) + list(describe_run(copy, args.model))
        lines += [f"{key}={value}" for key, value in environment.items()]
        lines += [f"calls of the stand-in server: {dict(server.calls)}"] * bool(server.calls)
        log = (copy / "out.log").read_text().splitlines()
        said = [line for line in log if line.startswith(SAID)]
        lines += ["it said:", *("  " + line for line in (said if done == 0 else log)[-4:])]
        text = "\n".join([f"== {name}: {program.folder}/{program.file} {' '.join(program.arguments)}".rstrip(), *lines])
        text = text.replace(str(args.model), "MODEL").replace(str(copy), ".").replace(server.url, "URL")
        print(text, flush=True)
        parts.append(text)
    if args.out is not None:
        args.out.write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
