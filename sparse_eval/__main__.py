"""python -m sparse_eval: validate first (exit code 2, one line, no model loaded), then run."""

from __future__ import annotations

import io
import os
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparse_eval.cli.compose import Checked, Composer
    from sparse_eval.cli.config import Settings

HELP = """\
python -m sparse_eval [key=value …]          one run
python -m sparse_eval -m key=a,b [key=value …]   a sweep over every combination
python -m sparse_eval plan=true …            what would run and cost; loads no weights

  policy=quest budget=2048                   the main policy, tokens a KV head may read per step
  compare=[oracle,window,random]             measured beside it
  model=smollm2 | model=hub model.id=ORG/NAME    context=4096  prompts=docs  prompts.n=4
  --config-dir DIR                           your own yaml files (DIR/policy/mine.yaml)
  --cfg job                                  print the composed config

keys and defaults: conf/config.yaml; options: conf/<group>/; see also
python -m sparse_eval.report PATH…      pictures and page from finished runs
python -m sparse_eval.lm_cli …          lm-eval's own command line, --model sparse_eval
python -m sparse_eval.fetch NAME       get a model or text before going offline
python -m sparse_eval.check TARGET     the policy contract, on a policy of yours
"""


def main() -> None:
    words = flags_first(sys.argv[1:])
    sys.argv[1:] = words  # what Hydra reads
    if words and words[0] in ("-h", "--help"):
        print(HELP)
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without × or µ shows ?, and goes on
    try:
        checked = check(words)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)  # nothing has begun
    if checked is not None:
        from sparse_eval.app import main as run_app

        run_app(checked)


def flags_first(words: Sequence[str]) -> list[str]:
    """Hydra's parser wants its flags before the key=value words; people write them anywhere."""
    flags: list[str] = []
    rest: list[str] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        (flags if word.startswith("-") else rest).append(word)
        if word in ("--config-dir", "-cd", "--cfg", "-c", "--package", "-p") and waiting:
            flags.append(waiting.pop(0))
    return flags + rest


def check(words: Sequence[str]) -> Checked | None:
    """Compose and validate every job. None: there is nothing left to do (the plan is printed)."""
    from sparse_eval.cli.compose import Checked, Composer, parse, sweep_jobs
    from sparse_eval.cli.config import check_values
    from sparse_eval.cli.pack import pack, packed_keys, without_hydra

    flags, overrides = split_words(words)
    composer = Composer(tuple([flags.config_dir] if flags.config_dir else []))
    parsed = parse(overrides, composer.loader)
    is_sweep = flags.multirun
    swept = [o.input_line for o in parsed if o.is_sweep_override()]
    if swept and not is_sweep:
        composer.check_words(parsed)
        composer.check_lists(parsed)
        raise ValueError(
            f"{swept[0]} lists several values, which is a sweep: "
            f"python -m sparse_eval -m {shlex.join(words)}"
        )
    composer.check_words(parsed)
    composer.check_launcher(parsed)
    jobs = (
        [without_hydra(job) for job in sweep_jobs(parsed)]
        if is_sweep
        else [without_hydra(overrides)]
    )
    is_plan = any(map(asks_for_plan, overrides))
    if not is_sweep:
        packed_keys(composer.compose(jobs[0]))
    elif swept:
        overrides, unpacked = pack(composer, overrides), jobs
        jobs = [without_hydra(job) for job in sweep_jobs(parse(overrides, composer.loader))]
    if not is_plan:
        for job in jobs:
            check_values(composer.compose(job))
        resolve_each(composer, jobs)
    if is_plan:
        from sparse_eval.cli.config import Settings
        from sparse_eval.cli.plan import print_plan

        plans = [(named(job), attempt(composer, job)) for job in jobs]
        if swept and any(isinstance(found, ValueError) for _, found in plans):
            # packed, one combination that cannot run would stand for all
            plans = [(named(job), attempt(composer, job)) for job in unpacked]
        print_plan(plans)
        if not any(isinstance(found, Settings) for _, found in plans):
            sys.exit(2)
        return None
    flag_words = [word for word in words if word not in flags.overrides]
    return Checked([*flag_words, *overrides], jobs, is_sweep, composer)


def resolve_each(composer: Composer, jobs: Sequence[Sequence[str]]) -> None:
    """Validates what policies, model and device say of the jobs; torch is imported here."""
    for job in jobs:
        resolved(composer, job)


def resolved(composer: Composer, job: Sequence[str]) -> Settings:
    """The job's settings, its inputs looked at. Raises ValueError with one line."""
    from sparse_eval.cli.preflight import check_inputs
    from sparse_eval.cli.settings import resolve

    settings = resolve(composer, job)
    check_inputs(settings)
    return settings


def asks_for_plan(word: str) -> bool:
    return word.replace(" ", "").lower() == "plan=true"


def named(job: Sequence[str]) -> str:
    """A job by its words, less the one that asks for the plan."""
    return " ".join(word for word in job if not asks_for_plan(word))


def attempt(composer: Any, job: Sequence[str]) -> Any:
    """The job's settings, or the ValueError that says why it cannot run."""
    try:
        return resolved(composer, job)
    except ValueError as error:
        return error


def split_words(words: Sequence[str]) -> tuple[Any, list[str]]:
    """Hydra's own flags, and the overrides."""
    from hydra._internal.utils import get_args_parser

    flags = get_args_parser().parse_args(list(words))
    return flags, list(flags.overrides)


if __name__ == "__main__":
    main()
