"""The engine on a vLLM process with a fake vLLM, which has no model; server, socket and engine are real."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from conditions import HANG_S, until, wait_until
from engines import TOKENIZER
from tiny_models import build_tiny
from tunesmith.config import EngineSection
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.engine.vllm.engine import VllmEngine
from tunesmith.errors import EngineError
from tunesmith.types import Distribution, Engine, Sampling

FAKE = str(Path(__file__).parents[2] / "fake_vllm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where engines put their folders."""
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def environment(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([FAKE, os.environ.get("PYTHONPATH", "")]))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield


def build(*, decode_block=4, **args):
    model = copy.deepcopy(build_tiny("llama"))
    section = EngineSection(kind="vllm", decode_block=decode_block, max_num_seqs=8, vllm={"args": args})
    return VllmEngine(model, TOKENIZER, section, max_model_len=64)


@pytest.fixture(scope="module")
def engine(environment):
    built = build()
    built.resume(0)
    yield built
    built.close()


@pytest.fixture
def calls(engine):
    """Reads the calls of vLLM since the test began."""
    path = engine._process.folder / "calls.jsonl"
    num_before = len(path.read_text().splitlines())
    return lambda: [json.loads(line) for line in path.read_text().splitlines()[num_before:]]


@pytest.fixture
def limited(engine):
    """vLLM samples eight tokens of a request and waits for an abort, however late it comes; call it to end that."""
    path = engine._process.folder / "limit"
    path.with_suffix(".new").write_text("8")
    path.with_suffix(".new").rename(path)
    yield lambda: path.unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def sample(engine, prompt=(1, 2, 3), **settings):
    return run_lockstep(engine.generate(prompt, Sampling(**({"max_tokens": 8} | settings))))


def test_tokens_and_logprobs_are_those_of_vllm(engine):
    completion = sample(engine)
    assert completion.sampled_ids == (4, 5, 6, 7, 8, 9, 10, 11)
    assert completion.logprobs == tuple(-0.5 - 0.001 * token for token in completion.sampled_ids)
    assert completion.stop_reason == "length" and set(completion.policy_versions) == {engine.policy_version}


def test_streamed_tokens_are_those_of_the_completion(engine):
    async def run():
        streamed = []
        sampling = Sampling(max_tokens=10)
        completion = await engine.generate([1], sampling, on_tokens=lambda ids, logprobs: streamed.append(tuple(ids)))
        return streamed, completion

    streamed, completion = run_lockstep(run())
    assert len(streamed) > 1 and sum(streamed, ()) == completion.sampled_ids


@pytest.mark.parametrize(
    ("settings", "num_tokens", "reason"),
    [
        ({"max_tokens": 5}, 5, "length"),
        ({"max_tokens": 60, "stop_token_ids": (9,)}, 6, "stop"),
        ({"max_tokens": 100}, 61, "context"),
    ],
)
def test_requests_end_as_in_the_engine_of_this_process(engine, settings, num_tokens, reason):
    completion = sample(engine, **settings)
    assert completion.stop_reason == reason
    assert len(completion.sampled_ids) == num_tokens


def test_a_prompt_that_fills_the_context_is_refused(engine):
    with pytest.raises(ValueError, match="a prompt of 64 tokens fills the context of 64"):
        sample(engine, prompt=[1] * 64)


def test_a_stop_string_ends_the_request_and_aborts_it(engine, calls, limited):
    stop = TOKENIZER.decode([7])
    completion = sample(engine, max_tokens=50, stop=(stop,))
    assert completion.sampled_ids == (4, 5, 6, 7) and completion.stop_reason == "stop"
    sample(engine)  # sent after the abort
    assert any(each["call"] == "abort" for each in calls())


def test_the_most_likely_tokens_are_returned(engine):
    completion = sample(engine, max_tokens=2, top_logprobs=2)
    assert completion.top_logprobs == (((4, -0.504), (5, -1.0)), ((5, -0.505), (6, -1.0)))


