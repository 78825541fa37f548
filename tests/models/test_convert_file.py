"""Saved models of every kind: contiguous on disk, layout recorded, equal values and outputs; runs across layouts."""

import copy
import importlib
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from cl_train.commands.convert import main
from cl_train.config.schema import ConfigError, OptimConfig
from cl_train.memory_format.convert import convert
from cl_train.memory_format.layout import classify, model_memory_format, to_contiguous_state, to_memory_format
from cl_train.models.card import ModelCard, Preprocessing
from cl_train.models.convert_file import convert_file, load_model
from cl_train.models.files import read_weights
from cl_train.models.sources import build_model
from cl_train.step.optim import build_optimizer
from cl_train.step.precision import Precision, build_scaler
from cl_train.system import checkpoint_file as checkpoint
from cl_train.training.state import collect, restore
from tests.faults.forkserver import ForkServer
from tests.networks import small
from tests.train_states import train_state

ROOT = Path(__file__).resolve().parents[2]
IMAGES = (2, 3, 32, 32)
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def squeezenet(layout: str = "channels_last") -> nn.Module:
    torch.manual_seed(0)
    model = torchvision.models.squeezenet1_1(num_classes=10).eval()
    convert(model, memory_format=LAYOUTS[layout])
    return model


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each kind of file, made by its own library from a channels_last model."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("files")
    model, x = squeezenet(), torch.randn(IMAGES)
    paths = {kind: folder / name for kind, name in (
        ("state dict", "w.pth"), ("checkpoint", "c.pt"), ("safetensors", "w.safetensors"),
        ("scripted", "s.pt"), ("traced", "t.pt"), ("exported program", "e.pt2"))}  # fmt: skip
    torch.save(model.state_dict(), paths["state dict"])
    facts = {"model": "squeezenet1_1", "memory_format": "channels_last"}
    checkpoint.write(paths["checkpoint"], checkpoint.snapshot({"model": model.state_dict(), "facts": facts}))
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, paths["safetensors"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(model).save(str(paths["scripted"]))
        torch.jit.trace(model, x).save(str(paths["traced"]))
        torch.export.save(torch.export.export(model, (x,)), paths["exported program"])
    return paths


KINDS = {"state dict": "state dict", "checkpoint": "checkpoint", "safetensors": "safetensors",
         "scripted": "TorchScript", "traced": "TorchScript", "exported program": "exported program"}  # fmt: skip
PROGRAMS = ("scripted", "traced", "exported program")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "exported program" else name for name in KINDS]
)
def test_every_kind_is_converted_and_equal(name: str, files: dict[str, Path], tmp_path: Path) -> None:
    source, target, trust = files[name], tmp_path / files[name].name, name in PROGRAMS
    model_name = "squeezenet1_1" if name in ("state dict", "safetensors") else None
    result = convert_file(source, target, model_name=model_name, input_shape=IMAGES, trust=trust)
    assert result.kind == KINDS[name] and result.passed and result.values_equal, str(result)
    assert result.difference is not None and result.difference < 1e-4
    assert result.memory_format == "channels_last"
    model, _, _ = load_model(target, model_name or "squeezenet1_1", trust=trust)
    assert model_memory_format(model) == "channels_last"
    x = torch.randn(IMAGES).to(memory_format=torch.channels_last)
    assert torch.allclose(model(x), squeezenet()(x), atol=1e-4)
    if trust:  # for anyone who loads the program with torch alone
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            is_export = target.suffix == ".pt2"
            alone = torch.export.load(target).module() if is_export else torch.jit.load(target)
        assert model_memory_format(alone) == "channels_last"
    else:
        weights = read_weights(target)
        assert weights.card.memory_format == "channels_last" and weights.stored == "contiguous"
        assert all(value.is_contiguous() for value in weights.tensors.values())
    back = convert_file(target, tmp_path / f"back-{target.name}", memory_format=torch.contiguous_format, trust=trust,
                        model_name="squeezenet1_1", input_shape=IMAGES)  # fmt: skip
    assert back.passed
    assert (
        model_memory_format(load_model(tmp_path / f"back-{target.name}", "squeezenet1_1", trust=trust)[0])
        == "contiguous"
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_loaded_only_if_trusted(name: str, files: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trust=true"):
        convert_file(files[name], tmp_path / "out.pt")
    with pytest.raises(ConfigError, match="trust=true"):
        read_weights(files[name])
    assert not (tmp_path / "out.pt").exists()


def test_a_converted_state_dict_stays_a_plain_weights_file(files: dict[str, Path], tmp_path: Path) -> None:
    convert_file(files["state dict"], tmp_path / "w.pth")
    state = torch.load(tmp_path / "w.pth", weights_only=True)
    assert squeezenet("contiguous").load_state_dict(state).missing_keys == []
    assert set(state) == set(squeezenet().state_dict())


def test_equal_weights_are_equal_bytes_on_disk(tmp_path: Path) -> None:
    for layout in LAYOUTS:
        torch.save(squeezenet(layout).state_dict(), tmp_path / f"{layout}.pth")
        convert_file(tmp_path / f"{layout}.pth", tmp_path / layout / "weights.pth")
    contents = [(tmp_path / layout / "weights.pth").read_bytes() for layout in LAYOUTS]
    assert contents[0] == contents[1]


def test_weights_without_a_model_compare_values_only(files: dict[str, Path], tmp_path: Path) -> None:
    result = convert_file(files["state dict"], tmp_path / "w.safetensors")
    assert result.values_equal and result.difference is None and not result.passed and "model=<name>" in str(result)
    with pytest.raises(ConfigError, match="model=<name>"):
        load_model(tmp_path / "w.safetensors")


def test_wrapped_tied_and_5d_weights(tmp_path: Path) -> None:
    shared = torch.randn(8, 3, 3, 3).to(memory_format=torch.channels_last)
    video = torch.randn(8, 3, 3, 3, 3).to(memory_format=torch.channels_last_3d)
    torch.save({"state_dict": {"a.weight": shared, "b.weight": shared, "c.weight": video}}, tmp_path / "w.pth")
    for target in ("w2.pth", "w.safetensors"):
        assert convert_file(tmp_path / "w.pth", tmp_path / target).values_equal
        assert read_weights(tmp_path / target).stored == "contiguous"


def test_files_that_cannot_be_read_are_refused(tmp_path: Path, files: dict[str, Path]) -> None:
    (tmp_path / "text.pth").write_text("hello")
    torch.save({"a": 1}, tmp_path / "empty.pth")
    (tmp_path / "cut.pt").write_bytes(files["checkpoint"].read_bytes()[:-1000])
    damaged = bytearray(files["checkpoint"].read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "flipped.pt").write_bytes(damaged)
    weights = files["state dict"]
    cases: list[tuple[Path | str, str, dict[str, Any], str]] = [
        *(
            (tmp_path / name, "out.pth", {}, name)
            for name in ("text.pth", "empty.pth", "cut.pt", "flipped.pt", "no.pt")
        ),
        (weights, str(weights), {}, "another name"),
        (weights, "out.pth", {"model_name": "mobilenet_v3_small"}, "does not fit"),
        *((weights, f"out{suffix}", {}, "suffixes .pth") for suffix in (".ckpt", ".h5", ".onnx.txt", "")),
        (files["scripted"], "out.onnx", {"trust": True}, "TorchScript can be written as .pt, .pth"),
        (weights, "out.onnx", {}, "model=<name>"),
        ("squeezenet1_1", "out.pth", {}, "weights=DEFAULT"),
        ("squeezenet1_1", "out.pth", {"weights": "DEFAULTS"}, r"mean DEFAULT\? \(there are DEFAULT, IMAGENET1K_V1\)"),
        (tmp_path, "out.pth", {}, "folder without a checkpoint"),
    ]
    for source, target, options, problem in cases:
        with pytest.raises(ConfigError, match=problem):
            convert_file(source, tmp_path / target, **options)
        assert not (tmp_path / "out.pth").exists() and not (tmp_path / "out.onnx").exists()


def test_an_existing_file_is_replaced_only_on_request(files: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "out.pth"
    target.write_bytes(b"precious")
    with pytest.raises(ConfigError, match="overwrite=true"):
        convert_file(files["state dict"], target)
    assert target.read_bytes() == b"precious"
    convert_file(files["state dict"], target, overwrite=True)
    assert set(torch.load(target)) == set(squeezenet().state_dict())
    assert [path.name for path in tmp_path.iterdir()] == ["out.pth"]


class LayoutDependent(nn.Conv2d):
    """Wrong in one of the layouts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.5 if classify(x) == "channels_last" else 1.0)


def layout_dependent(num_classes: int) -> nn.Module:
    return LayoutDependent(3, num_classes, 3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_layouts_are_run_in_either_direction(layout: str, tmp_path: Path) -> None:
    torch.save(layout_dependent(4).state_dict(), tmp_path / "in.pth")
    own = f"{__name__}:layout_dependent"
    options = {"model_name": own, "input_shape": (2, 3, 8, 8), "memory_format": LAYOUTS[layout]}
    result = convert_file(tmp_path / "in.pth", tmp_path / "out.pth", **options)
    assert result.difference == pytest.approx(0.5 if layout == "channels_last" else 1 / 3, rel=1e-3)
    assert not result.passed and not (tmp_path / "out.pth").exists()


PREPROCESSING = Preprocessing(40, 32, "bicubic", (0.5, 0.25, 0.125), (0.5, 0.25, 0.125))
CARD = ModelCard("channels_last", "tests.networks:small", "fp32", ("cat", "dog", "emu"), PREPROCESSING)


@pytest.mark.parametrize(
    "suffix", [".pth", ".safetensors", *(pytest.param(name, marks=pytest.mark.slow) for name in (".pt2", ".onnx"))]
)
@pytest.mark.filterwarnings("ignore")
def test_each_kind_runs_without_this_package_and_carries_the_card(suffix: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, target = small(3).eval(), torch.randn(5, 3, 32, 32), tmp_path / f"out{suffix}"
    facts = CARD.to_dict()
    checkpoint.write(tmp_path / "in.pt", checkpoint.snapshot({"model": model.state_dict(), "facts": facts}))
    result = convert_file(tmp_path / "in.pt", target, model_name="tests.networks:small")
    assert result.passed, str(result)
    if suffix == ".onnx":
        session = importlib.import_module("onnxruntime").InferenceSession(target)
        found = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
        recorded = session.get_modelmeta().custom_metadata_map
    elif suffix == ".pt2":
        recorded = dict.fromkeys(facts, "")
        found = torch.export.load(target, extra_files=recorded).module()(x)
    else:
        safe = importlib.import_module("safetensors.torch")
        state = safe.load_file(target) if suffix == ".safetensors" else torch.load(target)
        recorded = safe.safe_open(target, "pt").metadata() if suffix == ".safetensors" else state._metadata[""]
        plain = small(3).eval()
        plain.load_state_dict(state)
        found = plain(x)
    assert torch.allclose(found, model(x), atol=1e-4)
    assert json.loads(str(recorded["crop"])) == 32 and recorded["model"] == "tests.networks:small"
    assert ModelCard.read(recorded) == CARD
    loaded, preprocessing, classes = load_model(target, "tests.networks:small", trust=True) if suffix != ".onnx" else (
        model, PREPROCESSING, CARD.classes)  # fmt: skip
    assert torch.allclose(loaded(x), model(x), atol=1e-4)
    assert (preprocessing, classes) == (PREPROCESSING, CARD.classes)


@pytest.mark.parametrize(
    "metadata",
    [None, 3, {"mean": "[[["}, {1: 2, "mean": {"a": 1}}, {**CARD.to_dict(), "crop": 1 << 40},
     {**CARD.to_dict(), "std": [0, 1, 1]}, {**CARD.to_dict(), "interpolation": ["bilinear"]},
     {**CARD.to_strings(), "resize": "31"}],
)  # fmt: skip
def test_a_card_of_odd_values_is_unknown(metadata: object) -> None:
    assert ModelCard.read(metadata).preprocessing is None


def test_a_function_named_by_a_file_is_not_called(tmp_path: Path) -> None:
    facts = {"model": "os:abort", "memory_format": "channels_last"}
    checkpoint.write(tmp_path / "c.pt", checkpoint.snapshot({"model": small(3).state_dict(), "facts": facts}))
    with pytest.raises(ConfigError, match="model=<name>"):
        load_model(tmp_path / "c.pt")
    assert load_model(str(tmp_path / "c.pt"), "tests.networks:small")[0](torch.zeros(1, 3, 32, 32)).shape == (1, 3)


def test_a_zoo_model_by_name_and_a_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    (tmp_path / "hub/checkpoints").mkdir(parents=True)
    torch.manual_seed(0)
    model = torchvision.models.squeezenet1_1().eval()
    torch.save(model.state_dict(), tmp_path / "hub/checkpoints/squeezenet1_1-b8a52dc0.pth")  # as if downloaded
    target = tmp_path / "RUN/checkpoints/step-00000001.pt"
    target.parent.mkdir(parents=True)
    assert convert_file("squeezenet1_1", target, weights="DEFAULT", input_shape=IMAGES).passed
    loaded, preprocess, classes = load_model(tmp_path / "RUN")
    assert len(classes) == 1000 and preprocess is not None and (preprocess.resize, preprocess.crop) == (256, 224)
    built = build_model("squeezenet1_1", num_classes=1000, weights=str(tmp_path / "RUN"))
    for other in (loaded, built):
        assert torch.equal(other.features[0].weight, model.features[0].weight)


@pytest.mark.slow
def test_the_command(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], fork_server: ForkServer
) -> None:
    words = [str(files["checkpoint"]), f"out={tmp_path / 'c.pt'}", "input=2,3,32,32"]
    done = fork_server.call("forkserver:run_script", [str(ROOT / "scripts/convert.py"), words], tmp_path / "log")
    assert done.wait() == 0, done.output()
    assert read_weights(tmp_path / "c.pt").card.memory_format == "channels_last"
    with pytest.raises(ConfigError) as wrong:
        main([str(files["checkpoint"]), "memory_format=contiguous"])
    assert "channels_last" in str(wrong.value) and "out=" in str(wrong.value)
    assert main([str(files["state dict"]), f"out={tmp_path / 'w.pth'}"]) == 1
    assert "model=<name>" in capsys.readouterr().out


# --- every kind of model in memory, in both layouts -------------------------------------------------------------------


def features() -> nn.Module:
    """resnet18 up to its last convolution, so that the output's layout can be seen."""
    torch.manual_seed(0)
    return nn.Sequential(*list(torchvision.models.resnet18().children())[:-2]).eval()


def as_eager(model: nn.Module, x: torch.Tensor) -> Any:
    return model


def as_fx(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.fx.symbolic_trace(model)


def as_scripted(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.jit.script(model)


def as_traced(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.jit.trace(model, x)


def as_exported(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.export.export(model, (x,))


def as_compiled(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.compile(model, backend="aot_eager")


KINDS_IN_MEMORY = (as_fx, as_scripted, as_traced, as_exported, as_compiled)


@pytest.mark.parametrize(
    "make",
    [as_eager, *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS_IN_MEMORY)],
)
@pytest.mark.parametrize("mode", ["full", "conv"])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_every_kind_of_model_gives_equal_outputs_in_both_layouts(make: Any, mode: str) -> None:
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = features()(x)
        model = make(features(), x)
        report = convert(model, mode)
        assert len(report.changed) == 20
        assert model_memory_format(model) == "channels_last"
        run = model.module() if isinstance(model, torch.export.ExportedProgram) else model
        found = run(to_memory_format(x, torch.channels_last))
        assert classify(found) == "channels_last"
        assert torch.allclose(found, expected, atol=1e-4)
        convert(model, mode, memory_format=torch.contiguous_format)
        run = model.module() if isinstance(model, torch.export.ExportedProgram) else model
        plain = run(x)
        assert classify(plain) == "contiguous" and torch.allclose(plain, expected, atol=1e-4)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of inductor about its own imports
def test_inductor_gives_equal_outputs_in_both_layouts() -> None:
    x = torch.randn(2, 3, 32, 32)
    model = nn.Sequential(*list(features().children())[:5]).eval()
    with torch.no_grad():
        expected = model(x)
        for layout in LAYOUTS.values():
            convert(model, memory_format=layout)
            found = torch.compile(model)(to_memory_format(x, layout))
            assert torch.allclose(found, expected, atol=1e-4)
            assert classify(found) == ("contiguous" if layout is torch.contiguous_format else "channels_last")
            torch._dynamo.reset()


# --- a run that changes its layout ------------------------------------------------------------------------------------


class Run:
    """resnet18 with SGD and momentum on one batch; float64, as BatchNorm over few pixels multiplies rounding errors."""

    def __init__(self, layout: str) -> None:
        torch.manual_seed(0)
        self.model = torchvision.models.resnet18(num_classes=10).double()
        convert(self.model, memory_format=LAYOUTS[layout])
        self.optimizer = build_optimizer(OptimConfig(), self.model, dict(self.model.named_parameters()), lr=1e-3)
        self.scaler = build_scaler(Precision("fp32"), torch.device("cpu"))
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(4, 3, 32, 32, generator=generator, dtype=torch.float64).to(memory_format=LAYOUTS[layout])
        self.y = torch.tensor([1, 2, 3, 4])

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            loss = nn.functional.cross_entropy(self.model(self.x), self.y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        return collect(train_state(self.model, self.optimizer, self.scaler), {}, {})

    def resume(self, path: Path) -> None:
        restore(checkpoint.load(path), train_state(self.model, self.optimizer, self.scaler))


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("contiguous", "channels_last"), ("channels_last", "contiguous")])
def test_a_checkpoint_resumes_in_the_other_layout(first: str, second: str, tmp_path: Path) -> None:
    run = Run(first)
    run.steps(2)
    checkpoint.write(tmp_path / "a.pt", checkpoint.snapshot(run.state()))
    uninterrupted = run.steps(3)
    other = Run(second)
    other.resume(tmp_path / "a.pt")
    assert model_memory_format(other.model) == second
    for parameter in other.model.parameters():
        assert other.optimizer.state[parameter]["momentum_buffer"].stride() == parameter.stride()
    saved_at = checkpoint.load(tmp_path / "a.pt")["saved_at"]
    checkpoint.write(tmp_path / "b.pt", checkpoint.snapshot({**other.state(), "saved_at": saved_at}))
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()  # equal weights, equal bytes
    assert other.steps(3) == pytest.approx(uninterrupted, rel=1e-6)


def test_contiguous_state_leaves_the_model_alone() -> None:
    model = squeezenet()
    before = copy.deepcopy(model.state_dict())
    to_contiguous_state(model.state_dict())
    assert model_memory_format(model) == "channels_last"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def bias_before_head(num_classes: int) -> nn.Module:
    """The last bias is not the classifier's."""
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes, False))


def test_the_number_of_classes_is_found(tmp_path: Path) -> None:
    torch.save(bias_before_head(5).state_dict(), tmp_path / "in.pt")
    own_model = "tests.models.test_convert_file:bias_before_head"
    done = convert_file(tmp_path / "in.pt", tmp_path / "out.pt", model_name=own_model)
    assert done.difference is not None and done.difference < 1e-5


def test_nan_weights_are_copied_faithfully(tmp_path: Path) -> None:
    torch.save({"weight": torch.tensor([1.0, torch.nan])}, tmp_path / "in.pt")
    assert convert_file(tmp_path / "in.pt", tmp_path / "out.pt").values_equal


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")
def test_a_script_for_other_images_is_converted_without_a_comparison(tmp_path: Path) -> None:
    torch.jit.script(nn.Sequential(nn.Conv2d(1, 4, 3))).save(tmp_path / "in.pt")
    done = convert_file(tmp_path / "in.pt", tmp_path / "out.pt", trust=True)
    assert done.difference is None and not done.passed and "input=" in done.problems[0]


@pytest.mark.slow
def test_an_export_with_named_and_nested_inputs(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, pair: list[torch.Tensor], *, scale: torch.Tensor) -> torch.Tensor:
            return self.conv(pair[0] + pair[1]) * scale

    images = torch.randn(2, 3, 8, 8)
    program = torch.export.export(Model(), ([images, images],), {"scale": torch.tensor(2.0)})
    torch.export.save(program, tmp_path / "in.pt2")
    done = convert_file(tmp_path / "in.pt2", tmp_path / "out.pt2", trust=True)
    assert done.difference is not None and done.difference < 1e-5
