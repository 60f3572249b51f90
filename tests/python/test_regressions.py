"""Mistakes that were made once."""

import argparse
import copy
import os
import threading

import numpy as np
import pytest
import torch
import zinf
from torch import nn
from twins import LR, assert_same_model, born, budget, build_net, net_loss, pair, same, step


@pytest.mark.raw_access
def test_an_array_outlives_the_gradient_it_was_taken_from(engine):
    model = born(engine)
    net_loss(model).backward()
    array = model[0].weight.grad.numpy()
    wanted = array.copy()
    model.zero_grad()
    for seed in range(3):  # other units come and go
        net_loss(model, seed).backward()
        model.zero_grad()
    engine.stats()
    assert np.array_equal(array, wanted)


@pytest.mark.raw_access
def test_an_array_outlives_its_model(engine):
    model = born(engine)
    array = model[0].weight.detach().numpy()
    wanted = array.copy()
    del model
    others = [born(engine, seed=seed) for seed in range(3)]
    for other in others:
        net_loss(other)
    assert np.array_equal(array, wanted)


def test_reading_through_const_pointers_while_another_thread_computes(engine):
    plain, managed = pair(engine)
    wanted = plain[0].bias.tolist()
    stop = threading.Event()
    errors = []

    def compute():
        try:
            while not stop.is_set():
                net_loss(managed)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        for _ in range(50):
            assert managed[0].bias.tolist() == wanted
    finally:
        stop.set()
        thread.join()
    assert not errors


def test_twins_are_loaded_as_they_were_saved(place, tmp_path):
    def build_both(engine):
        models = [born(engine, seed=seed) for seed in (1, 2)]
        return models, [zinf.AdamW(model.parameters(), lr=LR) for model in models]

    with zinf.Engine(**place) as engine:
        models, optimizers = build_both(engine)
        for model, optimizer in zip(models, optimizers, strict=True):
            step(model, optimizer)
        engine.save(tmp_path / "both")
        wanted = [model[0].weight.clone() for model in models]
    with zinf.Engine(**place) as engine:
        models, optimizers = build_both(engine)
        engine.load(tmp_path / "both")
        for model, weight in zip(models, wanted, strict=True):
            assert same(model[0].weight, weight)


def test_a_model_that_was_once_a_part_is_saved_too(engine, tmp_path):
    with engine.init():
        model = nn.Sequential(build_net())[0]
    wanted = model[0].weight.clone()
    engine.save(tmp_path / "part")
    with torch.no_grad():
        model[0].weight.zero_()
    engine.load(tmp_path / "part")
    assert same(model[0].weight, wanted)


def test_a_released_part_stays_released(engine):
    _, model = pair(engine)
    optimizer = zinf.AdamW(model.parameters(), lr=LR)
    engine.release(model[0])
    step(model, optimizer)
    managed = engine.stats()["managed"]
    step(model, optimizer)
    assert engine.stats()["managed"] == managed
    assert type(model[0].weight.detach().new_tensor([1.0])) is torch.Tensor
    assert isinstance(model[0].weight.data, torch.FloatTensor), "no keys are left on it"


def test_what_could_not_be_loaded_is_not_saved(engine, tmp_path):
    _model = born(engine)
    with pytest.raises(ValueError, match="extra"):
        engine.save(tmp_path / "bad", extra=argparse.Namespace(lr=1))
    assert not (tmp_path / "bad").exists()


def test_a_refused_step_changes_nothing(engine):
    plain, managed = pair(engine)
    embedding = nn.Embedding(8, 4, sparse=True)
    optimizer = zinf.AdamW([*managed.parameters(), embedding.weight], lr=LR)
    net_loss(managed).backward()
    embedding(torch.tensor([1])).sum().backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="sparse"):
            optimizer.step()
    assert_same_model(managed, plain)
    assert not any(float(state["step"]) for state in optimizer.state.values() if "step" in state)


def test_a_budget_without_nvme_is_kept():
    with zinf.Engine(host_memory=budget(4 << 20)) as engine, engine.init():
        with pytest.raises(zinf.BudgetError, match=r"host_memory.*nvme="):
            [nn.Linear(1024, 1024) for _ in range(2)]


def test_a_load_that_fails_half_way_stops_training(engine, tmp_path):
    model = born(engine)
    optimizer = zinf.AdamW(model.parameters(), lr=LR)
    step(model, optimizer)
    engine.save(tmp_path / "one")
    engine.save(tmp_path / "good")
    volume = tmp_path / "one/volume.zinf"
    data = bytearray(volume.read_bytes())
    at = data.rfind(model[4].weight.detach().clone().numpy().tobytes()[:64])
    data[at] ^= 1
    volume.write_bytes(data)
    with pytest.raises(RuntimeError, match="checksum"):
        engine.load(tmp_path / "one")
    with pytest.raises(RuntimeError, match="was not finished"):
        step(model, optimizer)
    engine.load(tmp_path / "good")
    step(model, optimizer)


