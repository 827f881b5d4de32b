"""Two frontiers of one setting: recall against tokens read and against bytes read, metadata
included; what each policy holds at equal shares; and where the two rank policies differently.

A line is a policy over its budgets; variants of an adaptive policy that differ in delta or p alone
are points of one line. Between measured points lines are straight; beyond them they are not read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
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

GRID_SHARES = [i / 40 for i in range(1, 40)]
"""Shares of what dense reads at which two policies are compared."""

CLEAR = 2
"""Standard errors, paired over prompts, that a difference must exceed to rank two policies."""

SHOWN = 3
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
    lines = table["policy"].map(str).map(line_of)
    of_one = table.groupby(lines)["policy"].transform("nunique") == 1
    table["line"] = lines.mask(of_one, table["policy"])
    return table


def line_of(policy: str) -> str:
    """The policy without the fields that set how much it reads: "ffd:delta=7:bits=4" is a point of
    "ffd:bits=4"."""
    fields = policy.replace(",", ":").split(":")
    return ":".join(f for f in fields if f.partition("=")[0] not in LEVELS)


def held_at(x: pd.DataFrame, axis: str, shares: Sequence[float]) -> pd.DataFrame:
    """Recall of one line at shares of what dense reads: a row per prompt, a column per share, NaN
    beyond the prompt's points."""
    held = {}
    for prompt, part in x.groupby("prompt", sort=False):
        known = part.dropna(subset=[AXES[axis]]).sort_values(AXES[axis])
        at, recall = known[AXES[axis]].to_numpy(), known["recall"].to_numpy()
        inside = [len(at) > 0 and at[0] - 1e-9 <= share <= at[-1] + 1e-9 for share in shares]
        values = np.interp(shares, at, recall) if len(at) else np.full(len(shares), np.nan)
        held[prompt] = np.where(inside, values, np.nan)
    return pd.DataFrame.from_dict(held, orient="index", columns=list(shares))


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
    for axis in AXES:
        held = {line: held_at(table[table["line"] == line], axis, shares) for line in lines}
        for share, line in itertools.product(shares, lines):
            recall = held[line][share].dropna()
            entry = {"axis": axis, "share": share, "policy": line, "n": len(recall)}
            entry |= {"recall": recall.mean(), "recall_se": recall.sem()}
            if against not in (None, line):
                difference = (recall - held[against][share]).dropna()
                entry |= {"difference": difference.mean(), "difference_se": difference.sem()}
            found.append(entry)
    return pd.DataFrame(found)


@dataclass(frozen=True)
class Gap:
    """How much more one line holds than another at equal shares: mean over prompts, its standard
    error (NaN for one prompt)."""

    mean: float
    error: float
    n: int

    @property
    def is_clear(self) -> bool:
        """Above CLEAR standard errors; never of one prompt, which says nothing of its error."""
        return abs(self.mean) > max(1e-9, CLEAR * self.error) if self.n > 1 else False

    def __str__(self) -> str:
        return f"{abs(self.mean):.3f}" + ("" if math.isnan(self.error) else f" ± {self.error:.3f}")


def gaps(a: pd.DataFrame, b: pd.DataFrame) -> dict[float, Gap]:
    """Line a less line b (of held_at) at each share, over the prompts where both reach it."""
    difference = a - b
    columns = (difference.mean(), difference.sem(), difference.count())
    return {
        share: Gap(float(mean), float(error), int(n))
        for share, mean, error, n in zip(difference.columns, *columns, strict=True)
    }


@dataclass(frozen=True)
class Turn:
    """Two lines that tokens and bytes rank differently at a share: first is ahead by tokens."""

    first: str
    second: str
    share: float
    by_tokens: Gap
    by_bytes: Gap

    @property
    def is_clear(self) -> bool:
        clear = self.by_tokens.is_clear and self.by_bytes.is_clear
        return clear and self.by_tokens.mean * self.by_bytes.mean < 0

    @property
    def size(self) -> float:
        return min(abs(self.by_tokens.mean), abs(self.by_bytes.mean))

    def __str__(self) -> str:
        return (
            f"reading {self.share:.1%} of the tokens {self.first} holds {self.by_tokens} more of "
            f"the mass than {self.second}, reading {self.share:.1%} of the bytes {self.by_bytes} "
            "less"
        )


