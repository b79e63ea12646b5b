"""What a model path names, found without loading weights: folders, hub ids, GGUF files, adapters."""
