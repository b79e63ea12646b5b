"""Models: loading, adapters, checkpoints, the attention interface, logits and logprobs, the pocket model."""
