"""Equal numbers of forward and backward passes on all ranks of a sharded model.

Gathering a layer is a collective, so every rank must run as many rows as the rank with the most: otherwise the layer
that a rank gathers would meet another layer, or the sum of gradients, of a rank that is done. What a rank lacks it runs
on two tokens, with gradients of zero.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from transformers import PreTrainedModel

from tunesmith.experience.samples import EMPTY, Trie
from tunesmith.model.arrays import copy_to_device
from tunesmith.model.forward.attention import run_body
from tunesmith.trainer.sharding.sharded_model import find_sharding
from tunesmith.trainer.tree_attention.plan import TreePlan, describe_attention
from tunesmith.trainer.tree_attention.tile_schedule import pad_trie

NUM_TOKENS = 2
"""Of an empty row: compiled layers are compiled once more for a single token."""


def match_rows(model: PreTrainedModel, num_rows: int, after_row: Callable[[], None] = lambda: None) -> None:
    """Before a pass of `num_rows` rows, run the passes that other ranks have in addition; all ranks call this.

    Nothing happens unless the model is sharded. With gradients enabled, backward passes run too. `after_row` is called
    after each, as other ranks call it after their rows.
    """
    sharding = find_sharding(model)
    if sharding is None:
        return
    for _ in range(max(sharding.ranks.all_gather_objects(num_rows)) - num_rows):
        run_empty_row(model)
        after_row()


def run_empty_row(model: PreTrainedModel) -> None:
    """One forward, and a backward of zeros if gradients are enabled."""
    steps = np.arange(NUM_TOKENS)
    trie = Trie(
        token_ids_T=np.zeros(NUM_TOKENS, dtype=np.int64),
        depth_T=steps,
        subtree_end_T=np.full(NUM_TOKENS, NUM_TOKENS),
        parent_E=EMPTY,
        target_E=EMPTY,
        sample_E=EMPTY,
        time_E=EMPTY,
        num_flat_tokens=NUM_TOKENS,
    )
    padded = pad_trie(trie) if model.device.type == "cuda" else trie
    ids_T, depth_T = copy_to_device(np.stack([padded.token_ids_T, padded.depth_T]), model.device)
    plan = TreePlan(trie, model.device, **describe_attention(model))
    hidden_1TC = run_body(model, ids_T[None], depth_T[None], plan)
    if torch.is_grad_enabled():
        hidden_1TC.backward(torch.zeros_like(hidden_1TC))
