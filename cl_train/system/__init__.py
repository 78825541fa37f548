"""The machine around a run: processes, signals, files and locks that survive kills, versions, load
and nested tensors.

Start with `files.py`; `run_folder.py` is what a run leaves. May import `config`.
"""
