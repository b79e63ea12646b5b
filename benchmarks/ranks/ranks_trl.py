"""TRL with vLLM in the same processes on several GPUs, as the peer of `ranks.py`: the same prompts, shape and lengths.

torchrun starts one process a GPU; TRL trains data-parallel through accelerate, and each process samples with a vLLM of
its own. Times of a step are those of the first rank, which waits for the others in every step.

    python -m benchmarks.ranks.ranks_trl --gpus 2 --shape qwen3-0.6b --model TOKENIZER --vllm-memory 0.35
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.shared.peer_trl import run_trl_grpo
from benchmarks.shared.questions import list_questions
from benchmarks.shared.report import describe_environment


def score(response: str, answer: str) -> float:
    """A reward that differs within groups, as in ranks.py."""
    return float(sum(map(ord, response)) % 11)


def run_worker(arguments: argparse.Namespace) -> None:
    """One rank; the first writes the seconds of the measured steps."""
    num_ranks, out = int(os.environ["WORLD_SIZE"]), Path(arguments.worker)
    questions = list_questions((arguments.steps + 1) * arguments.tasks * num_ranks)

    def save(seconds: list[float], mean_completion_tokens: float | None = None) -> None:
        """Replace the result, so that a run that is stopped has that of the steps it made."""
        if os.environ["RANK"] != "0" or len(seconds) < 2:
            return
        record = {
            "num_ranks": num_ranks,
            "seconds": seconds[1:],
            "mean_completion_tokens": mean_completion_tokens,
            "environment": describe_environment("cuda"),
        }
        partial = out.with_suffix(".partial")
        partial.write_text(json.dumps(record))
        partial.replace(out if mean_completion_tokens is not None else out.with_suffix(".steps"))

    result = run_trl_grpo(
        model_path=arguments.model,
        prompts=[[{"role": "user", "content": question}] for question in questions],
        answers=["" for _ in questions],
        score=score,
        num_tasks=arguments.tasks,
        group_size=arguments.group,
        max_new_tokens=arguments.max_new_tokens,
        num_steps=arguments.steps,
        learning_rate=1e-6,
        device="cuda",
        micro_batch=arguments.micro_batch,
        vllm_memory=arguments.vllm_memory,
        on_step=save,
    )
    save([0.0, *result.seconds_per_step], result.mean_completion_tokens)
    os._exit(0)  # vLLM's own shutdown may wait


def measure(arguments: argparse.Namespace, num_ranks: int, model: str) -> dict[str, Any]:
    """Start the ranks, and end them once the result is there or at the limit of time."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        names = ("tasks", "group", "max_new_tokens", "micro_batch", "vllm_memory", "steps")
        given = [text for name in names for text in (f"--{name.replace('_', '-')}", str(getattr(arguments, name)))]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        command = [
            sys.executable,
            *launcher,
            "-m",
            "benchmarks.ranks.ranks_trl",
            "--worker",
            str(out),
            "--model",
            model,
            *given,
        ]
        environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "8"} | os.environ
        process = subprocess.Popen(command, start_new_session=True, env=environment)
        deadline = time.monotonic() + arguments.limit_s
        while process.poll() is None and not out.exists() and time.monotonic() < deadline:
            time.sleep(1)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20 if out.exists() else 0)
        process.terminate()  # torchrun ends its processes, which have sessions of their own
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        found = next((each for each in (out, out.with_suffix(".steps")) if each.exists()), None)
        if found is None:
            raise SystemExit(
                f"TRL made no step after its warm-up step in {arguments.limit_s:g} s (its output says why)"
            )
        return json.loads(found.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="2", help="numbers of GPUs, with commas")
    parser.add_argument("--shape", default="qwen3-0.6b", help="random weights of this shape, see shared/shapes.py")
    parser.add_argument("--model", help="folder of the model whose tokenizer is used")
    parser.add_argument("--tasks", type=int, default=64, help="tasks per GPU and step")
    parser.add_argument("--group", type=int, default=8, help="rollouts per task")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="most tokens per rollout")
    parser.add_argument("--micro-batch", type=int, default=64, help="completions of a forward and backward")
    parser.add_argument("--vllm-memory", type=float, default=0.35, help="share of the GPU memory for vLLM")
    parser.add_argument("--steps", type=int, default=3, help="measured steps after one warm-up step")
    parser.add_argument("--limit-s", type=float, default=420.0, help="most seconds for one number of GPUs")
    parser.add_argument("--out", help="JSON file; default: results/ranks/ranks_cuda/trl_SHAPE.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        run_worker(arguments)
        return
    if arguments.model is None:
        parser.error("--model is required: the tokenizer of any model folder")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        build = (
            "import sys, torch; from pathlib import Path; from benchmarks.shared.shapes import save_random_model; "
            "save_random_model(sys.argv[1], Path(sys.argv[2]), tokenizer=sys.argv[3], device=torch.device('cuda'))"
        )
        command = [sys.executable, "-c", build, arguments.shape, str(model), arguments.model]
        subprocess.run(command, check=True)
        results = [measure(arguments, int(number), str(model)) for number in arguments.gpus.split(",")]
    out = Path(arguments.out or f"results/ranks/ranks_cuda/trl_{arguments.shape}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    settings = {key: value for key, value in vars(arguments).items() if key not in ("out", "worker", "model")}
    out.write_text(json.dumps({"arguments": settings, "results": results}, indent=1) + "\n")
    size = f"{arguments.tasks} x {arguments.group} x {arguments.max_new_tokens}"
    print(f"\nTRL with vLLM, {arguments.shape}, {size} a GPU")
    print(f"{'GPUs':>4}{'step s':>9}{'tokens a completion':>21}")
    for result in results:
        seconds = statistics.median(result["seconds"])
        tokens = result["mean_completion_tokens"] or float("nan")
        print(f"{result['num_ranks']:>4}{seconds:>9.2f}{tokens:>21.1f}")
        print(f"| {arguments.shape} | {result['num_ranks']} | {seconds:.2f} |")
    print(f"raw: {out}")


if __name__ == "__main__":
    main()
