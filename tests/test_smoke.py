"""Read this first: the real loop, shrunk to 96 tiny JPEGs and two epochs of three steps."""

import torch

import cl_train


def test_a_run_learns_and_leaves_its_records_and_its_weights(image_folder, tmp_path):
    settings = {"image_size": 32, "workers": 0, "root": str(image_folder)}
    words = ("data=folder", "channels_last=true", "epochs=2", "batch_size=32", "log_every=1")
    model = "tests.networks:small"  # two convolutions; `image_folder`: three colours, 32 + 7 each
    folder = tmp_path / "run"
    run = cl_train.train(
        *words, "optim.lr=0.4", f"hydra.run.dir={folder}", "device=cpu", model=model, data=settings
    )

    assert run.exit_code == 0 and run.summary["status"] == "completed"
    assert run.summary["memory_format"] == "channels_last"
    steps = [(record["kind"], record["step"]) for record in run.history]
    train = "train"
    assert steps == [(train, 1), (train, 2), (train, 3), ("val", 3),
                     (train, 4), (train, 5), (train, 6), ("val", 6)]  # fmt: skip
    losses = [record["loss"] for record in run.history if record["kind"] == train]
    assert losses[-1] < losses[0] and run.summary["train"]["loss"] == losses[-1]
    assert run.top1 > 90 and run.summary["val"]["images"] == 21

    trained, preprocess, classes = cl_train.load_model(folder, model=model)
    assert classes == ("blue", "green", "red")
    red = torch.full((40, 40, 3), 30, dtype=torch.uint8)
    red[..., 0] = 220
    assert trained(preprocess(red.numpy())[None]).argmax() == classes.index("red")
    assert trained.get_submodule("3").weight.stride() == (72, 1, 24, 8), "channels_last again"
