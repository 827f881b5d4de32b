"""What tasks with prompts share: the tokenizer, the weights when needed, prompts, prefills."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sparse_eval.cli.config import Settings
from sparse_eval.cli.progress import Progress
from sparse_eval.models import LoadedModel, check_shapes, local_tokenizer, model_info
from sparse_eval.prompts import LOCAL_TEXTS, Prompt, make_prompts, whole_text
from sparse_eval.storage.keep import shared_model
from sparse_eval.tasks.shared import shared

if TYPE_CHECKING:
    from sparse_eval.prefill import Prefilled

NUMERIC_PACKAGES = ("torch", "triton", "transformers", "numpy", "tokenizers")
"""Their versions are part of what a capture's or a prefill's content depends on."""

MOST_CHARS_PER_TOKEN = 8
"""A text of more than that many for each token wanted is long enough for any usual tokenizer."""


@dataclass
class PromptedTask:
    """settings: the run's. The model is loaded only if something was never measured."""

    settings: Settings
    progress: Progress

    @cached_property
    def loaded(self) -> LoadedModel:
        s = self.settings
        with shared(), self.progress.stage(f"loading {model_info(s.model).title}"):
            return shared_model(s)

    @cached_property
    def here(self) -> Any | None:
        """The tokenizer, if it is here already."""
        with shared():
            return local_tokenizer(self.settings.model, model_cache=self.settings.model_cache)

    @cached_property
    def tokenizer(self) -> Any:
        return self.loaded.tokenizer if self.here is None else self.here

    @cached_property
    def prompts(self) -> list[Prompt]:
        s = self.settings
        what = f"cutting prompts of {s.context} tokens from {s.prompts['source']}"
        with shared(), self.progress.stage(what):
            return self.cut(self.tokenizer)

    def check_inputs(self) -> None:
        """ValueError or SharedFailed for what cannot do, found without weights or network: shapes
        that no model has, a text that is no text or may be too short and is."""
        s = self.settings
        check_shapes(s.model)
        if s.prompts["source"] in LOCAL_TEXTS:
            num_chars = len(whole_text(s.prompts, s.model_cache).text)
            wanted = s.prompts["n"] * (s.context + s.task["steps"])
            if num_chars < MOST_CHARS_PER_TOKEN * wanted:
                self.local_prompts()

    def local_prompts(self) -> list[Prompt] | None:
        """The prompts, if they can be cut without fetching or running a model."""
        needs_more = self.settings.prompts["source"] in ("transcripts", "dataset")
        return None if needs_more or self.here is None else self.cut(self.here)

    def cut(self, tokenizer: Any) -> list[Prompt]:
        s = self.settings
        return make_prompts(
            s.prompts,
            tokenizer,
            context=s.context,
            extra=s.task["steps"],
            seed=s.seed,
            loaded=self.loaded if s.prompts["source"] == "transcripts" else None,
            model_cache=s.model_cache,
            cache_dir=s.cache_dir,
        )

    def prefill(
        self, ids: Tensor, what: str, key: str, *, is_one_of_many: bool = False
    ) -> Prefilled:
        """Of ids[:-1], dense; with cache_prefill=true kept on disk under its content's key."""
        from sparse_eval.prefill import prefill
        from sparse_eval.prefill_store import load_prefill, save_prefill

        s, model = self.settings, self.loaded.model
        path = s.cache_dir / "prefills" / f"{key}.safetensors"
        if s.cache_prefill and os.path.isfile(path):
            try:
                return load_prefill(path, model, ids)
            except ValueError as error:
                self.progress.warn(f"{error}; prefilling again")
        total = len(ids) - 1
        bar = self.progress.bar(f"prefill, {what}", total, is_one_of_many=is_one_of_many)
        with shared(), bar as tick:
            num_queries = s.task["prompt_queries"]
            filled = prefill(model, ids, num_prompt_queries=num_queries, on_tokens=tick)
        if s.cache_prefill:
            try:
                save_prefill(filled, path)
            except OSError as error:
                line = f"prefill not kept on disk ({error}); the run goes on"
                self.progress.warn(line, once="prefills")
        return filled
