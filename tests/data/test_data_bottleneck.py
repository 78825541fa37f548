"""The advice names the bottleneck and the setting to change."""

import pytest

from cl_train.data.bottleneck import bottleneck_advice
from cl_train.data.images import Times


@pytest.mark.parametrize(
    ("times", "workers", "expected", "setting"),
    [
        (Times(12.0, 6.0, 1.0, 1000), 2, "the disk is the bottleneck: a file takes 12.0 ms", "resized copy"),
        (Times(0.5, 8.0, 1.0, 9000), 2, "the workers are idle 52 %", "data.prefetch"),
        (Times(0.5, 16.0, 3.0, 9000), 2, "the workers are the bottleneck: 2 on 8 cores", "data.workers=8"),
        (Times(2.0, 68.0, 9.0, 9000), 8, "decoding is the bottleneck: 86 %", "data.exact_decode=false"),
        (Times(0.5, 9.0, 0.4, 9000), 0, "the workers are the bottleneck", "data.workers=8"),
    ],
)
def test_each_bottleneck_has_its_setting(times, workers, expected, setting):
    text = bottleneck_advice(times, workers=workers, seconds=10, data_wait_pct=42.4, cores=8)
    assert text.startswith("the step waits 42 % of its time for data; ")
    assert expected in text and setting in text


def test_no_advice_without_need():
    busy = Times(0.5, 16.0, 3.0, 9000)
    assert bottleneck_advice(busy, workers=2, seconds=10, data_wait_pct=10.0, cores=8) is None
    assert bottleneck_advice(Times(), workers=2, seconds=10, data_wait_pct=50, cores=8) is None
