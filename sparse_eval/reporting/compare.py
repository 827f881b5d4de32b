"""Two runs side by side: what differs in their configs, and in their results, sample by sample."""

from __future__ import annotations

import html
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

from sparse_eval.reporting.compare_labels import aligned, other_settings
from sparse_eval.reporting.compare_latency import paired_timings, timing_cells, timing_lines
from sparse_eval.reporting.grid import grid_of
from sparse_eval.reporting.html_table import html_table
from sparse_eval.reporting.paired import holm, least_p, paired
from sparse_eval.reporting.summarise import distinct_labels, prompts_of, sparse_rows
from sparse_eval.reporting.tables_live import TextTable
from sparse_eval.storage.table import frame_of

MUST_AGREE = ("schema", "dtype", "protocol", "model", "revision", "weights")
"""Runs that differ in one of these measured different things: their samples are no pairs."""

METRICS = {
    "recall": {"mass_recall": True, "output_error": False},
    "needle": {"correct": True, "answer_nll": False},
    "lm_eval": {"value": True},
    "fidelity": {"kl_mean": False, "top1_agreement": True},
}
"""Task -> column -> whether more is better."""

SAMPLE = ["task", "policy", "budget_tokens", "what", "prompt", "capture"]
"""What one value of a metric belongs to."""

IGNORED = ("provenance", "tracking", "verbose", "name", "cache_dir", "model_cache", "cache_gb")


@dataclass(frozen=True)
class Comparison:
    """config: (key, A, B) of keys that differ. results: one line per task, policy, budget and
    metric: mean_a, mean_b, difference (B minus A), low, high, p, p_holm, n, better, identical (in
    every sample). timings: of paired_timings."""

    config: list[tuple[str, str, str]]
    results: pd.DataFrame
    only_a: list[str]
    only_b: list[str]
    timings: pd.DataFrame = field(default_factory=pd.DataFrame)


def compare(
    a: pd.DataFrame, b: pd.DataFrame, config_a: Mapping[str, Any], config_b: Mapping[str, Any]
) -> Comparison:
    """Pairs are the same prompt under the same policy and budget on the same capture; a policy that
    each run has under settings of its own is paired too. Raises ValueError, with one line, where
    the runs cannot be paired."""
    a, b = frame_of(a), frame_of(b)
    check_pairable(a, b)
    samples_a, samples_b = per_sample(a), per_sample(b)
    check_captures(samples_a, samples_b)
    keys = ["task", "policy", "budget_tokens", "what", "metric"]
    others = other_settings(*(with_labels(rows) for rows in (a, b)))
    on = [*keys, "prompt", "capture"]
    met = [
        named(samples_a, o.a, o.shown).merge(
            named(samples_b, o.b, o.shown), on=on, suffixes=("_a", "_b")
        )
        for o in others
    ]
    alike = samples_a.merge(samples_b, on=on, suffixes=("_a", "_b"))
    pairs = pd.concat([*met, alike]) if met else alike
    cells_a, cells_b = (
        cells_of(s) + timing_cells(rows) for s, rows in ((samples_a, a), (samples_b, b))
    )
    paired_a = {c for o, m in zip(others, met, strict=True) for c in cells_of(m, o.a)}
    paired_b = {c for o, m in zip(others, met, strict=True) for c in cells_of(m, o.b)}
    lower = lower_is_better(a) | lower_is_better(b)
    results = pd.DataFrame(
        [
            line_of(key, part, lower)
            for key, part in pairs.groupby(keys, dropna=False, sort=False)
            if (part["value_a"].notna() & part["value_b"].notna()).any()
        ]
    )
    if len(results):
        results["p_holm"] = holm(list(results["p"]))
    return Comparison(
        config_difference(*aligned(config_a, config_b, others)),
        results,
        [cell for cell in cells_a if cell not in {*cells_b, *paired_a}],
        [cell for cell in cells_b if cell not in {*cells_a, *paired_b}],
        paired_timings(a, b),
    )


def check_pairable(a: pd.DataFrame, b: pd.DataFrame) -> None:
    tasks_a, tasks_b = tasks_of(a), tasks_of(b)
    if not tasks_a & tasks_b:
        raise ValueError(
            f"these runs cannot be paired: A measured {', '.join(sorted(tasks_a))}, "
            f"B {', '.join(sorted(tasks_b))}"
        )
    for name in MUST_AGREE:
        if name not in a or name not in b:
            continue
        first, second = (sorted(set(map(str, frame[name]))) for frame in (a, b))
        if first != second:
            raise ValueError(
                f"these runs cannot be pooled or paired: {name} is {', '.join(first)} in A and "
                f"{', '.join(second)} in B"
            )


def tasks_of(rows: pd.DataFrame) -> set[str]:
    """What was measured for itself: the recall at a needle's answers belongs to these."""
    if "needle_kind" in rows:
        rows = rows[(rows["task"] != "recall") | rows["needle_kind"].isna()]
    return set(rows["task"])


