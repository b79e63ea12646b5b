"""vLLM as the sampling engine, in a process and if need be an environment of its own (docs/vllm.md)."""
