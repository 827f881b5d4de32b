"""Two frontiers of one setting: recall against tokens read and against bytes read, metadata
included; what each policy holds at equal shares; and where the two rank policies differently.

A line is a policy over its budgets; variants of an adaptive policy that differ in delta or p alone
are points of one line. Between measured points lines are straight; beyond them they are not read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sparse_eval.reporting.summarise import (
    CELL,
    check_one_setting,
    dense_policies,
    recall_rows,
    sparse_rows,
)

AXES = {"tokens": "tokens_share", "bytes": "bytes_share"}
LEVELS = ("delta", "p")
"""Fields that set how much an adaptive policy reads, as a budget does."""

SHOWN = 5
"""Most pairs of policies that the sentence names."""


def points(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per prompt, policy and budget, of the layers that policies act on: line, policy,
    budget_tokens, prompt, recall, lse_error, tokens_share, bytes_share. Shares are of what dense
    reads in these layers; bytes_share is NaN for what cannot be built."""
    rows = recall_rows(rows)
    check_one_setting(rows)
    sparse = sparse_rows(rows)
    kinds = ["mass_recall", "lse_error", "density", "bytes_kv", "bytes_metadata", "bytes_dense"]
    kinds = [name for name in kinds if name in sparse]
    grouped = sparse.groupby([*CELL, "prompt"], dropna=False, sort=False)
    table = grouped[kinds].mean()
    unknown = (
        sparse["bytes_metadata"]
        .isna()
        .groupby([sparse[k] for k in [*CELL, "prompt"]], dropna=False, sort=False)
        .any()
    )
    read = (table["bytes_kv"] + table["bytes_metadata"]).where(~unknown)
    table = table.assign(tokens_share=table["density"], bytes_share=read / table["bytes_dense"])
    table = table.rename(columns={"mass_recall": "recall"}).reset_index()
    table["line"] = [line_of(str(policy)) for policy in table["policy"]]
    return table


def line_of(policy: str) -> str:
    """The policy without the fields that set how much it reads: "ffd:delta=7:bits=4" is a point of
    "ffd:bits=4"."""
    fields = policy.replace(",", ":").split(":")
    return ":".join(f for f in fields if f.partition("=")[0] not in LEVELS)


def recall_at(x: pd.DataFrame, axis: str, share: float) -> float:
    """Recall of one line and prompt at a share of what dense reads; NaN beyond its points."""
    known = x.dropna(subset=[AXES[axis]]).sort_values(AXES[axis])
    at, recall = known[AXES[axis]].to_numpy(), known["recall"].to_numpy()
    if not len(at) or not at[0] - 1e-9 <= share <= at[-1] + 1e-9:
        return math.nan
    return float(np.interp(share, at, recall))


def equal_shares(
    rows: pd.DataFrame, shares: Sequence[float], against: str | None = None
) -> pd.DataFrame:
    """One line per axis, share and policy line: recall (mean over the n prompts that reach the
    share), recall_se, and difference, difference_se to `against`, paired by prompt. Raises
    ValueError if `against` was not measured."""
    table = points(rows)
    lines = list(dict.fromkeys(table["line"]))
    if against is not None and against not in lines:
        raise ValueError(f"against must be one of {', '.join(lines)}, got {against!r}")
    found = []
    for axis, share in itertools.product(AXES, shares):
        held = {line: at_each_prompt(table[table["line"] == line], axis, share) for line in lines}
        for line, recall in held.items():
            entry = {"axis": axis, "share": share, "policy": line, "n": len(recall)}
            entry |= {"recall": recall.mean(), "recall_se": recall.sem()}
            if against is not None:
                difference = (recall - held[against]).dropna()
                entry |= {"difference": difference.mean(), "difference_se": difference.sem()}
            found.append(entry)
    return pd.DataFrame(found)


def at_each_prompt(x: pd.DataFrame, axis: str, share: float) -> pd.Series:
    """Recall by prompt, of the prompts whose points reach the share."""
    held = {prompt: recall_at(part, axis, share) for prompt, part in x.groupby("prompt")}
    return pd.Series(held, dtype=float).dropna()


@dataclass(frozen=True)
class Gap:
    """How much more one line holds than another at equal shares: mean over prompts, its standard
    error (NaN for one prompt)."""

    mean: float
    error: float
    n: int

    @property
    def is_clear(self) -> bool:
        """Above its standard error; of one prompt, above a thousandth."""
        least = 1e-3 if math.isnan(self.error) else self.error
        return abs(self.mean) > least

    def __str__(self) -> str:
        return f"{abs(self.mean):.3f}" + ("" if math.isnan(self.error) else f" ± {self.error:.3f}")


def gap(a: pd.DataFrame, b: pd.DataFrame, axis: str) -> Gap:
    """Line a less line b over the shares that both were measured at or between."""
    by_prompt = []
    for prompt in sorted(set(a["prompt"]) & set(b["prompt"]), key=str):
        mine, theirs = a[a["prompt"] == prompt], b[b["prompt"] == prompt]
        at = pd.concat([mine[AXES[axis]], theirs[AXES[axis]]]).dropna()
        both = [recall_at(mine, axis, x) - recall_at(theirs, axis, x) for x in at]
        both = [x for x in both if not math.isnan(x)]
        if both:
            by_prompt.append(sum(both) / len(both))
    series = pd.Series(by_prompt, dtype=float)
    return Gap(series.mean(), series.sem(), len(series))


@dataclass(frozen=True)
class Turn:
    """Two lines that tokens and bytes rank differently: first is ahead at equal tokens."""

    first: str
    second: str
    by_tokens: Gap
    by_bytes: Gap

    def __str__(self) -> str:
        return (
            f"at equal tokens {self.first} holds {self.by_tokens} more of the mass than "
            f"{self.second}, at equal bytes {self.by_bytes} less"
        )


def turns(rows: pd.DataFrame) -> Iterator[Turn]:
    """Pairs that the two frontiers rank differently, beyond their errors on both."""
    table = points(rows)
    table = table[~table["policy"].isin(dense_policies(table))]
    lines = {name: x for name, x in table.groupby("line", sort=False)}
    lines = {name: x for name, x in lines.items() if x["bytes_share"].notna().all()}
    for (a, x), (b, y) in itertools.combinations(lines.items(), 2):
        tokens, in_bytes = gap(x, y, "tokens"), gap(x, y, "bytes")
        if not (tokens.is_clear and in_bytes.is_clear) or tokens.mean * in_bytes.mean >= 0:
            continue
        first, second = (a, b) if tokens.mean > 0 else (b, a)
        yield Turn(str(first), str(second), tokens, in_bytes)


def ranking_sentence(rows: pd.DataFrame) -> str:
    """Whether tokens and bytes rank the policies of one setting differently, and where most."""
    found = sorted(turns(rows), key=lambda t: -min(abs(t.by_tokens.mean), abs(t.by_bytes.mean)))
    if not found:
        return "Tokens read and bytes read rank the policies alike, as far as their errors tell."
    shown = "; ".join(map(str, found[:SHOWN]))
    more = f"; and {len(found) - SHOWN} more pairs" if len(found) > SHOWN else ""
    n = found[0].by_tokens.n
    return (
        f"Tokens read and bytes read rank policies differently: {shown}{more} (means over the "
        f"shares where both were measured, n = {n} prompt{'s' if n > 1 else ''})."
    )
