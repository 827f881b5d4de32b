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
import pandas as pd
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.table import Table

from sparse_eval.compose import Composer
from sparse_eval.config import Settings
from sparse_eval.core import Row
from sparse_eval.device import describe_device, peak_memory_bytes
from sparse_eval.failure import run_guarded
from sparse_eval.models import model_info
from sparse_eval.progress import Progress
from sparse_eval.report import write_report
from sparse_eval.results import CellStore, Journal, provenance, summarise_recall, write_summary
from sparse_eval.settings import resolve
from sparse_eval.tasks.recall import Recall
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
    task = Recall(settings, progress)
    journal, store = Journal(folder), CellStore(settings.cache_dir)
    rows: list[Row] = []
    for cell in task.run(store):
        journal.append(cell)
        rows += cell
    tracker.log_rows(rows)
    summary = summarise(
        settings, rows, overrides, time.perf_counter() - started, task.replay_errors
    )
    write_summary(folder, summary)
    tracker.log_summary(summary)
    with progress.stage("pictures and report"):
        page = write_report(folder)
    tracker.log_plots([*sorted((folder / "plots").glob("*.png")), page])
    print_results(rows, settings, progress)
    progress.console.print(f"\npictures  {folder / 'plots'}\nreport    {page}")
    return rows


def announce(settings: Settings, progress: Progress) -> None:
    """What runs, on what, and what it will cost, before anything slow starts."""
    info = model_info(settings.model)
    cells = len(settings.cells()) * settings.prompts["n"]
    budgets = ", ".join(map(str, settings.budgets))
    progress.console.print(
        f"[bold]{info.title}[/bold]\n"
        f"device    {settings.device} ({describe_device(settings.device)}), {settings.dtype}, "
        f"{settings.backend} backend\n"
        f"prompts   {settings.prompts['n']} × {settings.context:,} tokens from "
        f"{settings.prompts['source']}, {settings.task['steps']} decode steps each\n"
        f"policies  {', '.join(n.label for n in settings.policies)}\n"
        f"budgets   {budgets} tokens of {settings.context:,}\n"
        f"cost      {settings.prompts['n']} prefills at most, {cells} cells"
    )


def summarise(
    settings: Settings, rows: list[Row], overrides: list[str], seconds: float, replay_errors: dict
) -> dict[str, Any]:
    """summary.json: headline figures, the resolved config, provenance."""
    headline = summarise_recall(pd.DataFrame(rows))
    return {
        "command": "python -m sparse_eval " + " ".join(overrides),
        "headline": json.loads(headline.to_json(orient="records")),
        "config": config_record(settings),
        "replay_error": {str(sample): error for sample, error in replay_errors.items()},
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


def print_results(rows: list[Row], settings: Settings, progress: Progress) -> None:
    """The table: policy × budget -> mean recall over the non-dense layers, and what the policy
    found beyond the forced pages."""
    table = summarise_recall(pd.DataFrame(rows))
    dense = ", ".join(map(str, settings.dense_layers)) or "none"
    grid = Table(
        title=f"Attention-mass recall, {model_info(settings.model).title}, "
        f"{settings.context:,} tokens of {settings.prompts['source']}, page {rows[0]['page_size']}",
        caption=f"mean over layers (dense, not counted: {dense}), KV heads, queries and "
        f"n = {settings.prompts['n']} prompts; in brackets: the share found of the mass that "
        "the forced pages (sinks, local) do not hold",
        title_justify="left",
        caption_justify="left",
    )
    budgets = sorted(table["budget_tokens"].dropna().unique())
    grid.add_column("policy")
    for budget in budgets:
        grid.add_column(f"{int(budget)} tokens", justify="right")
    # yardsticks first: what everything and what the best choice would give
    for named in sorted(settings.policies, key=lambda n: (not n.policy.dense, n.policy.realisable)):
        mine = table[table["policy"] == named.label].set_index("budget_tokens")
        cells = []
        for budget in budgets:
            if named.policy.adaptive:
                row = mine.iloc[0]
            else:
                row = mine.loc[budget]
            cells.append(f"{row['recall']:.3f} ({row['contested']:.3f})")
        grid.add_row(named.label, *cells)
    progress.console.print()
    progress.console.print(grid)


def main(argv: list[str]) -> None:
    """Hand validated words to Hydra."""
    register_resolvers()
    hydra.main(version_base="1.3", config_path="pkg://sparse_eval.conf", config_name="config")(
        job
    )()
