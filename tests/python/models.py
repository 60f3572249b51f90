"""The models of the one-hash matrix: unmodified PyTorch and Hugging Face, tiny.

A case says how a model is built, what its batches are and how a step goes.
Sizes are odd on purpose (no multiple of a page or a vector). Most models have
a weight above 64 KiB, and the largest one is a small part of the whole: it fits
several times (weight, gradient, moments) where the whole must not.
"""

import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

VOCAB = 331
NUM_CLASSES = 10


@dataclass(frozen=True)
class Case:
    """One row of the matrix."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], Any]  # generator, number of the micro-batch
    loss: Callable[[nn.Module, Any], torch.Tensor]
    wrap: Callable[[nn.Module], Any] = lambda model: model  # what the loop calls instead of the model
    context: Callable[[], AbstractContextManager] = nullcontext  # around the forward pass
    micro_batches: int = 1
    clip_norm: float | None = None  # torch's clip_grad_norm_
    max_grad_norm: float | None = None  # zinf.AdamW's; the plain run uses torch's clip_grad_norm_
    loss_scale: float | None = None  # the first scale of a GradScaler
    has_master: bool = False  # narrow weights: the plain run uses zinf.AdamW as well
    uses_all: bool = True  # every weight is used in every step
    peak_below_weights: bool = True  # no operator needs most of the weights at once
    raw_access: bool = False  # compiled code takes raw pointers, which the audit refuses


def transformers():
    """Imported late: it takes seconds, and most tests do without it."""
    import transformers

    return transformers


def image_batch(generator, _):
    images = torch.randn(4, 3, 16, 16, generator=generator)
    return images, torch.randint(NUM_CLASSES, (4,), generator=generator)


def vector_batch(generator, _):
    return torch.randn(6, 72, generator=generator), torch.randn(6, 72, generator=generator)


def sequence_batch(generator, _):
    return torch.randn(3, 9, 72, generator=generator), torch.randn(3, 9, 72, generator=generator)


def token_batch(generator, _):
    return torch.randint(VOCAB, (2, 16), generator=generator)


def class_loss(model, batch):
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def regression_loss(model, batch):
    inputs, targets = batch
    return F.mse_loss(model(inputs).to(targets.dtype), targets)


def next_token_loss(model, tokens):
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def labelled_loss(model, tokens):
    """The loss that Hugging Face models compute themselves."""
    return model(input_ids=tokens, labels=tokens).loss


def build_mlp():
    blocks = [
        nn.Sequential(nn.Linear(72, 233), nn.GELU(), nn.LayerNorm(233), nn.Linear(233, 72)) for _ in range(5)
    ]
    return nn.Sequential(*blocks)


class ResidualBlock(nn.Module):
    def __init__(self, channels_in, channels_out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def build_resnet():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1),
        ResidualBlock(16, 16, 1),
        ResidualBlock(16, 44, 2),
        ResidualBlock(44, 44, 2),
        *[ResidualBlock(44, 44, 1) for _ in range(3)],
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(44, NUM_CLASSES),
    )


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.cells = kind(72, 80, num_layers=2, batch_first=True, dropout=0.1, **options)
        self.head = nn.LazyLinear(72)
        self.head(self.cells(torch.zeros(1, 2, 72))[0])  # gives the head its size

    def forward(self, x):
        return self.head(self.cells(x)[0])


class Seq2Seq(nn.Module):
    """nn.Transformer, which is a torso only, with causal and padding masks."""

    def __init__(self):
        super().__init__()
        self.torso = nn.Transformer(72, 4, 2, 2, 232, dropout=0.1, batch_first=True)

    def forward(self, x):
        causal = self.torso.generate_square_subsequent_mask(x.shape[1])
        padding = torch.zeros(x.shape[:2])
        padding[0, -2:] = float("-inf")
        return self.torso(x, x.flip(1), tgt_mask=causal, tgt_is_causal=True, src_key_padding_mask=padding)


class CrossAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attention = nn.MultiheadAttention(72, 4, batch_first=True, dropout=0.1)
        self.cross_attention = nn.MultiheadAttention(
            72, 6, kdim=72, vdim=72, batch_first=True, add_bias_kv=True
        )
        self.widening = nn.Linear(72, 233)
        self.narrowing = nn.Linear(233, 72)

    def forward(self, x):
        attended, _ = self.self_attention(x, x, x, need_weights=False)
        crossed, weights = self.cross_attention(attended, x, x)
        return self.narrowing(F.gelu(self.widening(crossed))) + weights.mean()


class TiedLanguageModel(nn.Module):
    """One weight used as a table, as a layer's parameter and by itself."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCAB, 72)
        layer = nn.TransformerEncoderLayer(72, 4, 150, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 5)
        self.head = nn.Linear(72, VOCAB)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        hidden = self.body(self.table(tokens))
        return self.head(hidden) + 0.1 * F.linear(hidden.tanh(), self.table.weight)


