"""`tunesmith doctor`: what is wrong with a run, from the files in its folder."""
