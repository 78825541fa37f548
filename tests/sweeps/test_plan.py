"""Sweeps: what is planned, and in which places."""

import json
from dataclasses import replace
from functools import partial

import pytest

from cl_train.config.command_line import CommandLine, compose
from cl_train.errors import ConfigError
from cl_train.sweeps import launch as sweep_module
from cl_train.sweeps import places as places_module
from cl_train.sweeps.launch import run_sweep
from cl_train.sweeps.places import plan_places
from cl_train.sweeps.plan import Job, plan_sweep, read_sweep

BOTH = "channels_last=true,false"


def runs_of(*words):
    return compose(CommandLine.parse(["-m", *words]))


def saved_plan(folder, *words):
    planned = plan_sweep(runs_of(BOTH, *words, f"hydra.sweep.dir={folder}"))
    planned.folder.mkdir()
    planned.save()
    return planned


NAMES = [
    ("", "resnet18_contiguous"),
    (
        "channels_last=true,false repeats=2",
        "channels_last_1 contiguous_1 contiguous_2 channels_last_2",
    ),
    # Jobs that are compared are adjacent.
    ("model=resnet18,vgg11 seed=1,2 compare_by=seed", "18_contiguous_seed=1 =2 =1 =2"),
    (
        "optim.lr=1,2 schedule=cosine,step compare_by=schedule.name",
        "cosine_lr=1 step_lr=1 cosine_lr=2 step_lr=2",
    ),
    (
        "nproc=1,2 batch_size=range(8,17,8)",
        "=1_batch_size=8 =1_batch_size=16 =2_batch_size=8 =2_batch_size=16",
    ),
    ("precision=bf16,fp32 compare_by=precision", "contiguous_bf16 contiguous_fp32"),
    ("weights=a/b.pth,a_b.pth", "a_b.pth a_b.pth-2"),
    ("model=choice(resnet18,tests.networks:small)", "resnet18_contiguous small_contiguous"),
    (f"data.root='/a/path/{'x' * 200}',/b", "-52419fa5 =_b"),
]


@pytest.mark.parametrize(("words", "ends"), NAMES)
def test_the_names_of_jobs(words, ends):
    planned = plan_sweep(runs_of(*words.split(), "epochs=2"))
    assert str(planned.folder.parent) == "multirun"
    for job, end in zip(planned.jobs, ends.split(), strict=True):
        assert job.name.endswith(end)
    assert all(len(job.name) <= 100 and "/" not in job.name for job in planned.jobs)
    typed = [word for job in planned.jobs for word in job.overrides]
    assert not any(word.startswith("nproc") or "\\" in word for word in typed)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("optim=sgd,adamw", "compare_by=optim.name"),
        ("nproc=1,2", "compare_by=nproc"),
        ("repeats=2", "nothing is compared; use channels_last=true,false"),
        ("seed=1,2 compare_by=precision", "compare_by=seed"),
        ("seed=1,2 channels_last=true,false", ""),
        ("augment=basic,strong compare_by=augment.flip", ""),
        (f"{BOTH} data.root=/x", ""),
    ],
)
def test_a_sweep_without_a_verdict_is_announced(words, expected, capsys):
    plan_sweep(runs_of(*words.split()))
    output = capsys.readouterr().out
    assert expected in output and bool(expected) == bool(output)


def test_a_sweep_of_an_older_version_is_read(folder):
    saved_plan(folder)
    path = folder / "sweep.json"
    document = json.loads(path.read_text())
    document["options"] |= {"time_limit_s": 7, "max_reruns": 2, "wait_for_quiet_s": None}
    path.write_text(json.dumps(document))
    assert read_sweep(folder).options.time_limit_s == 7


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (f"{BOTH} model=resnet50 resume_sweep={{sweep}}", "resume_sweep"),
        ("compare_by=precision resume_sweep={sweep}", "resume_sweep"),
        (f"{BOTH} hydra.sweep.dir={{sweep}}", "resume_sweep"),
        ("model=resnet18 hydra.sweep.dir={sweep}/..", "resnet18_contiguous exists already"),
        ("resume_sweep={sweep}/..", "sweep.json"),
        (f"{BOTH} max_repeats=4", "max_repeats needs repeats=auto"),
        ("resume_sweep={sweep} repeats=1", "has 1 already"),
        ("environment=here,/no/python compare_by=environment", "name one Python"),
        ("channels_last=false,false", "listed twice .channels_last=false"),
        (f"{BOTH} launcher.gpus=all hydra.sweep.dir={{sweep}}/new", "launcher.gpus"),
        (f"{BOTH} hydra.sweep.dir={{sweep}}/new", "nproc=N"),  # under torchrun
    ],
)
def test_what_is_refused(words, named, folder, monkeypatch):
    saved_plan(folder)
    (folder.parent / "resnet18_contiguous").mkdir()
    monkeypatch.setattr(sweep_module, "visible_gpus", list)
    torchrun = "RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29500"
    for word in torchrun.split() if named == "nproc=N" else ():
        monkeypatch.setenv(*word.split("="))
    with pytest.raises(ConfigError, match=named):
        run_sweep(runs_of(*words.format(sweep=folder).split()))
    assert not (folder / "new").exists()


@pytest.mark.parametrize("words", ["device='cpu' data='synthetic'", "config=old"])
def test_a_job_knows_what_its_settings_say_however_they_are_typed(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").mkdir()
    (tmp_path / "old/config.yaml").write_text("data: synthetic\ndevice: cpu\n")
    planned = plan_sweep(runs_of(BOTH, *words.split(), "loss=my:loss"))
    planned.folder.mkdir(parents=True)
    planned.save()
    for jobs in (planned.jobs, read_sweep(planned.folder).jobs):
        assert {(job.on_cpu, job.has_loader) for job in jobs} == {(True, False)}
    assert planned.resume_command().endswith(" loss=my:loss")


def job(nproc=1, **facts):
    return Job(0, "a", ["model=resnet18"], nproc, **facts)


@pytest.mark.parametrize(
    ("asked", "visible", "cores", "settings", "expected"),
    [
        ("all", "0,1,2,3", 16, job(), [(gpu, 4) for gpu in "0123"]),
        ("all", "0,1,2", 16, job(nproc=2), [("01", 16)]),
        ("all", "0,1", 2, job(has_loader=False), [("0", 1), ("1", 1)]),  # no loader
        ("all", "0,1,2,3", 7, job(), "cores"),  # one core per job: none for its loader
        ("all", "0", 16, job(nproc=2), "nproc"),
        ("all", "0,1", 16, job(on_cpu=True), "device=cpu"),
        ("0", "2,5", 16, job(), "2,5"),
    ],
)
def test_gpus_and_cores(asked, visible, cores, settings, expected, monkeypatch):
    monkeypatch.setattr(places_module, "usable_cores", lambda: list(range(cores)))
    plan = partial(plan_places, asked.split(","), visible.split(","))
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            plan([[settings]] * 4)
        return
    places = plan([[replace(settings, nproc=1), settings]] * 4)
    assert [("".join(place.gpus), len(place.cores)) for place in places] == expected
    used = [core for place in places for core in place.cores]
    assert len(set(used)) == len(used), "no core is shared"
    assert len(plan([[settings]])) == 1, "one place per group"
