"""Hub names: looked up before anything begins, refused at once where they can't be had."""

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from support.told import Told

from vllm_medusa.cli.hub import find_models
from vllm_medusa.offline.options import CompareOptions


@pytest.fixture
def find(tmp_path, monkeypatch):
    """Look up one name with the given cache and hub; returns the notes."""

    def run(name: str, *, cached: bool, hub: Exception | None) -> Told:
        def model_info(self, *_, **__):
            if hub is not None:
                raise hub

        monkeypatch.setattr(
            huggingface_hub, "try_to_load_from_cache", lambda *_: "file" if cached else None
        )
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        told = Told()
        options = CompareOptions(target=name, heads=str(tmp_path), prompts=Path("x"))
        find_models(options, told)
        return told

    return run


def test_a_name_that_the_hub_has_is_said(find):
    assert find("someone/model", cached=False, hub=None).notes == [
        "someone/model: no such local folder; looking it up on the Hugging Face hub"
    ]


def test_without_a_network_the_cache_is_used_or_the_remedy_said(find):
    told = find("someone/model", cached=True, hub=OSError("no route"))
    assert told.notes[1] == "the hub is unreachable; using the cached someone/model"
    assert constants.HF_HUB_OFFLINE
    with pytest.raises(
        ValueError, match=r"is unreachable \(no route\)\. Pass a model's folder, .* hf d"
    ):
        find("someone/model", cached=False, hub=OSError("no route"))


def test_a_folder_is_not_looked_up(find, tmp_path):
    assert find(str(tmp_path), cached=False, hub=OSError("no route")).notes == []
