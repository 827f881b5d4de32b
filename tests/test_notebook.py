"""The example notebook runs from top to bottom, on a small capture."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

from tests.tiny import tiny_capture

ROOT = Path(__file__).parent.parent


def test_the_notebook_runs(llama, tmp_path, monkeypatch):
    capture = tiny_capture(llama, context=800, steps=8)
    capture.save(tmp_path / "capture.safetensors")
    monkeypatch.setenv("CAPTURE", str(tmp_path / "capture.safetensors"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "examples" / "own_policy.ipynb", as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    assert not [out for out in outputs if out.output_type == "error"]
    assert any("promises, 0 broken" in out.get("text", "") for out in outputs)
