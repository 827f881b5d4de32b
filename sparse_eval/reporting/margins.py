"""Where a policy wins and where it loses: against the best rival that reads no more bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from sparse_eval.reporting.summarise import CELL, check_one_setting, recall_rows, sparse_rows
from sparse_eval.storage.columns import names

MARGIN_COLUMNS = names(
    "budget_tokens layer recall read rival rival_budget rival_recall rival_read margin margin_se n"
)
CHEAPER_TOLERANCE = 1.01
"""A rival counts as no dearer while it reads at most this many times the bytes."""

MEAN = -1
"""Stands for the mean of the non-dense layers where layers are counted."""


def margins(rows: pd.DataFrame, policy: str) -> pd.DataFrame:
    """Where a policy wins and loses: per budget and layer (NaN: mean of the non-dense layers) the
    rival with the highest recall among the realisable ones that read no more bytes there (1 %
    tolerance, metadata included, any budget), and margin = recall − rival's recall, paired by
    prompt, with its standard error. Cells without such a rival are left out."""
    rows = sparse_rows(recall_rows(rows))
    check_one_setting(rows)
    cell = rows.groupby(CELL, dropna=False, sort=False).ngroup()
    cells = rows[CELL].groupby(cell).first()
    rows = rows.assign(cell=cell, read=rows["bytes_kv"] + rows["bytes_metadata"])
    levels = pd.concat([rows.assign(level=MEAN), rows.assign(level=rows["layer"])])
    keys = ["level", "prompt", "cell"]
    means = levels.groupby(keys)[["mass_recall", "read"]].mean().unstack("cell")
    found = []
    for level, here in means.groupby(level="level"):
        recall = here["mass_recall"].to_numpy()
        read = pd.DataFrame(here["read"]).mean().to_numpy()
        for own in np.flatnonzero(cells["policy"] == policy).tolist():
            rival = best_rival(own, recall, read, cells["policy"].to_numpy())
            if rival is not None:
                layer = np.nan if level == MEAN else level
                found.append({"layer": layer} | margin_of(own, rival, recall, read, cells))
    return pd.DataFrame(found, columns=list(MARGIN_COLUMNS))


def best_rival(own: int, recall: np.ndarray, read: np.ndarray, policy: np.ndarray) -> int | None:
    """The cell of another policy that reads no more and leads the most, over shared prompts.

    recall: prompts × cells, read: bytes by cell, NaN where not realisable."""
    lead = recall - recall[:, [own]]
    shared = ~np.isnan(lead).all(axis=0)
    no_dearer = read <= read[own] * CHEAPER_TOLERANCE
    rivals: list[int] = np.flatnonzero((policy != policy[own]) & no_dearer & shared).tolist()
    return max(rivals, key=lambda rival: np.nanmean(lead[:, rival]), default=None)


def margin_of(
    own: int, rival: int, recall: np.ndarray, read: np.ndarray, cells: pd.DataFrame
) -> dict[str, Any]:
    pairs = recall[:, [own, rival]]
    pairs = pairs[~np.isnan(pairs).any(axis=1)]
    margin, num = pairs[:, 0] - pairs[:, 1], len(pairs)
    return {
        "budget_tokens": cells["budget_tokens"].iloc[own],
        "recall": pairs[:, 0].mean(),
        "read": read[own],
        "rival": cells["policy"].iloc[rival],
        "rival_budget": cells["budget_tokens"].iloc[rival],
        "rival_recall": pairs[:, 1].mean(),
        "rival_read": read[rival],
        "margin": margin.mean(),
        "margin_se": margin.std(ddof=1) / num**0.5 if num > 1 else np.nan,
        "n": num,
    }
