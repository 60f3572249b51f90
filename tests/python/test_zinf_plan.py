"""Plans: the command as a person meets it, engine.plan(), and whether engines train within what they say."""

import json
import math
import os
import pathlib
import random
import re
import struct
import subprocess
import sys
from dataclasses import asdict

import pytest
import zinf
from models import build_mlp
from plan_training import Small, saved_bytes
from torch import nn
from twins import budget

ZINF = os.environ.get("ZINF_COMMAND", pathlib.Path(sys.executable).parent / "zinf")
SEVEN_BILLION = "--layers 32 --hidden 4096 --heads 32 --vocab 32000 --cluster rtx4090-workstation --batch 4"
TIERS = ["device", "host", "NVMe"]
MIB = 1 << 20


def plan(*arguments: object) -> subprocess.CompletedProcess:
    command = [str(ZINF), "plan", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def json_plan(*arguments: object) -> dict:
    run = plan(*arguments, "--json")
    assert run.returncode in (0, 1), run.stderr
    return json.loads(run.stdout)


def test_the_table_says_what_goes_where_and_how_fast():
    run = plan(*SEVEN_BILLION.split(), "--tokens", "1e9", "--price", "0.4")
    assert run.returncode == 0, run.stderr
    for words in ("6.57 billion parameters", "optimizer states", "there is", "least", "tokens/s", "bound by",
                  "bytes/parameter", "1 billion tokens take", "and cost"):  # fmt: skip
        assert words in run.stdout


def test_json_has_the_members_that_are_documented():
    report = json_plan(*SEVEN_BILLION.split(), "--tokens", "1e9")
    common = {"model", "params", "cluster", "devices", "batch", "micro_batches", "precision", "fits",
              "weights_on", "states_on", "activations_on", "memory", "tiers"}  # fmt: skip
    fitting = {"step_seconds", "compute_seconds", "efficiency", "tokens_per_second", "tflops_per_device",
               "bound_by", "written_bytes_per_drive_day", "kept_bytes", "lanes", "projected",
               "seconds_to_tokens", "cost"}  # fmt: skip
    assert report.keys() == common | fitting
    assert [tier["tier"] for tier in report["tiers"]] == TIERS
    for tier in report["tiers"]:
        assert tier["least_bytes"] <= tier["taken_bytes"] <= tier["capacity_bytes"]
    short = json_plan(*SEVEN_BILLION.split(), "--host-memory", "1GB")
    assert short.keys() == common | {"shortages", "helps"}
    assert [one["tier"] for one in short["shortages"]] == ["host"]


def printed_least(text: str, tier: str) -> str:
    line = next(line for line in text.splitlines() if re.match(rf" +{tier} +[\d.]+ [KMGT]?i?B .*B$", line))
    return " ".join(line.split()[-2:])


@pytest.mark.parametrize(("tier", "option"), [("device", "--device-memory"), ("host", "--host-memory")])
def test_the_printed_least_is_enough_and_less_is_not(tier, option):
    arguments = SEVEN_BILLION.split()
    number, unit = printed_least(plan(*arguments).stdout, tier).split()
    assert plan(*arguments, option, f"{number}{unit}").returncode == 0
    assert plan(*arguments, option, f"{0.95 * float(number):.4f}{unit}").returncode == 1


def test_what_does_not_fit_is_told_with_what_would_be_enough():
    arguments = [*SEVEN_BILLION.split(), "--host-memory", "1GB"]
    run = plan(*arguments)
    assert run.returncode == 1
    assert "host: " in run.stdout
    assert "are missing" in run.stdout
    helps = re.findall(r"of ([\d.]+) ([KMGT]iB) \((--[a-z-]+)\)", run.stdout)
    assert "--host-memory" in [option for *_, option in helps]
    for number, unit, option in helps:
        rest = arguments[: -2 if option == "--host-memory" else None]
        assert plan(*rest, option, f"{number}{unit}").returncode == 0, option


def test_more_memory_is_never_slower():
    sizes = ",".join(f"{size / 10}GB" for size in range(92, 108, 3))
    sweep = json_plan(*SEVEN_BILLION.split(), "--what-if", f"host_memory={sizes}")["sweep"]
    seconds = [one["step_seconds"] for one in sweep]
    assert seconds == sorted(seconds, reverse=True)


def test_a_sweep_of_which_nothing_fits_fails():
    assert plan(*SEVEN_BILLION.split(), "--what-if", "host_memory=1MB,40GB").returncode == 0
    run = plan(*SEVEN_BILLION.split(), "--what-if", "host_memory=1MB,2MB")
    assert run.returncode == 1
    assert run.stdout.count("does not fit") == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--layers 4 --hidden 64 --cluster dgx-a10", "did you mean dgx-a100?"),
        ("--layers 4 --hidden 64 --cluster elephant", "known are dgx2-v100"),
        ("--layers 0 --hidden 64 --cluster gh200", "no layers"),
        ("--layers -1 --hidden 64 --cluster gh200", "--layers -1: it cannot be negative"),
        ("--layers 4 --hidden 64 --heads 33 --cluster gh200", "a model with 33 heads that do not divide its"),
        ("--layers 99999999999999999999 --hidden 64 --cluster gh200", "10^18"),
        ("--layers 9999999999 --hidden 9999999999 --cluster gh200", "more than 10^18 parameters"),
        ("--layers 4 --hidden 64 --cluster gh200 --batch 1e30", "must be from 0 to 10^18"),
        ("--layers 4 --hidden 64 --cluster gh200 --host-memory 99999999999999999999GB", "64 bits"),
        ("--layers 4 --hidden 64 --cluster gh200 --nodes 0", "nodes must be from 1"),
        ("config.json --layers 4 --cluster gh200", "contradict"),
        ("--paper --what-if batch=1,2", "--paper prints tables"),
        ("--layers 4 --hidden 64 --cluster gh200 --what-if batc=1", "did you mean batch?"),
    ],
)
def test_bad_input_is_told(arguments, words):
    run = plan(*arguments.split())
    assert run.returncode == 2, run.stdout
    assert words in run.stderr
    assert run.stdout == ""


