"""Many runs and the verdict over them: a plan, a process per run, pairs, a report. No torch.

Read `plan.py` first (the jobs of a command line), then `launch.py` (a thread per place, `job.py`
for each process), `verdict.py` (pairs of finished runs), and `report.py`. The package may import
measure's statistics and charts, system and config.
"""
