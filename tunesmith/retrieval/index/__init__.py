"""The index folder: passages, BM25 arrays, vectors, and a manifest; how it is built and searched."""
