"""Hub checkpoints as local folders; a hub that cannot be reached is one line within seconds."""

from __future__ import annotations

import json
import logging
import os
import re
import ssl
import threading
import urllib.error
import urllib.request
from pathlib import Path

from sparse_eval.inputs.store import Unavailable

PROBE_SECONDS = 3.0
OFFLINE_CHOICES = (
    "without the hub: model=smollm2 (from a package index), model=folder model.path=DIR, "
    "model=gguf model.path=FILE, or a filled HF_HOME with HF_HUB_OFFLINE=1"
)
_REPO = re.compile(r"[\w.-]+/[\w.-]+")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
    "tekken.json",
)


def check_repo(repo: object) -> str:
    if not isinstance(repo, str) or not _REPO.fullmatch(repo):
        hint = ""
        if isinstance(repo, str) and os.path.exists(os.path.expanduser(repo)):
            hint = f"; for a local checkpoint use model=folder model.path={repo}"
        raise ValueError(f"model.id must be ORG/NAME on the hub, got {repo!r}{hint}")
    return repo


def is_offline() -> bool:
    """Whether the user told the hub's libraries to stay offline."""
    flags = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(flag.upper() in ("1", "ON", "YES", "TRUE") for flag in flags)


def endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def is_reachable() -> bool:
    """Whether the hub answers at all within PROBE_SECONDS, name look-up and proxies included."""
    answered = threading.Event()

    def probe() -> None:
        request = urllib.request.Request(endpoint(), method="HEAD")
        try:
            urllib.request.urlopen(request, timeout=PROBE_SECONDS).close()
        except urllib.error.HTTPError:
            pass
        except (OSError, ValueError) as error:
            # a certificate this probe cannot judge: the hub client has its own and will say
            if not isinstance(getattr(error, "reason", None), ssl.SSLError):
                return
        answered.set()

    # a name look-up cannot be timed out, so it is left behind in a daemon thread
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS + 0.5)
    return answered.is_set()


def cached(repo: str, revision: str | None) -> Path | None:
    """The snapshot folder in the hub's cache if it holds a whole checkpoint, else None."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repo, "config.json", revision=revision)
    folder = Path(config).parent if isinstance(config, str) else None
    return folder if folder is not None and is_complete(folder) else None


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint folder has its config, every weight file and a tokenizer."""
    has_tokenizer = any((folder / name).is_file() for name in _TOKENIZER_FILES)
    return has_tokenizer and (folder / "config.json").is_file() and bool(weight_files(folder))


def weight_files(folder: Path) -> list[Path]:
    """The files transformers would read the weights from; [] if one is missing."""
    for stem in ("model.safetensors", "pytorch_model.bin"):
        if (folder / stem).is_file():
            return [folder / stem]
        index = folder / f"{stem}.index.json"
        if index.is_file():
            names = set(json.loads(index.read_text())["weight_map"].values())
            files = [folder / name for name in sorted(names)]
            return files if all(file.is_file() for file in files) else []
    return []


def snapshot(repo: str, revision: str | None) -> Path:
    """A local folder with the checkpoint at a revision (None: the newest), downloaded if need be.

    A pinned revision that is cached costs no request. Raises Unavailable in one line.
    """
    pinned = revision is not None
    have = cached(repo, revision)
    if have is not None and (pinned or is_offline()):
        return have
    if is_offline():
        raise Unavailable(
            f"{_at(repo, revision)} is not in the local hub cache and HF_HUB_OFFLINE is set; "
            + OFFLINE_CHOICES
        )
    if not is_reachable():
        if have is not None:
            return have
        raise Unavailable(
            f"cannot reach the model hub {endpoint()} for {_at(repo, revision)}, "
            f"and it is not in the local cache; {OFFLINE_CHOICES}"
        )
    return _download(repo, revision)


def _download(repo: str, revision: str | None) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    for client in ("httpx", "httpx2"):
        logging.getLogger(client).setLevel(logging.WARNING)  # else a line per request
    try:
        info = HfApi(endpoint()).model_info(repo, revision=revision, timeout=20)
        files = wanted_files([file.rfilename for file in info.siblings or []])
        if not files:
            raise Unavailable(f"{_at(repo, revision)} holds no safetensors or .bin weights to load")
        # by name, so that the cache learns which commit the name stands for
        return Path(
            snapshot_download(repo, revision=revision, allow_patterns=files, endpoint=endpoint())
        )
    except GatedRepoError:
        raise Unavailable(
            f"{repo} is gated: accept its licence on the hub and set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise Unavailable(f"{repo} has no revision {revision} on the hub") from None
    except RepositoryNotFoundError:
        raise Unavailable(
            f"{repo} is not on the hub, or is private and HF_TOKEN is not set"
        ) from None
    except Unavailable:
        raise
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0] or type(error).__name__
        raise Unavailable(
            f"the hub failed for {_at(repo, revision)}: {first_line}; {OFFLINE_CHOICES}"
        ) from error


def wanted_files(names: list[str]) -> list[str]:
    """Of a repository's files those that loading needs: top level, one kind of weights."""
    top = [name for name in names if "/" not in name and not name.startswith("consolidated")]
    kind = ".safetensors" if any(name.endswith(".safetensors") for name in top) else ".bin"
    weights = [name for name in top if name.endswith(kind)]
    text = [name for name in top if name.endswith((".json", ".txt", ".model", ".jinja"))]
    return weights + text if weights else []


def _at(repo: str, revision: str | None) -> str:
    return f"{repo} at {revision[:12]}" if revision else repo
