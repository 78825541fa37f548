"""The process that measures a model in an environment. It needs torch 2.4 or later, torchvision,
and nothing of this package; `environments.py` starts one per environment.

A request is one line of JSON on stdin, the answer one line on what was stdout: the first request
describes a `Measured`, each other one names its method. Both environments run this file, so they
run the same step: forward, cross-entropy, backward, SGD with momentum.
"""

import importlib
import json
import os
import platform
import statistics
import sys
import time
import warnings
from typing import Any

import torch
import torchvision


class Measured:
    """A model on its device in one layout, with its batch and optimizer."""

    def __init__(self, request: dict[str, Any]) -> None:
        torch.manual_seed(0)
        torch.backends.cudnn.benchmark = True
        if request["precision"] == "tf32":
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.allow_tf32 = True
        self.device = torch.device(request["device"])
        self.dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(request["precision"])
        self.trains = request["mode"] == "train"

        self.model = build_model(request["model"], request["options"])
        self.model.load_state_dict(torch.load(request["weights"], weights_only=True))
        self.model.to(self.device).train(self.trains)
        batch = torch.load(request["batch"], weights_only=True)
        self.images, self.targets = (tensor.to(self.device) for tensor in batch)
        if request["channels_last"]:
            self.images = channels_last(self.images)
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                tensor.data = channels_last(tensor.data)
        self.forward: Any = self.model
        if request["compile"]:
            self.forward = torch.compile(self.model, dynamic=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)
        is_scaled = self.dtype == torch.float16
        kind = self.device.type
        self.scaler = torch.amp.GradScaler(kind, enabled=is_scaled, init_scale=1024.0)

    def result(self) -> dict[str, Any]:
        """Versions, logits and the norm of every gradient in eval mode, which draws no random
        number.
        """
        self.model.eval()
        logits, loss = self.logits_and_loss(self.model)
        loss.backward()
        gradients = [parameter.grad for parameter in self.model.parameters()]
        # Both environments must return as many norms, also where one leaves out a gradient.
        norms = [0.0 if grad is None else grad.double().norm().item() for grad in gradients]
        self.optimizer.zero_grad(set_to_none=True)
        self.model.train(self.trains)
        values = logits.detach().double().flatten().tolist()
        return {"versions": versions(), "logits": values, "gradient_norms": norms}

    def logits_and_loss(self, forward: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            logits = forward(self.images)
            while not isinstance(logits, torch.Tensor):  # the first one of a tuple or a dict
                logits = next(iter(logits.values())) if isinstance(logits, dict) else logits[0]
            return logits, torch.nn.functional.cross_entropy(logits, self.targets)

    def step(self) -> None:
        """One step; waits for the device."""
        with torch.set_grad_enabled(self.trains):
            _, loss = self.logits_and_loss(self.forward)
        if self.trains:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def block_s(self, steps: int, clock: str) -> float:
        """The median of the seconds of `steps` steps; the first step is left out."""
        now = getattr(time, clock)
        times_s = []
        for _ in range(steps + 1):
            start = now()
            self.step()
            times_s.append(now() - start)
        return statistics.median(times_s[1:])

    def operator_ms(self, steps: int) -> dict[str, float]:
        """Milliseconds of a step that each kind of operator takes by itself, of torch's profiler:
        the median over `steps` steps, so that an interruption does not count.
        """
        is_cuda = self.device.type == "cuda"
        attribute = "self_device_time_total" if is_cuda else "self_cpu_time_total"
        times_ms: dict[str, list[float]] = {}
        for _ in range(steps):
            with torch.profiler.profile() as profile:
                self.step()
            for row in profile.key_averages():
                times_ms.setdefault(row.key, []).append(getattr(row, attribute) / 1000)
        return {name: statistics.median(times) for name, times in times_ms.items()}


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.to(memory_format=formats.get(tensor.dim(), torch.preserve_format))


def build_model(name: str, options: dict[str, Any]) -> torch.nn.Module:
    """As `model=` names it: of torchvision, `timm/<name>`, or `package.module:function`."""
    if name.startswith("timm/"):
        return importlib.import_module("timm").create_model(name[5:], num_classes=1000, **options)
    if ":" in name:
        module, function = name.split(":")
        return getattr(importlib.import_module(module), function)(1000)
    return torchvision.models.get_model(name, weights=None, num_classes=1000, **options)


def versions() -> dict[str, Any]:
    has_cuda = torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda if has_cuda else None,
        "cudnn": torch.backends.cudnn.version() if has_cuda else None,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    # What libraries print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    measured: Measured | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if measured is None:
                measured = Measured(request)
                answer: Any = measured.result()
            else:
                answer = getattr(measured, request.pop("do"))(**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="Warning: Profiler clears events")  # torch 2.11
    main()
