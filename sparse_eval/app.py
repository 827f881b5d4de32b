"""One job, from a composed config to a finished run folder; the only room that drives Hydra."""

from __future__ import annotations

import json
import logging
import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from sparse_eval.compose import Composer
from sparse_eval.config import Settings
from sparse_eval.core import Row
from sparse_eval.device import describe_device, peak_memory_bytes
from sparse_eval.failure import run_guarded
from sparse_eval.kits import KITS
from sparse_eval.models import model_info
from sparse_eval.progress import Progress
from sparse_eval.report import write_report
from sparse_eval.results import CellStore, Journal, provenance, write_summary
from sparse_eval.settings import resolve
from sparse_eval.tracking import Tracker, make_tracker

log = logging.getLogger("sparse_eval")


def register_resolvers() -> None:
    """${run_id:} six hex digits per process and job folder; ${short_name:text} at most 80 long."""
    run_id = os.urandom(3).hex()
    OmegaConf.register_new_resolver("run_id", lambda: run_id, replace=True)
    OmegaConf.register_new_resolver("short_name", lambda text: str(text)[:80], replace=True)


def job(cfg: DictConfig) -> None:
    """What Hydra calls for each job."""
    runtime = HydraConfig.get()
    folder = Path(runtime.runtime.output_dir)
    dirs = tuple(
        source.path
        for source in runtime.runtime.config_sources
        if source.provider == "command-line"
    )
    overrides = list(runtime.overrides.task)
    run_guarded(lambda: run(resolve(Composer(dirs), overrides), folder, overrides), folder)


def run(settings: Settings, folder: Path, overrides: list[str]) -> list[Row]:
    """Measure, journal every cell as it is finished, then summary, pictures and page."""
    progress = Progress(verbose=settings.verbose)
    announce(settings, progress)
    tracker = make_tracker(
        settings.tracking,
        config=config_record(settings),
        folder=folder,
        task=settings.task["name"],
        say=progress.console.print,
    )
    failed = True
    try:
        rows = measure(settings, folder, overrides, progress, tracker)
        failed = False
    finally:
        tracker.finish(failed=failed)
    return rows


def measure(
    settings: Settings, folder: Path, overrides: list[str], progress: Progress, tracker: Tracker
) -> list[Row]:
    started = time.perf_counter()
    kit = KITS[settings.task["name"]]
    task = kit.task(settings, progress)
    journal, store = Journal(folder), CellStore(settings.cache_dir)
    told = Journal(folder, "samples.jsonl") if kit.has_samples else None
    rows: list[Row] = []
    for cell in task.run(store):
        journal.append(cell)
        if told is not None:
            told.append(kit.show.samples(cell))
        rows += cell
    tracker.log_rows(rows)
    headline = kit.show.headline(rows) | task.facts()
    summary = summarise(settings, headline, overrides, time.perf_counter() - started)
    write_summary(folder, summary)
    tracker.log_summary(summary)
    with progress.stage("pictures and report"):
        page = write_report(folder)
    tracker.log_plots([*sorted((folder / "plots").glob("*.png")), page])
    kit.show.print_results(rows, settings, progress.console)
    progress.console.print(f"\npictures  {folder / 'plots'}\nreport    {page}")
    return rows


def announce(settings: Settings, progress: Progress) -> None:
    """What runs, on what, and what it will cost, before anything slow starts."""
    device = f"{settings.device} ({describe_device(settings.device)})"
    lines = [
        f"[bold]{model_info(settings.model).title}[/bold]",
        f"device    {device}, {settings.dtype}, {settings.backend} backend",
        *KITS[settings.task["name"]].show.announce(settings),
    ]
    progress.console.print("\n".join(lines))


def summarise(
    settings: Settings, headline: dict[str, Any], overrides: list[str], seconds: float
) -> dict[str, Any]:
    """summary.json: headline figures, the resolved config, provenance."""
    return {
        "command": "python -m sparse_eval " + " ".join(overrides),
        **headline,
        "config": config_record(settings),
        "provenance": provenance(
            device=settings.device, backend=settings.backend, dtype=settings.dtype
        ),
        "finished": datetime.now().astimezone().isoformat(timespec="seconds"),
        "wall_seconds": seconds,
        "peak_memory_bytes": peak_memory_bytes(settings.device),
    }


def config_record(settings: Settings) -> dict[str, Any]:
    """Settings as plain JSON values."""
    record = {key: value for key, value in vars(settings).items() if key != "policies"}
    record["policies"] = {n.label: n.policy.config() for n in settings.policies}
    return json.loads(json.dumps(record, default=str))


def main(argv: list[str]) -> None:
    """Hand validated words to Hydra."""
    register_resolvers()
    hydra.main(version_base="1.3", config_path="pkg://sparse_eval.conf", config_name="config")(
        job
    )()