def build_normed():
    """Both weight_norm implementations, spectral_norm with its buffers, orthogonal."""
    layers = []
    for _ in range(4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            hooked = nn.utils.weight_norm(nn.Linear(72, 233))
        layers += [
            hooked,
            nn.Tanh(),
            parametrizations.weight_norm(nn.Linear(233, 72)),
            parametrizations.spectral_norm(nn.Linear(72, 72)),
            nn.Tanh(),
            parametrizations.orthogonal(nn.Linear(72, 72)),
        ]
    return nn.Sequential(*layers)


class Branching(nn.Module):
    """Depth, order and choice of branches change with every batch."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(72, 233), nn.ReLU(), nn.Linear(233, 72)) for _ in range(5)
        )
        self.gate = nn.Parameter(torch.full((5,), 0.5))

    def forward(self, x, route):
        for branch in route:
            x = x + self.gate[branch] * self.branches[branch](x)
        return x


def branching_batch(generator, number):
    inputs, targets = vector_batch(generator, number)
    length = int(torch.randint(1, 5, (), generator=generator))
    return inputs, targets, torch.randint(5, (length,), generator=generator).tolist()


def branching_loss(model, batch):
    inputs, targets, route = batch
    return F.mse_loss(model(inputs, route), targets)


def build_gpt2():
    hf = transformers()
    config = hf.GPT2Config(n_layer=4, n_head=4, n_embd=64, vocab_size=VOCAB, n_positions=32, use_cache=False)
    return hf.AutoModelForCausalLM.from_config(config)


def build_llama():
    hf = transformers()
    config = hf.LlamaConfig(
        num_hidden_layers=4,
        hidden_size=64,
        intermediate_size=170,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=32,
        use_cache=False,
    )
    return hf.AutoModelForCausalLM.from_config(config)


def build_bert():
    hf = transformers()
    config = hf.BertConfig(
        num_hidden_layers=5,
        hidden_size=64,
        intermediate_size=130,
        num_attention_heads=4,
        vocab_size=VOCAB,
        max_position_embeddings=32,
    )
    return hf.AutoModelForMaskedLM.from_config(config)


def build_t5():
    hf = transformers()
    config = hf.T5Config(
        num_layers=2,
        d_model=64,
        d_ff=130,
        num_heads=4,
        d_kv=16,
        vocab_size=VOCAB,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return hf.AutoModelForSeq2SeqLM.from_config(config)


def build_vit():
    hf = transformers()
    config = hf.ViTConfig(
        num_hidden_layers=4,
        hidden_size=72,
        intermediate_size=233,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        num_labels=NUM_CLASSES,
    )
    return hf.AutoModelForImageClassification.from_config(config)


def vit_loss(model, batch):
    images, labels = batch
    return model(pixel_values=images, labels=labels).loss


def build_mixtral():
    hf = transformers()
    config = hf.MixtralConfig(
        num_hidden_layers=4,
        hidden_size=64,
        intermediate_size=52,  # grouped_mm wants rows of a multiple of 16 bytes
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=32,
        num_local_experts=4,
        output_router_logits=True,
        use_cache=False,
    )
    return hf.AutoModelForCausalLM.from_config(config)


def build_mamba():
    hf = transformers()
    config = hf.MambaConfig(
        num_hidden_layers=6, hidden_size=64, state_size=8, vocab_size=VOCAB, use_cache=False
    )
    return hf.AutoModelForCausalLM.from_config(config)


def short_token_batch(generator, _):
    return torch.randint(VOCAB, (2, 8), generator=generator)


def checkpointing(use_reentrant):
    """Hugging Face's own switch for torch.utils.checkpoint."""

    def build():
        model = build_gpt2()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        if use_reentrant:
            model.enable_input_require_grads()
        return model

    return build


def cpu_autocast(dtype):
    return lambda: torch.autocast("cpu", dtype=dtype)


def half_batch(generator, number):
    inputs, targets = vector_batch(generator, number)
    return inputs.half(), targets


MLP = Case("mlp", build_mlp, vector_batch, regression_loss)
GPT2 = Case("gpt2", build_gpt2, token_batch, labelled_loss)
LLAMA = Case("llama", build_llama, token_batch, labelled_loss)

MODELS = [
    MLP,
    Case("resnet", build_resnet, image_batch, class_loss),
    # A recurrent operator takes the weights of all layers at once.
    Case("lstm", lambda: Recurrent(nn.LSTM), sequence_batch, regression_loss, peak_below_weights=False),
    Case("gru", lambda: Recurrent(nn.GRU), sequence_batch, regression_loss, peak_below_weights=False),
    Case("transformer", Seq2Seq, sequence_batch, regression_loss),
    Case(
        "attention",
        lambda: nn.Sequential(*[CrossAttention() for _ in range(3)]),
        sequence_batch,
        regression_loss,
    ),
    Case("tied", TiedLanguageModel, token_batch, next_token_loss),
    Case("normed", build_normed, vector_batch, regression_loss),
    Case("branching", Branching, branching_batch, branching_loss, uses_all=False),
    GPT2,
    LLAMA,
    Case("bert", build_bert, token_batch, labelled_loss),
    Case("t5", build_t5, token_batch, labelled_loss),
    Case("vit", build_vit, image_batch, vit_loss),
    Case("mixtral", build_mixtral, token_batch, labelled_loss),
    Case("mamba", build_mamba, short_token_batch, labelled_loss),
]

VARIANTS = [
    replace(GPT2, name="gpt2-checkpoint", build=checkpointing(use_reentrant=False)),
    replace(GPT2, name="gpt2-checkpoint-reentrant", build=checkpointing(use_reentrant=True)),
    replace(GPT2, name="gpt2-autocast", context=cpu_autocast(torch.bfloat16)),
    replace(GPT2, name="gpt2-accumulate", micro_batches=3),
    replace(GPT2, name="gpt2-clip", clip_norm=0.5),
    replace(GPT2, name="gpt2-max-norm", max_grad_norm=0.5),
    replace(MLP, name="mlp-compile", wrap=torch.compile, raw_access=True, peak_below_weights=False),
    replace(GPT2, name="gpt2-compile", wrap=torch.compile, raw_access=True, peak_below_weights=False),
    replace(LLAMA, name="llama-bf16", build=lambda: build_llama().bfloat16(), has_master=True),
    # The first scales overflow fp16, so some steps are skipped.
    replace(
        MLP,
        name="mlp-fp16",
        build=lambda: build_mlp().half(),
        batch=half_batch,
        loss_scale=2.0**26,
        has_master=True,
    ),
    replace(MLP, name="mlp-fp16-autocast", context=cpu_autocast(torch.float16), loss_scale=2.0**26),
]

CASES = {case.name: case for case in MODELS + VARIANTS}
