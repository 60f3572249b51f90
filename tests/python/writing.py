"""Run as a program: writes a model and its optimizer's states that are larger than the budget, in every way.

Prints "<name> <bytes>" for each: by how much the peak of the process was above what it had before.
"""

import os
import sys
from pathlib import Path

import safetensors.torch
import torch
import zinf
from torch import nn

MIB = 1 << 20
WEIGHTS_BYTES = 32 * MIB
BUDGET = WEIGHTS_BYTES // 4


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(WEIGHTS_BYTES // MIB))

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


def hugging_face():
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    config = transformers.GPT2Config(n_embd=384, n_layer=4, n_head=4, vocab_size=512, n_positions=32)
    return transformers.GPT2LMHeadModel(config)  # its head is tied to its embedding


def resident(field):
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) * 1024


def measure(ways):
    for name, write in ways.items():
        write()  # what is imported and allocated once is not counted
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = resident("VmRSS")
        write()
        sys.stdout.write(f"{name} {resident('VmHWM') - before}\n")


def write_blocks(folder, nvme):
    with zinf.Engine(host_memory=BUDGET, nvme=nvme) as engine:
        with engine.init():
            model = Blocks()
        optimizer = zinf.AdamW(model.parameters(), update="backward")
        model(torch.randn(2, 512)).square().mean().backward()
        optimizer.step()
        states = model.state_dict()  # held all the while
        measure(
            {
                "torch.save": lambda: torch.save(states, folder / "model.pt"),
                "legacy": lambda: torch.save(states, folder / "old.pt", _use_new_zipfile_serialization=False),
                "optimizer": lambda: torch.save(optimizer.state_dict(), folder / "optimizer.pt"),
                "save_file": lambda: safetensors.torch.save_file(states, folder / "file.safetensors"),
                "save_model": lambda: safetensors.torch.save_model(model, str(folder / "model.safetensors")),
            }
        )
        for mapped in (True, False):
            model.load_state_dict(torch.load(folder / "model.pt", mmap=mapped))
        optimizer.load_state_dict(torch.load(folder / "optimizer.pt"))


def write_pretrained(folder, nvme):
    with zinf.Engine(host_memory=BUDGET, nvme=nvme) as engine:
        with engine.init():
            model = hugging_face()
        measure({"save_pretrained": lambda: model.save_pretrained(folder / "pretrained")})


if __name__ == "__main__":
    torch.set_num_threads(2)
    write_blocks(Path(sys.argv[1]), sys.argv[2])
    write_pretrained(Path(sys.argv[1]), sys.argv[2])
