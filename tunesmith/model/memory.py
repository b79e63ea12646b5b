"""Memory that a run needs on each device, part by part, from sizes and settings alone.

The model may be on the meta device, so that nothing is allocated. Weights, gradients and the state of AdamW are exact.
Activations are those of the trainer's largest row: for each token what the layers' linear maps and norms put out and
read, since the backward pass needs it. `count_blocks` and `compute_cache_bytes` are the engine's own rule for the size
of its KV cache. `tests/model/test_memory.py` compares the sums with the peaks of runs in `results/`.

Not counted: CUDA graphs, which take less than 1 GiB, and the data of tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from tunesmith.config import ClusterSection, EngineSection, LoraSection, TrainerSection
from tunesmith.errors import ConfigError
from tunesmith.model.forward.logprobs import CHUNK_BYTES, CHUNK_FRACTION, CHUNK_TOKENS
from tunesmith.model.forward.recurrence import RECURRENT_TYPES, STATELESS_TYPES, count_saved_values, count_state_bytes
from tunesmith.model.torch_modes import is_exact

GIB = 2**30
LIBRARY_BYTES = {"cuda": GIB, "cpu": GIB // 2}
"""What the CUDA context and its libraries, or a process with torch and transformers, take besides a run's tensors."""
MIN_CACHE_GIB = 2.0
"""KV cache where `engine.kv_cache_gib` is not set: exactly this on a CPU, at least this on a GPU."""
STATE_BYTES, GRADIENT_BYTES = 12, 4
"""Bytes of each trained parameter besides its weight: float32 master and moments, which ranks share; its gradient."""
ACTIVATION_FRACTION = 0.3
"""Fraction of the device's memory that is left for activations and logits."""
CACHE_FRACTION = 0.5
"""Fraction of the remaining memory for the cache; the rest is for the caches of other models."""
STREAMED_FRACTION = 0.1
"""Fraction of the device's memory above which several ranks do not keep whole gradients."""
MIN_ROW_TOKENS = 1024
"""Rows that are halved to fit a GPU stay at least this long; shorter ones leave it idle."""
MIN_SNAPSHOTS = 16
"""Snapshots of recurrent states, even if they take memory from the KV cache."""
NF4_BYTES = 0.516
"""Bytes of a weight in 4 bits: 64 weights share a scale of 8 bits, and 256 scales one of 32 bits."""
EAGER_FACTOR = 1.4
"""Activations of layers that are not compiled, as on a CPU, relative to those of compiled ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """What the memory of a run depends on besides its model."""

    trainer: TrainerSection
    lora: LoraSection | None
    engine: EngineSection | None
    """None if nothing is sampled."""
    cluster: ClusterSection = field(default_factory=ClusterSection)
    num_ranks: int = 1
    max_model_len: int
    num_tokens: int
    """Most tokens of an update on one rank."""
    extra_bytes: Mapping[str, int] = field(default_factory=dict)
    """Further models by their name."""

    @property
    def row_tokens(self) -> int:
        """Tokens of the largest row; a sequence longer than the limit is a row of its own."""
        return min(max(self.trainer.max_tokens_per_row, self.max_model_len), self.num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A device and its memory."""

    type: str
    """cuda or cpu."""
    num_bytes: int


