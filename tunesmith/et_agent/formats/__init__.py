"""The file formats of ET-Agent's code (arXiv:2601.06860), read, written and converted.

`records` holds one class for each format, `files` reads and writes them, `tags` parses the text of a trajectory into a
transcript, `validity` has the two format checks of the original, and `convert` maps records to rows and back.
"""
