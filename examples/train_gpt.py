"""Trains a GPT on real text, with a fraction of the memory that it takes; the rest is on NVMe.

    python examples/train_gpt.py [--host-memory 150MB] [--nvme DIRECTORY] [--text FILE ...] [--steps 40]

The model is a plain torch.nn.Module and the loop is the usual one; two lines know of zinf. At the end a small
twin of the model is trained three times, in memory with torch.optim.AdamW, with every state on NVMe, and on
an emulated accelerator that has less memory than the model, and their weights are compared.
"""

import argparse
import glob
import hashlib
import itertools
import os
import sys
import sysconfig
import tempfile
import time

import torch
import torch.nn.functional as F
import zinf
import zinf.emulated
from torch import nn

VOCABULARY = 256  # bytes


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, length: int):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions(positions))))


def read_text(files: list[str]) -> torch.Tensor:
    """The given files, else the collection of sayings that `make demo` installs, else Python's library."""
    if not files:
        files = sorted(f for f in glob.glob("/usr/share/games/fortunes/*") if "." not in os.path.basename(f))
    if not files:
        files = sorted(glob.glob(os.path.join(sysconfig.get_paths()["stdlib"], "*.py")))
    text = b"".join(open(file, "rb").read() for file in files)
    if len(text) < 1 << 16:
        sys.exit(f"{len(text)} bytes of text in {len(files)} files are too few to train on")
    print(f"text: {len(text) / 1e6:.1f} MB from {len(files)} files such as {os.path.basename(files[0])}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(text: torch.Tensor, count: int, length: int):
    generator = torch.Generator().manual_seed(0)
    while True:
        begins = torch.randint(len(text) - length - 1, (count,), generator=generator)
        rows = torch.stack([text[begin : begin + length + 1] for begin in begins]).long()
        yield rows[:, :-1], rows[:, 1:]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data, steps: int, show=None) -> list[float]:
    losses = []
    device = next(model.parameters()).device
    for x, y in itertools.islice(data, steps):
        x, y = x.to(device), y.to(device)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if show:
            show(losses)
    return losses


class Bar:
    """A line with progress, rate and time left; on a terminal it is drawn over itself."""

    def __init__(self, total: int):
        self.total = total
        self.begin = time.monotonic()
        self.tty = sys.stdout.isatty()

    def __call__(self, losses: list[float]) -> None:
        done = len(losses)
        if not self.tty and done % max(1, self.total // 10) and done != self.total:
            return
        rate = done / (time.monotonic() - self.begin)
        filled = 24 * done // self.total
        left = (self.total - done) / rate
        line = f"step {done}/{self.total} [{'#' * filled}{'.' * (24 - filled)}]"
        line += f" loss {losses[-1]:.3f}  {rate:.2f} steps/s  {left:.0f} s left "
        print(
            ("\r" if self.tty else "") + line, end="" if self.tty and done < self.total else "\n", flush=True
        )


def digest(model: nn.Module) -> str:
    sha = hashlib.sha256()
    for name, value in model.state_dict().items():
        sha.update(name.encode())
        sha.update(value.cpu().clone().numpy().tobytes())
    return sha.hexdigest()


def disk_bytes() -> int:
    with open("/proc/self/io") as file:
        counters = dict(line.split(": ") for line in file)
    return int(counters["read_bytes"]) + int(counters["write_bytes"])


def peak_bytes() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def twin(text: torch.Tensor, device: str = "cpu", **options) -> str:
    """The weights of one, as a hash; in memory with torch's optimizer where no engine has options."""
    torch.manual_seed(0)
    model = GPT(layers=2, width=64, heads=2, length=64).to(device)
    if not options:
        train(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), batches(text, 4, 64), 10)
        return digest(model)
    with zinf.Engine(**options) as engine:
        engine.adopt(model)
        train(model, zinf.AdamW(model.parameters(), lr=1e-3), batches(text, 4, 64), 10)
        return digest(model)


def compare_twins(text: torch.Tensor, nvme: str) -> bool:
    away = {"nvme": nvme, "weights": "nvme", "states": "nvme"}
    digests = {
        "in memory": twin(text),
        "on NVMe": twin(text, **away, evict="always"),
        "on a device": twin(text, "emu", **away, device_memory="256KiB"),
    }
    for name, value in digests.items():
        print(f"twin {name:11}  {value[:32]}")
    return len(set(digests.values())) == 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nvme", default=tempfile.gettempdir(), help="a directory on a fast disk")
    parser.add_argument("--text", nargs="*", default=[], help="files to train on")
    parser.add_argument(
        "--host-memory", default="150MB", help="for weights, states, gradients and activations"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=2, help="of 64 bytes in a batch")
    args = parser.parse_args()
    zinf.emulated.enable()  # for the last twin; before the first backward pass
    text = read_text(args.text)

    engine = zinf.Engine(host_memory=args.host_memory, nvme=args.nvme)
    torch.manual_seed(0)
    with engine.init():
        model = GPT(args.layers, args.width, heads=8, length=64)
    optimizer = zinf.AdamW(model.parameters(), lr=2e-4, update="backward")

    parameters = sum(p.numel() for p in model.parameters())
    limit = engine.stats()["host_limit_bytes"]
    print(f"GPT: {args.layers} layers, width {args.width}, {parameters / 1e6:.1f} M parameters")
    print(
        f"host_memory {limit / 1e6:.0f} MB; weights {4 * parameters / 1e6:.0f} MB and Adam states "
        f"{8 * parameters / 1e6:.0f} MB ({8 * parameters / limit:.1f} times as much), the rest in {args.nvme}"
    )
    moved = disk_bytes()
    losses = train(model, optimizer, batches(text, args.rows, 64), args.steps, Bar(args.steps))
    moved = disk_bytes() - moved

    stats = engine.stats()
    engine.close()
    print("\nsummary")
    print(f"  loss                 {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(
        f"  peak memory          {stats['host_peak_bytes'] / 1e6:.1f} MB of {limit / 1e6:.1f} MB host_memory"
    )
    print(f"                       {peak_bytes() / 1e6:.0f} MB resident with Python, torch and its libraries")
    per_parameter = moved / parameters / args.steps
    print(f"  to and from disk     {moved / 1e9:.2f} GB, {per_parameter:.1f} bytes per parameter and step")
    same = compare_twins(text, args.nvme)
    print("the twins' weights are equal bit for bit" if same else "THE TWINS' WEIGHTS DIFFER")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
