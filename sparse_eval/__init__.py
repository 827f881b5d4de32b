"""What do KV selection policies read, does it hold the attention mass, what does it cost?

`measure`, `patched` and `load` are the Python entry points; `python -m sparse_eval` the CLI.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparse_eval.live import patched
    from sparse_eval.measuring import measure
    from sparse_eval.results import load

__version__ = "0.1.0"
__all__ = ["__version__", "load", "measure", "patched"]

_HOMES = {"measure": "measuring", "patched": "live", "load": "results"}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import sparse_eval` loads neither transformers nor triton."""
    if name not in _HOMES:
        raise AttributeError(f"module 'sparse_eval' has no attribute {name!r}")
    return getattr(import_module(f"sparse_eval.{_HOMES[name]}"), name)
