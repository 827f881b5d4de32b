"""Two runs' timings of the same work side by side: the ratio, and whether their ranges overlap.

A run times a piece of work many times in one session, so its 10th to 90th percentile is the spread
within that session; nothing here knows how two sessions of one setting would differ.
"""

from __future__ import annotations

import pandas as pd

from sparse_eval.reporting.tables_latency import microseconds, mode_of
from sparse_eval.reporting.tables_live import TextTable, lines_of

WORK = ["work", "batch", "context", "graph"]
SETTING = [
    "device",
    "policy",
    "page_size",
    "budget_tokens",
    "lists",
    "density_target",
    "keys",
    "layer",
    "delta_target",
    "keep_ratio",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "seed",
]
"""What may differ between A and B: their configs show it. Told apart where one run has several."""

TIMES = ["median_us", "p10_us", "p90_us"]
NOTE = (
    "µs: median (10th to 90th percentile of the repeats within one run); B / A: of the medians, "
    "below 1 where B is faster; one is called faster where the two ranges are apart. Neither run "
    "was repeated: no test."
)


def paired_timings(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """One line per work that both timed: WORK, the settings that vary within a run, TIMES of each
    (_a, _b), implementation_a and _b, ratio (B / A) and verdict. Empty where there is none."""
    a, b = timings_of(a), timings_of(b)
    names = [n for n in SETTING if n in a and n in b]
    varying = [n for n in names if max(a[n].nunique(dropna=False), b[n].nunique(dropna=False)) > 1]
    keys = [*WORK, *varying]
    columns = [*keys, *TIMES, "implementation"]
    first, second = (f[columns].drop_duplicates(keys, keep="last") for f in (a, b))
    pairs = first.merge(second, on=keys, suffixes=("_a", "_b"))
    pairs["ratio"] = pairs["median_us_b"] / pairs["median_us_a"]
    verdicts = [verdict(line) for line in lines_of(pairs)]
    order = pairs.assign(verdict=pd.Series(verdicts, pairs.index, dtype=object))
    return order.sort_values(
        ["graph", "batch", "context"], ascending=[False, True, True], kind="stable"
    ).reset_index(drop=True)


def timings_of(rows: pd.DataFrame) -> pd.DataFrame:
    """The latency rows, with `work`: a baseline's family, so that the fastest SDPA of one run meets
    the other's, and `implementation`: its own name."""
    if "what" not in rows:
        return pd.DataFrame(columns=[*WORK, *TIMES, "implementation"])
    rows = rows[rows["task"] == "latency"]
    name = rows["baseline"].fillna("") if "baseline" in rows else pd.Series("", rows.index)
    is_loop = (rows["what"] == "generate") & (name != "")
    return rows.assign(
        work=rows["what"].where(~is_loop, rows["what"] + ", " + name),
        implementation=name.where(name != "", rows["what"]),
    )


def timing_cells(rows: pd.DataFrame) -> list[str]:
    """What a run timed, in words."""
    return list(
        dict.fromkeys(
            f"{line['work']}, batch {line['batch']:.0f}, {line['context']:,.0f} tokens, "
            f"{mode_of(line)}"
            for line in lines_of(timings_of(rows))
        )
    )


def verdict(line: dict[str, float]) -> str:
    """In words: which is faster, if their ranges are apart."""
    if line["p90_us_b"] < line["p10_us_a"]:
        return "B faster"
    if line["p90_us_a"] < line["p10_us_b"]:
        return "A faster"
    return "ranges overlap"


def timing_lines(pairs: pd.DataFrame) -> TextTable:
    """pairs: of paired_timings."""
    varying = [name for name in pairs if name in SETTING]
    lines = [
        [
            str(line["work"]),
            *(value_of(line[name]) for name in varying),
            f"{line['batch']:.0f}",
            f"{line['context']:,.0f}",
            mode_of(line),
            f"{line['ratio']:.3f}",
            in_words(line),
            *(microseconds(*(line[f"{t}_{run}"] for t in TIMES)) for run in "ab"),
        ]
        for line in lines_of(pairs)
    ]
    varied = [name.replace("_", " ") for name in varying]
    head = ["work", *varied, "batch", "context", "mode", "B / A", "verdict", "A µs", "B µs"]
    return TextTable(head, lines, NOTE, (*varied, "mode", "verdict"))


def value_of(value: object) -> str:
    is_whole = isinstance(value, float) and value.is_integer()
    return f"{value:,.0f}" if is_whole else str(value)


def in_words(line: dict[str, str]) -> str:
    """The verdict; which implementations, where the two runs' differ."""
    a, b = line["implementation_a"], line["implementation_b"]
    return line["verdict"] + ("" if a == b else f" (A: {a}, B: {b})")
