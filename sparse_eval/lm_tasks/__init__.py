"""The group `sparse_eval_offline`: long-context lm-eval tasks made by seed, which need no network.

Ordinary task YAMLs: lm-eval finds them by include_path=FOLDER, or --include_path on its command
line. The generators load neither torch nor a model.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
GROUP = "sparse_eval_offline"
