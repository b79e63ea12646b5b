"""From token ids to logprobs: the attention interface, logits, distributions."""
