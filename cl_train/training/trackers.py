"""Who else receives the records of a run (`log_to`): TensorBoard, Weights & Biases, or the user's
function.

The first record is `start_record`, then come those of metrics.jsonl, last `{"kind": "end", "step",
"summary"}`.
"""

import copy
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cl_train.config.validation import optional_module, suggest, user_function
from cl_train.errors import ConfigError
from cl_train.system.files import refuse_link, write_text
from cl_train.system.run_folder import Record

log = logging.getLogger("cl_train")

Tracker = Callable[[Record], object]

# TensorBoard sorts the groups of its charts by name: what is looked at first comes first.
_FIRST = ("train/loss", "train/top1", "train/top5", "train/images_per_s")
SHOWN = 16  # images of the first batch
_NO_RESULTS = ("step", "time", "warmup", "world_size", "images")
_HPARAMS = (
    "model channels_last precision compile batch_size seed data.image_size optim.name optim.lr"
)


def start_record(folder: Path, config: dict[str, Any], step: int, classes: int) -> Record:
    """Returns the first record. step: above 0 if the run was resumed. classes: their number."""
    group = folder.parent.name if (folder.parent / "sweep.json").is_file() else None
    start = {"kind": "start", "step": step, "folder": str(folder), "group": group}
    return start | {"config": config, "classes": classes}


class Trackers:
    """The trackers of `log_to`. One that raises gets no further records, and the run goes on."""

    def __init__(self, log_to: Sequence[str]) -> None:
        self._trackers = {f"log_to={name}": find_tracker(name) for name in log_to}
        self._failures: dict[str, str] = {}

    def send(self, record: Record) -> None:
        """Sends `record` to all. Raises ConfigError: TensorBoard or wandb cannot begin the run."""
        for name, tracker in self._trackers.items():
            is_for_all = record["kind"] != "images"
            if name in self._failures or not (is_for_all or isinstance(tracker, TensorBoard)):
                continue
            try:
                tracker(copy.deepcopy(record))  # what one changes, the others must not see
            except Exception as error:  # training must not depend on a tracker
                reason = str(error).strip().partition("\n")[0]
                failure = f"{type(error).__name__}: {reason}"
                if record["kind"] == "start" and isinstance(tracker, TensorBoard | Wandb):
                    what = f"{name} cannot begin the run: {failure}"
                    raise ConfigError(f"{what}; mend it, or leave it out of log_to") from error
                self._failures[name] = failure
                log.warning("%s gets no further records: it raised %s", name, failure)

    def close(self) -> None:
        for name, failure in self._failures.items():
            log.error("WARNING: %s HAS LOST RECORDS OF THIS RUN (%s)", name, failure)


def find_tracker(name: str) -> Tracker:
    """Raises ConfigError: there is no such tracker, or its package is not installed."""
    if name == "tensorboard":
        return TensorBoard()
    if name == "wandb":
        return Wandb()
    if ":" not in name:
        choices = "must be tensorboard, wandb or package.module:function"
        raise ConfigError(f"log_to={name}: {choices}{suggest(name, ['tensorboard', 'wandb'])}")
    function: Tracker = user_function("log_to", name)
    return function


def metrics_of(record: Record) -> dict[str, float]:
    """Returns the numbers of a record as `train/loss`, `val/top1` and so on; of the last record,
    those by which runs are compared.
    """
    kind = record["kind"]
    values = {f"{kind}/{name}": record[name] for name in record if name not in _NO_RESULTS}
    if kind == "end":
        summary = record["summary"]
        values = {
            "whole_run/top1": (summary["val"] or {}).get("top1"),
            "whole_run/train_loss": summary["train"]["loss"],
            "whole_run/images_per_s": (summary["images_per_s"]["end_to_end"] or {}).get("median"),
            # From 5 % on the speed is not to be trusted.
            "whole_run/waited_for_a_core_pct": summary["lost_pct"],
            "whole_run/peak_memory_gib": summary["peak_memory_gib"],
        }
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