@dataclass(frozen=True)
class Ranking:
    """turned: pairs that the two frontiers rank differently, each where it is plainest; the
    plainest first. compared: pairs that both axes compare at some share, over two prompts or more.
    lines: of the policies that choose."""

    turned: list[Turn]
    compared: int
    lines: int


def rank_pairs(rows: pd.DataFrame) -> Ranking:
    """Pairs turn where their differences exceed their errors on both axes, with opposite signs, and
    because of bytes: at the tokens that either reads for these bytes, the first is ahead too."""
    table = points(rows)
    table = table[~table["policy"].isin(dense_policies(table))]
    lines = {str(name): x for name, x in table.groupby("line", sort=False)}
    known = {name: x for name, x in lines.items() if x["bytes_share"].notna().all()}
    tokens, in_bytes = (
        {name: held_at(x, axis, GRID_SHARES) for name, x in known.items()} for axis in AXES
    )
    found, compared = list[Turn](), 0
    for a, b in itertools.combinations(known, 2):
        by_tokens, by_bytes = gaps(tokens[a], tokens[b]), gaps(in_bytes[a], in_bytes[b])
        here = [
            Turn(*((a, b) if x.mean > 0 else (b, a)), share, x, y)
            for share, x, y in zip(GRID_SHARES, by_tokens.values(), by_bytes.values(), strict=True)
            if x.n == y.n > 1
        ]
        compared += bool(here)
        turned = [turn for turn in here if turn.is_clear and is_ahead(turn, known)]
        found += sorted(turned, key=lambda turn: -turn.size)[:1]
    return Ranking(sorted(found, key=lambda turn: -turn.size), compared, len(lines))


def is_ahead(turn: Turn, lines: Mapping[str, pd.DataFrame]) -> bool:
    """Whether first holds more at the tokens that either reads for the turn's bytes. Two lines that
    read the same metadata read the same tokens there: what turns them is a crossing, not bytes."""
    first, second = lines[turn.first], lines[turn.second]
    read = [tokens_at(line, turn.share) for line in (first, second)]
    held = (held_at(line, "tokens", read) for line in (first, second))
    return bool(((next(held) - next(held)).mean() > 0).all())


def tokens_at(line: pd.DataFrame, share: float) -> float:
    """The share of tokens that a line reads at a share of bytes, mean over prompts."""
    tokens = line.assign(recall=line["tokens_share"])
    return float(held_at(tokens, "bytes", [share])[share].mean())


def ranking_sentence(rows: pd.DataFrame) -> str:
    """Whether tokens and bytes rank the policies of one setting differently, and where most."""
    ranking = rank_pairs(rows)
    found = ranking.turned
    if not ranking.compared:
        return f"Tokens read and bytes read: nothing could be compared, {why_not(rows, ranking)}."
    if not found:
        return "Tokens read and bytes read rank the policies alike, as far as their errors tell."
    shown = "; ".join(map(str, found[:SHOWN]))
    more = f"; and {len(found) - SHOWN} more pairs" if len(found) > SHOWN else ""
    n = found[0].by_tokens.n
    return (
        f"Tokens read and bytes read rank policies differently: {shown}{more} (each pair where it "
        f"is plainest, n = {n} prompts)."
    )


def why_not(rows: pd.DataFrame, ranking: Ranking) -> str:
    if ranking.lines < 2:
        return "there are no two policies that leave something out"
    if points(rows)["prompt"].nunique() < 2:
        return "one prompt has no standard error"
    return "no two policies read the same share of tokens and of bytes"
