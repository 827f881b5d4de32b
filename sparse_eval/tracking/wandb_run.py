"""One W&B run of one job: never a prompt, never a hang, never the end of the job."""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_eval.storage.files import plain, to_json, write_atomic
from sparse_eval.storage.table import frame_of
from sparse_eval.tracking.curves import curve_tables
from sparse_eval.tracking.wandb_service import abandon, has_key

if TYPE_CHECKING:
    import pandas as pd

    from sparse_eval.core import Row


class WandbTracker:
    """One W&B run. What goes wrong in W&B is said once, and the work goes on without it."""

    def __init__(
        self,
        tracking: Mapping[str, Any],
        *,
        config: Mapping[str, Any],
        folder: Path,
        task: str,
        say: Callable[[str], None] = print,
        cache_dir: Path | None = None,
    ) -> None:
        self.say = say
        self.run: Any = None
        self.is_offline = False
        self.note = None if cache_dir is None else cache_dir / "wandb" / f"{run_id(config)}.json"
        options = {
            "project": tracking["project"],
            "entity": tracking["entity"],
            "group": tracking["group"] or folder.parent.name,
            "tags": list(tracking["tags"]),
            "name": folder.name,
            "job_type": task,
            "config": plain(config),
            "id": run_id(config),
            "dir": str(folder),
        }
        with self.guard("start"):
            folder.mkdir(parents=True, exist_ok=True)
            self._start(tracking["mode"], options, tracking)

    def _start(self, mode: str, options: dict[str, Any], tracking: Mapping[str, Any]) -> None:
        if mode == "online" and not has_key():
            self.say("W&B: no API key found, going on offline")
            mode = "offline"
        try:
            self.run = self._init(mode, options, tracking)
        except Exception as error:
            if mode != "online":
                raise
            self.say(f"W&B: no connection ({first_line(error)}), going on offline")
            mode = "offline"
            abandon()
            self.run = self._init(mode, options, tracking)
        self.run.define_metric("budget_tokens")
        for task in ("recall", "needle", "fidelity", "lm_eval"):
            self.run.define_metric(f"{task}/*", step_metric="budget_tokens")
        self.is_offline = mode == "offline"
        if mode == "offline":
            where = shlex.quote(str(Path(self.run.dir).parent))
            self.say(f"W&B: offline, upload with: wandb sync {where}")
        elif mode == "online":
            self.say(f"W&B: {self.run.url}")

    def _init(self, mode: str, options: dict[str, Any], tracking: Mapping[str, Any]) -> Any:
        import wandb

        settings = wandb.Settings(
            init_timeout=tracking["init_timeout"],
            finish_timeout=tracking["finish_timeout"],
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
        )
        # Offline runs have nothing to resume from; without finish_previous a second init in one
        # process would return the first run, with its config.
        options = options | {"mode": mode, "resume": "allow" if mode == "online" else None}
        return wandb.init(**options, reinit="finish_previous", settings=settings)

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """A failure inside ends W&B's part, with one warning, and nothing else."""
        try:
            yield
        except Exception as error:
            text = f"W&B could not {what} ({first_line(error)}): the run goes on without it"
            warnings.warn(text, stacklevel=3)
            self.run = None

    def log_rows(self, rows: Iterable[Row] | pd.DataFrame) -> None:
        """The rows as a table, and <task>/<policy>/… over budget_tokens. A run that already holds
        these rows, online or in another folder offline, gets nothing twice."""
        with self.guard("log the rows"):
            if self.run is None:
                return
            frame = frame_of(rows)
            digest = hashlib.sha256(frame.to_csv().encode()).hexdigest()
            if self.run.summary.get("rows_digest") == digest or self._is_noted(digest):
                return
            self._log_table(frame)
            for table, setting in curve_tables(frame):
                self._log_curves(table, setting)
            self.run.summary["rows_digest"] = digest
            self._take_note(digest)

    def _is_noted(self, digest: str) -> bool:
        """Whether an earlier offline run of this id holds the rows and still lies in its folder."""
        if not self.is_offline or self.note is None or not self.note.is_file():
            return False
        try:
            told = json.loads(self.note.read_text())
            is_same = told["digest"] == digest and Path(told["folder"]).is_dir()
        except (OSError, ValueError, KeyError, TypeError):  # damaged: as if it were not there
            return False
        if not is_same:
            return False
        self.say(f"W&B: these rows are already in {told['folder']}: not logged twice")
        return True

    def _take_note(self, digest: str) -> None:
        if self.is_offline and self.note is not None:
            folder = Path(self.run.dir).parent
            write_atomic(self.note, to_json({"digest": digest, "folder": str(folder)}).encode())

    def _log_table(self, frame: pd.DataFrame) -> None:
        import wandb

        lines: list[Any] = [
            [cell(value) for value in line] for line in frame.itertuples(index=False)
        ]
        self.run.log({"rows": wandb.Table(columns=list(frame.columns), data=lines)})  # type: ignore[attr-defined]

    def _log_curves(self, table: pd.DataFrame, setting: str) -> None:
        """table: policy, budget_tokens and one column a value, named by the key's two ends."""
        parts = [name for name in table if name not in ("policy", "budget_tokens")]
        for budget in table["budget_tokens"].astype(float).unique():
            lines = table[
                table["budget_tokens"].fillna(-1) == (-1 if math.isnan(budget) else budget)
            ]
            values = {
                f"{task}/{line['policy']}{setting}/{value}": line[f"{task}/{value}"]
                for line in lines.to_dict("records")
                for task, value in (str(part).rsplit("/", 1) for part in parts)
                if not math.isnan(line[f"{task}/{value}"])
            }
            if not math.isnan(budget):
                self.run.log({"budget_tokens": int(budget), **values})
            at = "any" if math.isnan(budget) else f"{budget:.0f}"
            self.run.summary.update({f"{key}/{at}": value for key, value in values.items()})

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """Numbers and texts of summary.json, nested names joined by /; no lists, no config."""
        with self.guard("log the summary"):
            if self.run is not None:
                told = {k: v for k, v in summary.items() if k != "config"}
                self.run.summary.update(dict(scalars(plain(told))))

    def log_plots(self, paths: Iterable[Path]) -> None:
        """Pictures as plots/<name>, pages as one artifact."""
        with self.guard("log the plots"):
            if self.run is None:
                return
            import wandb

            paths = [Path(path) for path in paths]
            pictures = [path for path in paths if path.suffix == ".png"]
            if pictures:
                self.run.log({f"plots/{p.stem}": wandb.Image(str(p)) for p in pictures})
            pages = [path for path in paths if path.suffix == ".html"]
            if pages:
                artifact = wandb.Artifact(f"report-{self.run.id}", type="report")
                for page in pages:
                    artifact.add_file(str(page), policy="immutable")
                self.run.log_artifact(artifact)

    def finish(self, *, failed: bool = False) -> None:
        with self.guard("finish"):
            if self.run is not None:
                self.run.finish(exit_code=int(failed))
        self.run = None


def run_id(config: Mapping[str, Any]) -> str:
    """The same config is the same W&B run, whenever and wherever it runs again."""
    text = json.dumps(plain(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def scalars(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested mappings as (a/b/c, value), lists left out."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from scalars(inner, f"{name}/{key}" if name else key)
    elif value is not None and not isinstance(value, list):
        yield name, value


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def cell(value: Any) -> Any:
    """A value that a W&B table can hold."""
    return to_json(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
