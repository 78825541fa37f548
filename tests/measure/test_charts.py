"""Charts stay readable on a busy machine."""

import math

import numpy as np
import pytest

from cl_train.measure import charts
from cl_train.measure.charts import Bar, write_chart, write_times_chart
from cl_train.measure.statistics import Interval
from cl_train.measure.times_report import OperatorTimes, TimedCall

pytest.importorskip("matplotlib")


@pytest.fixture
def axes(monkeypatch):
    """The axes of the figures that are drawn."""
    figures, make = [], charts._figure
    monkeypatch.setattr(charts, "_figure", lambda *args: figures.append(make(*args)) or figures[-1])
    return lambda: figures[-1].axes


def arrows(of):
    return [
        (line.get_marker(), line.get_xdata()[0])
        for line in of.lines
        if line.get_ls() == "None" and line.get_marker() in "<>"
    ]


def test_times_show_bars_and_labels_beside_an_interval_of_a_disturbed_row(tmp_path, axes):
    rounds = np.array([[10.0, 8.0]] * 6)
    noisy = np.array(
        [[10.0, 8.0], [10.0, 2000.0], [3000.0, 9.0], [10.0, 8.0], [10.0, 8.5], [9.0, 8.0]]
    )
    lost = np.array([[1.0, 4.0]] * 6)
    line = "my_net.py:67"
    calls = [
        TimedCall("aten.convolution.default", "forward", "conv", "convolution", ms=rounds),
        TimedCall("aten.div.Tensor", "backward", "head", f"contiguous gradient of {line}", ms=lost),
        TimedCall("aten.add.Tensor", "forward", "add", "element-wise", ms=noisy),
    ]
    times = OperatorTimes(calls, np.array([[30.0, 25.0]] * 6))
    write_times_chart(times, "net", tmp_path / "times.png")
    stacked, differences = axes()
    labels = [text.get_text() for text in stacked.get_legend().get_texts()]
    assert "contiguous gradient of my_net.py:67" in labels
    assert sorted(round(bar.get_width(), 3) for bar in differences.patches) == [-3.0, 1.75, 2.0]
    low, high = differences.get_xlim()
    assert -5 < low < -3 and 2 < high < 4
    assert sorted(arrows(differences)) == [("<", low), (">", high)]
    assert differences.get_xlabel().startswith("ms saved")


def test_ratios_have_arrows_where_an_interval_goes_on(tmp_path, axes):
    bars = [
        Bar("a", Interval(1.2, 0.0, math.inf, 2), "inconclusive", ""),
        Bar("b", Interval(1.5, 1.4, 1.6, 4), "faster", ""),
    ]
    write_chart({"fp32": bars}, "Speed", ("contiguous", "channels_last"), tmp_path / "speed.png")
    [panel] = axes()
    low, high = panel.get_xlim()
    assert arrows(panel) == [("<", low), (">", high)] and high < 4
