"""The inference engine that rollouts call: scheduler, KV cache, sampling, and the workers that run the model."""
