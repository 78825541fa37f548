"""The load of others: own workers do not count, other processes do."""

import subprocess
import sys
import time

from cl_train.system.machine_load import MachineLoad, _own_cpu_s

BUSY = "import time\nend = time.monotonic() + 30\nwhile time.monotonic() < end: pass"


def test_a_running_child_is_not_another_process() -> None:
    load = MachineLoad()
    own_before = load._own_s
    child = subprocess.Popen([sys.executable, "-c", BUSY])
    time.sleep(0.5)
    while_running = _own_cpu_s() - own_before
    child.kill()
    child.wait()
    assert while_running > 0.05
    assert _own_cpu_s() - own_before >= while_running - 0.05
    others_pct = load.others_pct()
    assert others_pct is None or 0 <= others_pct <= 101
