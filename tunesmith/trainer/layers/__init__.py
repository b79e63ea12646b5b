"""How the layers of a row run in training: compiled, checkpointed, as CUDA graphs, with gradients in place."""
