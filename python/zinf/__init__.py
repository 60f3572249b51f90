"""Train any PyTorch model on the memory that you have."""

import torch

try:
    from zinf import _C
except ImportError as error:  # another torch may lack symbols that the module needs
    raise ImportError(
        f"zinf's C++ module, built for torch 2.13, does not load with torch {torch.__version__}: {error}"
    ) from error

if torch.__version__ != _C.torch_version:
    raise ImportError(
        f"zinf was built for torch {_C.torch_version}, but torch {torch.__version__} is installed: "
        "install that version, or build zinf again"
    )

__version__ = _C.__version__
__all__ = ["__version__"]