def test_a_pause_keeps_the_tokens_so_far_and_their_version(engine, calls, limited):
    async def run():
        sampled = []
        first = asyncio.ensure_future(
            engine.generate([1], Sampling(max_tokens=50), on_tokens=lambda ids, logprobs: sampled.extend(ids))
        )
        await until(lambda: len(sampled) >= 4)
        engine.pause()
        second = asyncio.ensure_future(engine.generate([30], Sampling(max_tokens=3)))
        await asyncio.sleep(0.05)
        assert not first.done() and not second.done()
        limited()
        engine.resume(version)
        return sampled, await first, await second

    version = engine.policy_version + 1
    sampled, first, second = run_lockstep(run())
    assert first.sampled_ids == tuple(range(2, 52)) == tuple(sampled)
    num_old = first.policy_versions.count(version - 1)
    assert 4 <= num_old <= 8 and first.policy_versions == (version - 1,) * num_old + (version,) * (50 - num_old)
    assert second.policy_versions == (version,) * 3
    again = [each for each in calls() if each["call"] == "generate"][1]
    assert again["prompt"] == [1, *range(2, 2 + num_old)] and again["max_tokens"] == 50 - num_old


def test_weights_are_pushed_for_a_new_version_only(engine, calls):
    engine.resume(engine.policy_version)
    assert [each["call"] for each in calls()] == ["reset_prefix_cache"]
    model = engine._model
    model.model.norm.weight.data.fill_(0.25)
    engine.resume(engine.policy_version + 1)
    names = [each["call"] for each in calls()][1:]
    assert names == ["start_push", "receive_push", "finish_push", "reset_prefix_cache"]
    numbers = [int(path.stem.removeprefix("received-")) for path in engine._process.folder.glob("received-*")]
    received = load_file(engine._process.folder / f"received-{max(numbers)}.safetensors")
    assert (received["model.norm.weight"] == 0.25).all()
    assert received.keys() >= set(model.state_dict()) - {"lm_head.weight"} and "lm_head.weight" in received


def test_parameters_reach_vllm(engine, calls):
    distribution = Distribution(
        temperature=0.5, top_p=0.9, top_k=7, repetition_penalty=1.5, presence_penalty=0.1, logit_bias=((5, 2.0),)
    )
    sample(engine, max_tokens=2, distribution=distribution, stop_token_ids=(90,), ignore_eos=True)
    (found,) = [each for each in calls() if each["call"] == "generate"]
    expected = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.0, "repetition_penalty": 1.5, "presence_penalty": 0.1,
        "frequency_penalty": 0.0, "logit_bias": {"5": 2.0}, "max_tokens": 2, "min_tokens": 0, "logprobs": 0,
        "stop_token_ids": [90], "ignore_eos": True,
    }  # fmt: skip
    assert {key: found[key] for key in expected} == expected and "seed" not in found


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"distribution": Distribution(grammar="x")}, "a grammar"),
        ({"distribution": Distribution(bad_words=((3,),))}, "bad_words"),
        ({"return_entropy": True}, "entropy"),
        ({"distribution": Distribution(top_p=0.5, min_p=0.1)}, "top_p together with min_p"),
        ({"distribution": Distribution(temperature=0.001)}, "a temperature between"),
        ({"distribution": Distribution(logit_bias=((1, -1e4),))}, "a logit_bias beyond 100"),
        ({"distribution": Distribution(min_tokens=2, end_ids=(5,))}, "min_tokens"),
    ],
)
def test_what_vllm_samples_in_another_way_is_refused(engine, settings, named):
    with pytest.raises(ValueError, match=named):
        sample(engine, **settings)


def test_penalties_of_the_reply_do_not_survive_a_pause(engine, limited):
    async def run():
        sampled = []
        request = asyncio.ensure_future(
            engine.generate(
                [1],
                Sampling(max_tokens=50, distribution=Distribution(presence_penalty=0.5)),
                on_tokens=lambda ids, logprobs: sampled.extend(ids),
            )
        )
        await until(lambda: sampled)
        engine.pause()
        limited()
        engine.resume(engine.policy_version)
        await request

    with pytest.raises(EngineError, match="presence_penalty or frequency_penalty after a pause"):
        run_lockstep(run())


