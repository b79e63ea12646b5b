"""The forward pass from token ids to logprobs: attention interface, logits, sampling distributions, logprobs."""
