"""Measurements of the project itself, not part of the package. Run them from a checkout; keys are
those of `cl-train`.

bash benchmarks/gpu_report.sh out=DIR    this machine's GPU, decisive facts first
python -m benchmarks.peers overhead out=FILE                 cl_train against a bare training loop
python -m benchmarks.figures             the numbers and pictures of README and docs, from results/
"""
