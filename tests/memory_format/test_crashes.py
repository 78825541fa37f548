"""The convolution whose kernel writes outside its memory is refused, by its shape at the shape that
trains, wherever a step of channels_last would run.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import cl_train
from cl_train.errors import ConfigError
from cl_train.models.facts import refuse_known_crash

CRASHES = "oneDNN writes outside its memory"


def stem(channels=3, **options):
    """The stem of RepVGG: refused at 96 px."""
    conv = nn.Conv2d(channels, 48, 1, **{"stride": 2, "bias": False, **options})
    return nn.Sequential(conv, nn.BatchNorm2d(48), nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.mark.parametrize(
    ("model", "shape", "is_refused"),
    [
        (stem(), (4, 3, 96, 96), True),
        (stem(), (4, 3, 95, 95), False),  # no pixel is left over
        (stem(15), (4, 15, 20, 256), True),
        (stem(), (4, 3, 64, 64), False),
        (stem(16), (4, 16, 96, 96), False),
        (stem(padding=1), (4, 3, 96, 96), False),
        (stem(stride=1), (4, 3, 96, 96), False),
        (stem(4, groups=2), (4, 4, 96, 96), False),
        (stem().requires_grad_(False), (4, 3, 96, 96), False),
        (stem().double(), (4, 3, 96, 96), False),
        (nn.Sequential(nn.MaxPool2d(2), *stem()), (4, 3, 96, 96), False),  # 48 px arrive
        (stem(), (4, 3, 18, 18), "with threads"),  # which share the rows of small images
    ],
)
def test_the_shape_that_trains_decides(model, shape, is_refused, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2 if is_refused == "with threads" else 1)
    images = torch.randn(shape, dtype=next(model.parameters()).dtype)
    words = rf"0 \(stride 2, \d+ input channels.*{CRASHES}"
    with pytest.raises(ConfigError, match=words) if is_refused else nullcontext():
        refuse_known_crash(model, images)


def test_functions_for_users_say_it():
    model = stem()
    images = torch.randn(2, 3, 96, 96).to(memory_format=torch.channels_last)
    with pytest.raises(ConfigError, match=CRASHES):
        cl_train.audit(model, images)
    assert cl_train.audit(model, images, backward=False).of("kept", "forward")
    with pytest.raises(ConfigError, match=CRASHES):
        cl_train.compare_layouts(model, 2, image_size=96, time_limit_s=0.0)
    choice = cl_train.choose_memory_format(model, batch_size=2, image_size=96, time_limit_s=0.0)
    assert not choice.channels_last and CRASHES in choice.reason
    report = cl_train.check_parity(model, image_size=96)
    assert report.passed is False and CRASHES in str(report)
    assert cl_train.check_parity(model, image_size=96, mode="infer").passed


def test_what_is_no_model_is_named():
    for name in ("audit", "check_parity", "choose_memory_format", "compare_layouts"):
        with pytest.raises(ValueError, match="a str is no model"):
            getattr(cl_train, name)("resnet18", *([None] if name == "audit" else []))


def repvgg(num_classes):
    return nn.Sequential(*stem(), nn.Linear(48, num_classes))


def test_training_refuses_it_and_auto_trains_contiguous(train):
    words = ["data=synthetic", "data.root=null", "data.image_size=96", "data.synthetic_images=16"]
    words += [f"model={__name__}:repvgg", "batch_size=4", "epochs=2", "log_to=[]"]
    words.append("data.size_schedule=[[0,32],[1,96]]")  # the largest decides
    with pytest.raises(ConfigError, match=CRASHES):
        train(*words, "channels_last=true")
    done = train(*words, "channels_last=auto")
    assert done.summary["memory_format"] == "contiguous" and done.summary["status"] == "completed"
