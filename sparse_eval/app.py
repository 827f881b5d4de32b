"""One job, from a composed config to a finished run folder; the only room that drives Hydra."""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from sparse_eval.budgets import resolve_budget
from sparse_eval.cli.compose import Checked, Composer
from sparse_eval.cli.config import Settings
from sparse_eval.cli.failure import (
    PartsFailed,
    run_guarded,
    stop_on_signals,
    stoppable,
    told,
)
from sparse_eval.cli.kits import KITS
from sparse_eval.cli.progress import Level, Progress
from sparse_eval.cli.settings import resolve
from sparse_eval.core import Row
from sparse_eval.device import describe_device, describe_dtype, peak_memory_bytes
from sparse_eval.models import model_info
from sparse_eval.needle.config import needle_config
from sparse_eval.parts import Parts, config_record, parts_of
from sparse_eval.provenance import provenance
from sparse_eval.results import write_parquet, write_summary
from sparse_eval.storage.cells import CellStore
from sparse_eval.storage.journal import Journal
from sparse_eval.terminal import labelled
from sparse_eval.tracking.tracker import Tracker, make_tracker, track_sweep

if TYPE_CHECKING:
    from sparse_eval.cli.sweep import SweepResult

log = logging.getLogger("sparse_eval")


@dataclass
class Sweep:
    """The sweep that this process started; workers of a launcher have none."""

    jobs: list[list[str]] = field(default_factory=list)
    folder: Path | None = None
    composer: Composer | None = None


SWEEP = Sweep()

PROBE_BYTES = 2**20
"""Room that there must be under outputs/ before a run begins: what a small one leaves, less its
page."""


def register_resolvers() -> None:
    """${run_id:} six hex digits a run or sweep; ${short_name:text} a file name of at most 80."""
    run_id = os.urandom(3).hex()
    # cached with the config, which Hydra hands to its launchers' workers: one folder for all
    OmegaConf.register_new_resolver("run_id", lambda: run_id, replace=True, use_cache=True)
    OmegaConf.register_new_resolver("short_name", short_name, replace=True)


def short_name(text: Any) -> str:
    """A folder's name of whole key=value words: paths among the overrides would make folders of
    their own, and a file system counts bytes (255 at most). What finds no room is left out; only a
    first word that is too long by itself is cut."""
    words = [re.sub(r"[^\w.,=+\[\]-]", "_", word) for word in split_words(str(text))]
    name = words[0][:80].encode()[:200].decode(errors="ignore")
    for word in words[1:]:
        longer = f"{name},{word}"
        if len(longer) <= 80 and len(longer.encode()) <= 200:
            name = longer
    return name


def split_words(text: str) -> list[str]:
    """Words between commas that stand in no bracket."""
    words, depth = [""], 0
    for letter in text:
        depth += (letter in "[{(") - (letter in ")}]")
        if letter == "," and depth <= 0:
            words.append("")
        else:
            words[-1] += letter
    return words


register_resolvers()  # also in a launcher's workers, which import this module and no other


