"""The commands of `cl-train`: one short file each, which reads settings, calls the rooms below and prints the result.

May import every other room. `python scripts/<command>.py` runs the same code from a checkout.
"""
