"""Which families of transformers are computed as transformers computes them: a tiny random model of each.

For every text and vision-language family of the installed transformers, a configuration with small sizes is built, with
a sliding window or chunk of 64 tokens where the family has one. If it is not refused, three things are compared with
the family's own code on sequences of 80 to 150 tokens: logits of two packed sequences, logprobs of sampled tokens in
the engine, and the trainer's logprobs of these tokens on a trie. `verify_model`, which runs whenever a model is loaded,
sees seven tokens: a window that only a mask of the modeling code knows would pass it.

    python -m benchmarks.engine.families --out results/engine/families.json
    python -m benchmarks.engine.families --only llama gemma3_text

Each family runs in a process of its own. A model whose tiny configuration transformers cannot build or run is listed as
not tried. Two experts with nearly equal scores may change places by rounding: such a difference is in one token.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import multiprocessing
import resource
import sys
import warnings
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
)

from benchmarks.shared.report import describe_environment, save_record
from benchmarks.training.experts import build_samples, sample
from tunesmith.config import AlgorithmSection, EngineSection, TrainerSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.errors import ModelError
from tunesmith.model.forward.attention import CausalPlan, check_architecture, run_body, use_plan_attention
from tunesmith.model.forward.logits import compute_logits, verify_model
from tunesmith.model.towers import choose_attention, find_auto_class
from tunesmith.trainer.trainer import Trainer

VOCABULARY, WINDOW, LAYERS = 131, 64, 4
LENGTHS = (120, 80)
"""Tokens of the packed sequences."""
TOLERANCE = 2e-3
"""Largest difference of a logprob, or of a logit in standard deviations, that counts as equal."""
NUM_PARAMETERS = 300_000_000
SIZES: dict[str, Any] = {
    # width
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embed_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 16),
    # depth and heads
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "swa_head_dim", "swa_v_head_dim", "kv_channels"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_num_shared_experts"), 1),
    # recurrent layers
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    "linear_num_key_heads": 2,
    **dict.fromkeys(("mamba_n_heads", "mamba_d_head", "mamba_num_heads", "mamba_head_dim"), 8),
    "mamba_d_state": 6,
    "ssm_state_size": 6,
    "mamba_n_groups": 2,
    "n_groups": 2,
    "mamba_d_ssm": 64,
    "linear_num_value_heads": 4,
    # what depends on positions
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_chunk_size", "window_size"), WINDOW),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length"), 512),
    "floor_scale": 16,
    "original_max_position_embeddings": 64,
    "rotary_dim": 8,
    # tokens
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    # dropout
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    **dict.fromkeys(("dropout", "activation_dropout", "layerdrop"), 0.0),
}
KEPT_NONE = ("sliding_window", "attention_chunk_size", "q_lora_rank", "n_inner", "original_max_position_embeddings")
"""Sizes that switch something on: they stay None where a family has None."""
BY_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type")
LATENT = {"num_key_value_heads": 4}
AXES = {"mrope_section": [2, 1, 1]}
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k25", "minicpm3"), LATENT),
    **dict.fromkeys(("mistral4", "sarvam_mla", "youtu"), LATENT),
    "longcat_flash": LATENT | {"head_dim": 8},
    **dict.fromkeys(("glm46v", "glm4v", "glm_ocr", "glmga"), AXES),
    **dict.fromkeys(("qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl"), AXES),
    "glm4v_moe": {"mrope_section": [1, 1, 0]},
    "paddleocr_vl": {"mrope_section": [4, 2, 2]},
    "step3p7": {"sliding_window": WINDOW},
    "helium": {"head_dim": 8},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "bamba": {"attn_layer_indices": [1, 3]},
}
"""What single families need besides."""
TOWER = {
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model", "mlp_dim"), 16),
    **dict.fromkeys(("num_hidden_layers", "depth", "num_layers", "encoder_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads", "num_key_value_heads", "encoder_attention_heads"), 2),
    "intermediate_size": 24,
    "head_dim": 8,
    "out_hidden_size": 32,
    "projection_dim": 32,
    "text_hidden_size": 32,
}


def list_families() -> list[str]:
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    return list(dict.fromkeys(config.model_type for mapping in mappings for config in mapping))


def build_config(family: str) -> PretrainedConfig:
    config = CONFIG_MAPPING[family]()
    text = config.get_text_config()
    small = shrink(text, FAMILIES.get(family, {}))
    if text is config:
        return small
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is text:
            setattr(config, name, small)
        elif part is not None:
            set_sizes(part, TOWER)
    return config


def shrink(config: PretrainedConfig, own: dict[str, Any]) -> PretrainedConfig:
    """The configuration with small sizes; by its constructor, which derives others, unless that refuses them."""
    sizes = dict(SIZES)
    if "qk_rope_head_dim" in dir(config):
        del sizes["head_dim"]
    for name in BY_LAYER:
        if isinstance(getattr(type(config), name, None), property):
            continue  # it follows from others
        if isinstance(values := getattr(config, name, None), (list, tuple)) and values:
            sizes[name] = choose_layers(list(values))
    if "mrope_section" in own:
        rope = getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10_000.0}
        sizes["rope_parameters"] = rope | own
    known = {*inspect.signature(type(config)).parameters, *vars(config)}
    given = {name: value for name, value in sizes.items() if name in known and can_set(config, name)}
    given |= {name: value for name, value in own.items() if name != "mrope_section"}
    try:
        return type(config)(**given)
    except (TypeError, ValueError, AttributeError):
        set_sizes(config, sizes)
        return config


def can_set(config: PretrainedConfig, name: str) -> bool:
    value = getattr(config, name, None)
    return not (value is None and name in KEPT_NONE) and (name in BY_LAYER or not isinstance(value, (list, tuple)))


def set_sizes(config: PretrainedConfig, sizes: dict[str, Any]) -> None:
    for name, value in sizes.items():
        if hasattr(config, name) and can_set(config, name):
            setattr(config, name, value)


def choose_layers(values: list[Any]) -> list[Any]:
    """As many values as the tiny model has layers, the first ones, with one of every kind."""
    chosen = values[:LAYERS]
    missing = [value for value in dict.fromkeys(values) if value not in chosen][: LAYERS - 1]
    return [*chosen[: LAYERS - len(missing)], *missing]


def build_model(config: PretrainedConfig, attention: Any) -> PreTrainedModel:
    build = find_auto_class(config).from_config
    with torch.device("meta"):
        empty = build(copy.deepcopy(config), attn_implementation=attention)
    if (size := sum(each.numel() for each in empty.parameters())) > NUM_PARAMETERS:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(0)
    model: PreTrainedModel = build(copy.deepcopy(config), attn_implementation=attention, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    for _, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
        noise = torch.randn(parameter.shape, generator=generator)
        mean = parameter.data.mean().round() if parameter.dim() == 1 else 0.0  # scales of norms are near 1 or near 0
        parameter.data = mean + noise * (0.25 if parameter.dim() > 1 else 0.1)
    return model


@torch.no_grad()
def compare_logits(model: PreTrainedModel, reference: PreTrainedModel) -> Tensor:
    """Largest differences [T] of the logits of packed sequences, in standard deviations."""
    ids = torch.randint(3, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    expected = torch.cat([reference(input_ids=row[None]).logits[0] for row in ids.split(LENGTHS)])
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    plan = CausalPlan(list(LENGTHS), torch.device("cpu"))
    found = compute_logits(model, run_body(model, ids[None], positions[None], plan)[0])
    return (found - expected).abs().amax(dim=-1) / expected.std()


def compare_samples(model: PreTrainedModel, reference: PreTrainedModel) -> tuple[float, float]:
    """Largest difference of a logprob in the engine from the reference, and in the trainer from the engine."""
    ids = torch.randint(3, VOCABULARY, (90,), generator=torch.Generator().manual_seed(2)).tolist()
    prompts, settings = [ids] * 2 + [ids[:30]] * 6, EngineSection(page_size=4, kv_cache_tokens=3000)
    completions = sample(LocalEngine(model, None, settings, max_model_len=256), prompts, 60)
    differences = []
    for prompt, completion in zip(prompts[1:3], completions[1:3], strict=True):
        sampled = torch.tensor(completion.sampled_ids)
        with torch.no_grad():
            logits = reference(input_ids=torch.tensor([[*prompt, *completion.sampled_ids]])).logits[0]
        expected = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, sampled[:, None])[:, 0]
        differences.append((torch.tensor(completion.logprobs) - expected).abs().max().item())
    samples = [replace(each, routes=None) for each in build_samples(prompts, completions, version=0)]
    section = TrainerSection(mismatch_stop=1e9, mismatch_warn=1e9)
    trainer = Trainer(model, section, AlgorithmSection(), max_model_len=256, num_total_steps=1)
    return max(differences), trainer.step(samples)["mismatch/max_log_ratio"]


def examine(family: str) -> dict[str, Any]:
    """What became of a family: equal, different, refused or not tried."""
    try:
        config = build_config(family)
        check_architecture(config)
        model, reference = build_model(config, choose_attention(config)), build_model(config, "eager")
        with torch.no_grad():
            reference(input_ids=torch.arange(3, 3 + LENGTHS[0])[None])
    except ModelError as error:
        return {"status": "refused", "reason": str(error).partition("; supported are")[0]}
    except Exception as error:  # noqa: BLE001 - whatever transformers raises for a size that does not suit it
        return {"status": "not tried", "reason": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    try:
        use_plan_attention(model)
        verify_model(model)
    except ModelError as error:
        return {"status": "refused when loaded", "reason": str(error).partition("; supported are")[0]}
    logits_T = compare_logits(model, reference)
    engine, trainer = compare_samples(model, reference)
    found = {"logits": logits_T.max().item(), "engine": engine, "trainer": trainer}
    is_equal = max(found.values()) < TOLERANCE
    return {
        "status": "equal" if is_equal else "different",
        "parameters": sum(each.numel() for each in model.parameters()),
        **found,
        "tokens_that_differ": int((logits_T > TOLERANCE).sum()),
    }


def run_family(family: str, connection: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    connection.send(examine(family))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list_families(), metavar="MODEL_TYPE")
    parser.add_argument("--limit-s", type=float, default=120, help="seconds for a family")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    found: dict[str, dict[str, Any]] = {}
    context = multiprocessing.get_context("fork")
    for family in arguments.only:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=run_family, args=(family, sender))
        process.start()
        sender.close()
        try:
            result = receiver.recv() if receiver.poll(arguments.limit_s) else {"status": "not tried", "reason": "time"}
        except EOFError:
            result = {"status": "failed", "reason": "an exception of the comparison, printed above"}
        process.kill()
        process.join()
        found[family] = result
        print(family, json.dumps(result), flush=True)
    counts = Counter(each["status"] for each in found.values())
    print(json.dumps(counts))
    if arguments.out is not None:
        save_record(arguments.out, {"counts": counts, "families": found, "environment": describe_environment("cpu")})
    sys.exit(1 if counts["different"] + counts["failed"] else 0)


if __name__ == "__main__":
    main()
