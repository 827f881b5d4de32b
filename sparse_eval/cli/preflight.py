"""What a run would only find once it has begun: texts, chat formats and shapes that cannot do."""

from __future__ import annotations

from sparse_eval.cli.config import Settings
from sparse_eval.cli.kits import KITS
from sparse_eval.cli.progress import Progress
from sparse_eval.inputs.store import Unavailable
from sparse_eval.tasks.shared import SharedFailed


def check_inputs(settings: Settings) -> None:
    """ValueError in one line, as far as it can be known without weights and without a network."""
    if settings.task["name"] == "latency":
        return  # no text, and its shapes are checked with its settings
    task = KITS[settings.task["name"]].task(settings, Progress())
    try:
        task.check_inputs()
    except SharedFailed as failed:
        if isinstance(failed.__cause__, ValueError):
            raise ValueError(str(failed.__cause__)) from None
    except (OSError, Unavailable):  # of the machine: the run tries, and tells
        return
