"""zinf's Adam against torch.optim.AdamW(fused=True) and, if it can be imported, DeepSpeedCPUAdam.

Three comparisons, all on the same buffers (huge pages) and the same number of threads:

- fp32: one update.
- mixed: bf16 gradient in, unscale and clip, update of an fp32 master, bf16 weight out. zinf does it in one
  pass, with a plain or a split master; the others copy to fp32, unscale, clip, update and copy to bf16 (torch
  unscales and clips by two multiplications, GradScaler's and clip_grad_norm_'s; DeepSpeed by one).
- clipped: the same with the norm that clipping asks for: zinf sums the squares of the bf16 gradient first,
  the others take the norm of its fp32 copy.

All contestants run once per round in rotating order; the ratios of each round count, so that a busy machine
disturbs all alike. Prints medians with quartiles, and one line of JSON.

    PYTHONPATH=build/release/python python bench/micro/adam_vs_peers.py [--elems N] [--threads N] [--rounds N]
"""

import argparse
import json
import mmap
import os
import platform
import statistics
import time

import torch
from zinf import _C

HYPER = {"lr": 1e-4, "weight_decay": 0.01, "eps": 1e-8}
SCALE = 0.5
CLIP = 0.74


def clip_factor(norm):
    return min(1.0, 10.0 / norm)


def huge(numel, dtype):
    """Zeros on huge pages.

    The extra bytes keep neighbours from being a multiple of 256 MiB apart: with such buffers every update,
    of any library, takes several times as long on AMD Zen.
    """
    memory = mmap.mmap(-1, numel * dtype.itemsize + (6 << 20), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=numel).zero_()


class Buffers:
    def __init__(self, numel):
        self.weight = huge(numel, torch.float32).normal_()
        self.grad = huge(numel, torch.float32).normal_().mul_(1e-2)
        self.exp_avg = huge(numel, torch.float32)
        self.exp_avg_sq = huge(numel, torch.float32)
        self.grad16 = huge(numel, torch.bfloat16).copy_(self.grad)
        self.weight16 = huge(numel, torch.bfloat16).copy_(self.weight)
        self.low = huge(numel, torch.uint16)


class Zinf:
    name = "zinf"

    def __init__(self, buffers, threads):
        self.buffers = buffers
        self.pool = _C.ThreadPool(threads)
        self.steps = 0

    def update(self, weight, grad, **options):
        b = self.buffers
        self.steps += 1
        _C.adam_update(
            weight,
            grad,
            b.exp_avg,
            b.exp_avg_sq,
            step=self.steps,
            pool=self.pool,
            **HYPER,
            **options,
        )

    def fp32(self):
        self.update(self.buffers.weight, self.buffers.grad)

    def mixed(self):
        b = self.buffers
        self.update(b.weight16, b.grad16, master=b.weight, inverse_scale=SCALE, clip=CLIP)

    def norm(self):
        return _C.sum_of_squares(self.buffers.grad16, inverse_scale=SCALE, pool=self.pool) ** 0.5

    def clipped(self):
        b = self.buffers
        self.update(b.weight16, b.grad16, master=b.weight, inverse_scale=SCALE, clip=clip_factor(self.norm()))


class ZinfSplit(Zinf):
    """The same with the master split into the bf16 weight and 16 more bits."""

    name = "zinf_split"

    def mixed(self):
        b = self.buffers
        self.update(b.weight16, b.grad16, low=b.low, inverse_scale=SCALE, clip=CLIP)

    def clipped(self):
        b = self.buffers
        self.update(b.weight16, b.grad16, low=b.low, inverse_scale=SCALE, clip=clip_factor(self.norm()))


