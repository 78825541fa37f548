"""The speed and the results of a model in both memory formats, measured in one process.

Read `alternate.py` first, which runs variants in turns and drops the rounds that other processes
disturbed; then `timed_step.py`, the step of training on a copy of the model; then `paired.py`,
which measures that step in two layouts: a ratio with its interval. `auto.py` chooses by it.
`parity.py` compares what the layouts compute; `audit.py` names the operators that lose
channels_last in a model, `atlas.py` in all of torch; `statistics.py` turns measurements into
verdicts, without torch. May import models, memory_format, step, data, system and config.
"""
