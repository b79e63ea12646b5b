"""The critic: values of all trained tokens, and updates towards the returns.

The value of a sampled token is that of the state it was sampled in, computed from the hidden state of the token before.
The loss is the mean over all trained tokens of the update, so it does not depend on rows.

Axes: T tokens of a row, E trained events, of one row or concatenated over rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tunesmith.cluster.ranks import Ranks
from tunesmith.config import CriticSection, TrainerSection
from tunesmith.errors import TrainingError
from tunesmith.experience.samples import Trie
from tunesmith.model.arrays import copy_to_device
from tunesmith.model.value_model import ValueModel
from tunesmith.trainer.layers.gradient_checkpointing import checkpointed_layers, enable_checkpointing
from tunesmith.trainer.sharding.sharded_adamw import build_optimizer
from tunesmith.trainer.tree_attention.plan import TreePlan, describe_attention


class Critic:
    """A value model and its optimizer."""

    def __init__(
        self, model: ValueModel, settings: CriticSection, trainer: TrainerSection, ranks: Ranks = Ranks()
    ) -> None:
        self._model = model.eval()
        self._settings = settings
        self.warmup_steps = settings.warmup_steps
        """First steps of a run in which only the critic is updated."""
        self._has_checkpointing = trainer.has_gradient_checkpointing
        if self._has_checkpointing:
            enable_checkpointing(model.body)
        optimizer = {"learning_rate": settings.learning_rate, "weight_decay": 0.0}
        self._ranks = ranks
        self.optimizer = build_optimizer(model, trainer.model_copy(update=optimizer), ranks)

    @torch.no_grad()
    def score(self, rows: Sequence[Trie]) -> np.ndarray:
        """Values [E] (float64) of the events, concatenated over rows."""
        values = [self._compute_values(row).cpu().double().numpy() for row in rows]
        return np.concatenate(values) if values else np.zeros(0)

    def update(self, rows: Sequence[Trie], old_values_E: np.ndarray, returns_E: np.ndarray) -> dict[str, float]:
        """Update the critic towards the returns; values and returns are concatenated over rows.

        Metrics are means over the epochs. Raises TrainingError when a loss or its gradient is not finite, with the
        parameters as before that epoch.
        """
        losses, norms, clipped = [], [], []
        num_events = sum(self._ranks.all_gather_objects(len(returns_E)))
        for _ in range(self._settings.num_epochs):
            own = self._accumulate(rows, old_values_E, returns_E, num_events=num_events)
            loss, num_clipped = map(sum, zip(*self._ranks.all_gather_objects(own), strict=True))
            norm = self.optimizer.compute_grad_norm()
            if not (np.isfinite(loss) and torch.isfinite(norm)):
                self.optimizer.clear_gradients()
                raise TrainingError(
                    f"the critic's loss is {loss:g} and the norm of its gradient is {norm.item():g}: lower "
                    "algorithm.critic.learning_rate, or try model.dtype=float32"
                )
            self.optimizer.update(
                learning_rate=self._settings.learning_rate,
                grad_norm=norm,
                max_grad_norm=self._settings.max_grad_norm,
            )
            losses.append(loss)
            norms.append(norm.item())
            clipped.append(num_clipped / num_events)
        return {
            "critic/loss": float(np.mean(losses)),
            "critic/grad_norm": float(np.mean(norms)),
            "critic/clip_frac": float(np.mean(clipped)),
        }

    def state_dict(self) -> dict[str, Any]:
        """State of model and optimizer; tensors are not copied."""
        return {"model": self._model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def count_state_bytes(self) -> int:
        """Approximate size of `state_dict`, without gathering it."""
        model = sum(tensor.nbytes for tensor in self._model.state_dict().values())
        return model + self.optimizer.count_state_bytes()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`; training continues bit for bit."""
        self._model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _accumulate(
        self, rows: Sequence[Trie], old_values_E: np.ndarray, returns_E: np.ndarray, *, num_events: int
    ) -> tuple[float, float]:
        """Accumulate the gradient of the loss, a mean over `num_events`; return this rank's terms of the loss and its
        number of clipped tokens."""
        loss, num_clipped = 0.0, 0.0
        ends = np.cumsum([len(row.parent_E) for row in rows], dtype=np.int64)[:-1]
        with checkpointed_layers(self._model.body) if self._has_checkpointing else nullcontext():
            for row, old_E, targets_E in zip(
                rows, np.split(old_values_E, ends), np.split(returns_E, ends), strict=bool(rows)
            ):
                values_E = self._compute_values(row)
                losses_E, is_clipped_E = compute_value_losses(
                    values_E,
                    torch.from_numpy(old_E).to(values_E),
                    torch.from_numpy(targets_E).to(values_E),
                    clip_range=self._settings.clip_range,
                )
                row_loss = losses_E.sum() / num_events
                row_loss.backward()
                loss += row_loss.item()
                num_clipped += is_clipped_E.sum().item()
        return loss, num_clipped

    def _compute_values(self, row: Trie) -> Tensor:
        device = self._model.head.weight.device
        ids_T, depth_T, parent_E = (
            copy_to_device(each, device, torch.int64) for each in (row.token_ids_T, row.depth_T, row.parent_E)
        )
        plan = TreePlan(row, device, **describe_attention(self._model.body))
        return self._model.compute_values(ids_T[None], depth_T[None], plan, parent_E)


def compute_value_losses(
    values_E: Tensor, old_values_E: Tensor, returns_E: Tensor, *, clip_range: float | None
) -> tuple[Tensor, Tensor]:
    """Half the squared error [E] (Schulman et al., 2017, eq. 9), and where the clip stopped the gradient.

    With `clip_range`, the maximum of the plain error and the error of the value clipped to `clip_range` around the old
    one, as in PPO's published code (Engstrom et al., 2020, section 2). Values within the range are unchanged bit for
    bit, so the two errors are then equal.
    """
    plain_E = (values_E - returns_E).square() / 2
    if clip_range is None:
        return plain_E, torch.zeros_like(plain_E, dtype=torch.bool)
    difference_E = values_E - old_values_E
    clipped_E = values_E.where(
        difference_E.abs() <= clip_range, old_values_E + difference_E.clamp(-clip_range, clip_range)
    )
    clipped_loss_E = (clipped_E - returns_E).square() / 2
    return torch.maximum(plain_E, clipped_loss_E), (clipped_loss_E > plain_E)
