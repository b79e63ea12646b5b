"""Upload of an exported model to a hub: the folder hf, or adapter, as a repository OWNER/NAME.

What would refuse the upload is found before weights load: the name, the token, the network, a repository that exists
with another visibility. The hub is the one of HF_ENDPOINT.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from tunesmith.config import ExportSection
from tunesmith.errors import ConfigError, ModelError
from tunesmith.hub import HUB_ID, describe_hub_failure, find_connection_error, is_offline
from tunesmith.model.source.resolve import ADAPTER_CONFIG

logger = logging.getLogger(__name__)


def check_push(settings: ExportSection, repository: str, *, is_public: bool) -> None:
    """Raise ConfigError or ModelError if the export could not be uploaded; the repository is not created yet."""
    if not HUB_ID.fullmatch(repository) or repository.count("/") != 1:
        raise ConfigError(f"push={repository!r} must be OWNER/NAME, a user or organization and the name of the model")
    if not {"hf", "adapter"}.intersection(settings.formats):
        raise ConfigError(
            f"push={repository!r} uploads the format hf or adapter: add one to formats={settings.formats}"
        )
    if huggingface_hub.get_token() is None:
        raise ModelError(f"push={repository!r} needs a token that may write: set HF_TOKEN, or run hf auth login")
    if is_offline():
        raise ModelError(f"push={repository!r} cannot be uploaded: HF_HUB_OFFLINE is set; unset it")
    if find_connection_error() is not None:
        raise ModelError(f"push={repository!r} cannot be uploaded: {describe_hub_failure()}")
    with hub_errors(repository):
        api = huggingface_hub.HfApi()
        api.whoami()
        try:
            is_private = bool(api.model_info(repository).private)
        except RepositoryNotFoundError:
            return
    if is_private == is_public:
        found, wanted = ("private", "remove --public") if is_private else ("public", "add --public")
        raise ConfigError(f"push={repository!r} exists on the hub and is {found}: {wanted}, or choose another name")


def push_folder(folder: Path, repository: str, *, is_public: bool) -> str:
    """Upload an exported folder as one commit; return the address of the repository."""
    if (folder / ADAPTER_CONFIG).is_file():
        base = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
        if base is not None and Path(base).exists():
            logger.warning(
                "%s names the local folder %s as its base: nobody else can load the adapter until "
                "base_model_name_or_path is a hub id",
                ADAPTER_CONFIG,
                base,
            )
    with hub_errors(repository):
        api = huggingface_hub.HfApi()
        address = str(api.create_repo(repository, private=not is_public, exist_ok=True))
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload of tunesmith export")
    return address


@contextmanager
def hub_errors(repository: str) -> Iterator[None]:
    """Raise a one-sentence ModelError for what the hub refuses, and for a connection that is lost."""
    try:
        yield
    except (HfHubHTTPError, httpx.HTTPError, OSError, RuntimeError, ValueError) as error:
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
        owner = repository.partition("/")[0]
        reasons = {401: "the token is not valid", 403: f"the token may not write to {owner!r}"}
        said = " ".join(str(error).split())[:300] or type(error).__name__
        raise ModelError(
            f"push={repository!r} is not uploaded: {reasons.get(status, said)}; the same command tries again, without "
            "a second export"
        ) from error
