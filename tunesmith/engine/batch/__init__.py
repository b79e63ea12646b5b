"""What one forward of the sampler is given: the KV cache, batches of sequences, sampling."""
