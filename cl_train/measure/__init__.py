"""The speed and the results of a model in both memory formats, measured in one process.

Read `timed_step.py` first: the step of training on a copy; then `paired.py`: two layouts,
alternating blocks, a ratio with its interval, without what other processes disturbed
(`taken_time.py`); `auto.py` chooses by it. `parity.py` compares what
they compute; `audit.py` names the operators that lose channels_last; `statistics.py` turns
measurements into verdicts, without torch. May import models, memory_format, step, data, system and
config.
"""
