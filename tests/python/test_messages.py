"""What users are told: by errors, by stats(), by a repr."""

import math
import pickle
import re
from pathlib import Path

import pytest
import torch
import zinf
from torch import nn
from twins import LR, assert_same_model, born, budget, plain_adamw, step

MIB = 1 << 20


def build_wide():
    return nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)])


def refusal(do):
    with pytest.raises(zinf.BudgetError) as error:
        do()
    return str(error.value)


def held(text):
    """MiB by what holds it, the largest first, as the error says it."""
    return {what: float(size) for size, what in re.findall(r"([0-9.]+) MiB of ([^,;]+)", text)}


def test_states_of_a_torch_optimizer_are_named_with_the_way_out(nvme):
    with zinf.Engine(host_memory=budget(24 * MIB), nvme=nvme) as engine:
        model = born(engine, build_wide)
        optimizer = torch.optim.Adam(model.parameters(), lr=LR)
        model(torch.ones(2, 1024)).sum().backward()
        text = refusal(optimizer.step)
    assert held(text)["states of torch.optim.adam.Adam"] >= 8
    assert "use zinf.AdamW: the states of torch.optim.adam.Adam cannot leave memory" in text
    assert "parameters that no engine manages" not in text
    assert "give nvme=:" not in text


def test_weights_from_outside_init_are_named_with_the_way_out(nvme):
    with zinf.Engine(host_memory=budget(12 * MIB), nvme=nvme):
        text = refusal(build_wide)
    assert held(text)["parameters that no engine manages (Linear.weight)"] >= 8
    assert "build the model inside `with engine.init():`, or give it to engine.adopt()" in text


def test_a_missing_nvme_is_named(nvme):
    with zinf.Engine(host_memory=budget(12 * MIB)) as engine:
        text = refusal(lambda: born(engine, build_wide))
    assert "give nvme=: without it weights, gradients and states cannot leave memory" in text


def test_activations_are_named_with_the_way_out(nvme):
    with zinf.Engine(host_memory=budget(24 * MIB), nvme=nvme) as engine:
        model = born(engine, build_wide)
        text = refusal(lambda: model(torch.ones(2048, 1024)))
    assert next(iter(held(text))) == "activations and other tensors"
    assert "make the batch smaller, or use gradient checkpointing" in text
    assert "zinf.AdamW" not in text
    assert "engine.init()" not in text


def test_what_the_memory_held_is_said_once(nvme):
    with zinf.Engine(host_memory=budget(4 * MIB), nvme=nvme):
        with pytest.raises(zinf.BudgetError) as error:
            torch.ones(8 * MIB)
        copy = pickle.loads(pickle.dumps(error.value))
        assert str(copy) == str(error.value)
        assert str(copy).count("The memory holds") == 1
        assert str(zinf.BudgetError("no room")) == "no room"


def test_more_host_memory_than_the_machine_has_is_refused():
    total = int(re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text()).group(1)) * 1024
    whose = "(the machine|the control group of this process) has"
    with pytest.raises(
        ValueError, match=f"host_memory is .*, but {whose} .*: give less, or nothing for 80 %"
    ):
        zinf.Engine(host_memory=total + 1)
    with pytest.raises(ValueError, match=f'host_memory is "100TB", but {whose}'):
        zinf.Engine(host_memory="100TB")


def test_float64_is_refused_when_the_optimizer_is_made(engine):
    model = engine.adopt(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double()))
    with pytest.raises(
        ValueError, match=r"takes float32, bfloat16 and float16, not torch.float64: model.float"
    ):
        zinf.AdamW(model.parameters(), lr=LR)
    optimizer = zinf.AdamW(model[0].parameters(), lr=LR)
    with pytest.raises(ValueError, match="float64"):
        optimizer.add_param_group({"params": model[1].parameters()})
    assert len(optimizer.param_groups) == 1
    model[1].requires_grad_(False)  # it is not trained
    optimizer.add_param_group({"params": model[1].parameters()})


def test_statistics_are_numbers(engine):
    model = born(engine)
    step(model, zinf.AdamW(model.parameters(), lr=LR))
    stats = engine.stats()
    assert all(type(value) in (int, float) and math.isfinite(value) for value in stats.values()), stats
    waits = engine.step_waits()
    assert len(waits) <= 5
    assert all(isinstance(name, str) and seconds >= 0 for name, seconds in waits)


@pytest.mark.parametrize("fused", [True, None])
def test_a_state_dict_leaves_torchs_fused_as_it_is(engine, fused):
    model = born(engine)
    optimizer = zinf.AdamW(model.parameters(), lr=LR)
    if fused is None:  # from an optimizer of torch's that was not fused
        plain = born(engine)
        other = torch.optim.AdamW(plain.parameters(), lr=LR)
        step(plain, other)
        optimizer.load_state_dict(other.state_dict())
    step(model, optimizer)
    torchs = torch.optim.AdamW(model.parameters(), lr=LR, fused=fused)
    torchs.load_state_dict(optimizer.state_dict())
    assert torchs.param_groups[0]["fused"] is fused


def test_torchs_fused_optimizer_goes_on_with_the_same_bits(engine):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(72, 72), nn.LayerNorm(72))
    managed = born(engine, lambda: nn.Sequential(nn.Linear(72, 72), nn.LayerNorm(72)))
    managed.load_state_dict(plain.state_dict())
    optimizers = [plain_adamw(plain), zinf.AdamW(managed.parameters(), lr=LR)]
    for seed in range(2):
        step(plain, optimizers[0], seed)
        step(managed, optimizers[1], seed)
    onwards = plain_adamw(managed)
    onwards.load_state_dict(optimizers[1].state_dict())
    for seed in range(2, 4):
        step(plain, optimizers[0], seed)
        step(managed, onwards, seed)
    assert_same_model(managed, plain)


def test_an_engine_says_what_it_is(nvme):
    engine = zinf.Engine(host_memory="512MiB", nvme=nvme)
    _model = born(engine, build_wide)
    assert (
        repr(engine) == f"zinf.Engine(host_memory=512.0 MiB, nvme=['{nvme}'], 4 units, 16.0 MiB of weights)"
    )
    engine.close()
    assert repr(engine) == "zinf.Engine(closed)"


def test_peaks_are_of_this_engine_alone():
    with zinf.Engine() as first:
        torch.ones(16 * MIB)
        peak = first.stats()["host_peak_bytes"]
        assert peak >= 64 * MIB
        zinf._C.trim_host_memory()  # freed memory is held, and counted, until then
        with zinf.Engine() as second:
            begin = second.stats()["host_peak_bytes"]
            assert begin < peak
            assert second.stats()["host_peak_activation_bytes"] <= begin
            torch.ones(4 * MIB)
            assert begin + 8 * MIB < second.stats()["host_peak_bytes"] < peak
            assert first.stats()["host_peak_bytes"] == peak
        torch.ones(32 * MIB)
        assert first.stats()["host_peak_bytes"] > peak
