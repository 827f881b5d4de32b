"""A table of texts as HTML: it scrolls by itself where the screen is narrow, its note below."""

from __future__ import annotations

import html
from collections.abc import Sequence

from sparse_eval.reporting.tables_live import TextTable


def html_table(table: TextTable) -> str:
    left = {0, *(table.head.index(name) for name in table.left)}

    def cells(tag: str, line: Sequence[str]) -> str:
        sides = ["left" if i in left else "right" for i in range(len(line))]
        return "".join(
            f'<{tag} class="{side}">{html.escape(text)}</{tag}>'
            for side, text in zip(sides, line, strict=True)
        )

    body = "".join(f"<tr>{cells('td', line)}</tr>" for line in table.lines)
    note = f'<p class="hint">{html.escape(table.note)}</p>' if table.note else ""
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{cells("th", table.head)}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{note}"
    )
