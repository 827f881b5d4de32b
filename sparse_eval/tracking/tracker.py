"""The tracker a run asked for: one that does nothing, or W&B's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sparse_eval.tracking.options import check_tracking

if TYPE_CHECKING:
    import pandas as pd

    from sparse_eval.core import Row


class Tracker(Protocol):
    """What a run tells while it goes on; failed: it ended with an error."""

    def log_rows(self, rows: Iterable[Row] | pd.DataFrame) -> None: ...
    def log_summary(self, summary: Mapping[str, Any]) -> None: ...
    def log_plots(self, paths: Iterable[Path]) -> None: ...
    def finish(self, *, failed: bool = False) -> None: ...


class NoTracker:
    """Everything stays in the run's folder."""

    def log_rows(self, rows: Iterable[Row] | pd.DataFrame) -> None:
        pass

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        pass

    def log_plots(self, paths: Iterable[Path]) -> None:
        pass

    def finish(self, *, failed: bool = False) -> None:
        pass


def make_tracker(
    tracking: Mapping[str, Any],
    *,
    config: Mapping[str, Any],
    folder: Path,
    task: str,
    say: Callable[[str], None] = print,
    cache_dir: Path | None = None,
) -> Tracker:
    """The tracker that a file of conf/tracking/ asks for. config: the resolved config as plain
    mappings and lists. cache_dir: where offline runs leave a note of what they hold, so that the
    same run again adds nothing twice. Raises ValueError for names and modes that do not exist."""
    check_tracking(tracking)
    if tracking["name"] == "none":
        return NoTracker()
    from sparse_eval.tracking.wandb_run import WandbTracker

    return WandbTracker(
        tracking, config=config, folder=Path(folder), task=task, say=say, cache_dir=cache_dir
    )


def track_sweep(
    folder: Path, page: Path, words: Sequence[str], say: Callable[[str], None] = print
) -> None:
    """The sweep's own pictures and page as one more run of its W&B group, where its jobs are
    tracked. words: the sweep's command line, by which the same sweep again is the same run."""
    configs = [json.loads(path.read_text())["config"] for path in folder.glob("*/summary.json")]
    tracking = next((c["tracking"] for c in configs if c["tracking"]["name"] == "wandb"), None)
    if tracking is None:
        return
    config = {"sweep": list(words), "jobs": len(configs)}
    options = dict(tracking) | {"group": tracking["group"] or folder.name}
    tracker = make_tracker(options, config=config, folder=folder, task="report", say=say)
    tracker.log_plots([*sorted((folder / "plots").glob("*.png")), page])
    tracker.finish()