def safetensors_of(model: nn.Module, path: pathlib.Path) -> pathlib.Path:
    """Only the header, which is all that a plan reads."""
    tensors = {name: {"dtype": "F32", "shape": list(p.shape)} for name, p in model.named_parameters()}
    header = json.dumps(tensors).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    return path


def test_an_engine_says_what_the_command_says(tmp_path):
    with zinf.Engine() as engine:
        model = engine.adopt(build_mlp())
        ours = engine.plan(batch=4, seq=256, cluster="dgx-a100", device_memory="24GB")
    file = safetensors_of(model, tmp_path / "model.safetensors")
    theirs = json_plan(file, "--batch", 4, "--seq", 256, "--cluster", "dgx-a100", "--device-memory", "24GB",
                       "--precision", "fp32")  # fmt: skip
    assert ours.pop("model") == "Sequential"
    theirs.pop("model")
    assert ours == theirs
    assert ours.fits
    assert "bound by" in str(ours)


def test_this_machine_is_planned_with_the_budgets_of_the_engine(nvme):
    limit = budget(64 * MIB)
    with zinf.Engine(host_memory=limit, nvme=f"{nvme}:1GB") as engine:
        model = engine.adopt(build_mlp())
        made = engine.plan(batch=2, seq=16)
        larger = engine.plan(batch=2, seq=16, host_memory="1GB")
    assert made["params"] == sum(parameter.numel() for parameter in model.parameters())
    capacities = {tier["tier"]: tier["capacity_bytes"] for tier in made["tiers"]}
    assert capacities == {"device": 0, "host": limit, "NVMe": 1e9}
    assert made["precision"] == "fp32"
    assert {tier["tier"]: tier["capacity_bytes"] for tier in larger["tiers"]}["host"] == 1e9


@pytest.fixture
def managing():
    """An engine with a model."""
    with zinf.Engine() as engine:
        model = engine.adopt(build_mlp())
        yield engine
        del model


def test_an_engine_sweeps(managing):
    sweep = managing.plan(cluster="gh200", what_if="batch=1,2,4", tokens=1e9, price=2)
    assert [one["batch"] for one in sweep["sweep"]] == [1, 2, 4]
    assert all(one["cost"] > 0 for one in sweep["sweep"])
    assert str(sweep).count("batch=") == 3
    assert sweep.fits


