"""Look up hub names of models before a job starts."""

from __future__ import annotations

from pathlib import Path

from vllm_medusa.job import Progress
from vllm_medusa.options import Model, Options, Source, described

_SECONDS = 10.0  # timeout of hub requests


def find_models(options: Options, progress: Progress) -> None:
    """Report models from the hub, and refuse names that can't be resolved.

    If the hub can't be reached, its local cache is used.
    """
    for each in described(type(options)):
        name = getattr(options, each.name)
        if each.item in (Model, Source) and name and not Path(name).expanduser().exists():
            _find(str(name), progress)


def _find(name: str, progress: Progress) -> None:
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    from vllm_medusa.config import use_hub_cache

    progress.note(f"{name}: no such local folder; looking it up on the Hugging Face hub")
    try:
        cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
        HfApi().model_info(name, timeout=_SECONDS)
    except (HFValidationError, RepositoryNotFoundError):
        raise ValueError(
            f"{name}: no such folder, and the hub has no such model, or it is private or gated: "
            "correct the name, or log in with `hf auth login`."
        ) from None
    except Exception as error:  # network errors of any library
        if not cached:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"{name}: no such folder, and the Hugging Face hub is unreachable "
                f"({reason:.200}). Pass a model's folder, or download it on a connected machine: "
                f"hf download {name} --local-dir FOLDER."
            ) from None
        progress.note(f"the hub is unreachable; using the cached {name}")
        use_hub_cache()
