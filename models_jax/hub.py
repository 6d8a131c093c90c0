"""Models of the Hugging Face hub, as `hub/OWNER/NAME` or `hub/OWNER/NAME@REVISION`. Downloads what is not there yet.

huggingface_hub keeps them in its cache; with HF_HUB_OFFLINE=1 only that is looked at.
"""

from __future__ import annotations

from pathlib import Path

from planner.errors import UserError

FILES = ["config.json", "generation_config.json", "tokenizer*", "*.jinja", "model*.safetensors*"]
"""What is fetched of a model."""


def find(model: str, where: str = "") -> Path:
    """The folder of the model. Raises UserError; `where` names who asks."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name, _, revision = model.partition("/")[2].partition("@")
    try:
        found = snapshot_download(name, revision=revision or None, allow_patterns=FILES)
    except HFValidationError:
        raise UserError(f"{name!r} names no model of the hub", where=where, mend="write hub/OWNER/NAME") from None
    except GatedRepoError:
        mend = f"accept its licence at https://huggingface.co/{name} and set HF_TOKEN"
        raise UserError(f"the hub lets only some people have {name}", where=where, mend=mend) from None
    except RevisionNotFoundError:
        raise UserError(
            f"{name} has no revision {revision}", where=where, mend="leave out @ and what follows"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(f"the hub has no model {name}", where=where, mend="check the name, or set HF_TOKEN") from None
    except LocalEntryNotFoundError:
        offline = constants.HF_HUB_OFFLINE
        why = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        mend = "unset HF_HUB_OFFLINE" if offline else "download it where there is a network"
        raise UserError(f"{name} is not in the cache and {why}", where=where, mend=mend) from None
    return Path(found)
