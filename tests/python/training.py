"""Trains a case of models.py and says, bit by bit, what came out."""

import functools
import hashlib
from dataclasses import dataclass

import torch
import zinf
from models import CASES
from torch.nn.utils import clip_grad_norm_

STEPS = 20
LR = 3e-3
WEIGHT_DECAY = 0.05

# Where weights and optimizer states live.
PLACEMENTS = {
    "host": {"weights": "host", "states": "host"},
    "states-nvme": {"weights": "host", "states": "nvme"},
    "nvme": {"weights": "nvme", "states": "nvme"},
    "evict": {"weights": "nvme", "states": "nvme", "evict": "always"},
}


def digest(name, tensor):
    """sha256 over name, dtype, shape and bytes."""
    tensor = tensor.detach().cpu().contiguous()
    sha = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
    sha.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


@dataclass(frozen=True)
class Outcome:
    """Losses and digests of every tensor that training left behind."""

    losses: tuple[str, ...]
    tensors: dict[str, str]

    @property
    def hash(self):
        return hashlib.sha256(repr((self.losses, sorted(self.tensors.items()))).encode()).hexdigest()


def model_digests(model):
    digests = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        digests[f"weight {name}"] = digest(name, parameter)
    for name, buffer in model.named_buffers():
        digests[f"buffer {name}"] = digest(name, buffer)
    return digests


def optimizer_digests(optimizer):
    digests = {}
    for index, states in optimizer.state_dict()["state"].items():
        for name, value in states.items():
            if name == "step":  # a tensor or a number
                value = torch.tensor(float(value))
            digests[f"state {index} {name}"] = digest(name, value)
    return digests


def outcome(losses, model, optimizer):
    digests = tuple(digest("loss", loss) for loss in losses)
    return Outcome(digests, model_digests(model) | optimizer_digests(optimizer))


def assert_same(ours, plain):
    """Names what differs, then compares the hash."""
    steps = [i for i, (a, b) in enumerate(zip(ours.losses, plain.losses, strict=True)) if a != b]
    assert not steps, f"losses differ from micro-batch {steps[0]} on"
    assert ours.tensors.keys() == plain.tensors.keys()
    names = [name for name, value in plain.tensors.items() if ours.tensors[name] != value]
    assert not names, f"{len(names)} of {len(plain.tensors)} tensors differ: {names[:5]}"
    assert ours.hash == plain.hash


def build(case, seed=0):
    torch.manual_seed(seed)
    return case.build().train()


def train(case, model, optimizer, clip_norm=None, steps=STEPS):
    """The usual loop. Returns the loss of every micro-batch."""
    if case.wrap is torch.compile:
        torch._dynamo.reset()
    forward = case.wrap(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=case.loss_scale or 1.0, enabled=bool(case.loss_scale))
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    losses = []
    for step in range(steps):
        for micro in range(case.micro_batches):
            batch = case.batch(generator, step * case.micro_batches + micro)
            with case.context():
                loss = case.loss(forward, batch) / case.micro_batches
            scaler.scale(loss).backward()
            losses.append(loss.detach().clone())
        if clip_norm is not None:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), clip_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return losses


@functools.cache
def plain_outcome(name, steps=STEPS):
    """What plain PyTorch makes of a case: the reference of every placement."""
    case = CASES[name]
    model = build(case)
    if case.has_master:
        optimizer = zinf.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    losses = train(case, model, optimizer, case.clip_norm or case.max_grad_norm, steps)
    return outcome(losses, model, optimizer)
