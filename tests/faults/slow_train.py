"""train.py with slower steps, for faults that come from outside."""

import runpy

import plants
import tiny

plants.slow_steps()
runpy.run_path(str(tiny.REPOSITORY / "train.py"), run_name="__main__")
