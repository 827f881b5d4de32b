"""lm-eval's own HFLM with a policy in place of its decode attention: `--model sparse_eval`.

Greedy answers decode through the policy from the last prompt token on. A log-likelihood, which HFLM
takes from one dense forward where no decode step happens, is fed token by token instead.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from sparse_eval.budgets import check_budget
from sparse_eval.device import resolve_device
from sparse_eval.live import patched
from sparse_eval.lm.arguments import check_batch_size, layers_of, policy_of
from sparse_eval.lm.decode import judge
from sparse_eval.lm.requests import Ask, check_generation, max_new_tokens
from sparse_eval.lm.stack import Decoder, Stack, stack
from sparse_eval.lm.texts import check_opening, cut
from sparse_eval.policies.base import Policy
from sparse_eval.prefill import prefill
from sparse_eval.prompts import leading_bos
from sparse_eval.trace import Trace

NUM_PROMPT_QUERIES = 64

log = logging.getLogger("lm_eval.sparse_eval")  # shown by lm-eval's command line


@register_model("sparse_eval")
class PolicyLM(HFLM):
    """HFLM under a policy; arguments that are not named here are HFLM's.

    policy: an instance, a name of conf/policy/ or a dotted class name. policy_config: its fields by
    name. budget: tokens a KV head may read per step. dense_layers: "0:1" or a list. question_tokens
    and kernels are `patched`'s, the latter its backend. strict: refuse prompts that do not fit
    instead of counting them in `truncated`. selections: how often the policy chose."""

    def __init__(
        self,
        pretrained: Any,
        policy: str | Policy = "quest",
        budget: int | None = None,
        policy_config: Mapping[str, Any] | None = None,
        page_size: int | None = None,
        sink_pages: int | None = None,
        local_pages: int | None = None,
        dense_layers: str | int | Sequence[int] = (0, 1),
        question_tokens: int | None = None,
        kernels: str = "auto",
        strict: bool = False,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("truncation"):
            raise ValueError(
                "truncation=True would cut prompts in silence: without it those that do not fit "
                "are cut from the left and counted, or refused with strict=True"
            )
        check_batch_size(kwargs.get("batch_size", 1))
        # before weights are loaded
        given = {"page_size": page_size, "sink_pages": sink_pages, "local_pages": local_pages}
        self.policy = policy_of(policy, policy_config, given)
        check_budget(self.policy, budget)
        self.dense_layers = layers_of(dense_layers)
        if isinstance(pretrained, str):
            kwargs["device"] = resolve_device(kwargs.get("device") or "auto")
        super().__init__(pretrained, **kwargs)
        if self.backend != "causal":
            raise ValueError(f"a policy needs a causal language model, got {self.backend}")
        self.budget = budget
        self.question_tokens = question_tokens
        self.kernels = kernels
        self.strict = strict
        self.truncated = 0
        self.selections = 0

    def set_cache_hook(self, cache_hook: Any) -> None:
        raise ValueError(
            "lm-eval's response cache (--use_cache) knows no policy and would hand one's answers "
            "to another: it is refused; task=lm_eval keeps finished answers by policy and budget"
        )

    @contextlib.contextmanager
    def under(self, prompt_queries: dict[int, Tensor] | None = None) -> Iterator[Trace]:
        """The model under the policy. Raises RuntimeError where it never selected."""
        question = self.question_tokens
        with patched(
            self.model,
            self.policy,
            budget=self.budget,
            dense_layers=self.dense_layers,
            protocol="decode" if question is None else "question",
            question_tokens=question,
            prompt_queries=prompt_queries,
            backend=self.kernels,
        ) as trace:
            yield trace
        self.selections += trace.calls

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Ids and their mask, int64 [B, T]. HFLM asks only the first string whether it brings its
        own BOS; here each is encoded for itself. One that does not fit is counted, or refused."""
        rows = [self.fitting(self.tok_encode(text), left_truncate_len) for text in strings]
        width = max(map(len, rows))
        ids_BT = torch.full((len(rows), width), self.tokenizer.pad_token_id)
        mask_BT = torch.zeros_like(ids_BT)
        for row, ids in enumerate(rows):
            own = slice(width - len(ids), None) if padding_side == "left" else slice(len(ids))
            ids_BT[row, own] = torch.tensor(ids)
            mask_BT[row, own] = 1
        return ids_BT, mask_BT

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """As HFLM. Raises ValueError where a prompt does not open with exactly one BOS, or holds no
        token at all."""
        is_prompt, bos_text = add_special_tokens is None, self.tokenizer.bos_token
        if is_prompt and bos_text and string.startswith(bos_text):
            add_special_tokens = False
        found = super().tok_encode(string, add_special_tokens, **kwargs)
        if is_prompt:
            check_opening(found, self.bos, string)
        return self.fitting(found, left_truncate_len)

    @cached_property
    def bos(self) -> list[int]:
        """What prompts open with: [BOS], or nothing where the tokenizer adds none."""
        return [] if self.add_bos_token is False else leading_bos(self.tokenizer)

    def fitting(self, ids: list[int], room: int | None) -> list[int]:
        """The last ids, a BOS kept; what does not fit is counted or refused. Raises ValueError for
        a prompt that is nothing but question."""
        if not room:
            return ids
        self.count_cut(len(ids), room)
        ids = cut(ids, room, self.bos)
        if self.question_tokens and 1 < len(ids) <= self.question_tokens:
            raise ValueError(
                f"{self.question_tokens} question tokens leave no context to prefill in a prompt "
                f"of {len(ids)} tokens"
            )
        return ids

    def count_cut(self, length: int, room: int) -> None:
        if length <= room:
            return
        if self.strict:
            raise ValueError(
                f"a prompt of {length} tokens does not fit into {room}, and strict=True"
            )
        self.truncated += 1
        log.warning(
            "a prompt of %d tokens does not fit into %d: cut from the left, %d so far",
            *(length, room, self.truncated),
        )

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """As HFLM. Raises ValueError for an answer that no prompt leaves room for, before any."""
        for _, kwargs in (request.args for request in requests):
            check_generation(kwargs)
            most = max_new_tokens(kwargs, self.max_gen_toks)
            if most > self.max_length - 2:
                room = self.max_length
                raise ValueError(
                    f"an answer of {most} tokens does not fit into {room} with a prompt"
                )
        return super().generate_until(requests, disable_tqdm)

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> Tensor:
        with self.under():
            return super()._model_generate(context, max_length, stop, **generation_kwargs)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        raise ValueError(
            "loglikelihood_rolling has no prompt that a decode-time policy could select from: "
            "it is refused"
        )

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Each distinct context is prefilled once; its continuations are fed together."""
        by_context = defaultdict(list)
        for place, (_, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                raise ValueError(
                    f"a continuation must have 1 to {self.max_length} tokens, got "
                    f"{len(continuation)}"
                )
            fitting = self.fitting(context, self.max_length + 1 - len(continuation))
            by_context[tuple(fitting)].append((place, tuple(continuation)))
        found: dict[int, tuple[float, bool]] = {}
        for ids, wanted in by_context.items():
            found |= self._judge(ids, wanted, int(override_bs or self._rows))
        return [found[place] for place in range(len(requests))]

    @property
    def _rows(self) -> int:
        return 64 if self.batch_size == "auto" else int(self.batch_size)

    def _judge(
        self, ids: tuple[int, ...], wanted: list[tuple[int, tuple[int, ...]]], rows: int
    ) -> dict[int, tuple[float, bool]]:
        tail = min(self.question_tokens or 1, len(ids))
        before = ids[: len(ids) - tail]
        filled = None
        if before:
            padded = torch.tensor([*before, 0])  # the last id is not prefilled
            filled = prefill(self.model, padded, num_prompt_queries=NUM_PROMPT_QUERIES)
        found = {}
        for start in range(0, len(wanted), rows):
            part = wanted[start : start + rows]
            whole: Stack = stack([filled] * len(part), self.model)
            asks = [Ask(ids, tail, 0, "", continuation=continuation) for _, continuation in part]
            with self.under(whole.prompt_queries):
                room = max(ask.most_fed for ask in asks)
                answers = judge(Decoder.of(self.model, whole, room), asks)
            for (place, _), answer in zip(part, answers, strict=True):
                found[place] = (answer.log_likelihood, answer.is_greedy)
        return found
