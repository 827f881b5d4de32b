"""lm-eval's own command line with policies: `python -m sparse_eval.lm_cli run …`.

--model sparse_eval --model_args pretrained=ORG/NAME,policy=quest,budget=1024; everything else is
lm-eval's. The bundled tasks are on its path; pretrained takes names of conf/model/ too (smollm2).
"""

from __future__ import annotations

import logging
import os
import re
import sys

log = logging.getLogger("lm_eval")
NAMED = re.compile(r"""(?<![\w.])(pretrained"?\s*[=:]\s*"?)([\w.-]+)(?=["',}\s]|$)""")
"""`pretrained` in model_args, as words with commas or as JSON, and a value without a slash."""


def with_folders(word: str) -> str:
    """A word of the command line, the names of shipped models replaced by their folders.

    Raises Unavailable for what cannot be fetched."""
    from sparse_eval.models import checkpoint_names, model_folder

    names = checkpoint_names()
    return NAMED.sub(
        lambda found: found[1] + (model_folder(found[2]) if found[2] in names else found[2]), word
    )


def main() -> int:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from lm_eval.__main__ import cli_evaluate

    import sparse_eval.lm.adapter  # noqa: F401  (registers the model with lm-eval)
    from sparse_eval.lm.names import BUNDLED
    from sparse_eval.lm.suite import told

    given = {word.partition("=")[0] for word in sys.argv[1:]}
    if "--include_path" not in given and {"run", "--tasks"} & given:
        sys.argv += ["--include_path", str(BUNDLED)]
    try:
        sys.argv[1:] = [with_folders(word) for word in sys.argv[1:]]
        cli_evaluate()
    except (ValueError, RuntimeError, OSError) as error:
        return failed(" ".join(str(error).split()) or type(error).__name__)
    except Exception as error:  # of a task's own code, or of lm-eval's, which may raise anything
        log.debug("the traceback", exc_info=True)
        return failed(f"{told(error)}; LMEVAL_LOG_LEVEL=DEBUG shows where")
    return 0


def failed(line: str) -> int:
    print(f"error: {line}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
