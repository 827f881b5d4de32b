"""The policy contract, callable on anybody's policy: python -m sparse_eval.check mypkg.MyPolicy."""

from __future__ import annotations

import argparse
import importlib
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_type_hints

import torch
import yaml

from sparse_eval.contract.behaviour import BEHAVIOUR_CHECKS
from sparse_eval.contract.cases import MakePolicy
from sparse_eval.contract.selections import SELECTION_CHECKS, make_samples
from sparse_eval.contract.subject import Fault, Skip, Subject
from sparse_eval.device import resolve_device
from sparse_eval.policies.base import Policy


@dataclass(frozen=True)
class CheckResult:
    """One promise: its name, whether it was kept, and the evidence or the reason it was skipped.
    cause: of what was raised the type and the place, which many promises may fail by; else ""."""

    name: str
    outcome: Literal["ok", "failed", "skipped"]
    detail: str = ""
    cause: str = ""

    def __str__(self) -> str:
        return f"{self.outcome:8}{self.name}{': ' if self.detail else ''}{self.detail}"


def check_policy(make_policy: MakePolicy, device: str = "cpu") -> list[CheckResult]:
    """Every promise of the contract, tried on the policy that make_policy(**fields) builds.

    make_policy gets page_size, sink_pages, local_pages and, for adaptive policies, the fields of
    dense_at; fields that it fixes itself win."""
    subject = Subject(make_policy, device)
    samples: list[Any] = []
    selects = result_of("select runs on every shape", lambda: samples.extend(make_samples(subject)))
    results = [selects]
    if selects.outcome == "ok":
        for check in SELECTION_CHECKS:
            results.append(result_of(name_of(check), partial(each, check, samples)))
    for behaviour in BEHAVIOUR_CHECKS:
        results.append(result_of(name_of(behaviour), partial(behaviour, subject)))
    return results


def each(check: Callable[[Any], None], samples: Sequence[Any]) -> None:
    """Run a check on every sample; skipped if it applies to none."""
    skips = []
    for sample in samples:
        try:
            check(sample)
        except Skip as skip:
            skips.append(skip)
    if len(skips) == len(samples):
        raise skips[0]


def result_of(name: str, run: Callable[[], None]) -> CheckResult:
    try:
        run()
    except Skip as skip:
        return CheckResult(name, "skipped", str(skip))
    except Fault as fault:
        raised = fault.__cause__
        cause = cause_of(raised) if isinstance(raised, Exception) else ""
        return CheckResult(name, "failed", str(fault), cause)
    except Exception as error:  # a policy is foreign code, which may raise anything
        line = " ".join(str(error).split())
        told = f"raised {type(error).__name__}: {line}{place(error)}"
        return CheckResult(name, "failed", told, cause_of(error))
    return CheckResult(name, "ok")


def cause_of(error: Exception) -> str:
    """Its type and place, by which one error is known whatever shapes its words name."""
    return f"{type(error).__name__}{place(error) or error}"


PACKAGE = Path(__file__).parent
NOT_A_POLICYS = (PACKAGE, Path(torch.__file__).parent)


