"""Rows as one typed table, in the columns' order."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from sparse_eval.storage.columns import (
    ALL_COLUMNS,
    CELL_IDENTITY,
    FLAG,
    INTEGER,
    LIST,
    NUMBER,
    TEXT,
    flat,
)
from sparse_eval.storage.files import to_json

if TYPE_CHECKING:
    from sparse_eval.core import Row


def frame_of(rows: Iterable[Row] | pd.DataFrame) -> pd.DataFrame:
    """Rows as a table: contract order, one type a column, each measurement once (the last wins).

    Text columns hold text or None, list columns tuples, policy_config JSON text; columns that the
    contract does not name follow at the end as they are."""
    frame = rows.copy() if isinstance(rows, pd.DataFrame) else pd.DataFrame(list(rows))
    known = [name for name in ALL_COLUMNS if name in frame]
    others = [name for name in frame if name not in known]
    # at once: a table that grows column by column is in pieces, which pandas warns of
    columns = {name: typed(frame[name]) for name in known} | {n: frame[n] for n in others}
    return once(pd.DataFrame(columns, index=frame.index))


def typed(column: pd.Series) -> pd.Series:
    if column.name in TEXT and pd.api.types.infer_dtype(column, skipna=False) == "string":
        return column.astype(object)
    if column.name in TEXT:
        return pd.Series([text_of(x) for x in column], column.index, dtype=object)
    if column.name in LIST:
        return pd.Series([tuple(x) if is_list(x) else None for x in column], column.index, object)
    if column.name in FLAG and not column.isna().any():
        return column.astype(bool)
    if column.name in INTEGER and not column.isna().any():
        return column.astype("int64")
    if column.name in INTEGER | NUMBER | FLAG:
        return column.astype("float64")
    return column


def text_of(value: Any) -> str | None:
    if isinstance(value, dict | list | tuple):
        return to_json(value)
    if value is None or value is pd.NA or (isinstance(value, float) and np.isnan(value)):
        return None
    return str(value)


def is_list(value: Any) -> bool:
    return isinstance(value, list | tuple | np.ndarray)


def once(frame: pd.DataFrame) -> pd.DataFrame:
    """Drops all but the last of rows that are the same measurement; rows without a key stay."""
    if "cell_key" not in frame:
        return frame.reset_index(drop=True)
    identity = [name for name in CELL_IDENTITY if name in frame]
    repeated = frame.duplicated(identity, keep="last") & frame["cell_key"].notna()
    return frame[~repeated].reset_index(drop=True)


def fields_of(policy_config: str | None) -> dict[str, Any]:
    """A policy's fields from its column, nested ones under dotted names; {} where it has none."""
    fields = json.loads(policy_config) if policy_config else {}
    return flat(fields) if isinstance(fields, dict) else {}
