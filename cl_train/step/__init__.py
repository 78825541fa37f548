"""One optimizer step: forward, loss, backward and update, under each precision, eager or as a CUDA graph.

Read `train_step.py` first, then `precision.py`. May import data, system and config.
"""
