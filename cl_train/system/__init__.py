"""The machine around a run: processes, signals, files and locks that survive kills, versions, load
and nested tensors.

Read `files.py` first; `run_folder.py` is what a run leaves. The package may import `config`.
"""
