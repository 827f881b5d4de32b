"""Who may import whom, read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [
    p for d in ("sparse_eval", "policies", "kernels") for p in sorted((ROOT / d).glob("**/*.py"))
]
LIBRARIES = {
    "transformers": {
        "models",
        "tiny",
        "prefill",
        "prefill_store",
        "attention",
        "live",
        "stack",
        "token_count",
    },
    "hydra": {"app", "compose", "pack", "settings", "__main__"},
    "wandb": {"wandb_run", "wandb_service"},
    "lm_eval": {"names", "suite", "requests", "scoring", "adapter", "lm_cli"},
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_stays_in_its_rooms(library):
    users = {p.stem for p in FILES if any(m.split(".")[0] == library for m in imports(p))}
    assert users <= LIBRARIES[library]


def test_kernels_know_no_policy_and_no_room():
    for path in (ROOT / "kernels").glob("**/*.py"):
        ours = {m for m in imports(path) if m.startswith("sparse_eval")}
        assert all(m.startswith("sparse_eval.kernels") for m in ours), path


def test_policies_know_kernels_and_core_only():
    for path in (ROOT / "policies").glob("*.py"):
        ours = {m for m in imports(path) if m.startswith("sparse_eval")}
        allowed = ("sparse_eval.core", "sparse_eval.policies", "sparse_eval.kernels")
        assert all(m.startswith(allowed) for m in ours), path


def test_nothing_imports_the_top_level_folders_bare():
    for path in FILES:
        assert not {m.split(".")[0] for m in imports(path)} & {"policies", "kernels", "conf"}, path


def test_kernels_folder_does_not_shadow_the_hub_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    code = (
        "from transformers import LlamaConfig, LlamaForCausalLM as M; "
        "M(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, "
        "num_attention_heads=1, num_key_value_heads=1)); import sys; "
        "assert getattr(sys.modules.get('kernels'), '__file__', None) is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
