"""A policy of anybody's, by its import path: what policy=external and the contract check build."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from sparse_eval.policies.base import Policy


def external_policy(target: str, fields: Mapping[str, Any] | None = None, **shared: Any) -> Policy:
    """The policy class at `target` ("mypkg.MyPolicy") built from shared values and its own fields.

    fields win over shared ones of the same name. Raises ValueError in one line if the target
    cannot be imported, is no Policy class, or does not take the fields."""
    cls = policy_class(target)
    try:
        return cls(**(shared | dict(fields or {})))
    except TypeError as error:
        raise ValueError(f"{target} does not take these fields: {error}") from None


def policy_class(target: str) -> type[Policy]:
    """The Policy subclass at a dotted path; ValueError in one line otherwise."""
    module_name, _, name = str(target).rpartition(".")
    if not module_name:
        raise ValueError(f"policy target must be package.module.Class, got {target!r}")
    try:
        cls = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # importing runs foreign code, which may raise anything
        raise ValueError(
            f"policy target {target} cannot be imported: {type(error).__name__}: {error}"
        ) from None
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        raise ValueError(
            f"policy target {target} must be a subclass of sparse_eval.policies.base.Policy"
        )
    return cls
