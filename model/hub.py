"""Where is the model that `--model` names? A folder as it is, or ORG/NAME[@REV] downloaded from a model hub.

Runs on the caller's thread before anything is loaded. The files are huggingface_hub's cache: complete files
stay there, so a download that was broken off goes on with the files that are missing.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

# What a model folder needs, from the repository's top level alone. Weights in other formats are left there.
_WANTED = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "LICENSE*"]
_UNWANTED = ["*/*", "consolidated*"]

_HUB_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")

# Left free on the disk after a download: other programs need some too.
_SPARE_BYTES = 256 * 1024**2


class HubError(RuntimeError):
    """The model that was named cannot be had; the message says why and what to do."""


@dataclass(frozen=True)
class HubModel:
    """A repository on a hub at a branch, tag or commit."""

    repo: str
    revision: str

    def __str__(self) -> str:
        return self.repo if self.revision == "main" else f"{self.repo}@{self.revision}"


def resolve_model(
    spec: str,
    *,
    cache_dir: Path | None = None,
    offline: bool = False,
    endpoint: str | None = None,
    progress: bool = True,
) -> Path:
    """The local folder of the model that `spec` names.

    An existing folder wins over a hub name of the same spelling. `cache_dir` None is huggingface_hub's own
    (HF_HOME), `endpoint` None its own hub (HF_ENDPOINT); a token comes from `hf auth login` or HF_TOKEN.
    With `offline` nothing is asked of the network. Raises HubError.
    """
    folder = Path(spec).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise HubError(f"{spec} is a file: name the folder that holds config.json")
    model = parse_hub_name(spec)
    if offline:
        return _from_cache(model, cache_dir)
    return _from_hub(model, cache_dir, endpoint, progress)


def parse_hub_name(spec: str) -> HubModel:
    """ORG/NAME or ORG/NAME@REV; HubError where `spec` is neither that nor an existing folder."""
    match = _HUB_NAME.fullmatch(spec)
    if match is None:
        raise HubError(
            f"there is no folder {spec}, and it is no hub name either (ORG/NAME or ORG/NAME@REVISION)"
        )
    return HubModel(match["repo"], match["revision"] or "main")


def free_bytes(folder: Path) -> int:
    """The free bytes of the disk that holds `folder`, or will once it is made."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _from_cache(model: HubModel, cache_dir: Path | None) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(
            snapshot_download(
                model.repo,
                revision=model.revision,
                cache_dir=cache_dir,
                local_files_only=True,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
            )
        )
    except errors.IncompleteSnapshotError:
        raise HubError(
            f"{model} is only partly downloaded: run once without --offline to finish it"
        ) from None
    except errors.LocalEntryNotFoundError:
        raise HubError(
            f"{model} is not in the local cache: run once without --offline to download it"
        ) from None
    except errors.HFValidationError as error:
        raise HubError(str(error)) from None


def _from_hub(model: HubModel, cache_dir: Path | None, endpoint: str | None, progress: bool) -> Path:
    from httpx2 import HTTPError
    from huggingface_hub import constants, errors, snapshot_download
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        """The library's bars, or none."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)  # the library's own name of the bar, which tqdm does not know
            super().__init__(*args, **{**kwargs, "disable": not progress})

    cache = Path(cache_dir or constants.HF_HUB_CACHE).expanduser()
    hub = endpoint or constants.ENDPOINT
    try:
        _check_repository(model, cache, endpoint)
        return Path(
            snapshot_download(
                model.repo,
                revision=model.revision,
                cache_dir=cache,
                endpoint=endpoint,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
                tqdm_class=Bar,
                library_name="strata-serve",
            )
        )
    except errors.GatedRepoError:
        raise HubError(
            f"{model} is gated: accept its terms at {hub}/{model.repo}, then run `hf auth login` "
            "(or set HF_TOKEN) with a token of the account that did"
        ) from None
    except errors.RevisionNotFoundError:
        raise HubError(f"{model.repo} has no branch, tag or commit {model.revision!r} at {hub}") from None
    except errors.RepositoryNotFoundError:
        raise _missing_or_private(model, hub) from None
    except errors.HFValidationError as error:
        raise HubError(str(error)) from None
    except errors.HfHubHTTPError as error:
        if error.response.status_code in (401, 403):  # mirrors that do not say which it is
            raise _missing_or_private(model, hub) from None
        return _cached_instead(model, cache, hub, error)
    except (HTTPError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        return _cached_instead(model, cache, hub, error)
    except OSError as error:  # a full disk or a broken file, in the middle of the download
        raise HubError(f"downloading {model} into {cache} failed: {error}. Run it again to go on") from error


def _missing_or_private(model: HubModel, hub: str) -> HubError:
    return HubError(
        f"{hub} has no repository {model.repo}, or it is private: check the spelling, or run "
        "`hf auth login` (or set HF_TOKEN) with a token that may read it"
    )


def _cached_instead(model: HubModel, cache: Path, hub: str, error: Exception) -> Path:
    """A hub that cannot be reached, or fails, is no reason to refuse a model that is here already."""
    try:
        return _from_cache(model, cache)
    except HubError:
        cause = error.__cause__ or error
        reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0].rstrip(".")
        raise HubError(
            f"{model} could not be downloaded from {hub}: {reason}. Nor is it complete in the local cache "
            f"{cache}. Check the network (HTTPS_PROXY, HF_ENDPOINT) and run it again: finished files are kept"
        ) from error


def _is_wanted(path: str) -> bool:
    """As huggingface_hub reads the two lists of patterns."""
    wanted, unwanted = (any(fnmatch(path, p) for p in patterns) for patterns in (_WANTED, _UNWANTED))
    return wanted and not unwanted


def _check_repository(model: HubModel, cache: Path, endpoint: str | None) -> None:
    """Refuses, before any download, a repository that holds no model for us or does not fit on the disk."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    info = HfApi(endpoint=endpoint).model_info(model.repo, revision=model.revision, files_metadata=True)
    files = [file for file in info.siblings or [] if _is_wanted(file.rfilename)]
    names = {file.rfilename for file in files}
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        raise HubError(f"{model} holds no config.json with *.safetensors weights, which is what Strata reads")
    missing_bytes = sum(
        file.size or 0
        for file in files
        if not isinstance(
            try_to_load_from_cache(model.repo, file.rfilename, cache_dir=cache, revision=info.sha), str
        )
    )
    available_bytes = free_bytes(cache)
    if missing_bytes and missing_bytes + _SPARE_BYTES > available_bytes:
        raise HubError(
            f"{model} needs {(missing_bytes + _SPARE_BYTES) / 1e9:.2f} GB more in {cache}, and "
            f"{available_bytes / 1e9:.2f} GB are free: free some, or set HF_HOME to a folder on another disk"
        )
