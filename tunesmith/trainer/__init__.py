"""Training step: packed rows of tries, scoring pass, loss pass, and AdamW on the parameters that the sampler reads."""
