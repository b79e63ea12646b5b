"""The demo: the whole job on the embedded model."""