class Peer:
    """A torch optimizer over the same buffers."""

    def __init__(self, buffers, name, make_optimizer, step):
        self.buffers = buffers
        self.name = name
        parameter = torch.nn.Parameter(buffers.weight)
        parameter.grad = buffers.grad
        self.optimizer = make_optimizer([parameter])
        self.optimizer.state[parameter] = {
            "step": step,
            "exp_avg": buffers.exp_avg,
            "exp_avg_sq": buffers.exp_avg_sq,
        }

    def fp32(self):
        self.optimizer.step()

    def mixed(self):
        self.passes(lambda grad: CLIP)

    def clipped(self):
        self.passes(lambda grad: clip_factor(torch.linalg.vector_norm(grad).item()))

    def passes(self, clip):
        b = self.buffers
        b.grad.copy_(b.grad16)
        if self.name == "deepspeed":
            b.grad.mul_(SCALE * clip(b.grad))
        else:
            b.grad.mul_(SCALE)
            b.grad.mul_(clip(b.grad))
        self.optimizer.step()
        b.weight16.copy_(b.weight)


def make_peers(buffers):
    def torch_fused(parameters):
        return torch.optim.AdamW(parameters, fused=True, **HYPER)

    peers = [Peer(buffers, "torch_fused", torch_fused, torch.tensor(0.0))]
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError as error:
        print(f"without DeepSpeedCPUAdam: {error}")
    else:
        peers.append(Peer(buffers, "deepspeed", lambda p: DeepSpeedCPUAdam(p, **HYPER), 0))
    return peers


def verify():
    """A wrong update may be fast: ours must equal torch's."""
    ours, theirs = Buffers(10_007), Buffers(10_007)
    theirs.weight.copy_(ours.weight)
    theirs.grad.copy_(ours.grad)
    Zinf(ours, 1).fp32()
    make_peers(theirs)[0].fp32()
    if not torch.equal(ours.weight, theirs.weight):
        raise SystemExit("zinf and torch differ: no use timing them")


def seconds(work):
    time.sleep(0.05)  # OpenMP's threads spin after their work: not at the expense of who comes next
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def spread(values):
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": low, "q3": high}


def compare(case, contestants, numel, rounds):
    """Per contestant: nanoseconds per element, and its time over zinf's in the same round."""
    times = {one.name: [] for one in contestants}
    for one in contestants:
        getattr(one, case)()
    for number in range(rounds):
        turn = number % len(contestants)
        for one in contestants[turn:] + contestants[:turn]:
            times[one.name].append(seconds(getattr(one, case)) / numel * 1e9)
    ours = times["zinf"]
    result = {}
    for name, values in times.items():
        ratios = [theirs / mine for theirs, mine in zip(values, ours, strict=True)]
        result[name] = {"ns": spread(values), "over_zinf": spread(ratios)}
        ns, ratio = result[name]["ns"], result[name]["over_zinf"]
        print(
            f"{case:7s} {name:12s} {ns['median']:6.3f} ({ns['q1']:.3f}..{ns['q3']:.3f}) ns/elem, "
            f"{ratio['median']:.3f} ({ratio['q1']:.3f}..{ratio['q3']:.3f}) times zinf's time"
        )
    return result


def cpu_name():
    with open("/proc/cpuinfo") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main():
    parser = argparse.ArgumentParser(description="Adam against its peers")
    parser.add_argument("--elems", type=int, default=64 << 20)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    setting = {
        "bench": "adam_vs_peers",
        "cpu": cpu_name(),
        "torch": torch.__version__,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        **vars(arguments),
    }
    print(", ".join(f"{name} {value}" for name, value in setting.items()))
    verify()
    buffers = Buffers(arguments.elems)
    zinf, split = Zinf(buffers, arguments.threads), ZinfSplit(buffers, arguments.threads)
    peers = make_peers(buffers)
    results = {
        "fp32": compare("fp32", [zinf, *peers], arguments.elems, arguments.rounds),
        "mixed": compare("mixed", [zinf, split, *peers], arguments.elems, arguments.rounds),
        "clipped": compare("clipped", [zinf, split, *peers], arguments.elems, arguments.rounds),
    }
    print(json.dumps({**setting, **results}))


if __name__ == "__main__":
    main()
