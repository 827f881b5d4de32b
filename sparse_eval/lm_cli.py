"""lm-eval's own command line with policies: `python -m sparse_eval.lm_cli run …`.

--model sparse_eval --model_args pretrained=ORG/NAME,policy=quest,budget=1024; everything else is
lm-eval's. The bundled tasks are on its path; pretrained takes names of conf/model/ too (smollm2).
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger("lm_eval")
NAMED = re.compile(r"""(?<![\w.])(pretrained"?\s*[=:]\s*"?)([\w.-]+)(?=["',}\s]|$)""")
"""`pretrained` in model_args, as words with commas or as JSON, and a value without a slash."""


def with_folders(word: str) -> str:
    """A word of the command line, the names of shipped models replaced by their folders.

    Raises Unavailable for what cannot be fetched."""
    from sparse_eval.fetch import checkpoint_names

    names = checkpoint_names()

    def folder_of(found: re.Match[str]) -> str:
        if found[2] not in names:
            return found[0]
        from sparse_eval.models import model_folder

        return found[1] + model_folder(found[2])

    return NAMED.sub(folder_of, word)


@contextlib.contextmanager
def bundled_tasks() -> Iterator[None]:
    """lm-eval's index holds the bundled tasks too, beside its own and those of --include_path."""
    import lm_eval.tasks

    from sparse_eval.lm.names import BUNDLED

    class WithBundled(lm_eval.tasks.TaskManager):
        def __init__(
            self, verbosity: Any = None, include_path: Any = None, *args: Any, **kwargs: Any
        ) -> None:
            own = folders(include_path)
            super().__init__(verbosity, [str(BUNDLED), *own], *args, **kwargs)

    original = lm_eval.tasks.TaskManager
    lm_eval.tasks.TaskManager = WithBundled  # type: ignore[misc]
    try:
        yield
    finally:
        lm_eval.tasks.TaskManager = original  # type: ignore[misc]


def folders(given: Any) -> list[Any]:
    """--include_path as a list. Raises ValueError for what is no folder."""
    own = [given] if isinstance(given, str | Path) else [*(given or [])]
    for folder in own:
        if not os.path.isdir(folder):
            raise ValueError(f"--include_path must be a folder, got {str(folder)!r}")
    return own


def check_model(words: Sequence[str]) -> None:
    """ValueError for a --model that is nearly sparse_eval, for model_args that --model sparse_eval
    refuses, and for a `pretrained` that looks like a shipped model's name and is none."""
    from sparse_eval.lm.arguments import check_arguments

    model, given = model_of(words)
    if model != "sparse_eval":
        check_model_name(model)
        return
    check_pretrained(given.get("pretrained"))
    check_arguments(given)


def check_model_name(name: str | None) -> None:
    from lm_eval.models import MODEL_MAPPING

    if name not in MODEL_MAPPING and difflib.get_close_matches(str(name), ["sparse_eval"]):
        raise ValueError(f"--model {name} is no model of lm-eval; did you mean sparse_eval?")


def model_of(words: Sequence[str]) -> tuple[str | None, dict[str, Any]]:
    """--model and --model_args as lm-eval reads them, from words or else from a --config file.
    Where it would refuse them: nothing, it tells."""
    from lm_eval._cli.utils import MergeDictAction

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--model", "-M")
    parser.add_argument("--model_args", "-a", nargs="+", action=MergeDictAction)
    parser.add_argument("--config", "-C")
    try:
        found, _ = parser.parse_known_args(list(words))
    except (argparse.ArgumentError, SystemExit, ValueError):
        return None, {}
    config = config_of(found.config)
    given = found.model_args or config.get("model_args") or {}
    if isinstance(given, str):
        from lm_eval.utils import simple_parse_args_string

        given = simple_parse_args_string(given)
    return found.model or config.get("model"), dict(given) if isinstance(given, Mapping) else {}


def check_pretrained(name: Any) -> None:
    from sparse_eval.fetch import checkpoint_names

    names = checkpoint_names()
    if not isinstance(name, str) or "/" in name or name in names or os.path.exists(name):
        return
    near = difflib.get_close_matches(name, names, n=2, cutoff=0.75)
    if near:
        raise ValueError(
            f"pretrained={name} is no model of conf/model/ and no folder; did you mean "
            f"{' or '.join(near)}? Models of Hugging Face are ORG/NAME"
        )


def check_words(words: Sequence[str]) -> None:
    """ValueError for lm-eval's cache of prompts, which is not keyed by --metadata: another
    max_length, seed or tokenizer would get the old prompts."""
    given = dict(zip(words, [*words, ""][1:], strict=True)) | dict(
        word.split("=", 1) for word in words if "=" in word
    )
    asked = given.get("--cache_requests")
    if asked is None:
        asked = cached_by_file(given.get("--config") or given.get("-C"))
    if asked not in (None, "delete"):
        raise ValueError(
            f"--cache_requests {asked} is refused: lm-eval's cache of prompts knows no --metadata "
            "and would hand out those of another length or seed; delete is accepted"
        )


def check_tasks(asked: argparse.Namespace) -> None:
    """ValueError where neither the words nor a --config file name a task."""
    if not asked.tasks and not config_of(asked.config).get("tasks"):
        raise ValueError("--tasks must name tasks of lm-eval, got none; `ls tasks` lists them all")


def config_of(path: str | None) -> Mapping[str, Any]:
    """What a --config file says; nothing where it cannot be read: lm-eval tells."""
    import yaml

    try:
        config = yaml.safe_load(Path(path or "").read_text()) if path else None
    except (OSError, yaml.YAMLError):
        return {}
    return config if isinstance(config, Mapping) else {}


def cached_by_file(path: str | None) -> Any:
    """What a --config file says of cache_requests: the word, or "true" of lm-eval's own flags."""
    asked = config_of(path).get("cache_requests")
    if isinstance(asked, Mapping):
        wanted = asked.get("cache_requests") or asked.get("rewrite_requests_cache")
        return "true" if wanted else None
    return asked or None


def main() -> int:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from lm_eval._cli.harness import HarnessCLI

    # its own refusals and --help, before anything large is imported
    asked = HarnessCLI().parse_args()
    is_run = getattr(asked, "command", None) == "run"
    try:
        check_words(sys.argv[1:])
        if is_run:
            check_tasks(asked)
        folders(getattr(asked, "include_path", None))
        check_model(sys.argv[1:])
    except ValueError as error:
        return failed(" ".join(str(error).split()), code=2)
    return run(is_run=is_run)


def run(*, is_run: bool) -> int:
    """lm-eval's own command, with the bundled tasks. is_run: models will be made."""
    from lm_eval.__main__ import cli_evaluate

    from sparse_eval.lm.suite import told

    if is_run:
        import sparse_eval.lm.adapter  # noqa: F401  (registers the model with lm-eval)
    try:
        sys.argv[1:] = [with_folders(word) for word in sys.argv[1:]]
        with bundled_tasks():
            cli_evaluate()
    except (ValueError, RuntimeError, OSError) as error:
        line = " ".join(str(error).split()) or type(error).__name__
        is_name = line.startswith("Tasks not found")
        return failed(f"{line}; `ls tasks` lists them all" if is_name else line)
    except Exception as error:  # of a task's own code, or of lm-eval's, which may raise anything
        log.debug("the traceback", exc_info=True)
        return failed(f"{told(error)}; LMEVAL_LOG_LEVEL=DEBUG shows where")
    return 0


def failed(line: str, code: int = 1) -> int:
    from tqdm import tqdm

    for bar in list(getattr(tqdm, "_instances", ())):
        bar.close()  # ends its own line
    print(f"error: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
