"""Models on the emulated device: its memory is not the host's, and the bits are the CPU's."""

import dataclasses
import zlib

import pytest
import torch
import zinf
from conftest import process_io
from models import CASES
from training import (
    LR,
    STEPS,
    WEIGHT_DECAY,
    Outcome,
    assert_same,
    build,
    digest,
    optimizer_digests,
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
}
MODELS = ["mlp", "resnet", "tied", "gpt2", "llama-bf16"]


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


def host_digests(model):
    digests = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        digests[f"weight {name}"] = digest(name, parameter.detach().cpu())
    for name, buffer in model.named_buffers():
        digests[f"buffer {name}"] = digest(name, buffer.cpu())
    return digests


def run(engine, case, entry):
    """Trains on the device; the outcome, and the statistics at its end."""
    if entry == "init":
        with engine.init():
            model = build(case).to("emu")
        engine.adopt(model)
    else:
        model = engine.adopt(build(case).to("emu"))
    arguments = {"lr": LR, "weight_decay": WEIGHT_DECAY, "max_grad_norm": case.max_grad_norm}
    optimizer = zinf.AdamW(model.parameters(), **arguments)
    losses = train(on_device(case), model, optimizer, case.clip_norm)
    stats = engine.stats()
    digests = tuple(digest("loss", loss.cpu()) for loss in losses)
    return Outcome(digests, host_digests(model) | optimizer_digests(optimizer)), stats


def cases():
    """Every model in the harshest placement and in one other; the rest with --all."""
    others = [placement for placement in PLACEMENTS if placement != "evict"]
    for index, name in enumerate(MODELS):
        for placement in PLACEMENTS:
            quick = placement in ("evict", others[index % len(others)])
            marks = [] if quick else [pytest.mark.full]
            yield pytest.param(name, placement, marks=marks, id=f"{name}-{placement}")


@pytest.mark.parametrize(("name", "placement"), list(cases()))
def test_same_bits_as_on_the_cpu(name, placement, nvme):
    entry = "init" if MODELS.index(name) % 2 else "adopt"
    before = process_io()[1]
    with zinf.Engine(nvme=nvme, audit=placement == "evict", **PLACEMENTS[placement]) as engine:
        ours, stats = run(engine, CASES[name], entry)
    assert_same(ours, plain_outcome(name))
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
        wanted = host_digests(model) | optimizer_digests(optimizer)
        engine.save(tmp_path / "three")
        train(on_device(case), model, optimizer, steps=2)
        assert engine.load(tmp_path / "three") == (3, None)
        assert host_digests(model) | optimizer_digests(optimizer) == wanted
        engine.release(model)
        assert engine.stats()["managed"] == 0
        assert host_digests(model) | optimizer_digests(optimizer) == wanted


def test_a_release_that_does_not_fit_is_refused(nvme):
    case = CASES["gpt2"]
    weights = sum(p.numel() * p.element_size() for p in build(case).parameters())
    with zinf.Engine(nvme=nvme, device_memory=weights // 2) as engine:
        model = engine.adopt(build(case).to("emu"))
        wanted = host_digests(model)
        with pytest.raises(RuntimeError, match="device_memory"):
            engine.release(model)
        assert host_digests(model) == wanted, "the rest is managed as before"


@pytest.mark.parametrize(
    "share", [1.0, 0.5, 0.12, *[pytest.param(s, marks=pytest.mark.full) for s in (0.75, 0.35, 0.2)]]
)
def test_a_device_budget_is_kept(share, nvme):
    case = CASES["gpt2"]
    weights = sum(p.numel() * p.element_size() for p in build(case).parameters())
    with zinf.Engine(nvme=nvme, device_memory=int(weights * share)) as engine:
        ours, stats = run(engine, case, "adopt")
    assert_same(ours, plain_outcome("gpt2"))
    assert 0 < stats["device_peak_resident_bytes"] <= weights * share
