"""Models split over ranks: the weights of a reference that averages gradients in the order of ranks."""

import json
import pathlib

import pytest
from ranks import run_ranks

HERE = pathlib.Path(__file__).parent
SCRIPT = f"import sys; sys.path.insert(0, {str(HERE)!r}); import rank_training; rank_training.main()"

IN_STEP, IN_BACKWARD = {}, {"update": "backward"}


def places(nvme):
    return {
        "memory": {},
        "nvme": {"nvme": nvme, "weights": "nvme", "states": "nvme"},
        "evict": {"nvme": nvme, "weights": "nvme", "states": "nvme", "evict": "always"},
        "stage 2": {"stage": 2},
        "stage 1, states on NVMe": {"stage": 1, "nvme": nvme, "states": "nvme"},
    }


def check_group(size, items):
    """Every rank has the weights and losses of the reference, in every item."""
    outputs = [
        [json.loads(line) for line in text.splitlines() if line.startswith("[")]
        for text in run_ranks(size, SCRIPT, json.dumps(items))
    ]
    references = [row[1:] for row in outputs[0] if row[0] == "reference"]
    for rank, rows in enumerate(outputs):
        ours = [row[1:] for row in rows if row[0] == "ours"]
        for item, (losses, weights), (all_losses, expected) in zip(items, ours, references, strict=True):
            assert losses == all_losses[rank], f"{item}: rank {rank} has other losses"
            other = [name for name, value in expected.items() if weights[name] != value]
            assert not other, f"{item}: rank {rank} has other weights: {other[:5]} of {len(expected)}"


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.full), 4])
@pytest.mark.parametrize("update", [IN_STEP, IN_BACKWARD], ids=["step", "backward"])
def test_places_and_stages_give_the_reference(size, update, nvme):
    # With one rank nothing is split: a stage is for several.
    chosen = {name: place for name, place in places(nvme).items() if size < 4 or name in ("memory", "evict")}
    check_group(size, [["mlp", place, update] for place in chosen.values()])


MODELS = ["resnet", "tied", "lstm", "normed", "branching", "gpt2", "mixtral"]
VARIANTS = [
    ("gpt2-accumulate", IN_STEP),
    ("gpt2-accumulate", {"update": "backward", "micro_batches": 3}),
    ("gpt2-clip", IN_STEP),
    ("gpt2-max-norm", IN_STEP),
    ("gpt2-max-norm", IN_BACKWARD),
    ("gpt2-checkpoint", IN_BACKWARD),
    ("llama-bf16", IN_STEP),
    ("llama-bf16", IN_BACKWARD),
    ("llama-bf16", {"master": "plain"}),
    ("mlp-fp16", IN_STEP),
]


@pytest.mark.parametrize("update", [IN_STEP, IN_BACKWARD], ids=["step", "backward"])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_models_give_the_reference(size, update):
    check_group(size, [[name, {}, update] for name in MODELS])


def test_variants_give_the_reference(nvme):
    away = {"nvme": nvme, "weights": "nvme", "states": "nvme"}
    check_group(2, [[name, place, options] for name, options in VARIANTS for place in ({}, away)])


DEVICE_PLACES = [
    {"device": "emu"},
    {"device": "emu", "device_memory": 1 << 20},
    {"device": "emu", "weights": "nvme", "states": "nvme", "evict": "always"},
    {"device": "emu", "stage": 2},
]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("update", [IN_STEP, IN_BACKWARD], ids=["step", "backward"])
def test_models_on_a_device_give_the_reference(size, update, nvme):
    places = [{**place, "nvme": nvme} if "weights" in place else place for place in DEVICE_PLACES]
    models = ["mlp", "gpt2"] if update else ["mlp", "gpt2", "llama-bf16", "gpt2-max-norm"]
    check_group(size, [[name, place, update] for place in places for name in models])


OWN_GRADIENT = """
import sys, torch, zinf
import torch.distributed as dist
from zinf import emulated

torch.set_num_threads(1)
emulated.enable(memory_bytes=64 << 20)
dist.init_process_group("gloo")
hashes = []
for device in ("cpu", "emu"):
    with zinf.Engine() as engine:
        torch.manual_seed(0)
        model = engine.adopt(torch.nn.Linear(33, 17).to(device))
        optimizer = zinf.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
        for step in range(3):
            x = torch.randn(4, 33, generator=torch.Generator().manual_seed(step + dist.get_rank()))
            model(x.to(device)).square().sum().backward()
            for parameter in model.parameters():
                parameter.grad = parameter.grad * 0.5
            model.weight.data_ptr()  # somebody has its address
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model.weight.mul_(0.9)
        hashes.append([p.detach().cpu().double().sum().item() for p in model.parameters()])
assert hashes[0] == hashes[1], hashes
dist.destroy_process_group()
"""


def test_own_gradients_and_edits_on_a_device_are_those_of_the_cpu():
    run_ranks(2, OWN_GRADIENT)


MIXED = """
import torch, zinf
import torch.distributed as dist
from zinf import emulated

emulated.enable(memory_bytes=64 << 20)
dist.init_process_group("gloo")
engine = zinf.Engine()
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).to("emu"))
engine.adopt(model)
try:
    model[1](model[0](torch.ones(2, 8)).to("emu")).sum().backward()
except RuntimeError as error:
    assert "must be on one device" in str(error), error
else:
    raise AssertionError("it was not refused")
"""


def test_a_model_on_two_devices_is_refused_with_ranks():
    run_ranks(2, MIXED)
