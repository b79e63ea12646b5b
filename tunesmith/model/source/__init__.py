"""Resolving model paths (folders, hub ids, GGUF files, adapters) without loading weights."""
