"""The models that the scripts of this folder train, and their data."""

import glob
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

VOCABULARY = 16384  # of the models that are not GPT-2


@dataclass(frozen=True)
class Gpt:
    """HF's GPT-2, tied."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 50257
    dropout: float = 0.1

    def make(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(n_layer=self.layers, n_embd=self.width, n_head=self.heads,
                            vocab_size=self.vocabulary, use_cache=False, resid_pdrop=self.dropout,
                            embd_pdrop=self.dropout, attn_pdrop=self.dropout)  # fmt: skip
        return GPT2LMHeadModel(config)


SIZES = {
    "2M": Gpt(2, 32, 2),
    "124M": Gpt(12, 768, 12),
    "153M": Gpt(12, 1024, 16, vocabulary=1024, dropout=0.0),  # no tensor is much larger than others
    "640M": Gpt(12, 2048, 16, vocabulary=VOCABULARY, dropout=0.0),
    "1.3B": Gpt(24, 2048, 16),
    "2.6B": Gpt(32, 2560, 20),
}


class Bottleneck(nn.Module):
    def __init__(self, before: int, width: int, stride: int):
        super().__init__()
        after = 4 * width
        self.path = nn.Sequential(
            nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after))  # fmt: skip
        same = before == after and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.path(images) + self.skip(images))


class Cnn(nn.Module):
    """As large as ResNet-50."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
                                   nn.MaxPool2d(3, 2, 1)]  # fmt: skip
        before = 64
        for stage, count in enumerate((3, 4, 6, 3)):
            width = 64 << stage
            for index in range(count):
                layers.append(Bottleneck(before, width, 2 if stage and not index else 1))
                before = 4 * width
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.body(images)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 1024)
        self.body = nn.LSTM(1024, 1024, num_layers=4, batch_first=True)
        self.head = nn.Linear(1024, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(tokens))[0])


def _moe() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1024,
                           num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
                           num_local_experts=8, num_experts_per_tok=2, use_cache=False)  # fmt: skip
    return MixtralForCausalLM(config)


OTHERS: dict[str, Callable[[], nn.Module]] = {"cnn": Cnn, "lstm": Lstm, "moe": _moe}
NAMES = (*SIZES, *OTHERS)


def make_model(name: str) -> nn.Module:
    return SIZES[name].make() if name in SIZES else OTHERS[name]()


def batches(count: int, length: int) -> Iterator[torch.Tensor]:
    """Rows of bytes of Python's library, as tokens."""
    files = sorted(glob.glob(os.path.join(sysconfig.get_paths()["stdlib"], "*.py")))
    text = torch.frombuffer(bytearray(b"".join(open(f, "rb").read() for f in files)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    while True:
        begins = torch.randint(len(text) - length, (count,), generator=generator)
        yield torch.stack([text[begin : begin + length] for begin in begins]).long()


def losses(name: str, model: nn.Module, count: int, length: int) -> Iterator[torch.Tensor]:
    """The loss of a forward pass on the next batch, each time it is asked."""
    cross_entropy = nn.functional.cross_entropy
    if name == "cnn":
        generator = torch.Generator().manual_seed(0)
        while True:
            images = torch.randn(4 * count, 3, 128, 128, generator=generator)
            labels = torch.randint(1000, (4 * count,), generator=generator)
            yield cross_entropy(model(images), labels)
    for rows in batches(count, length):
        if name == "lstm":
            yield cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        else:
            yield model(rows, labels=rows).loss
