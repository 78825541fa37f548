"""Which memory format is faster, and does it compute the same? Paired benchmarks, parity, sweeps and their reports.

Read `paired.py` first (two layouts in one process, alternating), then `pairs.py` (verdicts over finished runs). May
import models, memory_format, step, data, system and config.
"""
