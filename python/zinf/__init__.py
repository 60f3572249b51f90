"""Train any PyTorch model on the memory that you have.

    import zinf

    engine = zinf.Engine(host_memory="4GB", nvme="/mnt/nvme")
    with engine.init():
        model = AnyModel(config)
    optimizer = zinf.AdamW(model.parameters(), lr=3e-4)

and then the usual training loop.
"""

import torch

from zinf._build import TORCH_VERSION

if torch.__version__ != TORCH_VERSION:
    raise ImportError(
        f"zinf was built for torch {TORCH_VERSION}, but torch {torch.__version__} is installed: "
        "install that version, or build zinf again"
    )

from zinf import _C
from zinf._budget import BudgetError
from zinf._C import Need
from zinf._plan import Plan
from zinf.engine import Engine
from zinf.optim import AdamW

__version__ = _C.__version__
__all__ = ["AdamW", "BudgetError", "Engine", "Need", "Plan", "__version__"]