def estimate_memory(model: PreTrainedModel, settings: MemorySettings, card: Card) -> dict[str, int]:
    """Bytes of each part of a run, at most."""
    num_shared = settings.num_ranks if settings.cluster.has_sharded_weights else 1
    trained = [each for each in model.parameters() if each.requires_grad]
    num_trained = sum(each.numel() for each in trained)
    num_ends = sum(each.numel() for each in find_ends(model) if each.requires_grad)
    state = STATE_BYTES * num_trained // settings.num_ranks
    if trained and trained[0].dtype.itemsize > 2:  # a wide parameter is its own master
        state = 2 * trained[0].dtype.itemsize * num_trained // settings.num_ranks
    is_streamed = settings.cluster.has_sharded_gradients
    if is_streamed is None:
        is_streamed = GRADIENT_BYTES * num_trained > STREAMED_FRACTION * card.num_bytes
    num_whole = num_ends + (num_trained - num_ends) // (settings.num_ranks if is_streamed or num_shared > 1 else 1)
    parts = {
        "weights": count_held_bytes(model, settings.lora, num_shared),
        **settings.extra_bytes,
        "gradients": GRADIENT_BYTES * num_whole,
        "AdamW": state,
        "activations": count_activation_bytes(model, settings, card),
        "libraries": LIBRARY_BYTES[card.type],
    }
    engine = settings.engine
    if engine is None:
        return parts
    if engine.kind == "vllm":
        share = 0 if engine.vllm.devices is not None else int(engine.vllm.gpu_memory_share * card.num_bytes)
        return parts | {"vLLM": share}
    if card.type == "cpu" and engine.has_packed_weights:
        parts["weights"] *= 2  # the sampler's copy
    available = int(MIN_CACHE_GIB * GIB)
    if card.type != "cpu":
        free = card.num_bytes - parts["weights"] - parts["libraries"]
        available = compute_cache_bytes(
            free=free, total=card.num_bytes, num_trained=num_trained, num_ranks=settings.num_ranks
        )
    token_bytes = count_token_bytes(model.config) * model.dtype.itemsize
    state_bytes = count_state_bytes(model)
    num_slots, available = count_state_slots(engine, state_bytes, available=available)
    num_blocks = count_blocks(engine, token_bytes, max_model_len=settings.max_model_len, available=available)
    parts |= {"KV cache": num_blocks * engine.page_size * token_bytes}
    return parts | ({"recurrent states": num_slots * state_bytes} if num_slots else {})