def test_a_cancelled_request_is_aborted(engine, calls, limited):
    async def run():
        request = asyncio.ensure_future(engine.generate([1], Sampling(max_tokens=50)))
        await until(lambda: "generate" in {each["call"] for each in calls()})
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        engine.pause()
        engine.resume(engine.policy_version)

    run_lockstep(run())
    assert [each["call"] for each in calls()][:2] == ["generate", "abort"]


def test_the_event_loop_may_be_woken_for_what_a_call_has_read(engine):
    async def run():
        loop = asyncio.get_running_loop()
        for _ in range(5):
            request = asyncio.ensure_future(engine.generate([1], Sampling(max_tokens=3)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            time.sleep(0.1)  # noqa: ASYNC251 - the loop finds the answer and the timer in one iteration
            loop.call_soon(engine.resume, engine.policy_version)
            assert (await asyncio.wait_for(request, HANG_S)).sampled_ids == (2, 3, 4)

    run_lockstep(run())


def test_statistics_count_requests_and_tokens(engine):
    engine.compute_stats()
    sample(engine)
    stats = engine.compute_stats()
    assert stats["engine/num_requests"] == 1 and stats["engine/num_sampled_tokens"] == 8
    assert stats["engine/num_prefill_tokens"] == 3 and stats["perf/engine_busy_s"] > 0


def test_it_has_the_interface_that_rollouts_use(engine):
    typed: Engine = engine
    assert typed.max_model_len == 64 and typed.eos_ids == engine.eos_ids


def test_requests_fail_with_one_sentence_when_vllm_dies(environment):
    dying = build(last_token=20)
    with pytest.raises(EngineError, match=r"vLLM process has ended \(status 3\): .*; its log is .*vllm.log"):
        sample(dying, max_tokens=40)
    with pytest.raises(EngineError, match="vLLM process has ended"):
        sample(dying, max_tokens=2)
    dying.close()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"no_such": 1}, "vLLM could not start: TypeError: AsyncEngineArgs of vLLM 0.26.0 has no argument 'no_such'"),
        (
            {"log": "(EngineCore pid=7) ERROR 11-22 [core.py:1] ValueError: Free memory on device 0 (3/80) is less."},
            r"could not start: Free memory on device 0 \(3/80\) is less; lower engine.vllm.gpu_memory_share",
        ),
        ({"log": "Traceback\nKeyError: 'x'"}, "vLLM could not start: KeyError: 'x'; its log is"),
        (
            {"runner": "pooling"},
            "could not start: This model does not support .*generate`; .*set engine.kind=tunesmith",
        ),
    ],
)
def test_a_vllm_that_cannot_start_says_why(environment, args, message):
    with pytest.raises(EngineError, match=message) as raised:
        build(**args)
    assert "\n" not in str(raised.value)


def test_closing_ends_the_process_and_removes_its_folder(environment):
    engine = build()
    folder = engine._process.folder
    pids = [int(pid) for pid in (folder / "pids").read_text().split()]
    engine.close()
    assert not folder.exists()
    wait_for_end(pids)


def test_a_killed_program_leaves_no_process_behind(engine, tmp_path):
    script, pids_file = tmp_path / "program.py", tmp_path / "pids"
    script.write_text(
        "import json, sys, time\n"
        "from pathlib import Path\n"
        "from tunesmith.engine.vllm.process import VllmProcess\n"
        "process = VllmProcess(Path(sys.argv[1]), json.loads(sys.argv[2]), python=None, devices=None)\n"
        "time.sleep(600)\n"
    )
    (started, *_) = map(json.loads, (engine._process.folder / "calls.jsonl").read_text().splitlines())
    shutil.copy(engine._process.folder / "config.json", tmp_path)
    arguments = started | {"model": str(tmp_path)}
    del arguments["call"]
    program = subprocess.Popen([sys.executable, str(script), str(tmp_path), json.dumps(arguments)])
    wait_until(lambda: program.poll() is not None or (pids_file.exists() and len(pids_file.read_text().split()) == 2))
    assert program.poll() is None
    pids = [int(pid) for pid in pids_file.read_text().split()]
    program.kill()
    program.wait()
    wait_for_end(pids)


def wait_for_end(pids):
    wait_until(lambda: not any(is_running(pid) for pid in pids))


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
