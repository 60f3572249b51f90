"""Trains HF's GPT-2 on real text in this process and prints one line of JSON.

    python bench/e2e/worker.py --size 124M [--plain] [--host-memory BYTES --nvme DIRECTORY ...]

The other scripts of this folder run it and watch it from outside.
"""

import argparse
import ctypes
import gc
import glob
import hashlib
import json
import os
import sys
import sysconfig
import time
import traceback

import torch

SIZES = {  # layers, width, heads
    "2M": (2, 32, 2),
    "124M": (12, 768, 12),
    "640M": (32, 1216, 19),
    "1.3B": (24, 2048, 16),
    "2.6B": (32, 2560, 20),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--plain", action="store_true", help="torch alone, everything in memory")
    parser.add_argument("--probe", action="store_true", help="measure the first step before it is done")
    parser.add_argument("--host-memory", type=int)
    parser.add_argument("--nvme")
    parser.add_argument("--update", default="step")
    parser.add_argument("--clip", type=float)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def make_model(size: str) -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, heads = SIZES[size]
    config = GPT2Config(n_layer=layers, n_embd=width, n_head=heads, use_cache=False)
    return GPT2LMHeadModel(config)


def batches(count: int, length: int):
    """Rows of bytes of Python's library, as tokens."""
    files = sorted(glob.glob(os.path.join(sysconfig.get_paths()["stdlib"], "*.py")))
    text = torch.frombuffer(bytearray(b"".join(open(f, "rb").read() for f in files)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    while True:
        begins = torch.randint(len(text) - length, (count,), generator=generator)
        yield torch.stack([text[begin : begin + length] for begin in begins]).long()


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


class Run:
    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.result: dict = {"losses": [], "seconds": []}

    def train(self) -> None:
        import zinf

        args = self.args
        engine = None
        torch.manual_seed(0)
        if args.plain:
            model = make_model(args.size)
            optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
        else:
            engine = zinf.Engine(host_memory=args.host_memory, nvme=args.nvme)
            with engine.init():
                model = make_model(args.size)
            optimizer = zinf.AdamW(
                model.parameters(), lr=args.lr, max_grad_norm=args.clip, update=args.update
            )
        self.result["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        self.result["built"] = time.monotonic() - BEGIN
        data = batches(args.batch, args.tokens)
        if args.probe:
            rows = next(batches(args.batch, args.tokens))
            need = engine.probe(lambda: model(rows, labels=rows).loss.backward())
            self.result["least"] = need.least_bytes
        for _ in range(args.steps):
            begin = time.monotonic()
            rows = next(data)
            loss = model(rows, labels=rows).loss
            loss.backward()
            if args.plain and args.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            optimizer.zero_grad()
            self.result["losses"].append(loss.item())
            self.result["seconds"].append(round(time.monotonic() - begin, 3))
            print(f"step {len(self.result['losses'])}: loss {loss.item():.4f}", file=sys.stderr, flush=True)
            del loss
        self.result["hash"] = digest(model)
        if engine is not None:
            self.result["stats"] = engine.stats()

    def report(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.result["left"] = anonymous_bytes()  # without torch's tensors
        print(json.dumps(self.result))


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    run = Run(args)
    try:
        run.train()
    except Exception as error:
        run.result["error"] = type(error).__name__
        run.result["message"] = (str(error).splitlines() or [""])[0]
        run.result["where"] = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        del error
    run.report()


BEGIN = time.monotonic()
if __name__ == "__main__":
    main()
