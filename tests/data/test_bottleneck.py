"""The advice names the bottleneck and the setting to change."""

import pytest

from cl_train.data.loader import WorkerTimes, bottleneck_advice


@pytest.mark.parametrize(
    ("times", "workers", "expected", "setting"),
    [
        (WorkerTimes(12.0, 6.0, 1.0, 1000), 2, "12.0 ms", "smaller copy"),
        (WorkerTimes(0.5, 8.0, 1.0, 9000), 2, "52 %", "data.prefetch"),
        (WorkerTimes(0.5, 16.0, 3.0, 9000), 2, "2 of 8 cores", "data.workers=8"),
        (WorkerTimes(2.0, 68.0, 9.0, 9000), 8, "86 %", "resize"),
        (WorkerTimes(0.5, 9.0, 0.4, 9000), 0, "1 of 8 cores", "data.workers=8"),
        (WorkerTimes(resize_s=10.0, images=9000, dataset_s=65.0), 8, "your Dataset", "7.2 ms"),
        (WorkerTimes(), 2, "data.workers=2", "8 cores"),
    ],
)
def test_each_bottleneck_has_its_setting(times, workers, expected, setting):
    text = bottleneck_advice(times, workers=workers, cores=8, seconds=10, data_wait_pct=42.4)
    assert "42 %" in text and expected in text and setting in text


def test_no_advice_without_need():
    busy = WorkerTimes(0.5, 16.0, 3.0, 9000)
    assert bottleneck_advice(busy, workers=2, cores=8, seconds=10, data_wait_pct=10.0) is None
