"""Models on the emulated device: its memory is not the host's, and the bits are the CPU's."""

import dataclasses
import subprocess
import sys
import zlib

import pytest
import torch
import zinf
from conftest import process_io
from models import CASES
from torch import nn
from training import (
    LR,
    WEIGHT_DECAY,
    assert_same,
    build,
    model_digests,
    optimizer_digests,
    outcome,
    plain_outcome,
    train,
)
from zinf import emulated

emulated.enable(memory_bytes=256 << 20)  # here: before any test has run a backward pass

PLACEMENTS = {
    "auto": {},
    "host": {"weights": "host", "states": "host"},
    "nvme": {"weights": "nvme", "states": "nvme"},
    "evict": {"weights": "nvme", "states": "nvme", "evict": "always"},
    "states on the device": {"device_memory": 64 << 20},
}
MODELS = ["mlp", "resnet", "tied", "gpt2", "llama-bf16"]
STEPS = 6


@pytest.fixture(autouse=True)
def delays(request):
    """Everything on the device starts late, each test's in its own way."""
    emulated.set_pace(max_delay=5e-5, seed=zlib.crc32(request.node.name.encode()))
    yield
    emulated.set_pace()


def to_device(batch):
    if isinstance(batch, torch.Tensor):
        return batch.to("emu")
    return tuple(to_device(part) for part in batch)


def on_device(case):
    return dataclasses.replace(case, batch=lambda *arguments: to_device(case.batch(*arguments)))


def run(engine, case, entry, **options):
    """Trains on the device; the outcome, and the statistics at its end."""
    if entry == "init":
        with engine.init():
            model = build(case).to("emu")
        engine.adopt(model)
    else:
        model = engine.adopt(build(case).to("emu"))
    arguments = {"lr": LR, "weight_decay": WEIGHT_DECAY, "max_grad_norm": case.max_grad_norm, **options}
    optimizer = zinf.AdamW(model.parameters(), **arguments)
    losses = train(on_device(case), model, optimizer, case.clip_norm, STEPS)
    stats = engine.stats()
    return outcome(losses, model, optimizer), stats


def cases():
    """Every model in the harshest placement and in one other; the rest with --all."""
    others = [placement for placement in PLACEMENTS if placement != "evict"]
    for index, name in enumerate(MODELS):
        for placement in PLACEMENTS:
            quick = placement in ("evict", others[index % len(others)])
            marks = [] if quick else [pytest.mark.full]
            yield pytest.param(name, placement, marks=marks, id=f"{name}-{placement}")


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize(("name", "placement"), list(cases()))
def test_same_bits_as_on_the_cpu(name, placement, update, nvme):
    entry = "init" if MODELS.index(name) % 2 else "adopt"
    before = process_io()[1]
    with zinf.Engine(nvme=nvme, audit=placement == "evict", **PLACEMENTS[placement]) as engine:
        ours, stats = run(engine, CASES[name], entry, update=update)
    assert_same(ours, plain_outcome(name, STEPS))
    assert stats["audit_violations"] == 0
    if placement in ("nvme", "evict"):
        assert process_io()[1] - before >= stats["weights_bytes"] * (STEPS - 1)
    if placement == "evict":
        assert stats["device_resident_bytes"] == 0


def test_release_and_save_on_a_device(nvme, tmp_path):
    case = CASES["mlp"]
    with zinf.Engine(nvme=nvme, weights="nvme", states="nvme") as engine:
        model = engine.adopt(build(case).to("emu"))
        optimizer = zinf.AdamW(model.parameters(), lr=LR)
        train(on_device(case), model, optimizer, steps=3)
        wanted = model_digests(model) | optimizer_digests(optimizer)
        engine.save(tmp_path / "three")
        train(on_device(case), model, optimizer, steps=2)
        assert engine.load(tmp_path / "three") == (3, None)
        assert model_digests(model) | optimizer_digests(optimizer) == wanted
        engine.release(model)
        assert engine.stats()["managed"] == 0
        assert model_digests(model) | optimizer_digests(optimizer) == wanted


