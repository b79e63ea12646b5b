"""Reading passages: JSON Lines, Hugging Face data sets, folders of text files."""