def check_captures(a: pd.DataFrame, b: pd.DataFrame) -> None:
    """A prompt that both have must be one capture: K, V and queries of another code, another
    device or other versions are other data."""
    of_a, of_b = (frame.groupby("prompt")["capture"].agg(set) for frame in (a, b))
    shared = of_a.index.intersection(of_b.index)
    differ = [prompt for prompt in shared if not of_a[prompt] & of_b[prompt]]
    if differ:
        first = differ[0]
        names = (str(min(of[first]))[:12] for of in (of_a, of_b))
        raise ValueError(
            f"these runs cannot be pooled or paired: {len(differ)} of {len(shared)} shared prompts "
            f"have different captures (prompt {str(first)[:12]}: {' in A, '.join(names)} in B)"
        )


def per_sample(rows: pd.DataFrame) -> pd.DataFrame:
    """One value per task, policy, budget, metric and prompt: means over layers, KV heads, seeds.
    Empty where only latency was measured, which has no prompts."""
    if not rows["task"].isin(METRICS).any():
        return pd.DataFrame(columns=[*SAMPLE, "metric", "value"])
    rows = rows[rows["task"].isin(METRICS)]
    rows = rows.assign(prompt=prompts_of(rows), policy=distinct_labels(rows))
    rows["capture"] = rows.get("capture_hash", "")
    parts = []
    for task, metrics in METRICS.items():
        part = rows[rows["task"] == task]
        if not len(part):
            continue
        if task == "recall":
            part = sparse_rows(part)
        if task == "needle":
            part = part[part["outcome"].notna() & (part["role"] != "gate")]
            part = part.assign(correct=(part["outcome"] == "correct").astype(float))
        if task == "lm_eval":
            part = part[part["role"] == "sample"]
        what = part["needle_kind"].fillna("") if "needle_kind" in part else ""
        if task == "lm_eval":
            what = part["lm_task"] + ": " + part["metric"]
        part = part.assign(what=what)
        for metric in metrics:
            mean = part.groupby(SAMPLE, dropna=False, sort=False)[metric].mean()
            parts.append(mean.rename("value").reset_index().assign(metric=metric))
    return pd.concat(parts, ignore_index=True)


