"""W&B's own side: whether it has credentials, and ending what it began. It must never ask."""

from __future__ import annotations

import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit


def abandon() -> None:
    """Ends W&B's service and with it the half-started run, whose id would else stay taken."""
    import wandb

    wandb.teardown(exit_code=1)  # type: ignore[attr-defined]


def has_key() -> bool:
    """Whether W&B would find credentials by itself: environment or netrc. It must never ask."""
    import wandb

    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    base_url = wandb.setup().settings.base_url  # type: ignore[attr-defined]
    hosts = {urlsplit(base_url).netloc, "api.wandb.ai"}
    given = os.environ.get("NETRC")
    for path in [Path(given)] if given else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        try:
            known = netrc.netrc(str(path))
        except (OSError, netrc.NetrcParseError):
            continue
        if any(known.authenticators(host) for host in hosts):
            return True
    return False
