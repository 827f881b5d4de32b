"""lm-eval's own command line with policies: `python -m sparse_eval.lm_cli run …`.

--model sparse_eval --model_args pretrained=ORG/NAME,policy=quest,budget=1024; everything else is
lm-eval's. The bundled tasks are on its path.
"""

from __future__ import annotations

import os
import sys


def main() -> int:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from lm_eval.__main__ import cli_evaluate

    import sparse_eval.lm.adapter  # noqa: F401  (registers the model with lm-eval)
    from sparse_eval.lm.suite import BUNDLED

    given = {word.partition("=")[0] for word in sys.argv[1:]}
    if "--include_path" not in given and {"run", "--tasks"} & given:
        sys.argv += ["--include_path", str(BUNDLED)]
    try:
        cli_evaluate()
    except (ValueError, RuntimeError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
