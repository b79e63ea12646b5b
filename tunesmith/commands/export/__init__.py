"""A trained model as others load it: Hugging Face folders, adapters, GGUF files."""
