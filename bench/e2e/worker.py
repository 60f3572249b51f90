"""Trains a model in this process and prints JSON: one line at the end, or with --serve one for every order.

    python bench/e2e/worker.py --size 124M [--plain] [--host-memory BYTES --nvme DIRECTORY ...]

The other scripts of this folder run it and watch it from outside. With --serve it builds, prints what it has
built, and then waits: a line with a number on stdin is that many steps, "rest" gives the memory back that is
not in use. It ends with stdin.
"""

import argparse
import ctypes
import gc
import hashlib
import json
import sys
import time
import traceback
from collections.abc import Iterable

import torch
from models import NAMES, losses, make_model


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=NAMES, required=True, help="of HF's GPT-2, or another model")
    parser.add_argument("--plain", action="store_true", help="torch alone, everything in memory")
    parser.add_argument("--serve", action="store_true", help="steps when told on stdin")
    parser.add_argument("--need", action="store_true", help="only measure what a step needs")
    parser.add_argument("--probe", action="store_true", help="measure the first step before it is done")
    parser.add_argument("--host-memory", type=int)
    parser.add_argument("--nvme")
    parser.add_argument("--away", action="store_true", help="weights and states forced onto NVMe")
    parser.add_argument("--forward", action="store_true", help="a step is a forward pass")
    parser.add_argument("--compile", action="store_true", help="torch.compile for the model")
    parser.add_argument("--update", default="step")
    parser.add_argument("--stage", type=int, default=3, help="where torchrun's variables name several ranks")
    parser.add_argument("--master", default="split")
    parser.add_argument("--bf16", action="store_true", help="weights in bfloat16")
    parser.add_argument("--clip", type=float)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def digest(model: torch.nn.Module) -> str:
    sha = hashlib.sha256()
    for parameter in model.parameters():
        for rows in parameter.detach().split(4096):
            sha.update(rows.clone().numpy())
    return sha.hexdigest()


def anonymous_bytes() -> int:
    """Anonymous and shared memory of this process."""
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


class Trainer:
    """A model and its optimizer."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.engine = None
        self.steps, self.step_cpu_seconds = 0, 0.0
        torch.manual_seed(0)
        if args.bf16:
            torch.set_default_dtype(torch.bfloat16)
        if args.plain:
            self.model = make_model(args.size)
            self.optimizer = self._plain_optimizer()
        else:
            self._manage()
        torch.set_default_dtype(torch.float32)
        if args.compile:
            self.model.compile()
        self.losses = losses(args.size, self.model, args.batch, args.tokens)

    def _plain_optimizer(self) -> torch.optim.Optimizer:
        if self.args.bf16:  # torch's has no fp32 masters
            import zinf

            return zinf.AdamW(self.model.parameters(), lr=self.args.lr)
        return torch.optim.AdamW(self.model.parameters(), lr=self.args.lr, fused=True)

    def _manage(self) -> None:
        import zinf

        args = self.args
        where = "nvme" if args.away else "auto"
        self.engine = zinf.Engine(host_memory=args.host_memory, nvme=args.nvme, weights=where, states=where,
                                  stage=args.stage)  # fmt: skip
        with self.engine.init():
            self.model = make_model(args.size)
        self.optimizer = zinf.AdamW(self.model.parameters(), lr=args.lr, max_grad_norm=args.clip,
                                    update=args.update, master=args.master)  # fmt: skip

    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def step(self) -> float:
        """The loss before it."""
        if self.args.forward:
            with torch.no_grad():
                return next(self.losses).item()
        loss = next(self.losses)
        loss.backward()
        if self.args.plain and self.args.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        begin = time.process_time()
        self.optimizer.step()
        self.step_cpu_seconds += time.process_time() - begin
        self.steps += 1
        self.optimizer.zero_grad()
        return loss.item()

    def rest(self) -> None:
        gc.collect()
        if self.engine is not None:
            from zinf import _C

            _C.trim_host_memory()
        ctypes.CDLL(None).malloc_trim(0)

    def costs(self) -> dict[str, float]:
        """CPU seconds since the start, of updates and of moves, and what they were for."""
        if self.engine is None:
            return {"update_seconds": self.step_cpu_seconds, "updated": self.steps * self.parameters()}
        stats = self.engine.stats()
        return {
            "update_seconds": stats["update_cpu_seconds"],
            "updated": stats["updated_parameters"],
            "move_seconds": stats["nvme_cpu_seconds"],
            "moved": stats["bytes_read"] + stats["bytes_written"],
            "requests": stats["nvme_requests"],
            "plan_seconds": stats["plan_seconds"],
        }

    def least(self) -> int:
        """host_memory that a step needs; nothing is trained."""
        args = self.args
        forward = losses(args.size, self.model, args.batch, args.tokens)
        return self.engine.probe(lambda: next(forward).backward()).least_bytes

    def activations(self) -> int:
        """Bytes that a forward pass leaves for backward, besides the weights."""
        weights = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
        left: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                left[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            next(self.losses)
        return sum(left.values())


class Run:
    """So many steps, and what became of them."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.result: dict = {"losses": [], "seconds": []}

    def train(self) -> None:
        import zinf  # noqa: F401  a plain run holds its library too: the budgets are compared with that

        trainer = Trainer(self.args)
        self.result["parameters"] = trainer.parameters()
        self.result["built"] = time.monotonic() - BEGIN
        if self.args.probe:
            self.result["least"] = trainer.least()
        for _ in range(self.args.steps):
            begin = time.monotonic()
            loss = trainer.step()
            self.result["losses"].append(loss)
            self.result["seconds"].append(round(time.monotonic() - begin, 3))
            print(f"step {len(self.result['losses'])}: loss {loss:.4f}", file=sys.stderr, flush=True)
        self.result["hash"] = digest(trainer.model)
        if trainer.engine is not None:
            self.result["stats"] = trainer.engine.stats()

    def report(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.result["left"] = anonymous_bytes()  # without torch's tensors
        print(json.dumps(self.result))


def need(args: argparse.Namespace) -> dict:
    """Of memory, in bytes: plain for the activations, then managed for the least host_memory."""
    args.plain = True
    plain = Trainer(args)
    result = {"parameters": plain.parameters(), "activations": plain.activations()}
    del plain
    gc.collect()  # a large model does not fit twice
    args.plain = False
    return {**result, "least": Trainer(args).least()}


def serve(args: argparse.Namespace, orders: Iterable[str]) -> None:
    trainer = Trainer(args)
    print(json.dumps({"parameters": trainer.parameters()}), flush=True)
    for order in orders:
        if order.strip() == "rest":
            trainer.rest()
            print("{}", flush=True)
            continue
        losses = [trainer.step() for _ in range(int(order))]
        print(json.dumps({"losses": losses, "costs": trainer.costs()}), flush=True)


def describe(error: Exception) -> dict:
    return {
        "error": type(error).__name__,
        "message": (str(error).splitlines() or [""])[0],
        "where": [frame.name for frame in traceback.extract_tb(error.__traceback__)],
    }


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    if args.serve or args.need:
        try:
            print(json.dumps(need(args))) if args.need else serve(args, sys.stdin)
        except Exception as error:
            print(json.dumps(describe(error)), flush=True)
        return
    run = Run(args)
    try:
        run.train()
    except Exception as error:
        run.result |= describe(error)
        del error
    run.report()


BEGIN = time.monotonic()
if __name__ == "__main__":
    main()