def test_an_optimizer_may_be_older_than_the_adoption(engine, tmp_path):
    torch.manual_seed(0)
    model = build_net()
    optimizer = zinf.AdamW(model.parameters(), lr=LR)
    engine.adopt(model)
    step(model, optimizer)
    engine.save(tmp_path / "one")
    step(model, optimizer)
    assert engine.load(tmp_path / "one")[0] == 1
    assert float(optimizer.state[model[0].weight]["step"]) == 1


def test_states_of_another_optimizer_get_their_master(engine):
    torch.manual_seed(0)
    model = engine.adopt(build_net().bfloat16())
    other = torch.optim.AdamW(model.parameters(), lr=LR)
    optimizer = zinf.AdamW(model.parameters(), lr=LR)

    def loss(model, seed):
        return model(torch.ones(2, 72).bfloat16()).float().sum()

    step(model, other, loss=loss)
    optimizer.load_state_dict(other.state_dict())
    step(model, optimizer, loss=loss)
    state = optimizer.state_dict()["state"][0]
    assert state["master"].dtype == state["exp_avg"].dtype == torch.float32
    assert torch.allclose(state["master"], model[0].weight.float(), rtol=2**-8)


def test_loaded_states_are_the_optimizer_s_own(engine):
    model = engine.adopt(build_net())
    optimizer = zinf.AdamW(model.parameters(), lr=LR)
    step(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    step(model, optimizer)
    assert all(float(state["step"]) == 1 for state in saved["state"].values())


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_states_that_do_not_fit_are_refused_whole(engine, key):
    model = engine.adopt(build_net())
    optimizer = zinf.AdamW(model.parameters(), lr=LR)
    step(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    wrong = copy.deepcopy(optimizer.state_dict())
    wrong["state"][2][key] = torch.zeros(3)
    with pytest.raises(ValueError, match=key):
        optimizer.load_state_dict(wrong)
    del wrong["state"][2][key]
    with pytest.raises(ValueError, match="another optimizer"):
        optimizer.load_state_dict(wrong)
    now = optimizer.state_dict()["state"]
    assert all(same(now[index][name], before[index][name]) for index in before for name in before[index])
    step(model, optimizer)


def test_a_failed_optimizer_is_not_saved(engine, tmp_path):
    model = engine.adopt(build_net())
    optimizer = zinf.AdamW(model.parameters(), lr=LR)
    step(model, optimizer)
    optimizer._failure = "the disk was full"
    with pytest.raises(RuntimeError, match="the disk was full"):
        engine.save(tmp_path / "one")


def test_unknown_types_are_refused_before_anything_changes(engine):
    torch.manual_seed(0)
    model = engine.adopt(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    optimizer = zinf.AdamW(model.parameters(), lr=LR)
    model[1].double()
    before = model[0].weight.detach().clone()
    model[1](model[0](torch.ones(1, 3)).double()).sum().backward()
    with pytest.raises(RuntimeError, match="float64"):
        optimizer.step()
    assert same(model[0].weight, before)
    model[1].float()
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_an_engine_is_not_closed_inside_init(engine):
    with engine.init():
        with pytest.raises(RuntimeError, match=r"close\(\) inside init\(\)"):
            engine.close()
        nn.Linear(3, 3)


def test_a_forked_child_is_told_what_it_cannot_do(engine):
    model = born(engine)

    def refused(action):
        try:
            action()
        except (RuntimeError, ValueError) as error:
            return "forked child" in str(error)
        return False

    child = os.fork()
    if child == 0:
        actions = [lambda: engine.release(model), lambda: engine.adopt(nn.Linear(3, 3)), zinf.Engine]
        os._exit(0 if all([refused(action) for action in actions]) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_lists_need_no_more_than_a_small_budget(nvme, max_grad_norm):
    with zinf.Engine(nvme=nvme, host_memory=budget(16 << 20)) as engine:
        model = born(engine, lambda: nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(24)]))
        optimizer = zinf.AdamW(model.parameters(), lr=LR, max_grad_norm=max_grad_norm)
        for _ in range(2):
            model(torch.ones(1, 512)).sum().backward()
            torch._foreach_mul_([parameter.grad for parameter in model.parameters()], 0.5)
            optimizer.step()
            optimizer.zero_grad()
        assert engine.stats()["host_used_bytes"] <= engine.stats()["host_limit_bytes"]


def test_an_option_that_is_no_number_changes_nothing(engine):
    model = born(engine)
    optimizer = zinf.AdamW(model.parameters(), lr=LR)
    net_loss(model).backward()
    optimizer.param_groups[0]["lr"] = "fast"
    with pytest.raises(ValueError, match="fast"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = LR
    optimizer.step()


@pytest.mark.parametrize("option", ["maximize", "amsgrad"])
def test_options_of_another_optimizer_are_refused(engine, option):
    model = born(engine)
    other = torch.optim.AdamW(model.parameters(), lr=LR, **{option: True})
    step(model, other)
    with pytest.raises(ValueError, match=option):
        zinf.AdamW(model.parameters(), lr=LR).load_state_dict(other.state_dict())
    momentum = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    with pytest.raises(ValueError, match="betas"):
        zinf.AdamW(model.parameters(), lr=LR).load_state_dict(momentum.state_dict())
