"""Run by every rank of a group: trains cases of models.py split over the ranks, and says what came out.

    rank_training.py CASES    (JSON: a list of [name of the case, options of the engine, options of AdamW])

Among the options of the engine may be "device": "emu", where the model is then.

The reference is made by rank 0 with plain PyTorch: a replica of the model per rank, the replicas' gradients
summed in the order of ranks (with partition_group first inside of groups) and divided by their number, in
float32.
"""

import functools
import json
import sys

import torch
import zinf
from models import CASES
from torch.nn.utils import clip_grad_norm_
from training import LR, WEIGHT_DECAY, build, digest, model_digests
from zinf import emulated

STEPS = 4


class Rank:
    """What one rank's data loader and generators give it."""

    def __init__(self, rank, device="cpu"):
        self.device = device
        self._batches = torch.Generator().manual_seed(100 + rank)
        self._rng = torch.Generator().manual_seed(200 + rank).get_state()

    def loss(self, case, model, number):
        torch.set_rng_state(self._rng)
        batch = moved(case.batch(self._batches, number), self.device)
        with case.context():
            loss = case.loss(model, batch) / case.micro_batches
        self._rng = torch.get_rng_state()
        return loss


def moved(batch, device):
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    return tuple(moved(part, device) for part in batch) if isinstance(batch, tuple) else batch


def scaler_of(case):
    return torch.amp.GradScaler("cpu", init_scale=case.loss_scale or 1.0, enabled=bool(case.loss_scale))


def finish_step(case, model, optimizer, scaler):
    if case.clip_norm is not None:
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), case.clip_norm)
    scaler.step(optimizer)
    scaler.update()


def train(case, rank, engine_options, optimizer_options):
    engine_options = dict(engine_options)
    device = engine_options.pop("device", "cpu")
    engine = zinf.Engine(**engine_options)
    with engine.init():
        model = build(case).to(device)
    engine.adopt(model)
    if case.max_grad_norm is not None:
        optimizer_options = {**optimizer_options, "max_grad_norm": case.max_grad_norm}
    optimizer = zinf.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, **optimizer_options)
    scaler, data = scaler_of(case), Rank(rank, device)
    losses = []
    for step in range(STEPS):
        for micro in range(case.micro_batches):
            loss = data.loss(case, model, step * case.micro_batches + micro)
            scaler.scale(loss).backward()
            losses.append(digest("loss", loss))
        finish_step(case, model, optimizer, scaler)
        optimizer.zero_grad()
    weights = {name: value for name, value in model_digests(model).items() if name.startswith("weight")}
    stats = engine.stats()
    engine.close()
    return losses, weights, stats


def added(grads):
    """In their order, in float32; None where there is none."""
    there = [grad.float() for grad in grads if grad is not None]
    return functools.reduce(torch.add, there) if there else None


def averaged(replicas, group=None):
    """Of every parameter: the sum in the order of ranks, divided; None where no rank has a gradient."""
    group = group or len(replicas)
    scale = torch.tensor(1.0) / len(replicas)
    for parameters in zip(*(replica.parameters() for replica in replicas), strict=True):
        grads = [parameter.grad for parameter in parameters]
        total = added([added(grads[first : first + group]) for first in range(0, len(grads), group)])
        yield None if total is None else (total * scale).to(parameters[0].dtype)


def clip_as_ranks_do(parameters, most):
    squares = sum(p.grad.double().square().sum() for p in parameters if p.grad is not None)
    factor = torch.clamp(most / (squares.sqrt().float() + 1e-6), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def reference(case, size, group=None):
    """The losses of every rank, and the weights of all."""
    replicas = [build(case) for _ in range(size)]
    first = replicas[0]
    optimizer = zinf.AdamW(first.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    scaler, data = scaler_of(case), [Rank(rank) for rank in range(size)]
    losses = [[] for _ in range(size)]
    for step in range(STEPS):
        total = [None] * len(list(first.parameters()))
        for micro in range(case.micro_batches):
            for rank, replica in enumerate(replicas):
                replica.zero_grad()
                loss = data[rank].loss(case, replica, step * case.micro_batches + micro)
                scaler.scale(loss).backward()
                losses[rank].append(digest("loss", loss))
            passed = list(averaged(replicas, group))
            total = [
                b if a is None else a if b is None else a + b for a, b in zip(total, passed, strict=True)
            ]
        for parameter, grad in zip(first.parameters(), total, strict=True):
            parameter.grad = grad
        if case.max_grad_norm is not None:
            clip_as_ranks_do(list(first.parameters()), case.max_grad_norm)
        finish_step(case, first, optimizer, scaler)
        with torch.no_grad():
            for replica in replicas[1:]:
                for ours, theirs in zip(replica.parameters(), first.parameters(), strict=True):
                    ours.copy_(theirs)
    weights = {name: value for name, value in model_digests(first).items() if name.startswith("weight")}
    return losses, weights


def main():
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    items = json.loads(sys.argv[1])
    if any(item[1].get("device") == "emu" for item in items):
        emulated.enable(memory_bytes=256 << 20)
        emulated.set_pace(max_delay=5e-5, seed=rank)
    references = {}
    for name, engine_options, optimizer_options in items:
        case = CASES[name]
        losses, weights, _ = train(case, rank, engine_options, optimizer_options)
        print(json.dumps(["ours", losses, weights]), flush=True)
        if rank == 0:
            key = name, engine_options.get("partition_group")
            references[key] = references.get(key) or reference(case, size, key[1])
            print(json.dumps(["reference", *references[key]]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
