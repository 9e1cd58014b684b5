"""Complete or absent: new files and folders, locks, and refusals."""

import os
import re

import pytest

from vllm_medusa import files
from vllm_medusa.files import FileRefused


def test_a_file_is_replaced_only_when_complete(tmp_path):
    path = tmp_path / "a.json"
    files.write_json(path, {"b": 1, "a": [2]})
    assert path.read_text() == '{\n "a": [\n  2\n ],\n "b": 1\n}\n'
    with files.new_file(path) as file:
        file.write("half")
        file.flush()
        assert files.read_json(path) == {"a": [2], "b": 1}
        assert files.aside(path).read_text() == "half"
    assert path.read_text() == "half"
    assert os.listdir(tmp_path) == ["a.json"]


def test_data_is_synced_before_the_rename(tmp_path, monkeypatch):
    path, synced = tmp_path / "a", []
    monkeypatch.setattr(files, "sync", lambda place: synced.append((place, path.exists())))
    files.write_json(path, {})
    assert synced == [(files.aside(path), False), (tmp_path, True)]
    path.unlink()
    synced.clear()
    with files.new_folder(path) as part:
        (part / "one").touch()
    assert synced == [(part / "one", False), (part, False), (tmp_path, True)]


def test_a_failed_writer_leaves_only_the_old_file(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(TypeError), files.new_file(path, "wb") as file:
        file.write("no bytes")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_files_have_default_permissions(tmp_path):
    def narrow(path):
        path.write_bytes(b"x")
        path.chmod(0o600)  # as in safetensors

    with files.new_path(tmp_path / "a") as part:
        narrow(part)
    (tmp_path / "b").touch()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_the_folder_of_an_output(tmp_path, monkeypatch):
    files.require_parent(tmp_path / "a")
    with pytest.raises(FileRefused, match="no folder"):
        files.require_parent(tmp_path / "b" / "a")
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (tmp_path, os.W_OK))
    with pytest.raises(FileRefused, match="is not writable"):
        files.require_parent(tmp_path / "a")


def test_a_symlink_at_the_temporary_path_is_not_followed(tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("somebody's")
    files.aside(tmp_path / "a").symlink_to(kept)
    files.write_json(tmp_path / "a", {})
    assert kept.read_text() == "somebody's"


def test_a_folder_is_replaced_as_a_whole_and_only_with_overwrite(tmp_path):
    path = tmp_path / "out"
    with files.new_folder(path) as part:
        (part / "one").touch()
        assert not path.exists()
    with pytest.raises(FileRefused, match="created in the meantime"), files.new_folder(path):
        pass
    with pytest.raises(KeyError), files.new_folder(path, overwrite=True) as part:
        raise KeyError
    assert os.listdir(path) == ["one"]
    with files.new_folder(path, overwrite=True) as part:
        (part / "two" / "deep").mkdir(parents=True)
        (part / "two" / "secret").touch(mode=0o600)
    assert os.listdir(path) == ["two"]
    (tmp_path / "new").touch()
    assert (path / "two" / "secret").stat().st_mode == (tmp_path / "new").stat().st_mode
    (tmp_path / "new").unlink()
    assert os.listdir(tmp_path) == ["out"]


def test_a_lock_is_exclusive(tmp_path):
    path = tmp_path / "lock"
    with files.take_lock(path, "busy: wait"), pytest.raises(FileRefused, match=r"^busy: wait$"):
        files.take_lock(path, "busy: wait")
    files.take_lock(path, "busy: wait").close()


@pytest.mark.parametrize("content", ["{}", "[1]", "no JSON", '{"ours": 0}', "[" * 100_000])
def test_only_own_files_are_replaced(content, tmp_path):
    path = tmp_path / "figures.json"
    path.write_text(content)
    with pytest.raises(FileRefused, match=re.escape(f"{path} exists and holds no figures")):
        files.refuse_to_replace(path, "figures", lambda document: bool(document.get("ours")))
    assert path.read_text() == content
    for replaceable in ("", '{"ours": 1}'):
        path.write_text(replaceable)
        files.refuse_to_replace(path, "figures", lambda document: bool(document.get("ours")))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path in (tmp_path, tmp_path / "link"):
        with pytest.raises(FileRefused):
            files.refuse_to_replace(path, "figures", lambda document: True)


def test_unknown_files_are_refused(tmp_path):
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "training").mkdir()
    files.refuse_strangers(tmp_path, ["*.safetensors", "training/", "*.txt"])
    with pytest.raises(FileRefused, match=r"also holds notes\.txt, training, .*--overwrite"):
        files.refuse_strangers(tmp_path, ["*.safetensors"])


def test_other_settings_are_named():
    before = {"a": {"b": 1, "c": [1]}, "gone": None}
    assert not list(files.differences(before, {"a": {"c": [1], "b": 1}}))
    found = list(files.differences(before, {"a": {"b": 2, "c": [1]}}))
    assert found == ["a.b was 1 and is now 2"]


def test_a_run_depends_on_its_settings(tmp_path):
    folder, out = tmp_path / "out.run", tmp_path / "out"
    with files.Run(folder, {"a": 1}, of=out, origin="x") as run:
        assert not run.resumed
        (folder / "part").touch()
        with pytest.raises(FileRefused, match="another process"):
            files.Run(folder, {"a": 1}, of=out)
    assert files.read_json(folder / "run.json") == {"settings": {"a": 1}, "origin": "x"}
    with files.Run(folder, {"a": 1}, of=out) as run:
        assert run.resumed and (folder / "part").exists()
    with pytest.raises(FileRefused, match=r"out holds results for other settings: a was 1 and is"):
        files.Run(folder, {"a": 2}, of=out)
    assert (folder / "part").exists()
    out.write_text("results")
    (folder / "run.json").write_text("torn")
    with pytest.raises(FileRefused, match=r"run\.json can't be read"):
        files.Run(folder, {}, of=out)
    assert (folder / "part").exists()
    with files.Run(folder, {"a": 2}, of=out, restart=True, clear=out) as run:
        assert not run.resumed and not (folder / "part").exists() and out.read_text() == ""
        run.remove()
    assert not folder.exists()
    folder.mkdir()
    (folder / "mine").touch()
    for how in ({}, {"overwrite": True}, {"restart": True}):
        with pytest.raises(FileRefused, match="holds mine, which is not from a run"):
            files.Run(folder, {}, of=out, **how)
    assert (folder / "mine").exists()