def test_a_release_that_does_not_fit_is_refused(nvme):
    case = CASES["gpt2"]
    weights = weight_bytes(case)
    with zinf.Engine(nvme=nvme, device_memory=weights // 2) as engine:
        model = engine.adopt(build(case).to("emu"))
        wanted = model_digests(model)
        with pytest.raises(RuntimeError, match="device_memory"):
            engine.release(model)
        assert model_digests(model) == wanted, "the rest is managed as before"


@pytest.mark.parametrize(
    "share", [1.0, 0.5, 0.12, *[pytest.param(s, marks=pytest.mark.full) for s in (0.75, 0.35, 0.2)]]
)
def test_a_device_budget_is_kept(share, nvme):
    case = CASES["gpt2"]
    weights = weight_bytes(case)
    with zinf.Engine(nvme=nvme, device_memory=int(weights * share)) as engine:
        ours, stats = run(engine, case, "adopt")
    assert_same(ours, plain_outcome("gpt2", STEPS))
    assert 0 < stats["device_peak_resident_bytes"] <= weights * share


@pytest.mark.parametrize(("update", "under_way"), [("backward", 1), ("step", 2)])
@pytest.mark.parametrize("weights", [12, 8, 4])
def test_a_device_budget_is_kept_by_the_allocators_count(weights, update, under_way, nvme):
    """Torch has beside the units: activations, and the gradients that backward is just making."""
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(12)]).to("emu")
    each = 256 * 256 * 4
    data = torch.randn(4, 256).to("emu")
    activations = 24 * data.numel() * 4
    with zinf.Engine(nvme=nvme, states="host", device_memory=weights * each) as engine:
        engine.adopt(model)
        optimizer = zinf.AdamW(model.parameters(), lr=LR, update=update)
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        for _ in range(4):
            model(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        peak = torch.accelerator.max_memory_allocated()
        assert weights * each / 2 < peak <= (weights + under_way) * each + activations


def test_an_evaluation_finds_weights_of_the_last_one(nvme):
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(12)]).to("emu")
    each = 256 * 256 * 4
    data = torch.randn(4, 256).to("emu")
    expected = model(data).cpu()
    copied = []
    with zinf.Engine(nvme=nvme, device_memory=8 * each) as engine, torch.no_grad():
        engine.adopt(model)
        for _ in range(6):
            before = engine.stats()["device_bytes_in"]
            assert torch.equal(model(data).cpu(), expected)
            copied.append((engine.stats()["device_bytes_in"] - before) / each)
    # Of eight, one is in use and two may still be: five are found.
    assert copied[-1] <= 12 - (8 - 3)


def weight_bytes(case):
    return sum(p.numel() * p.element_size() for p in build(case).parameters())


@pytest.mark.parametrize("update", ["step", "backward"])
def test_states_live_on_the_device_as_far_as_they_fit(update, nvme):
    case = CASES["gpt2"]
    weights = weight_bytes(case)
    budget = 3 * weights  # weights, their gradients, and half of the moments
    with zinf.Engine(nvme=nvme, device_memory=budget) as engine:
        model = engine.adopt(build(case).to("emu"))
        optimizer = zinf.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, update=update)
        losses = train(on_device(case), model, optimizer, steps=STEPS)
        places = {state["exp_avg"].device.type for state in optimizer.state.values()}
        assert places == {"emu", "cpu"}
        assert engine.stats()["device_peak_resident_bytes"] <= budget
        assert_same(outcome(losses, model, optimizer), plain_outcome("gpt2", STEPS))


def moments(dtype, device, states, edit):
    """Of odd numbers of elements, whose gradients are all that a float can be."""
    numbers = torch.tensor([0.0, -0.0, 1e-45, -3e-41, 1e-20, 3e38, -3e38, float("inf"), float("nan"), 0.1])
    with zinf.Engine(device_memory="1MB" if states == "emu" else None) as engine:
        torch.manual_seed(1)
        model = nn.ParameterList([torch.randn(n).to(dtype) for n in (1, 7, 8, 1003, 4096 + 5)])
        model = engine.adopt(model.to(device))
        optimizer = zinf.AdamW(model.parameters(), lr=0.1, betas=(0.4, 0.98))
        for step in range(4):
            for parameter in model:
                scale = torch.rand(parameter.numel()).mul(20).sub(10).exp()
                grad = torch.randn(parameter.numel()) * scale
                if step == 2:
                    grad[:10] = numbers[: grad.numel()]
                parameter.grad = grad.to(dtype).to(device)
            optimizer.step()
            if edit and step == 1:
                with torch.no_grad():
                    model[3][::5] = 0.3
        assert all(state["exp_avg"].device.type == states for state in optimizer.state.values())
        return model_digests(model) | optimizer_digests(optimizer)


