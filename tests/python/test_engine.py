"""The engine's own calls: save and load, statistics, and what wrong arguments say."""

import argparse
import copy
import os
import tempfile
import threading

import numpy as np
import pytest
import torch
import zinf
from models import CASES
from torch import nn
from twins import (
    LR,
    assert_same_grads,
    assert_same_model,
    assert_same_training,
    born,
    build_net,
    net_loss,
    optimizers,
    pair,
    same,
    step,
)

if not hasattr(zinf, "Engine"):
    pytest.skip("this build of zinf has no Engine", allow_module_level=True)

EXTRA = {"epoch": 3, "name": "run", "scheduler": {"last_epoch": 7}, "best": 0.25}


def build_noisy():
    """Dropout shows the random state, BatchNorm the buffers."""
    return nn.Sequential(build_net(dropout=0.3), nn.BatchNorm1d(72), nn.Linear(72, 72))


def train(model, optimizer, steps):
    losses = []
    for seed in steps:
        optimizer.param_groups[0]["lr"] = LR / (seed + 1)
        losses.append(step(model, optimizer, seed).item())
    return losses


def test_load_resumes_exactly(engine, tmp_path):
    """In the same engine: back to the saved step."""
    managed = born(engine, build_noisy)
    optimizer = zinf.AdamW(managed.parameters(), lr=LR)
    torch.manual_seed(7)
    train(managed, optimizer, range(3))
    engine.save(tmp_path / "step-3", extra=EXTRA)
    expected = train(managed, optimizer, range(3, 6))
    left = copy.deepcopy(managed.state_dict())
    random = torch.rand(5)
    optimizer.param_groups[0].update(lr=99.0, betas=(0.1, 0.2), weight_decay=5.0)
    torch.manual_seed(8)

    assert engine.load(tmp_path / "step-3") == (3, EXTRA)
    assert optimizer.param_groups[0]["lr"] == LR / 3
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert train(managed, optimizer, range(3, 6)) == expected
    assert all(same(managed.state_dict()[name], value) for name, value in left.items())
    assert torch.equal(torch.rand(5), random)


@pytest.mark.parametrize("other", ["host", "evict"])
def test_load_into_a_new_engine(place, other, tmp_path, tmp_path_factory):
    """Another process would do this; the placement may change."""
    with zinf.Engine(**place) as engine:
        managed = born(engine, build_noisy)
        optimizer = zinf.AdamW(managed.parameters(), lr=LR)
        torch.manual_seed(7)
        train(managed, optimizer, range(3))
        engine.save(str(tmp_path / "step-3"), extra=EXTRA)
        expected = train(managed, optimizer, range(3, 6))

    forced = {"weights": "host", "states": "host"}
    if other == "evict":
        forced = {"weights": "nvme", "states": "nvme", "evict": "always"}
    with zinf.Engine(nvme=str(tmp_path_factory.mktemp("other")), **forced) as engine:
        resumed = born(engine, build_noisy, seed=5)
        optimizer = zinf.AdamW(resumed.parameters(), lr=99.0)
        assert engine.load(str(tmp_path / "step-3")) == (3, EXTRA)
        assert train(resumed, optimizer, range(3, 6)) == expected
        assert_same_model(resumed, managed)


def test_save_and_load_without_nvme(tmp_path):
    with zinf.Engine() as engine:
        managed = born(engine, build_noisy)
        optimizer = zinf.AdamW(managed.parameters(), lr=LR)
        train(managed, optimizer, range(3))
        engine.save(tmp_path / "step-3")
        expected = train(managed, optimizer, range(3, 6))
        assert engine.load(tmp_path / "step-3") == (3, None)
        assert train(managed, optimizer, range(3, 6)) == expected


def test_save_and_load_of_narrow_weights(engine, tmp_path):
    """The master has bits that the weights do not show."""

    def run(steps):
        for seed in steps:
            batch = CASES["llama-bf16"].batch(torch.Generator().manual_seed(seed), 0)
            CASES["llama-bf16"].loss(managed, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in managed.state_dict().items()}

    managed = born(engine, CASES["llama-bf16"].build)
    optimizer = zinf.AdamW(managed.parameters(), lr=1e-5)
    run(range(3))
    engine.save(tmp_path / "step-3")
    expected = run(range(3, 8))
    engine.load(tmp_path / "step-3")
    assert all(same(run_value, expected[name]) for name, run_value in run(range(3, 8)).items())