def fit_rows(model: PreTrainedModel, settings: MemorySettings, card: Card) -> MemorySettings:
    """The settings with rows that fit the GPU: halved until they do, unless their size was set. A gradient does not
    depend on the size of rows, up to rounding."""
    fitting, least = settings, max(settings.max_model_len, MIN_ROW_TOKENS)
    if card.type == "cpu" or "max_tokens_per_row" in settings.trainer.model_fields_set:
        return settings
    while sum(estimate_memory(model, fitting, card).values()) > card.num_bytes:
        if fitting.row_tokens <= least:
            break
        trainer = fitting.trainer.model_copy(update={"max_tokens_per_row": max(fitting.row_tokens // 2, least)})
        fitting = replace(fitting, trainer=trainer)
    return fitting


def find_ends(model: PreTrainedModel) -> list[Tensor]:
    """Embeddings and head, which ranks never share; one matrix if they are tied."""
    ends = {id(each.weight): each.weight for each in (model.get_input_embeddings(), model.get_output_embeddings())}
    return list(ends.values())


def count_held_bytes(model: PreTrainedModel, lora: LoraSection | None, num_shared: int) -> int:
    """Bytes of the weights on each of the ranks that share the layers."""
    end_bytes = sum(each.nbytes for each in find_ends(model))
    return end_bytes + (count_weight_bytes(model, lora) - end_bytes) // num_shared


def count_weight_bytes(model: PreTrainedModel, lora: LoraSection | None) -> int:
    """Bytes of all weights; on the meta device those of `model.lora.quantization` are still whole."""
    num_bytes = sum(each.nbytes for each in model.parameters())
    if lora is None or lora.quantization == "none" or model.device.type != "meta":
        return num_bytes
    ends = {id(each) for each in find_ends(model)}
    frozen = [each for each in model.parameters() if not each.requires_grad and each.ndim == 2 and id(each) not in ends]
    return num_bytes - sum(each.nbytes - int(NF4_BYTES * each.numel()) for each in frozen)


def count_activation_bytes(model: PreTrainedModel, settings: MemorySettings, card: Card) -> int:
    """Bytes that the backward pass of the largest row needs, and one chunk of logits."""
    text, row = model.config.get_text_config(), settings.row_tokens
    hidden, inner, layers = text.hidden_size, text.intermediate_size, text.num_hidden_layers
    sizes = [(each, find_head_size(each)) for each in list_layer_configs(text)]
    query = max(each.num_attention_heads * size for each, size in sizes)
    key = max(count_kv_heads(each) * size for each, size in sizes)
    names = [name for name, _ in model.named_parameters()]
    trained = [name for name, each in model.named_parameters() if each.requires_grad]
    values = 4 * hidden + 2 * query + 2 * key + 3 * inner
    values += (query + key) * any("q_norm." in name for name in names)
    values += 2 * hidden * any("post_feedforward_layernorm." in name for name in names)
    if not any("down_proj" in name for name in trained):
        values -= inner  # no gradient of the last map's weight needs its input
    num_values = layers * values
    if settings.trainer.has_gradient_checkpointing:
        num_values = layers * hidden + values
        if card.type != "cpu" and not is_exact():
            num_values += sum(each.num_attention_heads * find_head_size(each) for each in list_attention_layers(text))
    is_eager = card.type == "cpu" or not settings.trainer.has_compiled_layers
    activations = row * num_values * model.dtype.itemsize * (EAGER_FACTOR if is_eager else 1)
    saved = count_saved_values(model) or [0]
    activations += 4 * row * (max(saved) if settings.trainer.has_gradient_checkpointing else sum(saved))
    if (chunk := settings.trainer.logprob_chunk_tokens or (CHUNK_TOKENS if card.type == "cpu" else None)) is not None:
        return int(activations) + 4 * min(chunk, row) * text.vocab_size
    return int(activations) + min(int(max(CHUNK_BYTES, CHUNK_FRACTION * card.num_bytes)), 4 * row * text.vocab_size)


def find_head_size(text: PretrainedConfig) -> int:
    """Size of keys and values in the cache, which latent attention (MLA) expands and pads to the larger of them."""
    if getattr(text, "qk_nope_head_dim", None):
        return max(text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim)
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def list_layer_configs(text: PretrainedConfig) -> list[PretrainedConfig]:
    """The configuration of each layer: that of the model, unless layers have sizes of their own."""
    return list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else [text] * text.num_hidden_layers


def count_kv_heads(text: PretrainedConfig) -> int:
    return getattr(text, "num_key_value_heads", None) or text.num_attention_heads


def count_token_bytes(config: PretrainedConfig) -> int:
    """Keys and values of one token, as a number of values."""
    layers = list_attention_layers(config.get_text_config())
    return 2 * sum(count_kv_heads(each) * find_head_size(each) for each in layers)


def list_attention_layers(text: PretrainedConfig) -> list[PretrainedConfig]:
    """The configuration of each layer with attention."""
    types = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    others = (*RECURRENT_TYPES, *STATELESS_TYPES)
    return [each for each, name in zip(list_layer_configs(text), types, strict=True) if name not in others]


def compute_cache_bytes(*, free: int, total: int, num_trained: int, num_ranks: int) -> int:
    """Bytes for the KV cache of a GPU that has this memory free besides its weights: what activations and the trainer
    leave of it, times `CACHE_FRACTION`."""
    state = (STATE_BYTES / num_ranks + GRADIENT_BYTES) * num_trained
    return max(int(CACHE_FRACTION * (free - state - ACTIVATION_FRACTION * total)), int(MIN_CACHE_GIB * GIB))


def count_state_slots(engine: EngineSection, state_bytes: int, *, available: int) -> tuple[int, int]:
    """Slots of recurrent states, and the bytes that they leave for keys and values. There are those of the running
    requests, two that are of none, and with a prefix cache those of snapshots: as many again where half of the
    available bytes suffices."""
    if not state_bytes:
        return 0, available
    num_running = engine.max_num_seqs + 2
    num_left = available // 2 // state_bytes - num_running
    num_snapshots = min(max(num_left, MIN_SNAPSHOTS), engine.max_num_seqs)
    num_slots = num_running + num_snapshots * engine.has_prefix_cache
    return num_slots, max(available - num_slots * state_bytes, available // 2)


def count_blocks(engine: EngineSection, token_bytes: int, *, max_model_len: int, available: int) -> int:
    """Blocks of the KV cache: as many as the settings say, or as fit the available bytes."""
    if engine.kv_cache_tokens is not None:
        return -(-engine.kv_cache_tokens // engine.page_size)
    block_bytes = token_bytes * engine.page_size
    num_bytes = available if engine.kv_cache_gib is None else int(engine.kv_cache_gib * GIB)
    num_blocks = num_bytes // block_bytes
    if engine.kv_cache_gib is None:
        max_tokens = engine.max_num_seqs * (max_model_len + 4 * engine.page_size)
        num_blocks = min(num_blocks, -(-max_tokens // engine.page_size))
    if num_blocks == 0:
        raise ConfigError(
            f"the KV cache has no room for one block ({block_bytes} bytes): engine.kv_cache_gib="
            f"{engine.kv_cache_gib}; raise it, or free memory of the device"
        )
    return num_blocks