class SweepStart(Callback):
    """Hydra says where a sweep lies when it begins."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        SWEEP.folder = Path(str(config.hydra.sweep.dir))


def job(cfg: DictConfig) -> None:
    """What Hydra calls for each job; in a sweep a failed one lets the others go on."""
    runtime = HydraConfig.get()
    folder = Path(runtime.runtime.output_dir)
    dirs = tuple(
        source.path
        for source in runtime.runtime.config_sources
        if source.provider == "command-line"
    )
    overrides = list(runtime.overrides.task)
    level = None
    if runtime.mode == RunMode.MULTIRUN:
        level = Level(int(runtime.job.num), len(SWEEP.jobs), " ".join(overrides))
    stop_on_signals()
    ok = run_guarded(
        lambda: run(resolve(SWEEP.composer or Composer(dirs), overrides), folder, overrides, level),
        folder,
        overrides,
    )
    if not ok and level is None:
        sys.exit(1)


def run(
    settings: Settings, folder: Path, overrides: list[str], level: Level | None = None
) -> list[Row]:
    """Measure, journal every cell as it is finished, then summary, pictures and page; a job of a
    sweep (level: which) leaves pictures and page to the sweep's end."""
    progress = Progress(verbose=settings.verbose, level=level)
    announce(settings, progress)
    tracker = make_tracker(
        settings.tracking,
        config=config_record(settings),
        folder=folder,
        task=settings.task["name"],
        say=progress.say,
        cache_dir=settings.cache_dir,
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
    began, started = datetime.now().astimezone(), time.perf_counter()
    kit, is_job = KITS[settings.task["name"]], progress.level is not None
    parts = Parts(settings, progress, kit.task, remembers=is_job)
    journal = Journal(folder)
    store = CellStore(settings.cache_dir, on_error=progress.warn)
    samples = Journal(folder, "samples.jsonl") if kit.has_samples else None
    rows: list[Row] = []
    for cell in parts.run(store):
        journal.append(cell)
        if samples is not None:
            samples.append(kit.show.samples(cell))
        rows += cell
    if rows:
        tracker.log_rows(rows)
        headline = kit.show.headline(rows) | parts.facts
        summary = summarise(settings, headline, overrides, began, time.perf_counter() - started)
        write_summary(folder, summary)
        tracker.log_summary(summary)
        write_parquet(rows, folder / "rows.parquet")
    if rows:
        kit.show.print_results(rows, settings, progress.console)
    if rows and not is_job:
        present(folder, progress, tracker)
    if parts.failures:
        raise PartsFailed(parts.failures, len(parts_of(settings)))
    return rows


def present(folder: Path, progress: Progress, tracker: Tracker) -> None:
    """Pictures and page of a run on its own."""
    from sparse_eval.report import write_report  # loads the plotting libraries

    with progress.stage("pictures and report"):
        page = write_report(folder)
    tracker.log_plots([*sorted((folder / "plots").glob("*.png")), page])
    progress.say(f"\npictures  {folder / 'plots'}\nreport    {page}")


def announce(settings: Settings, progress: Progress) -> None:
    """What runs, on what, and what it will cost, before anything slow starts."""
    device = f"{settings.device} ({describe_device(settings.device)})"
    progress.console.print(model_info(settings.model).title, style="bold")
    lines = [
        f"device    {device}, {describe_dtype(settings.dtype, settings.device)}, "
        f"{settings.backend} backend",
        *KITS[settings.task["name"]].show.announce(settings),
    ]
    progress.console.print("\n".join(lines))
    for note in notes_on_budgets(settings):
        progress.console.print(labelled("note:", note))


def notes_on_budgets(settings: Settings) -> list[str]:
    """Budgets that leave nothing to choose: those that hold the prompt and every decode step."""
    task = settings.task
    if task["name"] == "latency" or all(n.policy.adaptive for n in settings.policies):
        return []
    longest, steps = longest_prompt(settings)
    read = f"{longest} tokens" + (f" and its {steps} decode steps" if steps else "")
    return [
        f"budget={asked} covers the context of {read}: every "
        "policy that has a budget reads everything there, as policy=full does"
        for asked in settings.budgets_asked
        if resolve_budget(asked, longest) >= longest + steps
    ]


def longest_prompt(settings: Settings) -> tuple[int, int]:
    """Tokens of the longest prompt, and the decode steps that its cache grows by at most. Those of
    task=lm_eval come with their documents: prompt and answer fill its max_length at most."""
    task = settings.task
    if task["name"] == "lm_eval":
        most = [n for n in (task["max_length"], model_info(settings.model).max_context) if n]
        return max(settings.context, min(most, default=2**31)), 0
    if task["name"] != "needle":
        return settings.context, task.get("steps", 0)
    needle = needle_config(
        task,
        context=settings.context,
        n=settings.prompts["n"],
        protocol=settings.protocol["name"],
    )
    return max(needle.contexts), needle.most_new_tokens


def summarise(
    settings: Settings,
    headline: dict[str, Any],
    overrides: list[str],
    began: datetime,
    seconds: float,
) -> dict[str, Any]:
    """summary.json: headline figures, the resolved config, provenance."""
    return {
        "command": f"python -m sparse_eval {shlex.join(overrides)}".rstrip(),
        **headline,
        "config": config_record(settings),
        "provenance": provenance(
            device=settings.device, backend=settings.backend, dtype=settings.dtype, started=began
        ),
        "finished": datetime.now().astimezone().isoformat(timespec="seconds"),
        "wall_seconds": seconds,
        "peak_memory_bytes": peak_memory_bytes(settings.device),
    }


def main(checked: Checked) -> None:
    """Hand validated words to Hydra; after a sweep, put together what its jobs left."""
    register_resolvers()  # a new id: two runs of one process in one second are two folders
    SWEEP.folder, SWEEP.composer = None, checked.composer
    SWEEP.jobs = checked.jobs if checked.is_sweep else []
    check_writable(checked)
    sys.argv[1:] = checked.words
    log.addHandler(logging.NullHandler())  # before and after Hydra's own, nothing on the terminal
    logging.raiseExceptions = False  # a full disk is told once, by the run
    stop_on_signals()
    with stoppable():
        failed = not jobs_end_well(checked)
    if failed:
        sys.exit(1)


def jobs_end_well(checked: Checked) -> bool:
    """Runs every job, then the end of a sweep, also where Hydra ends with an error of its own; not
    where somebody stopped it."""
    try:
        hydra.main(version_base="1.3", config_path="pkg://sparse_eval.conf", config_name="config")(
            job
        )()
    except SystemExit as end:
        if end.code == 1 and SWEEP.jobs:
            end_sweep(checked.words)
        raise
    return not SWEEP.jobs or end_sweep(checked.words)


def check_writable(checked: Checked) -> None:
    """One line where the run's folder cannot be written: exit code 1 for outputs/<name>, 2 for a
    folder that was given as hydra.run.dir or hydra.sweep.dir."""
    given = given_folder(checked)
    folder = given or Path("outputs") / checked.composer.compose(checked.jobs[0])["name"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(PROBE_BYTES))
    except OSError as error:
        what = folder if given is None else f"{hydra_dir(checked)}={folder}"
        print(f"error: {what} cannot be written ({error})", file=sys.stderr)
        sys.exit(1 if given is None else 2)


def hydra_dir(checked: Checked) -> str:
    return "hydra.sweep.dir" if checked.is_sweep else "hydra.run.dir"


def given_folder(checked: Checked) -> Path | None:
    """The folder that hydra.run.dir or hydra.sweep.dir names, up to where it is interpolated."""
    given = [word for word in checked.words if word.startswith(f"{hydra_dir(checked)}=")]
    if not given:
        return None
    path, interpolated, _ = given[-1].partition("=")[2].strip("'\"").partition("${")
    return Path(path) if not interpolated else Path(f"{path}x").parent


def end_sweep(words: list[str]) -> bool:
    """What a sweep leaves behind its jobs' folders. Returns whether every job ran through."""
    from sparse_eval.cli.sweep import finish_sweep  # loads the plotting libraries

    progress = Progress()
    if SWEEP.folder is None or not SWEEP.folder.is_dir():
        return False
    try:
        with progress.stage("pictures and report of the sweep"):
            result = finish_sweep(SWEEP.folder, SWEEP.jobs)
    except Exception as error:
        log.debug("no report of the sweep", exc_info=True)  # the command below shows it again
        print(
            f"error: no report of the sweep ({told(error)}); its rows are kept, once mended: "
            f"python -m sparse_eval.report {shlex.quote(str(SWEEP.folder))}",
            file=sys.stderr,
        )
        return False
    tell(result, progress)
    if result.page is not None:
        track_sweep(result.folder, result.page, words, progress.say)
    return not result.failures


def tell(result: SweepResult, progress: Progress) -> None:
    """How the sweep ended: the results of all its jobs, what failed, where everything lies."""
    done = result.num_jobs - len(result.failures)
    progress.console.print(f"\n{done} of {result.num_jobs} jobs ran through")
    for failure in result.failures:
        name = failure["folder"] or " ".join(failure["overrides"])
        print(f"failed    job {failure['job']} ({name}): {failure['error']}", file=sys.stderr)
    if result.failures:
        where = result.folder / "failures.json"
        print(f"          tracebacks in {where}", file=sys.stderr)
    if result.page is not None:
        progress.say(f"pictures  {result.folder / 'plots'}\nreport    {result.page}")
