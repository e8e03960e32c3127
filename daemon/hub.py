"""Models by hub id (`org/name`): huggingface_hub's snapshot, with its cache, its tokens and its offline switch.

Only safetensors and the small files around them are fetched: never a pickle, never code. The library is imported when a
hub id is asked for, not before. Enter at `snapshot`.
"""

import re
from pathlib import Path

from engine.errors import ModelError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WANTED = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.*"]
_WEIGHTS = ["*.safetensors", "model.safetensors.index.json"]
_UNWANTED = ["*/*"]  # other formats of the same model lie in folders


def is_id(name: str) -> bool:
    """Whether `name` looks like a hub id."""
    return _ID.fullmatch(name) is not None


def snapshot(model_id: str) -> Path:
    """The model's directory in the hub's cache: the newest revision, or, offline, the one that is there.
    Raises ModelError saying why there is none."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(model_id, allow_patterns=[*_WANTED, *_WEIGHTS], ignore_patterns=_UNWANTED))
    except GatedRepoError as error:
        raise ModelError(f"{model_id} is gated", "accept its terms on the hub, then set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"the hub has no {model_id}, or it is private", "check the name; set HF_TOKEN") from error
    except LocalEntryNotFoundError as error:
        if constants.is_offline_mode():
            raise ModelError(f"{model_id} is not in the hub's cache", "HF_HUB_OFFLINE is set: unset it once") from error
        raise ModelError(f"cannot reach the hub for {model_id}", "check the network (HF_ENDPOINT, proxies)") from error
    except HFValidationError as error:
        raise ModelError(f"{model_id} is no hub id: {error}") from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"cannot fetch {model_id} from the hub: {error}", "the next try goes on from there") from error