def test_saving_does_not_disturb_training(engine, tmp_path):
    plain, managed = pair(engine)
    theirs, mine = optimizers(plain, managed)
    for seed in range(4):
        net_loss(plain, seed).backward()
        net_loss(managed, seed).backward()
        theirs.step()
        mine.step()
        engine.save(tmp_path / f"step-{seed}")  # the gradients are still there
        for ours, parameter in zip(managed.parameters(), plain.parameters(), strict=True):
            assert same(ours.grad, parameter.grad)
        theirs.zero_grad()
        mine.zero_grad()
    assert_same_model(managed, plain)
    assert engine.load(tmp_path / "step-1")[0] == 2


def test_load_of_nothing(engine, tmp_path):
    plain, managed = pair(engine)
    with pytest.raises(FileNotFoundError, match="missing does not exist: name a directory.*save"):
        engine.load(tmp_path / "missing")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "data").write_bytes(b"no checkpoint" * 1000)
    for path in (tmp_path / "run", tmp_path / "run" / "data"):
        with pytest.raises(ValueError, match=f"{path} is no checkpoint.*volume.zinf.*save"):
            engine.load(path)
    engine.save(tmp_path / "run" / "step-1")
    with pytest.raises(ValueError, match="run is no checkpoint.*name one of those in it.*step-1"):
        engine.load(tmp_path / "run")
    (tmp_path / "run" / "step-1" / "volume.zinf").write_bytes(b"no checkpoint" * 1000)
    with pytest.raises(RuntimeError, match="step-1 is no whole checkpoint"):
        engine.load(tmp_path / "run" / "step-1")
    assert_same_model(managed, plain)


def test_load_of_the_weights_alone(engine, tmp_path):
    managed = born(engine, build_noisy)
    optimizer = zinf.AdamW(managed.parameters(), lr=LR)
    train(managed, optimizer, range(2))
    engine.save(tmp_path / "step-2", extra=EXTRA)
    saved = copy.deepcopy(managed.state_dict())
    train(managed, optimizer, range(2, 4))
    states = copy.deepcopy(optimizer.state_dict())
    random = torch.get_rng_state()

    assert engine.load(tmp_path / "step-2", only="weights") == (2, EXTRA)
    assert all(same(managed.state_dict()[name], value) for name, value in saved.items())
    assert torch.equal(torch.get_rng_state(), random)
    now = optimizer.state_dict()
    assert now["param_groups"] == states["param_groups"]
    for index, state in states["state"].items():
        assert all(same(now["state"][index][name], value) for name, value in state.items())
    train(managed, optimizer, range(1))


@pytest.mark.parametrize("optimizer", [None, "other groups", "torch"])
def test_weights_are_loaded_whatever_the_optimizer(place, optimizer, tmp_path, tmp_path_factory):
    with zinf.Engine(**place) as engine:
        managed = born(engine, build_noisy)
        train(managed, zinf.AdamW(managed.parameters(), lr=LR), range(2))
        engine.save(tmp_path / "step-2")
        saved = copy.deepcopy(managed.state_dict())
    with zinf.Engine(**{**place, "nvme": tmp_path_factory.mktemp("other")}) as engine:
        other = born(engine, build_noisy, seed=5)
        if optimizer == "other groups":
            kept = zinf.AdamW([{"params": [p]} for p in other.parameters()], lr=LR)
        elif optimizer == "torch":
            kept = torch.optim.SGD(other.parameters(), lr=LR)
        else:
            kept = None
        engine.load(tmp_path / "step-2", only="weights")
        assert all(same(other.state_dict()[name], value) for name, value in saved.items())
        if kept is not None:
            train(other, kept, range(1))


def test_load_of_something_unknown_alone(engine, tmp_path):
    _model = born(engine)
    engine.save(tmp_path / "one")
    with pytest.raises(ValueError, match="only is 'states', must be"):
        engine.load(tmp_path / "one", only="states")


def test_extra_keeps_numbers_of_numpy(engine, tmp_path):
    _model = born(engine)
    extra = {
        "loss": np.float32(0.1),
        "count": np.int64(7),
        "done": np.bool_(True),
        "curve": np.arange(6, dtype=np.int16).reshape(2, 3).T,
        "none": np.empty(0, dtype=np.float64),
        "raw": b"",
    }
    engine.save(tmp_path / "one", extra=extra)
    loaded = engine.load(tmp_path / "one")[1]
    assert loaded.keys() == extra.keys()
    for name, value in extra.items():
        assert type(loaded[name]) is type(value)
        assert np.array_equal(loaded[name], value)