def with_labels(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows that have samples, labelled as these are."""
    rows = rows[rows["task"].isin(METRICS)]
    return rows.assign(policy=distinct_labels(rows) if len(rows) else "")


def named(samples: pd.DataFrame, label: str, shown: str) -> pd.DataFrame:
    return samples[samples["policy"] == label].assign(policy=shown)


def cells_of(samples: pd.DataFrame, label: str | None = None) -> list[str]:
    """Policy (by its label in one run, where given) and budget of each cell."""
    cells = samples[["policy", "budget_tokens"]].drop_duplicates()
    return [
        f"{label or line.policy} at {budget_text(line.budget_tokens)}"
        for line in cells.itertuples()
    ]


def budget_text(budget: Any) -> str:
    return "any budget" if pd.isna(budget) else f"{budget:,.0f} tokens"


def lower_is_better(rows: pd.DataFrame) -> set[str]:
    """lm-eval's tasks whose compared metric is better when lower, as per_sample names them."""
    if "higher_is_better" not in rows:
        return set()
    told = rows[rows["higher_is_better"].notna()]
    told = told[~told["higher_is_better"].astype(bool)]
    return set(told["lm_task"] + ": " + told["metric"])


def line_of(key: Any, part: pd.DataFrame, lower: Collection[str] = ()) -> dict[str, Any]:
    """lower: what is better when lower, whatever its metric is called."""
    task, policy, budget, what, metric = key
    part = part.dropna(subset=["value_a", "value_b"])
    found = paired(list(part["value_a"]), list(part["value_b"]))
    higher = METRICS[task][metric] and what not in lower
    better = "" if found.mean == 0 else ("B" if (found.mean > 0) == higher else "A")
    return {
        "task": task + (f" {what}" if what else ""),
        "policy": policy,
        "budget_tokens": budget,
        "metric": metric,
        "mean_a": part["value_a"].mean(),
        "mean_b": part["value_b"].mean(),
        "difference": found.mean,
        "low": found.low,
        "high": found.high,
        "p": found.p,
        "n": found.n,
        "better": better,
        "identical": bool((part["value_a"] == part["value_b"]).all()),
    }


def config_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Leaves of two configs that differ."""
    flat_a, flat_b = flat(a), flat(b)
    keys = dict.fromkeys([*flat_a, *flat_b])
    return [
        (key, flat_a.get(key, "–"), flat_b.get(key, "–"))
        for key in keys
        if flat_a.get(key) != flat_b.get(key) and key.split(".")[0] not in IGNORED
    ]


def flat(value: Any, name: str = "") -> dict[str, str]:
    if isinstance(value, Mapping):
        return {
            key: text
            for inner, item in value.items()
            for key, text in flat(item, f"{name}.{inner}" if name else str(inner)).items()
        }
    return {name: str(value)}


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(k): v for k, v in line.items()} for line in table.to_dict("records")]


def verdict(line: Mapping[str, Any]) -> str:
    """What a line shows, in words."""
    if line["difference"] == 0:
        return "the same"
    if np.isnan(line["p"]):
        return "one sample: no test"
    if line["p_holm"] <= 0.05:
        return f"{line['better']} better"
    if least_p(int(line["n"])) > 0.05:
        return f"n too small (p ≥ {least_p(int(line['n'])):.2g})"
    return "not told apart"


NOTHING_SHARED = "No prompt under the same policy and budget is in both."

HEAD = ("task", "policy", "budget", "metric", "A", "B", "B − A", "95 %", "p", "p (Holm)", "n", "")


CELL = ["task", "policy", "budget_tokens"]


def differing(found: Comparison) -> pd.DataFrame:
    """The results of cells that are not identical in every metric."""
    results = found.results
    if not len(results):
        return results
    same = results.groupby(CELL, dropna=False)["identical"].transform("all")
    return results[~same]


def identical_line(found: Comparison) -> str:
    """The cells that are the same in both runs, in one line; "" for none."""
    if not len(found.results):
        return ""
    same = found.results.drop(differing(found).index)
    budgets: dict[str, list[str]] = {}
    for policy, part in same.groupby("policy", sort=False):
        at = ", ".join(map(budget_text, part["budget_tokens"].unique()))
        budgets.setdefault(at, []).append(str(policy))
    cells = "; ".join(f"{', '.join(policies)} at {at}" for at, policies in budgets.items())
    metrics = ", ".join(same["metric"].unique())
    return f"Identical in both, sample by sample ({metrics}): {cells}" if cells else ""


def lines(results: pd.DataFrame) -> list[list[str]]:
    """Results as texts, under HEAD."""
    return [
        [
            line["task"],
            line["policy"],
            budget_text(line["budget_tokens"]),
            line["metric"],
            f"{line['mean_a']:.4f}",
            f"{line['mean_b']:.4f}",
            f"{line['difference']:+.4f}",
            "–" if np.isnan(line["low"]) else f"[{line['low']:+.4f}, {line['high']:+.4f}]",
            "–" if np.isnan(line["p"]) else f"{line['p']:.3g}",
            "–" if np.isnan(line["p_holm"]) else f"{line['p_holm']:.3g}",
            str(line["n"]),
            verdict(line),
        ]
        for line in records(results)
    ]


NOTE = (
    "Paired by prompt on the same capture: mean of B − A with 95 % by Student's t, two-sided "
    "sign-flip test, Holm's correction over all lines, identical ones too; n: prompts."
)


def config_table(found: Comparison) -> TextTable:
    head = ["key", "A", "B"]
    return TextTable(head, [list(line) for line in found.config], "", tuple(head))


def tables_of(found: Comparison, *, whole: bool = True) -> dict[str, TextTable]:
    """What both runs measured, by title. whole: with the cells that are identical in both."""
    tables = {}
    results = found.results if whole else differing(found)
    if len(results):
        left = ("task", "policy", "budget", "metric", "")
        tables["Results"] = TextTable(list(HEAD), lines(results), NOTE, left)
    if len(found.timings):
        tables["Timings"] = timing_lines(found.timings)
    return tables


def print_comparison(found: Comparison, console: Console) -> None:
    if found.config:
        console.print(grid_of(config_table(found), "What differs in the config"))
    else:
        console.print("The configs are the same.")
    for title, table in tables_of(found, whole=False).items():
        console.print()
        console.print(grid_of(table, title))
    if identical_line(found):
        console.print(identical_line(found))
    if not tables_of(found):
        console.print(NOTHING_SHARED)
    for name, only in (("A", found.only_a), ("B", found.only_b)):
        if only:
            console.print(f"in {name} alone: {'; '.join(only)}")


def comparison_section(found: Comparison, names: Sequence[str]) -> str:
    """The comparison as a section of the page."""
    parts = [
        f'<section id="comparison"><div class="head"><h2>A against B</h2></div><p>A: '
        f"{html.escape(names[0])}<br>B: {html.escape(names[1])}</p>",
        "<h3>What differs in the config</h3>",
        html_table(config_table(found)) if found.config else "<p>Nothing.</p>",
    ]
    for title, table in tables_of(found, whole=False).items():
        parts += [f"<h3>{title}</h3>", html_table(table)]
    if identical_line(found):
        parts.append(f"<p>{html.escape(identical_line(found))}</p>")
    if not tables_of(found):
        parts.append(f"<p>{NOTHING_SHARED}</p>")
    for name, only in (("A", found.only_a), ("B", found.only_b)):
        if only:
            parts.append(f"<p>In {name} alone: {html.escape('; '.join(only))}</p>")
    return "\n".join([*parts, "</section>"])
