"""From samples to new weights: tries, packed rows, one exact gradient, AdamW on the parameters the sampler reads."""
