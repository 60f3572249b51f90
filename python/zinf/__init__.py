"""Train any PyTorch model on the memory that you have."""

import torch

from zinf._build import TORCH_VERSION

if torch.__version__ != TORCH_VERSION:
    raise ImportError(
        f"zinf was built for torch {TORCH_VERSION}, but torch {torch.__version__} is installed: "
        "install that version, or build zinf again"
    )

from zinf import _C

__version__ = _C.__version__
__all__ = ["__version__"]
