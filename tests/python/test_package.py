"""The package: it imports, knows its version, and refuses another torch than it was built for."""

import ast
import importlib
import pathlib
import subprocess
import sys

import pytest
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


def described(stub):
    """The names of a stub: {"name": its parameters, "Class": ..., "Class.method": its parameters}."""
    names = {}
    for node in ast.parse(stub).body:
        members = [(node, "")]
        if isinstance(node, ast.ClassDef):
            names[node.name] = None
            members = [(member, f"{node.name}.") for member in node.body]
        for member, prefix in members:
            if isinstance(member, ast.AnnAssign):
                names[member.target.id] = None
            elif isinstance(member, ast.FunctionDef) and member.name not in ("__enter__", "__exit__"):
                parameters = member.args.args + member.args.kwonlyargs
                named = [one.arg for one in parameters if one.arg != "self"]
                names[prefix + member.name] = named if not member.args.posonlyargs else None
    return names


def there(module):
    """The names of a compiled module; of a class those that it does not have from pybind11."""
    for name, value in vars(module).items():
        if not name.startswith("__") or name == "__version__":
            yield name, value
        if isinstance(value, type):
            for member, method in vars(value).items():
                if not member.startswith("_") or member == "__init__":
                    yield f"{name}.{member}", method


@pytest.mark.parametrize("name", ["_C", "_emulated"])
def test_stubs_are_installed_and_say_what_there_is(name):
    stub = described((pathlib.Path(zinf.__file__).parent / f"{name}.pyi").read_text())
    real = dict(there(importlib.import_module(f"zinf.{name}")))
    assert stub.keys() == real.keys()
    for one, parameters in stub.items():
        for parameter in parameters or []:
            assert f"{parameter}: " in real[one].__doc__, f"{one} has no {parameter}"
