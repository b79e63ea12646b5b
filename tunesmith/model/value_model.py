"""The critic: a language model's decoder with a value head in place of the vocabulary head.

The value at a token predicts the return of what is sampled after it. The head is initialized to zero, so an untrained
critic predicts 0 and advantages equal returns.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tunesmith.model.forward.attention import AttentionPlan, run_body


class ValueModel(nn.Module):
    """A decoder and a linear head [C -> 1]."""

    def __init__(self, body: PreTrainedModel) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(body.config.get_text_config().hidden_size, 1, dtype=body.dtype, device=body.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def compute_values(
        self, input_ids_1T: Tensor, position_ids_1T: Tensor, plan: AttentionPlan, node_E: Tensor
    ) -> Tensor:
        """Values [E] at the given tokens of the row, in float32 or wider."""
        hidden_TC = run_body(self.body, input_ids_1T, position_ids_1T, plan, decoder=self.body)[0]
        values_E = self.head(hidden_TC.index_select(0, node_E))[:, 0]
        return values_E.to(torch.promote_types(values_E.dtype, torch.float32))
