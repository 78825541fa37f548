"""One optimizer step: forward, loss, backward and update in each precision, eager or replayed as a
CUDA graph.

Read `train_step.py` first, then `precision.py`. May import data, system and config.
"""
