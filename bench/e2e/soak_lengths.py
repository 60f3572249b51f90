"""Random lengths at exactly what engine.probe() names: what fits once fits for ever.

    python bench/e2e/soak_lengths.py --nvme DIRECTORY [--cases mlp-10,gpt2-100] [--places ram,nvme,backward]
        [--steps 3000] [--before OTHER/build/release/python] [--out bench/reports]

A case is probed at its largest length in a process of its own, then trained there with random lengths up to
that one, with the host_memory that the probe named. --before is the package folder of another build tree,
whose probe stands beside (of a second step: then the optimizer's states are there). A refusal ends with exit
code 1, and so does a probe that names more than 3 % and 8 MiB beyond the other one.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import zinf
from report import Report, Section, report_path
from torch import nn
from torch.nn import functional as F

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
MIB = 1 << 20
VOCABULARY = 512
ROWS, LENGTH = 4, 256  # of the model that is drawn
PLACES = {
    "ram": {},
    "nvme": {"update": "step"},
    "clipped": {"update": "step", "max_grad_norm": 1.0},
    "backward": {"update": "backward"},
}
COLUMNS = ("model", "place", "probe MiB (before)", "peak MiB", "steps", "s/step", "refused")
NOTE = """\
host_memory is the number of bytes that the probe of the largest length named; lengths are drawn evenly from \
1 to that one. The peak is that of the budget."""


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    rows: int
    length: int  # the largest
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Body(nn.Module):
    """Embedding, layers over (rows, length, width), head."""

    def __init__(self, width: int, *layers: nn.Module):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            y = layer(x)
            x = x + (y[0] if isinstance(y, tuple) else y)
        return self.head(x)


class Along(nn.Module):
    """A convolution along the length."""

    def __init__(self, width: int, groups: int):
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1, groups=groups)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.conv(x.transpose(1, 2))).transpose(1, 2)


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))


def next_token(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), x.roll(-1, 1).flatten())


def labelled(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(input_ids=x, labels=x).loss


def body(rows: int, length: int, width: int, *layers: Callable[[], nn.Module]) -> Case:
    return Case(lambda: Body(width, *[layer() for layer in layers]), rows, length, next_token)


def hugging_face(model: str, config: str, rows: int, length: int, **options: int) -> Case:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(vocab_size=VOCABULARY, **options))

    return Case(build, rows, length, labelled)


def gpt2(rows: int, length: int, width: int, layers: int) -> Case:
    return hugging_face("GPT2LMHeadModel", "GPT2Config", rows, length, n_embd=width, n_layer=layers,
                        n_head=4, n_positions=length)  # fmt: skip


def llama(rows: int, length: int, width: int, layers: int) -> Case:
    return hugging_face("LlamaForCausalLM", "LlamaConfig", rows, length, hidden_size=width,
                        intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=4,
                        num_key_value_heads=2)  # fmt: skip


def frozen_table(rows: int, length: int, width: int, entries: int) -> Case:
    """Few trained weights behind a table that is not."""

    def build() -> nn.Module:
        model = Body(width, mlp(width), Along(width, 1), mlp(width))
        model.embedding = nn.Embedding(entries, width).requires_grad_(False)
        return model

    return Case(build, rows, length, next_token)


def small_config(kind: str) -> object:
    """Of a causal language model of transformers."""
    import transformers

    return transformers.AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH, pad_token_id=0,
        bos_token_id=1, eos_token_id=2)  # fmt: skip


def draw(seed: int) -> str:
    """The first causal language model, in the order of a die, that the small shape fits."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kinds = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    random.Random(seed).shuffle(kinds)
    for kind in kinds:
        try:
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(small_config(kind))
            if sum(parameter.numel() for parameter in model.parameters()) > 20_000_000:
                continue
            model = transformers.AutoModelForCausalLM.from_config(small_config(kind))
            labelled(model, torch.randint(VOCABULARY, (ROWS, LENGTH))).backward()
        except Exception:  # it wants another shape, or other inputs
            continue
        return kind
    raise SystemExit("no model of transformers fits the shape")


def named(kind: str) -> Case:
    def build() -> nn.Module:
        import transformers

        return transformers.AutoModelForCausalLM.from_config(small_config(kind))

    return Case(build, ROWS, LENGTH, labelled)


def lstm(width: int) -> Callable[[], nn.Module]:
    return lambda: nn.LSTM(width, width, batch_first=True)


