"""The file formats of ET-Agent's code (arXiv:2601.06860), read, written and converted.

`files` has one record class for each format, and reads and writes them; `convert` parses the text of trajectories and
maps records to rows and back.
"""