class TensorBoard:
    """Writes events into the run folder itself, so that TensorBoard names the run after it."""

    def __call__(self, record: Record) -> None:
        if record["kind"] == "start":
            self._begin(record)
            return
        if record["kind"] == "images":
            self._add_contact_sheet(record["images"])
            return
        values, step = metrics_of(record), record["step"]
        for tag, value in values.items():
            is_vital = tag.startswith("train/") and tag not in _FIRST
            shown_tag = tag.replace("train/", "vitals/") if is_vital else tag
            self._writer.add_scalar(shown_tag, value, step)
        if record["kind"] == "end":
            self._add_hparams(record["summary"]["memory_format"], values)
            self._writer.close()
        else:
            self._writer.flush()

    def _begin(self, start: Record) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._start, config = start, start["config"]
        # `purge_step` drops the events of lost work.
        self._writer: Any = SummaryWriter(start["folder"], purge_step=start["step"] + 1)
        text = "\n".join(f"    {key}: {value}" for key, value in config.items())
        self._writer.add_text("config", text)
        loss = f"loss in training ({config['loss']}) and validation (plain cross-entropy)"
        charts = {
            loss: ["Multiline", ["^train/loss$", "^val/loss$"]],
            "top-1 in training and validation, %": ["Multiline", ["^train/top1$", "^val/top1$"]],
        }
        self._writer.add_custom_scalars({"a run": charts})

    def _add_contact_sheet(self, images: Any) -> None:
        """Shows the images as the step gets them, without the normalisation."""
        from torchvision.utils import make_grid

        config = self._start["config"]
        images = images.float()
        mean, std = (images.new_tensor(config[f"data.{name}"]) for name in ("mean", "std"))
        pixels = (images * std.view(3, 1, 1) + mean.view(3, 1, 1)).clamp(0, 1)
        self._writer.add_image("images/first batch", make_grid(pixels, nrow=4), 0)

    def _add_hparams(self, memory_format: str, values: dict[str, float]) -> None:
        from torch.utils.tensorboard.summary import hparams

        compared = {key: str(self._start["config"][key]) for key in _HPARAMS.split()}
        # `add_hparams` would create a second run (pytorch/pytorch#32651).
        for part in hparams(compared | {"memory_format": memory_format}, values):
            self._writer.file_writer.add_summary(part)


class Wandb:
    """A run of Weights & Biases, in the project of WANDB_PROJECT or else cl_train.

    It does not use `sync_tensorboard`: of eight short runs, wandb 0.31 lost all events of two.
    """

    def __init__(self) -> None:
        self._library = optional_module("wandb", "log_to=wandb")

    def __call__(self, record: Record) -> None:
        if record["kind"] == "start":
            self._run = self._begin(record)
            return
        values = metrics_of(record)
        if record["kind"] != "end":
            self._run.log({**values, "step": record["step"]})
            return
        status = record["summary"]["status"]
        self._run.summary.update({**values, "status": status})
        self._run.finish(exit_code=int(status == "failed"))
        if self._run.offline:
            log.info("log_to=wandb: offline; to send it: wandb sync %s", self._run.sync_dir)

    def _begin(self, start: Record) -> Any:
        folder = Path(start["folder"])
        refuse_link(folder / "wandb")
        id_file = folder / "wandb.run_id"
        if not (start["step"] and id_file.is_file()):  # a resumed run continues its run
            write_text(id_file, secrets.token_hex(4) + "\n")
        run = self._library.init(
            id=id_file.read_text(encoding="utf-8").strip(),
            resume="allow",
            dir=folder,
            name=folder.name,
            project=os.environ.get("WANDB_PROJECT", "cl_train"),
            group=start["group"],
            config=start["config"],
            settings=self._library.Settings(console="off", silent=True),
        )
        # A resumed run repeats steps, which wandb's own step refuses.
        run.define_metric("*", step_metric="step")
        return run
