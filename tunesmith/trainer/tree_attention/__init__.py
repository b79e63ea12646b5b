"""Tree attention: each token of a packed row attends to itself and its ancestors in the trie."""
