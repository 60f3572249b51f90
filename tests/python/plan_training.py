"""Small models, and their training within the budgets that a plan has named.

As a script it reads runs (JSON) from its input, trains each for two steps and prints what it held.
"""

import json
import sys
from dataclasses import asdict, dataclass

import torch
import zinf
from models import transformers
from torch import nn
from torch.nn import functional as F
from twins import budget


@dataclass(frozen=True)
class Small:
    """vocabulary 0: an MLP."""

    layers: int
    width: int
    vocabulary: int
    batch: int
    tokens: int

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        if self.vocabulary == 0:
            return nn.Sequential(*[self._block() for _ in range(self.layers)])
        hf = transformers()
        config = hf.GPT2Config(**self.config())
        return hf.AutoModelForCausalLM.from_config(config)

    def _block(self) -> nn.Module:
        width = self.width
        return nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))

    def config(self) -> dict:
        return {
            "n_layer": self.layers,
            "n_head": 4,
            "n_embd": self.width,
            "vocab_size": self.vocabulary,
            "n_positions": self.tokens,
            "use_cache": False,
        }

    def loss(self, model: nn.Module) -> torch.Tensor:
        if self.vocabulary == 0:
            rows = torch.randn(self.batch * self.tokens, self.width)
            return F.mse_loss(model(rows), rows)
        tokens = torch.randint(self.vocabulary, (self.batch, self.tokens))
        return model(input_ids=tokens, labels=tokens).loss


def saved_bytes(small: Small) -> int:
    """What a forward pass leaves for backward, besides the weights."""
    model = small.build()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        small.loss(model)
    return sum(saved.values())


def train(small: Small, host_memory: int, nvme: str) -> dict:
    with zinf.Engine(host_memory=budget(host_memory), nvme=nvme) as engine:
        with engine.init():
            model = small.build()
        optimizer = zinf.AdamW(model.parameters(), lr=1e-3, update="backward")
        for _ in range(2):
            small.loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        stats = engine.stats()
    return {name: stats[name] for name in ("host_limit_bytes", "host_peak_bytes", "nvme_bytes")}


def main() -> None:
    torch.set_num_threads(2)
    for run in json.load(sys.stdin):
        small = Small(**run["small"])
        try:
            held = train(small, run["host_memory"], run["nvme"])
        except zinf.BudgetError as error:
            held = {"refused": str(error)}
        print(json.dumps({"small": asdict(small), "host_memory": run["host_memory"], **held}), flush=True)


if __name__ == "__main__":
    main()
