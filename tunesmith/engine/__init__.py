"""The sampler: scheduler, pages, attention over them, sampling, and the engine that rollouts call."""
