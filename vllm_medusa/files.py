"""Atomic files and folders, locks, digests, resumable runs, overwrite and settings checks.

Writes are atomic for readers, also after a crash: a temporary file is written, synced, and then
renamed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any, Self

_END_BYTES = 1 << 16
_CHECKPOINT_SUFFIXES = (".safetensors", ".bin", ".pt", ".json")


class FileRefused(ValueError):
    """A file or folder can't be read, written or replaced; the message has the remedy."""


class Run:
    """A locked folder of resumable work, bound to the settings it was started with.

    ``run.json`` in it is written first and holds ``settings``, everything the result depends on.
    ``resumed`` is true if the folder was started before with the same settings.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],  # plain JSON
        *,
        of: Path,  # the output as shown in messages
        restart: bool = False,  # discard a run with other settings
        overwrite: bool = False,  # discard any earlier run
        clear: Path | None = None,  # a file that is emptied before new settings are written
        remedy: str = "Choose another output, or pass --overwrite to discard it.",
        **notes: Any,  # stored with the settings, not compared
    ) -> None:
        """Create or resume the folder, whose parent exists.

        Raises FileRefused: it was started with other settings, is in use, or can't be created.
        """
        self.folder, settings = folder, json.loads(json.dumps(settings))
        try:
            folder.mkdir(exist_ok=True)
            self._lock = take_lock(
                folder / "lock",
                f"{of}: another process is writing it. Wait for it, or choose another output.",
            )
        except OSError as error:
            raise FileRefused(
                f"{folder} can't be created: {error.strerror}. Choose another output."
            ) from None
        begun = folder / "run.json"
        before: Any = None
        try:
            if begun.exists() and not overwrite:
                with suppress(FileRefused):
                    before = read_json(begun).get("settings")
                if before != settings and not restart:
                    changes = "; ".join(differences(before or {}, settings))
                    why = f"{begun} can't be read"
                    if changes:
                        why = f"{of} holds results for other settings: {changes}"
                    raise FileRefused(f"{why}. {remedy}")
            self.resumed = before == settings
            if not self.resumed:
                known = ("lock", begun.name, aside(begun).name)
                others = [path for path in folder.iterdir() if path.name not in known]
                if others and not begun.exists():
                    raise FileRefused(
                        f"{folder} holds {others[0].name}, which is not from a run. Choose another "
                        "output."
                    )
                for path in others:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                if clear is not None and clear.exists():
                    os.truncate(clear, 0)
                write_json(begun, {"settings": settings, **notes})
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the folder; the run can be resumed."""
        self._lock.close()

    def remove(self) -> None:
        """Delete the folder, once its result is saved or if there is none."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()


def aside(path: Path, tag: str = "part") -> Path:
    """Return the temporary path of ``path``."""
    return path.with_name(f".{path.name}.{tag}")


@contextmanager
def new_path(path: Path, tag: str = "part") -> Iterator[Path]:
    """A path to write, renamed to ``path`` if the block succeeds; its folder must exist.

    The file gets the default permissions of new files. Processes that write the same path
    concurrently need different tags.
    """
    part = aside(path, tag)
    part.unlink(missing_ok=True)  # it may be a link to another file
    part.touch()
    mode = part.stat().st_mode
    try:
        yield part
        part.chmod(mode)
        sync(part)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def new_file(path: Path, mode: str = "w", tag: str = "part") -> Iterator[IO[Any]]:
    """An open file, "w" (UTF-8) or "wb", that becomes ``path``; see `new_path`."""
    encoding = None if "b" in mode else "utf-8"
    with new_path(path, tag) as part, part.open(mode, encoding=encoding) as file:
        yield file


def write_json(path: Path, document: Any, tag: str = "part") -> None:
    """Write a JSON file with sorted keys, indented by one space."""
    with new_file(path, tag=tag) as file:
        json.dump(document, file, indent=1, sort_keys=True)
        file.write("\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises OSError: the file can't be read; FileRefused: it holds no JSON object.
    """
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise FileRefused(f"{path} is not JSON ({error}). Correct it, or write it again.") from None
    if not isinstance(document, dict):
        raise FileRefused(
            f"{path} holds {type(document).__name__}, not a JSON object. Correct it, or write "
            "it again."
        )
    return document


