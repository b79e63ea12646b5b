"""Tries and sequences for tests of recurrent layers, and their hidden states under plans."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from tunesmith.experience.samples import Trie, build_trie, concatenate_tries
from tunesmith.model.forward.attention import CausalPlan, run_body
from tunesmith.trainer.tree_attention.plan import TreePlan
from tunesmith.types import Sample

# three levels: children of one to three tokens, which are shorter than the convolution, and a chunk of 64 tokens
PATHS = {
    "three levels": [(1, 2, 3), (1, 2, 4), (1, 2, 4, 5, 6), (1, 2, 4, 5, 6, 7), (1, 2, 4, 5, 8, 9, 10), (1, 11), (12,)],
    "over a chunk": [(*range(1, 62), 90), (*range(1, 62), 91, 92, 93), (*range(1, 62), 91, 92, *range(5, 75)), (1, 2)],
}


def build_row(paths: list[tuple[int, ...]]) -> Trie:
    """The trie of the paths; a sample's last token has no node."""
    samples = [
        Sample(
            token_ids=(*path, 0), is_sampled=(False,) * len(path) + (True,), logprobs=(0.0,) * (len(path) + 1),
            advantages=(0.0,) * (len(path) + 1), policy_versions=(None,) * (len(path) + 1), distribution_spans=(),
            group_index=0, trajectory_index=0,
        )
        for path in paths
    ]  # fmt: skip
    return concatenate_tries([build_trie(samples, range(len(samples)))])


def find_ends(trie: Trie, num_paths: int) -> list[int]:
    """The node at the end of each path."""
    return [int(trie.parent_E[list(trie.sample_E).index(index)]) for index in range(num_paths)]


def run_last(model: PreTrainedModel, ids, positions, plan, lasts) -> torch.Tensor:
    ids_1T, positions_1T = (torch.as_tensor(each, device=model.device)[None] for each in (ids, positions))
    return run_body(model, ids_1T, positions_1T, plan)[0][lasts]


def run_trie(model: PreTrainedModel, paths: list[tuple[int, ...]]) -> torch.Tensor:
    trie = build_row(paths)
    plan = TreePlan(trie, model.device)
    return run_last(model, trie.token_ids_T, trie.depth_T, plan, find_ends(trie, len(paths)))


def run_separately(model: PreTrainedModel, paths: list[tuple[int, ...]]) -> torch.Tensor:
    """Each path is a row of its own, of one segment."""
    return torch.cat(
        [run_last(model, path, range(len(path)), CausalPlan([len(path)], model.device), [-1]) for path in paths]
    )


def collect(model: PreTrainedModel, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden states, and the gradients of all weights of a weighted sum of them."""
    weights = torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype, device=hidden.device).view_as(hidden)
    parameters = [each for each in model.parameters() if each.requires_grad]
    gradients = torch.autograd.grad((hidden * weights).sum(), parameters, allow_unused=True)
    return hidden.detach(), torch.cat([each.flatten() for each in gradients if each is not None])
