"""The commands' common parts: versions, help, exit statuses, progress, names on the hub."""

import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from support.commands import RecordingProgress

import vllm_medusa
from vllm_medusa import cli
from vllm_medusa.cli import console, serve
from vllm_medusa.cli.hub import find_models
from vllm_medusa.job import JobFailed
from vllm_medusa.offline.options import CompareOptions

COMMANDS = (
    *("generate", "adapt", "distill", "train", "calibrate", "tree"),
    *("convert", "inspect", "compare", "doctor"),
)


def test_version_help_and_options_load_neither_torch_nor_vllm():
    code = (
        "import contextlib, sys\nfrom vllm_medusa import cli, config\n"
        "for line in sys.argv[1:]:\n"
        "    with contextlib.suppress(SystemExit):\n        cli.main(line.split())\n"
        "    assert not {'torch', 'vllm'} & sys.modules.keys(), line\n"
    )
    lines = ["--version", "--help", *(f"{name} --help" for name in COMMANDS)]
    done = subprocess.run(
        [sys.executable, "-c", code, *lines], capture_output=True, text=True, check=True
    )
    assert done.stdout.count("usage: ") == len(lines) - 1


def test_every_public_name_can_be_imported():
    for name in vllm_medusa.__all__:
        assert getattr(vllm_medusa, name) is not None
    with pytest.raises(AttributeError, match="'nothing'"):
        vllm_medusa.nothing  # noqa: B018


def test_serve_passes_all_arguments_unchanged(monkeypatch):
    passed = []
    monkeypatch.setattr(serve, "run", lambda arguments: passed.append(arguments) or 0)
    with pytest.raises(SystemExit) as exit:
        cli.main(["serve", "target", "--help=all", "--speculative-model", "heads", "-tp", "2"])
    assert exit.value.code == 0
    assert passed == [["target", "--help=all", "--speculative-model", "heads", "-tp", "2"]]


def test_options_are_not_abbreviated(capsys):
    """Options can't be abbreviated: a value could be assigned to a similar option."""
    with pytest.raises(SystemExit) as exit:
        cli.main(["compare", "target", "heads", "--prompts", "x", "--budget", "7"])
    assert exit.value.code == 2
    assert "--budget 7. Did you mean --budgets?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["compare", "target", "heads", "--prompts", "x", "--wholly-other"])
    error = capsys.readouterr().err
    assert "unrecognized arguments: --wholly-other.\nSee vllm-medusa compare --help.\n" in error
    assert "usage:" not in error


class Stopped(JobFailed):
    status = 7


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ValueError("x is 1 [a]"), 2, "error: x is 1 [a]\n"),
        (OSError("no disk"), 2, "error: no disk\n"),
        (JobFailed("loss is NaN"), 1, "stopped: loss is NaN\n"),
        (Stopped("a stage"), 7, "stopped: a stage\n"),
        (KeyboardInterrupt(), 130, "interrupted; resume\n"),
    ],
)
def test_status_and_text(error, status, text, capfd):
    def job(progress):
        raise error

    assert console.run_job(job, interrupted="resume") == status
    assert capfd.readouterr().err == text


def test_plain_progress_prints_occasional_lines(monkeypatch, capfd):
    now = 0.0
    monkeypatch.setattr(console.time, "perf_counter", lambda: now)

    def job(progress):
        nonlocal now
        for seconds, *values in (
            (1.0, "states", 1, 9),
            (11.0, "states", 2, 9, "3 tok/s [x]"),
            (12.0, "states", 3, 9),
            (30.0, "texts", 4, None),
        ):
            now = seconds
            progress.at(*values)
        progress.note("a [b]")
        progress.warn("c [d]")
        return 3

    assert console.run_job(job, interrupted="") == 3
    assert capfd.readouterr().err == (
        "states: 2/9 3 tok/s [x], 70 s left\ntexts: 4\na [b]\nwarning: c [d]\n"
    )


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


def test_serve_refuses_a_gguf_file(tmp_path, capfd):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert serve.run([str(tmp_path / "model.gguf")]) == 2
    assert "gguf_file=NAME" in capfd.readouterr().err
