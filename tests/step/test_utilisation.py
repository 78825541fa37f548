"""Shares of the peak that a data sheet names. FLOPs: tests/models/test_facts.py."""

import pytest
import torch

from cl_train.step.precision import BY_NAME
from cl_train.step.utilisation import data_sheet_tflop_per_s, describe, utilisation


def test_shares_are_of_the_data_sheet_where_it_is_known(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    arguments = 8.0, 24.0, 5000.0, BY_NAME["fp16"]
    trained = utilisation(*arguments, torch.device("cuda"))
    assert describe(trained) == "8 GFLOP per image, 120 TFLOP/s: 38 % of the data sheet's peak"
    on_cpu = utilisation(*arguments, torch.device("cpu"))
    assert describe(on_cpu) == "8 GFLOP per image, 120 TFLOP/s"


@pytest.mark.parametrize(
    ("name", "fp16", "fp32"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5, 66.9),
        ("NVIDIA H100 PCIe", 756.5, 51.2),
        ("NVIDIA A10G", 70.0, 35.0),
        ("Tesla V100-PCIE-32GB", 112.0, 14.0),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None, None),
        ("NVIDIA A1000", None, None),
    ],
)
def test_the_peak_is_that_of_the_whole_gpu_by_name(name, fp16, fp32, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    of = [data_sheet_tflop_per_s(BY_NAME[each], torch.device("cuda")) for each in ("fp16", "fp32")]
    assert of == [fp16, fp32]
