"""The C++ API: an installed zinf, a project outside the tree, the bits and the checkpoints of Python."""

import os
import pathlib
import re
import subprocess

import numpy
import pytest
import torch
import torch.nn.functional as F
import zinf
from torch import nn
from twins import assert_same_model

ROOT = pathlib.Path(__file__).parents[2]
BUILD = pathlib.Path(os.environ.get("ZINF_BUILD", ROOT / "build/release"))
CPP_RUN = BUILD / "tests/cpp_run"
TEXT = ROOT / "README.md"
STEPS = 3
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def run(*command: object, **options) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """examples/cpp, built against a zinf that was installed elsewhere."""
    if not (BUILD / "build.ninja").exists():
        pytest.skip("there is no build tree to install from")
    prefix = tmp_path_factory.mktemp("prefix")
    build = tmp_path_factory.mktemp("build")
    run("cmake", "--install", BUILD, "--prefix", prefix)
    # Nothing of the source tree but the example.
    source = tmp_path_factory.mktemp("source")
    for file in (ROOT / "examples/cpp").iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    run("cmake", "-S", source, "-B", build, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", build)
    return build / "train_gpt"


@pytest.fixture
def one_thread():
    """Results depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def example_output(example, tmp_path_factory):
    return run(example, TEXT, tmp_path_factory.mktemp("nvme"), STEPS, env=ONE_THREAD)


def test_the_example_gives_the_same_bits_in_memory_and_on_nvme(example_output):
    assert "losses and weights are equal" in example_output
    hashes = re.findall(r"weights (\w{16})", example_output)
    assert len(hashes) == 2 and hashes[0] == hashes[1]
    assert example_output.count(f"step {STEPS} of {STEPS}") == 2
    assert float(re.search(r"([\d.]+) MB read", example_output)[1]) > 1


def test_the_example_needs_no_python(example):
    libraries = run("ldd", example)
    assert "libtorch_cpu" in libraries
    assert "not found" not in libraries
    assert "python" not in re.sub(r"=> \S+", "", libraries)  # the wheel's path may have it


def test_the_example_says_how_it_is_used(example, tmp_path):
    assert subprocess.run([example], capture_output=True).returncode == 2
    wrong = subprocess.run([example, TEXT, tmp_path / "none"], capture_output=True, text=True)
    assert wrong.returncode == 1
    assert "does not exist: name a directory" in wrong.stderr


class Linear(nn.Linear):
    """As torch::nn::Linear computes: the bias is added afterwards, in Python within the product."""

    def forward(self, x):
        y = x.matmul(self.weight.t())
        y += self.bias
        return y


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = Linear(width, 3 * width)
        self.project = Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = Linear(width, 4 * width)
        self.down = Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        all = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        all = all.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(all[0], all[1], all[2], is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Gpt(nn.Module):
    """The model of examples/cpp: the same operators in the same order."""

    def __init__(self, width=64, length=64):
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(2)))
        self.norm = nn.LayerNorm(width)
        with torch.no_grad():
            self.tokens.weight.normal_(0, 0.02)
            self.positions.weight.normal_(0, 0.02)

    def forward(self, text):
        x = self.tokens(text) + self.positions(torch.arange(text.shape[1]))
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


def fnv1a(model):
    value = 0xCBF29CE484222325
    for parameter in model.parameters():
        for byte in parameter.detach().view(torch.uint8).numpy().tobytes():
            value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{value:016x}"


def test_the_twin_in_python_has_the_same_bits(example_output, one_thread):
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    torch.manual_seed(0)
    model = Gpt()
    optimizer = zinf.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, max_grad_norm=1.0)
    losses = []
    for _ in range(STEPS):
        batch = text[torch.randint(len(text) - 65, (4, 1)) + torch.arange(65)]
        loss = F.cross_entropy(model(batch[:, :64]).reshape(-1, 256), batch[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(f"{loss.item():.6f}")
    assert losses == re.findall(r"memory: .* loss ([\d.]+)", example_output)
    assert fnv1a(model) == re.search(r"memory: weights (\w{16})", example_output)[1]


def small_model(dtype):
    """The model of cpp_run."""
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).to(dtype)


def small_passes(model, dtype, count=1):
    for _ in range(count):
        model(torch.randn(16, 8).to(dtype)).square().mean().backward()


def part_of_a_run(load, save, steps, dtype, nvme, extra=None, **options):
    """What cpp_run does; returns (step and extra that were loaded, the model at the end)."""
    options = options or {"max_grad_norm": 0.3}
    with zinf.Engine(nvme=nvme, weights="nvme", states="nvme", evict="always") as engine:
        model = engine.adopt(small_model(dtype))
        optimizer = zinf.AdamW(model.parameters(), lr=1e-2, **options)
        loaded = engine.load(load) if load is not None else None
        for _ in range(steps):
            small_passes(model, dtype, options.get("micro_batches", 1))
            optimizer.step()
            optimizer.zero_grad()
        if save is not None:
            engine.save(save, extra=extra or {"by": "Python"})
    return loaded, model


def plain_run(steps, micro_batches, max_grad_norm):
    model = small_model(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for _ in range(steps):
        small_passes(model, torch.float32, micro_batches)
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_grad_norm", [None, 0.3])
@pytest.mark.parametrize(("update", "micro_batches"), [("step", 1), ("backward", 1), ("backward", 3)])
def test_one_hash(tmp_path, one_thread, update, micro_batches, max_grad_norm, dtype):
    """Of C++, of Python, and of plain PyTorch, which has no float32 master for bfloat16."""
    options = {"update": update, "micro_batches": micro_batches, "max_grad_norm": max_grad_norm}
    _, model = part_of_a_run(None, None, STEPS, dtype, tmp_path, **options)
    name = str(dtype).removeprefix("torch.")
    arguments = [STEPS, name, tmp_path, update, micro_batches, max_grad_norm or "-"]
    assert run(CPP_RUN, "-", "-", *arguments, env=ONE_THREAD) == f"weights {fnv1a(model)}\n"
    if dtype == torch.float32:
        assert fnv1a(plain_run(STEPS, micro_batches, max_grad_norm)) == fnv1a(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("first", ["Python", "C++"])
def test_a_run_moves_between_the_languages(tmp_path, one_thread, dtype, first):
    def in_cpp(load, save, steps):
        name = str(dtype).removeprefix("torch.")
        return run(CPP_RUN, load or "-", save, steps, name, tmp_path, env=ONE_THREAD)

    _, expected = part_of_a_run(None, None, 6, dtype, tmp_path)
    if first == "Python":
        part_of_a_run(None, tmp_path / "a", 2, dtype, tmp_path)
        assert in_cpp(tmp_path / "a", tmp_path / "b", 2).startswith("step 2 of Python\n")
        loaded, model = part_of_a_run(tmp_path / "b", None, 2, dtype, tmp_path)
        assert loaded == (4, {"by": "C++"})
    else:
        in_cpp(None, tmp_path / "a", 3)
        loaded, model = part_of_a_run(tmp_path / "a", None, 3, dtype, tmp_path)
        assert loaded == (3, {"by": "C++"})
    assert_same_model(model, expected)


def test_an_extra_that_cpp_does_not_know_is_refused(tmp_path):
    part_of_a_run(None, tmp_path / "a", 1, torch.float32, tmp_path, extra={"by": numpy.arange(3)})
    command = [CPP_RUN, tmp_path / "a", tmp_path / "b", "1", "float32", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "has an extra of types that are not known here" in done.stderr
    assert not (tmp_path / "b").exists()


def test_an_exit_with_an_open_engine_leaves_no_files(tmp_path):
    run(CPP_RUN, "-", "-", 1, "float32", tmp_path)
    assert not list(tmp_path.iterdir())
