"""Reads through const pointers are served by a handler of SIGSEGV: beside others for the same signal."""

import os
import signal
import subprocess
import sys

import pytest
import zinf

if not hasattr(zinf, "Engine"):
    pytest.skip("this build of zinf has no Engine", allow_module_level=True)

SETUP = """
import ctypes, faulthandler, os, signal, sys
import torch, zinf
from torch import nn

def read(parameter):
    print(parameter)  # through a const pointer
    assert parameter.tolist()[0] == 1.0

engine = zinf.Engine(nvme=sys.argv[1], weights="nvme", evict="always")
with engine.init():
    layer = nn.LayerNorm(4096)
read(layer.weight)
"""
# A handler in C that no wrapper sees: it does nothing, so a true fault would come again and again.
C_HANDLER = """
libc = ctypes.CDLL(None)
handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda signum: os._exit(3))
libc.signal.argtypes = (ctypes.c_int, type(handler))
libc.signal(signal.SIGSEGV, handler)
"""
INSTALL = {
    "none": "",
    "enable": "faulthandler.enable()",
    "enable twice": "faulthandler.enable(); faulthandler.enable(all_threads=False)",
    "enable after disable": "faulthandler.enable(); faulthandler.disable(); faulthandler.enable()",
    "disable": "faulthandler.enable(); faulthandler.disable()",
    "default": "signal.signal(signal.SIGSEGV, signal.SIG_DFL)",
    "python": "signal.signal(signal.SIGSEGV, lambda *_: None)",
    "C": C_HANDLER + "torch.optim.SGD(layer.parameters()).step()",
}


def _run(nvme, script, **environment):
    # pytest has enabled its own faulthandler, and children inherit what it asks for by the environment.
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONFAULTHANDLER"}
    return subprocess.run(
        [sys.executable, "-c", SETUP + script, nvme],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("install", INSTALL)
def test_reads_are_served_whatever_is_installed_later(nvme, install):
    run = _run(nvme, f"{INSTALL[install]}\nread(layer.weight)\nassert engine.stats()['faults'] > 1")
    assert run.returncode == 0, run.stderr
    assert "Fatal Python error" not in run.stderr


@pytest.mark.parametrize("install", ["enable", "enable twice", "enable after disable", "environment"])
@pytest.mark.parametrize("crash", ["ctypes.string_at(8)", "faulthandler._sigsegv()"], ids=["fault", "raise"])
def test_a_true_fault_is_told_by_faulthandler(nvme, install, crash):
    by_environment = install == "environment"
    script = f"{'' if by_environment else INSTALL[install]}\nread(layer.weight)\n{crash}\nos._exit(4)"
    run = _run(nvme, script, **({"PYTHONFAULTHANDLER": "1"} if by_environment else {}))
    assert run.returncode == -signal.SIGSEGV, run.stderr
    assert run.stderr.count("Fatal Python error: Segmentation fault") == 1
    assert "<module>" in run.stderr  # where Python was


@pytest.mark.parametrize("install", ["none", "disable", "default"])
@pytest.mark.parametrize("crash", ["ctypes.string_at(8)", "signal.raise_signal(11)"], ids=["fault", "raise"])
def test_a_true_fault_ends_the_process(nvme, install, crash):
    run = _run(nvme, f"{INSTALL[install]}\n{crash}\nos._exit(4)")
    assert run.returncode == -signal.SIGSEGV, run.stderr


def test_a_handler_that_came_before_the_last_step_gets_true_faults(nvme):
    run = _run(nvme, f"{INSTALL['C']}\nread(layer.weight)\nctypes.string_at(8)")
    assert run.returncode == 3, run.stderr


def test_python_handlers_get_the_signals_that_are_sent_to_them(nvme):
    script = """
seen = []
assert signal.signal(signal.SIGSEGV, lambda signum, _: seen.append(signum)) is signal.SIG_DFL
signal.raise_signal(signal.SIGSEGV)
read(layer.weight)
assert seen == [signal.SIGSEGV]
signal.signal(signal.SIGSEGV, signal.SIG_IGN)
signal.raise_signal(signal.SIGSEGV)
read(layer.weight)
"""
    run = _run(nvme, script)
    assert run.returncode == 0, run.stderr
