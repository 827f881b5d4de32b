"""task=fidelity: feed a text's next tokens through a policy and compare its logits with dense ones.

After a dense prefill of N tokens the next M are fed one by one (teacher forcing): what a policy
does to the next-token distribution, whether or not any answer flips.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sparse_eval.core import Row
from sparse_eval.fidelity import NextTokens, compare, nll_of
from sparse_eval.inputs.tokens import leading_bos
from sparse_eval.prefill import Prefilled, cache_keyword, feed
from sparse_eval.prompts import Prompt
from sparse_eval.storage.cells import CellStore
from sparse_eval.tasks.live_task import Arm, LiveTask, Work, arms_of, read_columns


@dataclass
class Fidelity(LiveTask):
    """One run of teacher-forced fidelity."""

    def work(self, store: CellStore) -> Work:
        s, arms = self.settings, arms_of(self.settings)
        n, known, missing = s.prompts["n"], 0, s.prompts["n"]
        prompts = self.local_prompts()
        if prompts is not None:
            found = [
                sum(store.has(Measurement(self, prompt).key(arm)) for arm in arms)
                for prompt in prompts
            ]
            known, missing = sum(found), sum(count < len(arms) for count in found)
        steps = (len(arms) * n - known) * s.task["steps"]
        return Work([s.context] * missing, steps, steps, len(arms) * n, known)

    def run(self, store: CellStore) -> Iterator[list[Row]]:
        """Rows of one cell at a time; cells measured before come from the store."""
        arms = arms_of(self.settings)
        total = len(arms) * len(self.prompts)
        with self.progress.bar("measuring", total, unit="cells") as tick:
            for prompt in self.prompts:
                measurement = Measurement(self, prompt)
                keys = [measurement.key(arm) for arm in arms]
                known = [store.get(key) for key in keys]
                for arm, key, rows in zip(arms, keys, known, strict=True):
                    if rows is None:
                        rows = [measurement.cell(arm) | {"cell_key": key}]
                        store.put(key, rows)
                    # the label and the sample are this run's, whoever measured the cell
                    yield [row | {"policy": arm.label, "sample": prompt.sample} for row in rows]
                    tick(1)


@dataclass(frozen=True)
class Fed:
    """What feeding the text under one arm gave: logits, and what was read."""

    tokens: NextTokens
    read: Row


@dataclass
class Measurement:
    """One prompt: its dense cache and dense logits, made when first needed, and the cells on it."""

    task: Fidelity
    prompt: Prompt

    @cached_property
    def prefill_key(self) -> str:
        return self.task.prefill_key(self.prompt.hash, len(self.prompt.ids) - 1)

    @cached_property
    def filled(self) -> Prefilled:
        what = f"prompt {self.prompt.sample}"
        return self.task.prefill(self.prompt.ids, what, self.prefill_key)

    def key(self, arm: Arm) -> str:
        task = self.task.settings.task
        parts: dict[str, Any] = {
            "task": "fidelity",
            "text": self.prompt.continuation.tolist(),
            **{name: task[name] for name in ("steps", "short_window", "long_gain")},
        }
        return self.task.key(self.prefill_key, arm, parts)

    def cell(self, arm: Arm) -> Row:
        dense, needs_long = self.dense.tokens, self.needs_long  # measured before the clock starts
        started = time.perf_counter()
        fed = self.dense if arm.policy.dense else self._feed(arm)
        columns = (
            compare(fed.tokens, dense)
            | fed.read
            | {
                "expected_ids": self.prompt.continuation.tolist(),
                "output_ids": fed.tokens.choices,
                "dense_output_ids": dense.choices,
            }
        )
        at_long = compare(fed.tokens.where(needs_long), dense.where(needs_long))
        columns |= {f"long_{name}": value for name, value in at_long.items()}
        if arm.policy.dense:
            columns |= self._noise_floor()
        common = self.task.common(
            arm,
            context=len(self.prompt.ids),
            prompt_hash=self.prompt.hash,
            prefill_key=self.prefill_key,
        )
        common |= {"prompts": self.prompt.source}
        return common | columns | self.task.cost(time.perf_counter() - started)

    @cached_property
    def dense(self) -> Fed:
        """Dense, through the shared kernel like every arm: what they are compared with."""
        return self._feed(arms_of(self.task.settings)[0])

    def _feed(self, arm: Arm) -> Fed:
        with self.task.under(arm, self.filled) as trace:
            tokens = self._logits()
        return Fed(tokens, read_columns(trace))

    @torch.inference_mode()
    def _logits(self) -> NextTokens:
        """The logits that predict each token of the text, the tokens before it fed one by one."""
        model, cache = self.task.loaded.model, self.filled.fork()
        text = self.prompt.continuation
        fed = [self.prompt.ids[-1:], *text[:-1].split(1)]
        logits = torch.stack([feed(model, cache, token).float() for token in fed])
        return NextTokens(logits, text.to(logits.device))

    @torch.inference_mode()
    def _chunk(self, before: Tensor, cache: Any) -> NextTokens:
        """The same from one forward of the model's own attention. before: ids not yet cached."""
        model, text = self.task.loaded.model, self.prompt.continuation
        ids = torch.cat([before, text[:-1]]).to(model.device)
        keyword = {} if cache is None else {cache_keyword(model): cache}
        out = model(ids[None], **keyword, use_cache=cache is not None, logits_to_keep=len(text))
        return NextTokens(out.logits[0].float(), text.to(model.device))

    @cached_property
    def needs_long(self) -> Tensor:
        """bool [M]: tokens that dense predicts better than the same model with a short window does,
        by more than long_gain nats."""
        task = self.task.settings.task
        bos = torch.tensor(leading_bos(self.task.tokenizer), dtype=torch.int64)
        window = self.prompt.ids[-(task["short_window"] - len(bos)) :]
        short = self._chunk(torch.cat([bos, window]), None)
        return nll_of(short) - nll_of(self.dense.tokens) > task["long_gain"]

    def _noise_floor(self) -> Row:
        """Stock SDPA, all tokens in one forward, against dense through the shared kernel."""
        stock = compare(self._chunk(self.prompt.ids[-1:], self.filled.fork()), self.dense.tokens)
        return {"stock_kl_mean": stock["kl_mean"], "stock_agreement": stock["top1_agreement"]}
