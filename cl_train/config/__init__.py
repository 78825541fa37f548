"""The settings: their names, types, ranges and meaning, and how a command line becomes a checked
`Config`.

Read `schema.py` first. The package imports only `cl_train.errors` and no torch, so that a wrong
command line is refused at once.
"""
