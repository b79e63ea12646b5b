"""GGUF files: architecture, vocabulary, weights."""