@contextmanager
def new_folder(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder to fill, renamed to ``path`` if the block succeeds and removed otherwise.

    Its files get the default permissions of new files (safetensors allows only the owner to read).

    Raises FileRefused: ``path`` exists and ``overwrite`` is false, even if it was created while the
    block ran; or the folder can't be created.
    """
    path = path.resolve()  # "." has no name, and a folder can't replace a link
    part, old = aside(path), aside(path, "old")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
    except OSError as error:
        raise FileRefused(
            f"{path} can't be created ({error.strerror}): choose an output in a writable folder"
        ) from error
    try:
        yield part
        for entry in [*part.rglob("*"), part]:
            if entry.is_file() and not entry.is_symlink():
                entry.chmod(part.stat().st_mode & 0o666)
            sync(entry)
        if path.exists() and not overwrite:
            raise FileRefused(f"{path} was created in the meantime: choose another output")
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    part.rename(path)
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Sync a file or a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def take_lock(path: Path, busy: str) -> IO[bytes]:
    """Open and lock a file, creating it if needed; closing it releases the lock.

    Raises FileRefused: another process holds it; ``busy`` is the message, with the remedy.
    """
    file = path.open("ab")
    with suppress(BlockingIOError, FileNotFoundError):  # locked, or removed by its owner
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
    file.close()
    raise FileRefused(busy)


def digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_json(document: Any) -> str:
    """SHA-256 of a value as JSON with sorted keys; non-JSON types are converted with `str`."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()


def fingerprint(checkpoint: Path) -> str:
    """A digest that identifies a checkpoint (folder or file) without reading all of it."""
    files = sorted(checkpoint.iterdir()) if checkpoint.is_dir() else [checkpoint]
    return digest_ends(path for path in files if path.suffix in _CHECKPOINT_SUFFIXES)


def digest_ends(files: Iterable[Path]) -> str:
    """SHA-256 of names, sizes and both ends of files; missing files are skipped.

    A safetensors file starts with its header and ends with weights; a pickle ends with the
    checksums of all its tensors.
    """
    found = hashlib.sha256()
    for path in filter(Path.is_file, files):
        size = path.stat().st_size
        with path.open("rb") as file:
            found.update(f"{path.name} {size}\n".encode() + file.read(_END_BYTES))
            file.seek(max(0, size - _END_BYTES))
            found.update(file.read())
    return found.hexdigest()


def free_bytes(path: Path) -> int:
    """Free bytes on the disk of a path that exists or will be created."""
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    return shutil.disk_usage(existing).free


def require_parent(path: Path) -> None:
    """Refuse an output whose folder does not exist or is not writable."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise FileRefused(f"{path}: no folder {path.parent}. Create it, or choose another output.")
    if not os.access(folder, os.W_OK):
        raise FileRefused(f"{path}: {path.parent} is not writable. Choose another output.")


def require_output(folder: Path, inputs: Mapping[str, str | Path | None]) -> None:
    """Refuse an output that is a file, has no parent folder, or contains one of ``inputs``.

    ``inputs`` maps names, for messages, to paths; a `str` may be a hub name.
    """
    if folder.exists() and not folder.is_dir():
        raise FileRefused(f"--output {folder} is a file. Choose a folder.")
    place = folder.resolve()  # a link is kept, and its destination is replaced
    for path in (folder, place):
        require_parent(path)
    for name, given in inputs.items():
        if not given or (isinstance(given, str) and not Path(given).exists()):
            continue
        if Path(given).resolve().is_relative_to(place):
            raise FileRefused(
                f"{name} ({given}) is in --output {folder}, whose contents are replaced. Use "
                f"another folder, such as {folder / 'heads'}, or move the input."
            )


def refuse_to_replace(path: Path, what: str, ours: Callable[[dict[str, Any]], bool]) -> None:
    """Refuse an output without a parent folder, or an existing file that is not ``ours``.

    ``ours`` tells whether the JSON object in the file may be replaced; ``what`` describes what is
    written there. An empty file may always be replaced.
    """
    require_parent(path)
    if not os.path.lexists(path):
        return
    with suppress(FileRefused, OSError):
        if path.stat().st_size == 0 or ours(read_json(path)):
            return
    raise FileRefused(
        f"{path} exists and holds no {what} written by this command, so it is not replaced: "
        "choose another file, or remove it yourself."
    )


def refuse_strangers(folder: Path, ours: Sequence[str]) -> None:
    """Refuse to overwrite a folder with files not matched by ``ours``; "NAME/" matches a folder."""
    others = []
    for entry in sorted(folder.iterdir()):
        name = f"{entry.name}/" if entry.is_dir() and not entry.is_symlink() else entry.name
        if not any(fnmatch(name, pattern) for pattern in ours):
            others.append(entry.name)
    if others:
        raise FileRefused(
            f"{folder} also holds {', '.join(others[:4])}, which --overwrite would delete. Choose "
            "another output, or move them away."
        )


def differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """Yield the values that differ between two JSON objects."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in sorted(before.keys() | now.keys()):
            yield from differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif before != now:
        yield f"{name} was {before!r} and is now {now!r}"