UNSTORABLE = [
    (lambda: 0, r"extra is of type function"),
    ({"log": [1, lambda: 0]}, r"extra\['log'\]\[1\] is of type function"),
    ({"a": {"b": ({}, threading.Lock())}}, r"extra\['a'\]\['b'\]\[1\] is of type lock"),
    ({"fine": 1, "names": np.array(["a"])}, r"extra\['names'\] is of type ndarray"),
    ({"fine": 1, argparse.ArgumentParser: 2}, r"the key .* of extra is of type type"),
]


@pytest.mark.parametrize(("extra", "text"), UNSTORABLE, ids=[text for _, text in UNSTORABLE])
def test_the_part_of_extra_that_cannot_be_stored_is_told(engine, tmp_path, extra, text):
    _model = born(engine)
    with pytest.raises(ValueError, match=f"save: {text}.*may hold tensors, numbers"):
        engine.save(tmp_path / "bad", extra=extra)
    assert not (tmp_path / "bad").exists()


def test_a_parameter_group_that_cannot_be_stored_is_told(engine, tmp_path):
    model = born(engine)
    optimizer = zinf.AdamW(model.parameters(), lr=LR)
    optimizer.param_groups[0]["schedule"] = lambda step: LR
    with pytest.raises(ValueError, match=r"parameter groups\[0\]\[0\]\['schedule'\] is of type function"):
        engine.save(tmp_path / "bad")


def test_load_into_another_model(place, tmp_path, tmp_path_factory):
    with zinf.Engine(**place) as engine:
        managed = born(engine)
        engine.save(tmp_path / "net")
    other_place = {**place, "nvme": str(tmp_path_factory.mktemp("other"))}
    with zinf.Engine(**other_place) as engine:
        plain, managed = pair(engine, lambda: nn.Sequential(nn.Linear(72, 300), nn.Linear(300, 72)))
        with pytest.raises((RuntimeError, ValueError), match="301|shape|weight"):
            engine.load(tmp_path / "net")
        assert_same_model(managed, plain)


def test_save_where_it_cannot(engine, tmp_path):
    plain, managed = pair(engine)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises((OSError, RuntimeError), match="file"):
        engine.save(tmp_path / "file" / "step-1")
    assert_same_model(managed, plain)


def test_statistics(engine, place):
    managed = born(engine)
    stats = engine.stats()
    assert stats["managed"] == len(list(managed.parameters()))
    assert stats["weights_bytes"] == sum(parameter.nbytes for parameter in managed.parameters())
    calls = stats["intercepted"]
    managed[0].weight.sum()
    assert engine.stats()["intercepted"] > calls
    calls = engine.stats()["intercepted"]
    torch.ones(30).sum()
    assert engine.stats()["intercepted"] == calls, "operators without managed arguments are left alone"
    if place["weights"] == "host":
        assert engine.stats()["resident_bytes"] == stats["weights_bytes"]
        assert engine.stats()["reads"] == 0
    else:
        assert engine.stats()["resident_bytes"] < stats["weights_bytes"]
        assert engine.stats()["bytes_read"] >= managed[0].weight.nbytes


WRONG_ENGINES = [
    ({"weights": "disk"}, "weights.*disk"),
    ({"states": "ram"}, "states.*ram"),
    ({"evict": "sometimes"}, "evict.*sometimes"),
    ({"weights": "nvme"}, "nvme"),
    ({"states": "nvme"}, "nvme"),
    ({"host_memory": "four apples"}, "host_memory.*four apples"),
    ({"host_memory": -1}, "host_memory.*more than nothing"),
    ({"host_memory": -1e9}, "host_memory.*more than nothing"),
    ({"host_memory": 0.5}, "host_memory.*whole number"),
    ({"host_memory": float("nan")}, "host_memory is nan.*whole number"),
    ({"host_memory": float("inf")}, "host_memory is inf.*whole number"),
    ({"host_memory": 1e30}, "host_memory.*more than any memory"),
    ({"host_memory": True}, "host_memory is True"),
    ({"device_memory": "lots"}, "device_memory.*lots"),
    ({"nvme": 5}, "nvme is 5, must be a path"),
    ({"nvme": [5]}, "must be a path"),
]