@pytest.mark.parametrize("edit", [False, True], ids=["", "edited"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_updates_of_a_device_have_the_bits_of_the_cpus(dtype, edit):
    expected = moments(dtype, "cpu", "cpu", edit)
    assert moments(dtype, "emu", "emu", edit) == expected
    assert moments(dtype, "emu", "cpu", edit) == expected


@pytest.mark.parametrize("update", ["step", "backward"])
def test_states_on_a_device_are_saved_and_loaded(update, nvme, tmp_path):
    case = CASES["llama-bf16"]
    with zinf.Engine(nvme=nvme, device_memory="64MB") as engine:
        model = engine.adopt(build(case).to("emu"))
        optimizer = zinf.AdamW(model.parameters(), lr=LR, update=update)
        train(on_device(case), model, optimizer, steps=2)
        wanted = model_digests(model) | optimizer_digests(optimizer)
        engine.save(tmp_path / "two")
        copy = optimizer.state_dict()
        train(on_device(case), model, optimizer, steps=1)
        engine.load(tmp_path / "two")
        assert model_digests(model) | optimizer_digests(optimizer) == wanted
        optimizer.load_state_dict(copy)
        assert optimizer_digests(optimizer) == {k: v for k, v in wanted.items() if k.startswith("state")}
        assert all(state["exp_avg"].device.type == "emu" for state in optimizer.state.values())


@pytest.mark.parametrize("update", ["step", "backward"])
def test_a_step_does_not_wait_for_the_device(update, nvme):
    width = 64
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(8)])
    with zinf.Engine(nvme=nvme, states="host") as engine:
        engine.adopt(model.to("emu"))
        optimizer = zinf.AdamW(model.parameters(), lr=LR, update=update)
        x = torch.randn(4, width).to("emu")
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = model(x).sum()
        torch.accelerator.synchronize()
        emulated.set_pace(flops=2 * 4 * width * width / 0.05)
        loss.backward()
        optimizer.step()
        assert not torch.accelerator.current_stream().query(), "the host has queued all of it"
        emulated.set_pace()


def test_an_update_that_the_host_has_no_room_for_is_made_later():
    """Nothing is lost: whoever uses the weight is told, and it is there when there is room again."""
    elements = 1 << 20
    parameter = nn.Parameter(torch.ones(elements).to("emu"))
    model = nn.ParameterList([parameter])
    with zinf.Engine(host_memory="40MB") as engine:
        engine.adopt(model)
        optimizer = zinf.AdamW(model.parameters(), lr=0.5)
        grads = [torch.full((elements,), 2.0).to("emu") for _ in range(2)]
        parameter.grad = grads.pop()
        optimizer.step()  # makes the states
        parameter.sum().item()
        parameter.grad = None
        held = []
        with pytest.raises(zinf.BudgetError):
            while True:
                held.append(torch.empty(1 << 20, dtype=torch.uint8))
        parameter.grad = grads.pop()
        with pytest.raises((zinf.BudgetError, RuntimeError), match="host_memory"):
            optimizer.step()
            parameter.sum().item()
        del held
        plain = nn.Parameter(torch.ones(1))
        other = torch.optim.AdamW([plain], lr=0.5, fused=True)
        for _ in range(2):
            plain.grad = torch.full((1,), 2.0)
            other.step()
        assert parameter[0].item() == plain.item()


@pytest.mark.parametrize("end", ["close", "exit", "del"])
def test_an_end_with_updates_under_way(end):
    """Of an engine or of the process: nothing hangs and nothing crashes."""
    script = f"""
import gc, torch, zinf
from zinf import emulated
emulated.enable(memory_bytes=256 << 20)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)]).to("emu")
engine = zinf.Engine()
engine.adopt(model)
optimizer = zinf.AdamW(model.parameters(), lr=1e-3, update="backward")
x = torch.randn(4, 256).to("emu")
for _ in range(2):
    emulated.set_pace(max_delay=1e-3)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if {end!r} == "close":
    engine.close()
    print(model[0].weight.sum().item())
if {end!r} == "del":
    del model, optimizer, engine, x
    gc.collect()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
