"""A task's documents -> what the model is asked: prompts as ids, stops, continuations."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sparse_eval.lm.config import LmConfig
from sparse_eval.lm.quiet import quiet
from sparse_eval.lm.suite import naming, seed_everything
from sparse_eval.lm.texts import TextSide, cut

ACCEPTED = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"}
DEFAULT_NEW_TOKENS = 256
"""HFLM's, where a task says nothing."""
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""lm-eval's names for the most new tokens, the first one given winning."""


@dataclass(frozen=True)
class Ask:
    """One request of lm-eval. ids: the prompt's. tail: how many of its last tokens are not in the
    dense prefill. num_cut: tokens that did not fit and were cut from its front. Generation: stops,
    max_new_tokens; log-likelihood: continuation's ids (None: generation). arguments: a hash of what
    lm-eval asked, so that the answer goes back to the same request."""

    ids: tuple[int, ...]
    tail: int
    num_cut: int
    arguments: str
    stops: tuple[str, ...] = ()
    max_new_tokens: int = 0
    continuation: tuple[int, ...] | None = None

    @property
    def is_choice(self) -> bool:
        return self.continuation is not None

    @property
    def num_cached(self) -> int:
        return len(self.ids) - self.tail

    @property
    def most_fed(self) -> int:
        """Tokens fed one by one after the prefill, at most."""
        return self.tail + max(self.max_new_tokens, len(self.continuation or ()))


@dataclass(frozen=True)
class Sample:
    """One document. doc_id: its place among the task's. target: what lm-eval compares with."""

    doc_id: int
    asks: tuple[Ask, ...]
    target: str

    @property
    def hash(self) -> str:
        """16 hex digits of sha256 over all that is asked."""
        text = json.dumps([asdict(ask) for ask in self.asks], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def is_truncated(self) -> bool:
        return any(ask.num_cut for ask in self.asks)

    @property
    def prompt_tokens(self) -> int:
        return max(len(ask.ids) for ask in self.asks)


def build_options(config: LmConfig, side: TextSide) -> dict[str, Any]:
    """How lm-eval renders a document: the same words for building and for scoring."""
    return {
        "system_instruction": config.system,
        "apply_chat_template": config.chat != "none",
        "fewshot_as_multiturn": config.chat != "none",
    }


def instances_of(
    task: Any, doc_ids: Sequence[int], config: LmConfig, side: TextSide
) -> dict[int, list[Any]]:
    """lm-eval's requests by document."""
    seed_everything(task, config.seed)
    options = build_options(config, side)
    name = task.get_config("task")
    with quiet(), naming(name, "make its prompts"):
        task.build_all_requests(
            samples=list(doc_ids),
            **options,
            chat_template=side.chat if options["apply_chat_template"] else None,
        )
    found = defaultdict(list)
    for instance in task.instances:
        found[doc_ids[instance.doc_id]].append(instance)
    return found


def samples_of(
    name: str,
    task: Any,
    doc_ids: Sequence[int],
    config: LmConfig,
    side: TextSide,
    max_length: int,
) -> list[Sample]:
    """Documents as what is asked, in order. Raises ValueError in one line that names the task."""
    found = instances_of(task, doc_ids, config, side)
    samples = []
    for doc_id in doc_ids:
        instances = sorted(found[doc_id], key=lambda instance: instance.idx)
        try:
            asks = tuple(ask_of(instance, config, side, max_length) for instance in instances)
        except ValueError as error:
            raise ValueError(f"lm-eval task {name}, document {doc_id}: {error}") from None
        samples.append(Sample(doc_id, asks, str(task.doc_to_target(instances[0].doc))))
    return samples


def ask_of(instance: Any, config: LmConfig, side: TextSide, max_length: int) -> Ask:
    kind = instance.request_type
    if kind == "generate_until":
        text, kwargs = instance.args
        stops, max_new = generation(kwargs, config, side)
        ids, continuation = side.ids(text), None
        room = max_length - max_new
    elif kind == "loglikelihood":
        text, following = instance.args
        stops, max_new = (), 0
        ids, continuation = side.pair(text, following)
        if not continuation:
            raise ValueError(f"a continuation must have a token, got {following!r}")
        room = max_length + 1 - len(continuation)
    else:
        raise ValueError(f"requests must be generate_until or loglikelihood, got {kind}")
    if room < 2:
        raise ValueError(f"an answer does not fit into {max_length} tokens beside its prompt")
    fitting = cut(ids, room, side.bos)
    if len(fitting) < len(ids) and config.strict:
        raise ValueError(
            f"a prompt of {len(ids)} tokens and its answer exceed {max_length} tokens, and "
            "task.strict is set"
        )
    tail = side.tail(text, ids, instance.doc) if text else 1
    if side.is_question and text and not tail < len(fitting):
        raise ValueError(
            f"protocol=question: a prompt cut to {len(fitting)} tokens has no context left before "
            f"its {tail} question tokens"
        )
    return Ask(
        ids=tuple(fitting),
        tail=tail,
        num_cut=len(ids) - len(fitting),
        arguments=hash_of(instance),
        stops=stops,
        max_new_tokens=max_new,
        continuation=None if continuation is None else tuple(continuation),
    )


def hash_of(instance: Any) -> str:
    text = json.dumps([instance.request_type, *map(str, instance.args)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def generation(
    kwargs: Mapping[str, Any], config: LmConfig, side: TextSide
) -> tuple[tuple[str, ...], int]:
    """Stop strings, the tokenizer's EOS among them, and the most new tokens."""
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

    check_generation(kwargs)
    given = dict(normalize_gen_kwargs(dict(kwargs), DEFAULT_NEW_TOKENS))
    unknown = sorted(key for key in set(given) - ACCEPTED if (key, given[key]) != ("num_beams", 1))
    if unknown:
        raise ValueError(f"answers are decoded greedily, generation_kwargs {unknown} have no part")
    until: Any = given.get("until")
    stops = handle_stop_sequences(until, eos=side.eos_text)
    most = max_new_tokens(kwargs, DEFAULT_NEW_TOKENS)
    return tuple(stops), min(most, config.max_new_tokens or most)


def max_new_tokens(kwargs: Mapping[str, Any], default: int) -> int:
    """Of checked generation_kwargs."""
    given = (kwargs[key] for key in LENGTHS if kwargs.get(key) is not None)
    return int(str(next(given, default)))


def check_generation(kwargs: Mapping[str, Any]) -> None:
    """ValueError in one line for values that lm-eval would take and then trip over."""
    until = kwargs.get("until", [])
    stops = until if isinstance(until, list) else [until]
    if not all(isinstance(stop, str) for stop in stops):
        raise ValueError(f"generation_kwargs until must be a text or a list of them, got {until!r}")
    for key in LENGTHS:
        value = kwargs.get(key)
        if value is not None and not (str(value).isdecimal() and int(str(value)) >= 1):
            raise ValueError(f"generation_kwargs {key} must be an integer >= 1, got {value!r}")


def choices(task: Any, of_document: Sequence[Any]) -> Sequence[Any]:
    """A document's requests, or answers, less those that acc_mutual_info asks without the prompt,
    behind the others."""
    listed = [entry.get("metric") for entry in task.get_config("metric_list") or []]
    num = len(of_document)
    return of_document[: num // 2] if "acc_mutual_info" in listed else of_document


def batches(samples: Sequence[Sample], size: int) -> Iterator[list[Sample]]:
    """Consecutive documents, measured together: the unit that is kept and resumed."""
    for start in range(0, len(samples), size):
        yield list(samples[start : start + size])
