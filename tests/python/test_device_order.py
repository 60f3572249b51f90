"""An engine on a device that works later: every wait is needed, and none is missing."""

import gc

import pytest
import torch
import zinf
from torch import nn
from training import digest
from zinf import emulated

emulated.enable(memory_bytes=256 << 20)  # here: before any test has run a backward pass

WIDE = 1536  # 9 MiB of float32: more than the staging buffers have
BATCH = 16
STEPS = 3
PRODUCT_FLOPS = 2 * BATCH * WIDE * WIDE


@pytest.fixture(autouse=True)
def usual_pace():
    yield
    zinf._C._skip_device_waits([])
    emulated.set_pace()
    torch.accelerator.synchronize()


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDE, WIDE, bias=False), nn.GELU(), nn.Linear(WIDE, WIDE, bias=False))


def train(model, optimizer, device):
    for step in range(STEPS):
        x = torch.randn(BATCH, WIDE, generator=torch.Generator().manual_seed(step)).to(device)
        for _ in range(2):  # gradients are added to
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [digest(name, parameter.detach().cpu()) for name, parameter in model.named_parameters()]


@pytest.fixture(scope="module")
def expected():
    model = build()
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), "cpu")


UPDATES = [{}, {"update": "backward", "micro_batches": 2}]


def on_device(nvme, update=UPDATES[0], **options):
    with zinf.Engine(nvme=nvme, weights="host", states="host", **options) as engine:
        model = engine.adopt(build().to("emu"))
        return train(model, zinf.AdamW(model.parameters(), lr=1e-2, **update), "emu")


def slow_copies():
    emulated.set_pace(to_device=WIDE * WIDE * 4 / 0.03, to_host=WIDE * WIDE * 4 / 0.03)


def slow_products():
    emulated.set_pace(flops=PRODUCT_FLOPS / 0.03)


PACES = {"arrival": slow_copies, "uses": slow_products, "free": slow_products, "staging": slow_copies}


@pytest.mark.parametrize("pace", [slow_copies, slow_products])
@pytest.mark.parametrize("update", UPDATES, ids=["step", "backward"])
@pytest.mark.parametrize("evict", ["always", "lru"])
def test_same_bits_on_a_slow_device(pace, update, evict, expected, nvme):
    pace()
    options = {"evict": "always"} if evict == "always" else {"device_memory": 3 * WIDE * WIDE * 4}
    assert on_device(nvme, update, **options) == expected


@pytest.mark.parametrize("wait", PACES)
def test_a_wait_that_is_skipped_is_missed(wait, expected, nvme):
    PACES[wait]()
    zinf._C._skip_device_waits([wait])
    assert on_device(nvme, evict="always") != expected


@pytest.mark.parametrize(
    "seed", [*range(3), *[pytest.param(s, marks=pytest.mark.full) for s in range(3, 100)]]
)
def test_same_bits_whatever_the_delays(seed, expected, nvme):
    emulated.set_pace(max_delay=1e-3, seed=seed)
    options = {"evict": "always"} if seed % 2 else {"device_memory": 3 * WIDE * WIDE * 4}
    assert on_device(nvme, UPDATES[seed // 2 % 2], **options) == expected


def test_same_bits_on_a_stream_of_the_users_own(expected, nvme):
    slow_products()
    with torch.Stream(device="emu"):
        assert on_device(nvme, evict="always") == expected


def test_a_wait_of_another_name_is_refused():
    with pytest.raises(ValueError, match="arrival, uses, free, staging"):
        zinf._C._skip_device_waits(["departure"])


def test_staging_memory_is_a_small_pool(nvme):
    before, _ = emulated.pinned_bytes()
    emulated.reset_pinned_peak()
    with zinf.Engine(nvme=nvme, weights="host", states="host", evict="always") as engine:
        model = engine.adopt(build().to("emu"))
        train(model, zinf.AdamW(model.parameters(), lr=1e-2), "emu")
        _, peak = emulated.pinned_bytes()
    assert before < peak <= before + (16 << 20)
    assert emulated.pinned_bytes()[0] == before, "it goes with the engine, not with the model"


def test_what_is_released_is_freed_after_its_uses(nvme):
    model = build()
    x = torch.randn(BATCH, WIDE)
    expected = model(x).detach()
    with zinf.Engine(nvme=nvme, weights="host", evict="always") as engine:
        managed = engine.adopt(model.to("emu"))
        managed(x.to("emu"))  # known
        engine.release(managed)
        slow_products()
        with torch.no_grad():
            y = managed(x.to("emu"))
        del model, managed
        gc.collect()
        assert torch.equal(y.cpu(), expected)


def test_a_unit_that_two_streams_use_waits_for_both(nvme):
    first, second = torch.Stream(device="emu"), torch.Stream(device="emu")
    model = build()
    x = torch.randn(BATCH, WIDE)
    expected = model(x).detach()
    outputs = []
    with zinf.Engine(nvme=nvme, weights="host", device_memory=4 * WIDE * WIDE * 4) as engine, torch.no_grad():
        with first:
            managed = engine.adopt(model.to("emu"))
            managed(x.to("emu"))  # known
        first.synchronize()
        slow_products()
        for stream in (first, second, first):
            with stream:
                outputs.append(managed(x.to("emu")))
        other = engine.adopt(build().to("emu"))  # takes the room of the first
        other(x.to("emu"))
        torch.accelerator.synchronize()
        assert all(torch.equal(y.cpu(), expected) for y in outputs)
