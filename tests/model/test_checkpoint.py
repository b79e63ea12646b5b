from __future__ import annotations

import json
import os
import random
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    GenerationConfig,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from fakes import full_disk
from killed_runs import kill_at_call
from tiny_models import FreshConfigs
from tunesmith.errors import StorageError
from tunesmith.model.checkpoint import load_checkpoint, remove_old_checkpoints, save_checkpoint
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.storage import find_checkpoints, remove_leftovers

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
CONFIGS = FreshConfigs(
    {
        "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
        "qwen3 tied": Qwen3Config(**SIZES, tie_word_embeddings=True),
        "gemma2": Gemma2Config(**SIZES),
    }
)


def build_model(name: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype)
    use_plan_attention(model)
    return model


def build_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "hello": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return tokenizer


TOKENIZER = build_tokenizer()


def save(folder: Path, model: PreTrainedModel, **states) -> None:
    save_checkpoint(
        folder, model, TOKENIZER, trainer_state=states.get("trainer_state", {}), run_state=states.get("run_state", {})
    )


def equal_weights(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_restored_bit_for_bit_into_the_same_memory(tmp_path, name, dtype):
    saved, restored = build_model(name, dtype), build_model(name, dtype, seed=1)
    addresses = [tensor.data_ptr() for tensor in restored.state_dict().values()]
    save(tmp_path / "global_step_3", saved)
    load_checkpoint(tmp_path / "global_step_3", restored)
    assert equal_weights(saved, restored)
    assert [tensor.data_ptr() for tensor in restored.state_dict().values()] == addresses
    assert all(parameter.requires_grad for parameter in restored.parameters())


def test_transformers_loads_the_folder_as_it_is(tmp_path):
    folder = tmp_path / "global_step_3"
    saved = build_model("gemma2", torch.bfloat16)
    save(folder, saved)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.bfloat16
    assert equal_weights(saved, loaded)
    assert AutoTokenizer.from_pretrained(folder).chat_template == TOKENIZER.chat_template
    assert "tunesmith" not in (folder / "config.json").read_text()
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_inconsistent_generation_config_is_saved_unchanged(tmp_path):
    model = build_model()
    model.generation_config = GenerationConfig(do_sample=False, temperature=0.6, eos_token_id=[1, 2])
    save(tmp_path / "global_step_1", model)
    saved = GenerationConfig.from_pretrained(tmp_path / "global_step_1")
    assert (saved.temperature, saved.do_sample, saved.eos_token_id) == (0.6, False, [1, 2])
    assert model.generation_config.temperature == 0.6


def test_other_users_may_read_every_file(tmp_path):
    umask = os.umask(0o022)
    try:
        save(tmp_path / "global_step_1", build_model())
    finally:
        os.umask(umask)
    files = [path for path in (tmp_path / "global_step_1").rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o644}


def test_trainer_and_run_state_round_trip(tmp_path):
    trainer_state = {
        "step": 7,
        "moments": [{"m": torch.randn(3), "v": torch.randn(3).double()}],
        "rng": torch.get_rng_state(),
        "lr": 1e-6,
    }
    run_state = {"epoch": 1, "order": [3, 1, 2], "ema": 0.1 + 0.2, "name": None}
    save(tmp_path / "global_step_7", build_model(), trainer_state=trainer_state, run_state=run_state)
    restored = load_checkpoint(tmp_path / "global_step_7", build_model())
    assert restored.run_state == run_state
    assert (restored.trainer_state["step"], restored.trainer_state["lr"]) == (7, 1e-6)
    assert torch.equal(restored.trainer_state["moments"][0]["v"], trainer_state["moments"][0]["v"])
    assert torch.equal(restored.trainer_state["rng"], trainer_state["rng"])


def test_the_last_checkpoint_is_the_highest_committed_step(tmp_path):
    assert find_checkpoints(tmp_path) == find_checkpoints(tmp_path / "none") == []
    for step in (9, 10, 2):
        save(tmp_path / f"global_step_{step}", build_model())
    (tmp_path / "global_step_11").mkdir()
    (tmp_path / "global_step_12.tmp-5").mkdir()
    (tmp_path / "global_step_12.tmp-5" / "DONE.json").write_text("{}")
    assert find_checkpoints(tmp_path)[-1] == tmp_path / "global_step_10"
    remove_old_checkpoints(tmp_path, num_kept=2)
    assert [path.name for path in find_checkpoints(tmp_path)] == ["global_step_9", "global_step_10"]
    (tmp_path / "best.tmp-5").symlink_to("global_step_9")
    remove_leftovers(tmp_path)
    assert not (tmp_path / "global_step_12.tmp-5").exists() and not (tmp_path / "best.tmp-5").is_symlink()
    remove_old_checkpoints(tmp_path, num_kept=1, best_step=9)
    assert [path.name for path in find_checkpoints(tmp_path)] == ["global_step_9", "global_step_10"]


def test_a_committed_step_is_never_written_again(tmp_path):
    save(tmp_path / "global_step_1", build_model())
    with pytest.raises(StorageError, match="already holds a checkpoint"):
        save(tmp_path / "global_step_1", build_model(seed=1))


def test_a_damaged_or_foreign_checkpoint_is_refused(tmp_path):
    folder = tmp_path / "global_step_1"
    save(folder, build_model())
    with pytest.raises(StorageError, match="does not hold the weights of this model"):
        load_checkpoint(folder, build_model("gemma2"))
    weights = folder / "model.safetensors"
    weights.write_bytes(b"\xff" * weights.stat().st_size)
    with pytest.raises(StorageError, match="cannot read the weights"):
        load_checkpoint(folder, build_model())
    with (folder / "trainer" / "state.pt").open("ab") as file:
        file.truncate(10)
    with pytest.raises(StorageError, match=r"trainer/state\.pt is damaged: it has 10 bytes instead of"):
        load_checkpoint(folder, build_model())
    (folder / "DONE.json").unlink()
    with pytest.raises(StorageError, match=r"it has no DONE\.json"):
        load_checkpoint(folder, build_model())


@pytest.mark.parametrize("num_bytes", [10, 2_000, 12_000, 40_000])
def test_a_full_disk_is_one_sentence_and_damages_nothing(tmp_path, num_bytes):
    save(tmp_path / "global_step_1", build_model())
    with full_disk(num_bytes), pytest.raises(StorageError, match=r"^cannot write .*"):
        save(tmp_path / "global_step_2", build_model(), trainer_state={"m": torch.zeros(20_000)})
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_1"]
    load_checkpoint(tmp_path / "global_step_1", build_model())


def test_a_save_without_enough_disk_space_is_refused_before_it_starts(tmp_path):
    huge = torch.empty(2**58, device="meta")
    with pytest.raises(StorageError, match=r"^cannot write to .* GiB are free; free some, set keep_checkpoints"):
        save(tmp_path / "global_step_2", build_model(), trainer_state={"m": [huge]})
    assert list(tmp_path.iterdir()) == []


def run_in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked child and return the child's pid; the child never returns."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


def fill(model: PreTrainedModel, value: float) -> PreTrainedModel:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def check_survivor(root: Path) -> int:
    """The last committed step (0: none), after checking that it loads and that the rest are temporary leftovers."""
    last = next(reversed(find_checkpoints(root)), None)
    remove_leftovers(root)
    assert all((path / "DONE.json").is_file() for path in root.iterdir())
    if last is None:
        return 0
    model = build_model()
    state = load_checkpoint(last, model)
    step = state.run_state["step"]
    assert last.name == f"global_step_{step}"
    assert torch.equal(state.trainer_state["m"], torch.full((5,), float(step)))
    assert all(torch.equal(p, torch.full_like(p, float(step))) for p in model.parameters())
    return step


def save_step(root: Path, model: PreTrainedModel, step: int) -> None:
    state = {"m": torch.full((5,), float(step))}
    save(root / f"global_step_{step}", fill(model, step), trainer_state=state, run_state={"step": step})
    remove_old_checkpoints(root, num_kept=1)


def test_a_kill_at_any_disk_call_leaves_the_old_or_the_new_checkpoint(tmp_path):
    outcomes = []
    for number in range(1, 100):
        root = tmp_path / str(number)
        root.mkdir()
        model = build_model()
        save_step(root, model, 1)

        def work(number=number, root=root, model=model):
            kill_at_call(number)
            save_step(root, model, 2)

        _, status = os.waitpid(run_in_child(work), 0)
        outcomes.append(check_survivor(root))
        if not os.WIFSIGNALED(status):
            break
    assert len(outcomes) > 10
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {1, 2}


def test_a_kill_at_random_moments_leaves_the_last_commit(tmp_path):
    rng = random.Random(0)
    model = build_model()
    for num_kills in range(200):
        first = check_survivor(tmp_path) + 1
        if num_kills >= 8 and first > 1:
            break  # on a busy machine, children may be killed before their first commit

        def work(first=first):
            for step in range(first, first + 1000):
                save_step(tmp_path, model, step)

        child = run_in_child(work)
        time.sleep(rng.uniform(0.0, 0.25))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert check_survivor(tmp_path) >= first - 1
    assert check_survivor(tmp_path) > 0