def test_models_without_numbered_layers_are_planned():
    with zinf.Engine() as engine:
        model = engine.adopt(nn.Linear(72, 36).bfloat16())
        made = engine.plan(cluster="gh200")
    assert made["params"] == sum(parameter.numel() for parameter in model.parameters())
    assert made["precision"] == "bf16-split"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"cluster": "dgx-a10"}, "did you mean dgx-a100?"),
        ({"cluster": "gh200", "device_memry": "4GB"}, "did you mean device_memory?"),
        ({"cluster": "gh200", "device_memory": "4G"}, r'"4GB" \(decimal\)'),
        ({"cluster": "gh200", "batch": 0}, "the batch must be above 0"),
        ({"cluster": "gh200", "precision": "int4"}, "unknown precision"),
        ({"cluster": "gh200", "what_if": "x"}, "write a name and values"),
    ],
)
def test_an_engine_refuses_what_makes_no_sense(managing, arguments, words):
    with pytest.raises(ValueError, match=words):
        managing.plan(**arguments)


def test_an_engine_without_a_model_has_no_plan():
    with zinf.Engine() as engine:
        with pytest.raises(ValueError, match="manages no parameters yet"):
            engine.plan(cluster="gh200")
    with pytest.raises(RuntimeError, match="closed"):
        engine.plan(cluster="gh200")


def some_small(seed: int) -> Small:
    chance = random.Random(seed)
    return Small(
        layers=chance.choice([1, 2, 3, 6, 9]),
        width=4 * chance.choice([8, 21, 48]),
        vocabulary=chance.choice([0, 331, 5000, 20000]),
        batch=chance.choice([1, 2, 5]),
        tokens=chance.choice([8, 33, 64]),
    )


def host_plan(small: Small, folder: pathlib.Path, saved: int, host_bytes: float) -> dict:
    """On a machine without a device, for the engine's own way to train: everything in one micro-batch."""
    cluster = {"name": "here", "on_host": True, "host_bytes": host_bytes, "nvme_bytes": 1e12,
               "peak_flops": 1e12, "host_memory_rate": 1e10, "nvme_read_rate": 1e9,
               "nvme_write_rate": 1e9}  # fmt: skip
    (folder / "cluster.json").write_text(json.dumps(cluster))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **small.config()}))
    model = folder if small.vocabulary else safetensors_of(small.build(), folder / "model.safetensors")
    return json_plan(model, "--cluster", folder / "cluster.json", "--batch", small.batch,
                     "--seq", small.tokens, "--micro-batches", 1, "--precision", "fp32", "--no-recompute",
                     "--activation-bytes", saved)  # fmt: skip


def runs_of(small: Small, folder: pathlib.Path, nvme: str) -> list[dict]:
    """With the least host memory, with enough for everything, and between them."""
    saved = saved_bytes(small)
    roomy = next(tier for tier in host_plan(small, folder, saved, 1e12)["tiers"] if tier["tier"] == "host")
    least, most = math.ceil(roomy["least_bytes"]), math.ceil(roomy["taken_bytes"])
    sizes = [least, (least + most) // 2, most]
    for size in sizes:
        assert host_plan(small, folder, saved, size)["fits"]
    return [{"small": asdict(small), "host_memory": size, "nvme": nvme} for size in sizes]


def test_what_a_plan_accepts_the_engine_trains_within_its_budget(tmp_path, nvme):
    runs = [run for seed in range(12) for run in runs_of(some_small(seed), tmp_path, nvme)]
    runs.sort(key=lambda run: run["host_memory"])  # a process knows its highest peak alone
    script = pathlib.Path(__file__).with_name("plan_training.py")
    child = subprocess.run([sys.executable, script], input=json.dumps(runs), capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    held = [json.loads(line) for line in child.stdout.splitlines()]
    assert len(held) == len(runs)
    for one in held:
        assert "refused" not in one, one
        assert one["host_peak_bytes"] <= one["host_limit_bytes"], one
