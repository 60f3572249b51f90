"""The package: it imports, knows its version, and refuses another torch than it was built for."""

import pathlib
import subprocess
import sys

import zinf


def test_version_is_the_projects():
    version = (pathlib.Path(__file__).parents[2] / "version.txt").read_text().strip()
    assert zinf.__version__ == version


def test_another_torch_is_refused_by_name():
    code = "import torch; torch.__version__ = '9.9.9'; import zinf"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode != 0
    assert "ImportError: zinf was built for torch 2.13" in run.stderr
    assert "torch 9.9.9 is installed" in run.stderr
