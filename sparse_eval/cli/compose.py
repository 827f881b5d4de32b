"""Command-line words -> a composed config, or one line that says what is wrong with them."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import create_config_search_path
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sparse_eval.cli.config import KEYS, unknown_key

CONFIG_MODULE = "pkg://sparse_eval.conf"
GROUPS = ("model", "policy", "prompts", "task", "suite", "protocol", "tracking", "experiment")


@dataclass(frozen=True)
class Composer:
    """Composes conf/config.yaml with overrides; config_dirs are the user's own folders."""

    config_dirs: tuple[str, ...] = ()
    composed: dict[tuple[str, ...], dict[str, Any]] = field(default_factory=dict, compare=False)
    choices: dict[tuple[str, ...], dict[str, Any]] = field(default_factory=dict, compare=False)

    @cached_property
    def loader(self) -> ConfigLoaderImpl:
        path = create_config_search_path(CONFIG_MODULE)
        for folder in self.config_dirs:
            if not os.path.isdir(folder):
                raise ValueError(f"--config-dir must be a folder, got {folder!r}")
            where = f"file://{Path(folder).resolve()}"
            path.prepend("command-line", where, SearchPathQuery(None, "schema"))
        return ConfigLoaderImpl(config_search_path=path)

    def options(self, group: str) -> list[str]:
        return sorted(self.loader.get_group_options(group))

    def compose(self, overrides: Sequence[str]) -> dict[str, Any]:
        """The resolved config as a plain dict. Raises ValueError with one line."""
        key = tuple(overrides)
        if key not in self.composed:
            self.composed[key] = self._compose(overrides)
        return deepcopy(self.composed[key])

    def choice(self, group: str, overrides: Sequence[str]) -> str:
        """The option of a group that overrides, an experiment's included, come to."""
        self.compose(overrides)
        return str(self.choices[tuple(overrides)][group])

    def _compose(self, overrides: Sequence[str]) -> dict[str, Any]:
        try:
            config = self.loader.load_configuration(
                "config", list(overrides), RunMode.RUN, from_shell=False
            )
            OmegaConf.set_readonly(config, False)
            OmegaConf.set_struct(config, False)
            self.choices[tuple(overrides)] = dict(config.hydra.runtime.choices)
            config.pop("hydra", None)
            plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        except yaml.YAMLError as error:
            raise ValueError(f"broken yaml: {' '.join(str(error).split())}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"a yaml must be UTF-8: {error}") from None
        except (HydraException, OmegaConfBaseException) as error:
            line = one_line(error, overrides)
            field = re.match(r"unknown key '([\w.]+)': its group", line)
            raise ValueError(self._unknown_field(field[1], overrides) if field else line) from None
        assert isinstance(plain, dict)
        return {str(key): value for key, value in plain.items()}

    def _unknown_field(self, key: str, overrides: Sequence[str]) -> str:
        """The line for a field that its group does not have, with those that it has."""
        others = [word for word in overrides if word.partition("=")[0].strip() != key]
        group: Any = {} if len(others) == len(overrides) else self.compose(others)
        for name in key.split(".")[:-1]:
            group = group.get(name) if isinstance(group, dict) else None
        accepted = [name for name in group or {} if name != "_target_"]
        return unknown_key(key, accepted) if accepted else f"unknown key {key!r}"

    def check_words(self, overrides: Sequence[Override]) -> None:
        """Names of keys and of groups' options, before anything is composed."""
        for override in overrides:
            key = override.key_or_group
            if override.is_add() or override.is_force_add():
                raise ValueError(
                    f"{override.input_line} adds a key the config does not have; accepted "
                    f"without '+': {', '.join(KEYS)}"
                )
            if override.is_delete():
                raise ValueError(f"{override.input_line}: keys cannot be deleted")
            root = re.split(r"[./@]", key)[0]
            if root not in (*KEYS, "experiment", "hydra"):
                raise ValueError(unknown_key(root, KEYS))
            if key in GROUPS:
                for value in group_values(override):
                    self.check_option(key, value)

    def check_lists(self, overrides: Sequence[Override]) -> None:
        """ValueError for values without brackets where the key holds a list."""
        swept = [o for o in overrides if o.is_sweep_override()]
        others = [str(o.input_line) for o in overrides if o not in swept]
        for override in swept:
            key, _, values = str(override.input_line).partition("=")
            value: Any = self.compose(others)
            for name in key.split("."):
                value = value.get(name) if isinstance(value, dict) else None
            if isinstance(value, list):
                raise ValueError(f"{key} takes a list: '{key}=[{values.strip()}]'")

    def check_launcher(self, overrides: Sequence[Override]) -> None:
        """hydra/launcher: one that is installed."""
        for override in overrides:
            if override.key_or_group != "hydra/launcher" or override.is_sweep_override():
                continue
            installed = [name for name in self.options("hydra/launcher") if name != "basic_base"]
            if override.value() not in installed:
                raise ValueError(
                    f"hydra/launcher must be one of {', '.join(installed)}, got "
                    f'{override.value()!r}; more come with pip install -e ".[joblib]", '
                    '".[ray]" or ".[submitit]"'
                )

    def check_option(self, group: str, value: Any, *, key: str | None = None) -> None:
        """ValueError for a value that a group does not have. key: where it was given, if not as
        the group's own."""
        if value in self.options(group):
            return
        options = self.options(group)
        near = difflib.get_close_matches(str(value), options, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        if group == "model":
            hint += "; any other Hugging Face model: model=hub model.id=ORG/NAME"
        what = f"{group} must be one of" if key is None else f"{key} must be names among"
        raise ValueError(f"{what} {', '.join(options)}, got {value!r}{hint}")


@dataclass(frozen=True)
class Checked:
    """words: what Hydra gets, a sweep's jobs packed. jobs: the overrides of each; one if no sweep.
    composer: the one that has composed them."""

    words: list[str]
    jobs: list[list[str]]
    is_sweep: bool
    composer: Composer


def values_of(override: Override) -> list[str]:
    """A sweep's values, without their quotes. ValueError with one line where there are none."""
    try:
        values = [value.strip("'\"") for value in override.sweep_string_iterator()]
    except HydraException as error:
        raise ValueError(f"{override.input_line}: {one_line(error, [])}") from None
    if not values:
        raise ValueError(f"{override.input_line} names nothing")
    return values


def group_values(override: Override) -> list[Any]:
    """The values a group override takes, each of a sweep's."""
    if override.is_sweep_override():
        return values_of(override)
    value = override.value()
    return value if isinstance(value, list) else [value]


def parse(words: Sequence[str], loader: ConfigLoader | None = None) -> list[Override]:
    """Overrides from the command line; ValueError with one line for one that cannot be read.
    loader: whose groups glob(…) looks in."""
    overrides: list[Override] = []
    for word in words:
        try:
            overrides += OverridesParser.create(loader).parse_overrides([word])
        except HydraException:
            raise ValueError(f"cannot read {word!r}, expected key=value{hint_for(word)}") from None
    return overrides


def hint_for(word: str) -> str:
    """How to write a word that Hydra's grammar does not take as it is."""
    key, _, value = word.partition("=")
    if "=" in value:
        return "; a value with '=' inside needs quotes: 'compare=[\"quest:group=sum\"]'"
    if not value.isascii():
        return f"; letters beyond ASCII need quotes: \"{key}='{value}'\""
    return ""


def quoted(name: str) -> str:
    """A policy's name as a value that Hydra reads, quoted where it must be."""
    plain = re.fullmatch(r"\w+", name, re.ASCII)
    return name if plain else json.dumps(name, ensure_ascii=False)


def sweep_jobs(overrides: Sequence[Override]) -> list[list[str]]:
    """The override lists of every job of a sweep, as Hydra's basic sweeper makes them."""
    try:
        (jobs,) = BasicSweeper.split_arguments(list(overrides), max_batch_size=None)
    except HydraException as error:
        raise ValueError(one_line(error, [])) from None
    return [list(job) for job in jobs]


def one_line(error: Exception, overrides: Sequence[str]) -> str:
    """A Hydra or OmegaConf error in one line, causes included."""
    parts: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        lines = [line.strip() for line in str(cause).splitlines()]
        parts += [line for line in lines if line and not line.startswith("object_type")]
        cause = cause.__cause__
    text = "; ".join(dict.fromkeys(parts))
    missing = re.search(r"Key '([^']+)' is not in struct.*?full_key: ([\w.]+)", text)
    if missing:
        return f"unknown key {missing[2]!r}: its group has no field {missing[1]!r}"
    absent = re.search(r"Missing mandatory value: (\w+).*?full_key: ([\w.]+)", text)
    if absent:
        return f"{absent[2]} must be given"
    return re.sub(r"To append to your config use \S+;? ?", "", text)
