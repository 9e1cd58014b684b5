"""Hub names: looked up before a job starts, refused immediately if unavailable."""

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from support.recorded_progress import RecordingProgress

from vllm_medusa.cli.hub import find_models
from vllm_medusa.offline.options import CompareOptions


@pytest.fixture
def find(tmp_path, monkeypatch):
    """Look up one name with the given cache and hub; returns the notes."""

    def run(name: str, *, cached: bool, hub: Exception | None) -> RecordingProgress:
        def model_info(self, *_, **__):
            if hub is not None:
                raise hub

        monkeypatch.setattr(
            huggingface_hub, "try_to_load_from_cache", lambda *_: "file" if cached else None
        )
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        progress = RecordingProgress()
        options = CompareOptions(target=name, heads=str(tmp_path), prompts=Path("x"))
        find_models(options, progress)
        return progress

    return run


def test_an_existing_hub_name_is_reported(find):
    assert find("someone/model", cached=False, hub=None).notes == [
        "someone/model: no such local folder; looking it up on the Hugging Face hub"
    ]


def test_without_a_network_the_cache_is_used_or_a_remedy_given(find):
    progress = find("someone/model", cached=True, hub=OSError("no route"))
    assert progress.notes[1] == "the hub is unreachable; using the cached someone/model"
    assert constants.HF_HUB_OFFLINE
    with pytest.raises(
        ValueError, match=r"is unreachable \(no route\)\. Pass a model's folder, .* hf d"
    ):
        find("someone/model", cached=False, hub=OSError("no route"))


def test_a_folder_is_not_looked_up(find, tmp_path):
    assert find(str(tmp_path), cached=False, hub=OSError("no route")).notes == []
