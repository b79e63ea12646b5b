"""GGUF files: architecture metadata, vocabulary, tensors."""