def place(error: Exception) -> str:
    """Where a policy raised: the innermost line in the first file of the traceback that is its
    author's; of a policy that comes with the package, in its own. "" where there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if is_authors(frame.filename)]
    shipped = [frame for frame in frames if PACKAGE / "policies" in Path(frame.filename).parents]
    if not (theirs or shipped):
        return ""
    file = theirs[0].filename if theirs else shipped[-1].filename
    last = [frame for frame in frames if frame.filename == file][-1]
    return f" ({file}:{last.lineno}, in {last.name})"


def is_authors(filename: str) -> bool:
    """Not of this package, torch or Python itself, nor a text that dataclasses made."""
    if filename.startswith("<") or any(x in Path(filename).parents for x in NOT_A_POLICYS):
        return False
    packages = "site-packages" in filename or "dist-packages" in filename
    return packages or Path(sysconfig.get_path("stdlib")) not in Path(filename).parents


def name_of(check: Callable[..., None]) -> str:
    return check.__name__.replace("_", " ")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line per promise. Returns 0 if all are kept, 1 if not, 2 for a bad target."""
    parser = argparse.ArgumentParser(prog="python -m sparse_eval.check", description=__doc__)
    parser.add_argument("target", help="import path of a Policy subclass, such as mypkg.MyPolicy")
    parser.add_argument("fields", nargs="*", metavar="field=value", help="fields to fix, optional")
    parser.add_argument("--device", default="cpu", help="auto, cpu, cuda")
    options = parser.parse_args(arguments)
    try:
        fixed = dict(field_of(text) for text in options.fields)
        device = resolve_device(options.device)
        build(options.target, fixed)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    make_policy = partial(build, options.target, fixed)
    results = check_policy(make_policy, device)
    print("\n".join(lines_of(results)))
    failed = sum(result.outcome == "failed" for result in results)
    skipped = sum(result.outcome == "skipped" for result in results)
    kept = len(results) - failed - skipped
    print(f"{options.target}: {kept} kept, {failed} failed, {skipped} do not apply")
    return 1 if failed else 0


def lines_of(results: Sequence[CheckResult]) -> Iterator[str]:
    """A line a promise; one error that many promises fail by is told once, with their names."""
    by_cause: dict[str, list[str]] = {}
    for result in results:
        if result.cause:
            by_cause.setdefault(result.cause, []).append(result.name)
    for result in results:
        first, *others = by_cause.get(result.cause, [result.name])
        if result.name == first:
            yield str(result)
            if others:
                yield f"{'':8}{len(others)} more fail by it: {', '.join(others)}"


def build(target: str, fixed: Mapping[str, Any], **fields: Any) -> Policy:
    """The policy at an import path, fixed fields winning. ValueError in one line if the target
    cannot be imported, is no Policy class, or does not take the fields."""
    cls = policy_class(target)
    check_types(target, cls, fixed)
    try:
        return cls(**fields | dict(fixed))
    except TypeError as error:
        raise ValueError(f"{target} does not take these fields: {error}") from None


PLAIN = (int, float, bool, str, type(None))


def check_types(target: str, cls: type, fixed: Mapping[str, Any]) -> None:
    """ValueError where a field of a plain type (int, float, bool, str, or one of several) is given
    a value of another; what other annotations mean is the class's to say."""
    try:
        hints = get_type_hints(cls)
    except Exception:  # an annotation that cannot be resolved says nothing
        return
    for name, value in fixed.items():
        hint = hints.get(name)
        kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        if not all(kind in PLAIN for kind in kinds):
            continue
        fits = type(value) in kinds or (type(value) is int and float in kinds)
        if not fits:
            wanted = " or ".join("none" if k is type(None) else k.__name__ for k in kinds)
            raise ValueError(f"{target}: {name} must be {wanted}, got {value!r}")


def policy_class(target: str) -> type[Policy]:
    module_name, _, name = target.rpartition(".") if isinstance(target, str) else ("", "", "")
    if not module_name:
        raise ValueError(f"target must be an import path such as mypkg.MyPolicy, got {target!r}")
    try:
        cls = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # importing runs foreign code, which may raise anything
        line = " ".join(str(error).split())
        raise ValueError(f"cannot import {target}: {type(error).__name__}: {line}") from None
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        raise ValueError(f"{target} is no subclass of sparse_eval.policies.base.Policy")
    return cls


def field_of(text: str) -> tuple[str, Any]:
    """ "alpha=0.5" -> ("alpha", 0.5); ValueError if there is no "=" or no value."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ValueError(f"fields are given as field=value, got {text!r}")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError:
        raise ValueError(f"{name} has a value that is not YAML: {value!r}") from None


if __name__ == "__main__":
    sys.exit(main())