CASES = {  # the number is about the MiB of host_memory with everything in memory
    "mlp-10": body(2, 128, 64, *[lambda: mlp(64)] * 2),
    "gpt2-10": gpt2(2, 128, 64, 2),
    "llama-10": llama(2, 128, 64, 2),
    "conv-30": body(4, 512, 96, *[lambda: Along(96, 1)] * 4),
    "lstm-30": body(8, 48, 256, lstm(256), lstm(256)),
    "gpt2-100": gpt2(4, 256, 128, 4),
    "llama-100": llama(4, 256, 128, 4),
    "mlp-500": body(8, 512, 1024, *[lambda: mlp(1024)] * 6),
    "conv-700": body(64, 1024, 64, *[lambda: Along(64, 64)] * 8),
    "table-2000": frozen_table(8, 512, 128, 3 << 20),
}


def case_of(name: str) -> Case:
    return CASES[name] if name in CASES else named(name)


def train(spec: dict) -> dict:
    """In a process of its own: the probe, or the run."""
    torch.manual_seed(0)
    case = case_of(spec["case"])
    options = PLACES[spec["place"]]
    with zinf.Engine(host_memory=spec["host_memory"], nvme=spec["nvme"] if options else None) as engine:
        with engine.init():
            model = case.build()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = zinf.AdamW(trained, lr=1e-4, **options)

        def backward(length: int) -> None:
            case.loss(model, torch.randint(VOCABULARY, (case.rows, length))).backward()

        if spec["first"]:
            backward(1)
            optimizer.step()
            optimizer.zero_grad()
        if spec["host_memory"] is None:
            return {"least": engine.probe(lambda: backward(case.length)).least_bytes}
        lengths = random.Random(spec["seed"])
        since = time.monotonic()
        done, refused = 0, None
        while done < spec["steps"] and refused is None:
            length = lengths.randint(1, case.length)
            try:
                backward(length)
                optimizer.step()
                optimizer.zero_grad()
                done += 1
            except zinf.BudgetError as error:
                refused = f"length {length}: {error}"
        seconds = (time.monotonic() - since) / max(done, 1)
        peak = engine.stats()["host_peak_bytes"]
        return {"steps": done, "refused": refused, "seconds": seconds, "peak": peak}


def run(spec: dict, package: str | None = None) -> dict:
    environment = os.environ | ({"PYTHONPATH": package} if package else {})
    command = [sys.executable, os.path.abspath(__file__), "--one", json.dumps(spec)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"{spec}: exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--nvme", default=tempfile.gettempdir(), help="a directory on the disk to use")
    parser.add_argument("--cases", default=",".join([*CASES, "drawn"]), help=f"any of {(*CASES, 'drawn')}")
    parser.add_argument("--places", default="ram,nvme,backward", help=f"any of {tuple(PLACES)}")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0, help="of the lengths, and of the model that is drawn")
    parser.add_argument("--before", help="the folder of another build's package, for its probe")
    parser.add_argument("--out", help="a file for the report, or a directory for one")
    args = parser.parse_args()
    args.out = report_path(args.out, "lengths")
    return args


def main() -> None:
    args = arguments()
    if args.one:
        print(json.dumps(train(json.loads(args.one))))
        return
    table = Section("Random lengths at exactly what the probe names", NOTE, COLUMNS)
    report = Report("What fits once fits for ever", args.out, [table])
    for name in args.cases.split(","):
        kind = draw(args.seed) if name == "drawn" else name
        for place in args.places.split(","):
            spec = {"case": kind, "place": place, "nvme": args.nvme, "steps": args.steps, "seed": args.seed,
                    "first": False, "host_memory": None}  # fmt: skip
            before = run({**spec, "first": True}, args.before)["least"] if args.before else None
            least = run(spec)["least"]
            result = run({**spec, "host_memory": least})
            if result["refused"]:
                report.failures.append(f"{kind} {place}, step {result['steps'] + 1}, {result['refused']}")
            if before is not None and least > 1.03 * before + 8 * MIB:
                report.failures.append(f"{kind} {place}: the probe names {least}, before {before}")
            beside = f" ({before / MIB:.1f})" if before is not None else ""
            label = f"{kind} (drawn)" if name == "drawn" else kind
            table.rows.append((label, place, f"{least / MIB:.1f}{beside}", f"{result['peak'] / MIB:.1f}",
                               str(result["steps"]), f"{result['seconds']:.4f}",
                               "yes" if result["refused"] else "never"))  # fmt: skip
            print(" | ".join(table.rows[-1]), flush=True)
            report.write()
    for failure in report.failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    raise SystemExit(1 if report.failures else 0)


if __name__ == "__main__":
    main()
