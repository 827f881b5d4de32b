"""Tables of live tasks as texts: what the terminal and the page both show."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from sparse_eval.needle.score import OUTCOMES

SHORT = {
    "garbled": "garb.",
    "distractor": "distr.",
    "fabricated": "fabr.",
    "off_topic": "off",
    "empty": "empty",
    "truncated": "trunc.",
}


@dataclass(frozen=True)
class TextTable:
    """head: column names, the first and those in `left` aligned left. note: what columns mean."""

    head: list[str]
    lines: list[list[str]]
    note: str
    left: tuple[str, ...] = ()


def answers_table(table: pd.DataFrame) -> TextTable:
    """Every measured prompt, whatever the gate said. table: of summarise_needle."""
    others = [name for name in OUTCOMES if name != "correct"]
    head = [
        "policy",
        "budget",
        "KV read",
        "correct",
        "interval",
        *(SHORT[o] for o in others),
        "NLL",
    ]
    lines = [
        [
            line["policy"],
            budget_of(line),
            known(line["model_read_fraction"], ".1%"),
            f"{line['correct']} of {line['n']}",
            f"{line['low']:.2f}-{line['high']:.2f}",
            *(str(line[name] or "") for name in others),
            known(line["answer_nll"], ".2f"),
        ]
        for line in lines_of(table)
    ]
    note = (
        "correct of all prompts, Wilson 95 %; the other answers by kind (garbled, distractor, "
        "fabricated, off topic, empty, truncated); NLL of the true answer, nats"
    )
    return TextTable(head, lines, note)


def comparison_table(table: pd.DataFrame) -> TextTable:
    """Who read the value; and against dense, on the prompts whose gate passed."""
    resolvable = table["resolvable"].max() if "resolvable" in table else math.nan
    smallest = (
        "n too small to resolve any difference"
        if math.isnan(resolvable)
        else f"smallest difference it can resolve: {resolvable:.2f}"
    )
    head = [
        "policy",
        "budget",
        "hit",
        "chance",
        "heads > ½",
        "wordings",
        "minus dense",
        "p",
        "rank",
    ]
    lines = [
        [
            line["policy"],
            budget_of(line),
            known(line["page_hit"], ".1%"),
            known(line["page_hit_chance"], ".1%"),
            heads_cell(line),
            known(line["wording_spread"], ".2f"),
            *compared_cells(line),
        ]
        for line in lines_of(table)
    ]
    note = (
        "hit: share of the value's pages that a KV head reads, beside chance; heads > ½: those "
        "that read over half of them; wordings: spread of accuracy. minus dense: the difference, "
        "paired, where the dense gate passed, Tango 95 %, "
        "exact McNemar's p; "
        f"{smallest}; not inferior: one-sided 95 %"
    )
    return TextTable([*head, "verdict"], lines, note, ("verdict",))


def compared_cells(line: Mapping[str, Any]) -> list[str]:
    if line["is_dense"]:
        return ["", "", "", "dense"]
    if math.isnan(line["difference"]):
        return ["", "", "", str(line["verdict"])]
    interval = f"[{line['diff_low']:+.2f}, {line['diff_high']:+.2f}]"
    rank = "" if math.isnan(line["rank"]) else f"{line['rank']:.0f}"
    return [
        f"{line['difference']:+.2f} {interval}",
        f"{line['p_value']:.3f}",
        rank,
        line["verdict"],
    ]


def gate_lines(gate: pd.DataFrame) -> TextTable:
    """table: of gate_table."""
    lines = [
        [
            line["needle_kind"],
            f"{line['context']:,}",
            f"{line['depth']:g}",
            f"{line['gate_correct']} of {line['gate_n']}" if line["gate_n"] else "not run",
            "" if math.isnan(line["gate_lower"]) else f"{line['gate_lower']:.2f}",
            gate_cell(not line["not_ranked"], ran=line["gate_n"] > 0),
        ]
        for line in lines_of(gate)
    ]
    head = ["kind", "context", "depth", "dense correct", "lower bound", "gate"]
    return TextTable(head, lines, "dense on samples of the gate's own, one-sided 95 % bound")


def gate_cell(passed: bool, *, ran: bool) -> str:
    return "passed" if passed else "not passed" if ran else "not run"


def floor_line(floor: Mapping[str, float]) -> str:
    return (
        f"noise floor: stock SDPA against dense through the shared kernel, {floor['n']} prompts: "
        f"the true answer's NLL differs by {floor['nll_difference']:.1e} nats at most, "
        f"{floor['same_choice']:.1%} of next tokens are the same"
    )


def fidelity_floor_line(table: pd.DataFrame) -> str:
    """table: of summarise_fidelity, which has a dense line."""
    dense = table[table["is_dense"]].iloc[0]
    return (
        f"noise floor: stock SDPA, fed in one piece, against dense through the shared kernel: "
        f"KL {dense['stock_kl_mean']:.1e}, {dense['stock_agreement']:.1%} of next tokens equal"
    )


def fidelity_table(table: pd.DataFrame) -> TextTable:
    """table: of summarise_fidelity."""
    num_long, num = table["long_tokens"].max(), table["tokens"].max()
    lines = [
        [
            line["policy"],
            budget_of(line),
            known(line["model_read_fraction"], ".1%"),
            known(line["kl_mean"], ".4f"),
            known(line["kl_p99"], ".3f"),
            known(line["top1_agreement"], ".1%"),
            f"{known(line['nll_sparse'], '.3f')} ({known(line['nll_dense'], '.3f')})",
            known(line["long_kl_mean"], ".4f"),
            known(line["long_top1_agreement"], ".1%"),
            f"{known(line['long_nll_sparse'], '.3f')} ({known(line['long_nll_dense'], '.3f')})",
        ]
        for line in lines_of(table)
    ]
    head = ["policy", "budget", "KV read", "KL mean", "KL p99", "same top 1", "NLL (dense)"]
    head += ["long: KL mean", "long: same top 1", "long: NLL (dense)"]
    note = (
        f"{num:.0f} tokens of {table['n'].max()} prompts, {num_long:.0f} of them need the long "
        "context; KL(dense || policy) and NLL in nats, means over prompts"
    )
    return TextTable(head, lines, note)


def known(value: float, form: str) -> str:
    """A figure; n/a where it was not measured or cannot be, such as the bytes an oracle reads."""
    return "n/a" if math.isnan(value) else format(value, form)


def heads_cell(line: Mapping[str, Any]) -> str:
    above = known(line["heads_above_half"], ".1f")
    return above if above == "n/a" else f"{above}/{line['heads']:.0f}"


def lines_of(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in line.items()} for line in table.to_dict("records")]


def budget_of(line: Mapping[str, Any]) -> str:
    """In tokens; without one: all, or adaptive with what was read."""
    if not math.isnan(line["budget_tokens"]):
        return f"{line['budget_tokens']:,.0f}"
    density = line.get("density", math.nan)
    return "all" if math.isnan(density) or density >= 1 else f"adaptive: {density:.1%}"