@pytest.mark.parametrize(("options", "text"), WRONG_ENGINES, ids=lambda value: str(value))
def test_wrong_arguments_of_the_engine(options, text):
    with pytest.raises((ValueError, TypeError), match=text):
        zinf.Engine(**options)


@pytest.mark.parametrize("size", [65536, 65536.0, np.int64(65536), np.float32(65536), "64KiB"], ids=repr)
def test_a_budget_may_be_any_whole_number(size):
    with zinf.Engine(host_memory=size) as engine:
        assert engine.stats()["host_limit_bytes"] == 65536


def test_nvme_path_that_is_no_directory(tmp_path):
    (tmp_path / "file").write_text("")
    for name, problem in (("absent", "does not exist"), ("file", "is not a directory")):
        with pytest.raises(ValueError, match=f"nvme path.*{name}.*{problem}.*name a directory"):
            zinf.Engine(nvme=tmp_path / name)
        with pytest.raises(ValueError, match=name):
            zinf.Engine(nvme=[tmp_path, tmp_path / name / "below"], weights="nvme")


def test_nvme_path_that_is_given_twice(tmp_path):
    with pytest.raises(ValueError, match="nvme path .* is given twice"):
        zinf.Engine(nvme=[tmp_path, f"{tmp_path}/."])


def test_nvme_path_that_takes_no_files():
    with pytest.raises(ValueError, match='nvme path "/proc" takes no files.*name a directory'):
        zinf.Engine(nvme="/proc")


def test_nvme_path_without_leave_to_write():
    directory = tempfile.mkdtemp()  # everybody may look into its parent
    os.chmod(directory, 0o555)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)  # root may write anywhere
        with pytest.raises(ValueError, match=rf"{directory}\" takes no files \(Permission denied\)"):
            zinf.Engine(nvme=directory)
    finally:
        os.seteuid(user)
        os.rmdir(directory)


def test_trying_the_nvme_path_leaves_nothing(tmp_path):
    with zinf.Engine(nvme=tmp_path):
        assert os.listdir(tmp_path) == []


def test_unknown_arguments_of_the_engine():
    with pytest.raises(TypeError, match="wieghts"):
        zinf.Engine(wieghts="host")


WRONG_OPTIMIZERS = [
    ({"lr": -1.0}, "lr|learning rate"),
    ({"betas": (1.0, 0.9)}, "beta"),
    ({"betas": (0.9, -0.1)}, "beta"),
    ({"eps": -1e-8}, "eps"),
    ({"weight_decay": -0.1}, "weight_decay"),
    ({"max_grad_norm": -1.0}, "max_grad_norm"),
    ({"update": "later"}, "update.*later"),
]


@pytest.mark.parametrize(("options", "text"), WRONG_OPTIMIZERS, ids=lambda value: str(value))
def test_wrong_arguments_of_adamw(options, text):
    with pytest.raises((ValueError, TypeError), match=f"(?i){text}"):
        zinf.AdamW(build_net().parameters(), **options)


def test_adamw_without_parameters():
    with pytest.raises(ValueError, match="empty parameter list"):
        zinf.AdamW([])


def test_adopt_something_else(engine):
    with pytest.raises(TypeError, match="Module"):
        engine.adopt([torch.ones(3)])


def test_adopting_twice_is_harmless(engine):
    plain, managed = pair(engine)
    engine.adopt(managed)
    assert engine.stats()["managed"] == len(list(managed.parameters()))
    assert_same_model(managed, plain)


def test_adopting_from_another_engine_moves_the_model(engine, place, tmp_path_factory):
    plain, managed = pair(engine)
    assert_same_training(managed, plain)
    net_loss(plain).backward()
    net_loss(managed).backward()
    with zinf.Engine(**{**place, "nvme": str(tmp_path_factory.mktemp("other"))}) as other:
        other.adopt(managed)
        assert other.stats()["weights_bytes"] == sum(p.nbytes for p in managed.parameters())
        assert engine.stats()["weights_bytes"] == 0
        assert_same_grads(managed, plain)
        managed.zero_grad()
        plain.zero_grad()
        assert_same_training(managed, plain)
    assert_same_model(managed, plain)


def test_release_of_a_plain_model(engine):
    with pytest.raises((RuntimeError, ValueError), match="(?i)not managed|does not manage|adopt"):
        engine.release(build_net())
