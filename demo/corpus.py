"""Python source of the running installation -> token files, deterministic and deduplicated.

A file's place is decided by its content alone: files are sorted by the SHA-256 digest of their
text (the standard library first, installed packages after it), equal texts are kept once, and the
digest also says whether a file is held out. Two machines with the same files agree on everything.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from demo.recipe import BOS, EOS, CorpusRecipe
from vllm_medusa.files import new_file
from vllm_medusa.job import Progress

PACKAGES = {"site-packages", "dist-packages"}


class BuildError(ValueError):
    """The build cannot go on; the message says what to change."""


@dataclass(frozen=True)
class SourceFile:
    """One Python file: digest of its text, where it lies, whether it is held out."""

    digest: str
    path: Path
    heldout: bool

    def text(self) -> str:
        """Read the file again (the corpus is larger than what should stay in memory)."""
        return self.path.read_text(encoding="utf-8")


def default_roots() -> list[Path]:
    """Return the standard library, then the installed packages, of the running Python."""
    names = ("stdlib", "platlib", "purelib")
    roots = [Path(sysconfig.get_paths()[name]).resolve() for name in names]
    return list(dict.fromkeys(roots))


def find_sources(roots: list[Path], recipe: CorpusRecipe) -> list[SourceFile]:
    """List the usable files below `roots`: root by root, within a root by digest, no text twice.

    Raises BuildError when a root is no folder or nothing usable is found.
    """
    seen: set[str] = set()
    sources: list[SourceFile] = []
    for root in roots:
        if not root.is_dir():
            raise BuildError(f"--sources {root}: no such folder; give folders with .py files")
        found: dict[str, SourceFile] = {}
        for path in sorted(root.rglob("*.py")):
            if PACKAGES.intersection(path.relative_to(root).parts) or not path.is_file():
                continue  # inside the standard library's folder, but not of it
            if not recipe.min_bytes <= path.stat().st_size <= recipe.max_bytes:
                continue
            data = path.read_bytes()
            try:
                data.decode("utf-8")
            except UnicodeDecodeError:
                continue
            digest = hashlib.sha256(data).hexdigest()
            if digest not in seen:
                seen.add(digest)
                heldout = int(digest, 16) % recipe.heldout_every == 0
                found[digest] = SourceFile(digest, path, heldout)
        sources += [found[digest] for digest in sorted(found)]
    if not sources:
        raise BuildError(
            f"no .py file of {recipe.min_bytes}..{recipe.max_bytes} bytes below "
            f"{', '.join(map(str, roots))}; point --sources at a Python library folder"
        )
    return sources


def training_texts(sources: list[SourceFile], max_bytes: int) -> Iterator[str]:
    """Yield texts of files that are not held out, about `max_bytes` in all, spread evenly."""
    usable = [source for source in sources if not source.heldout]
    total = sum(source.path.stat().st_size for source in usable)
    step = max(1, total // max_bytes)
    for source in usable[::step]:
        yield source.text()


def tokenize(
    sources: list[SourceFile],
    tokenizer: Tokenizer,
    num_tokens: int,
    path: Path,
    progress: Progress,
    *,
    heldout: bool,
) -> np.ndarray:
    """Write `<s> text </s>` of each file to `path` until `num_tokens`; return them, uint16 [T].

    A finished file is reused as it is. Fewer tokens come back when the sources run out.
    """
    if not path.exists():
        bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
        written = 0
        with new_file(path, "wb") as out:
            for source in sources:
                if source.heldout != heldout:
                    continue
                ids = [bos, *tokenizer.encode(source.text(), add_special_tokens=False).ids, eos]
                ids = ids[: num_tokens - written]
                out.write(np.asarray(ids, dtype=np.uint16).tobytes())
                written += len(ids)
                progress.at("tokenize", written, num_tokens)
                if written >= num_tokens:
                    break
    return np.fromfile(path, dtype=np.uint16)


def rows(tokens: np.ndarray, length: int) -> np.ndarray:
    """Cut a token stream [T] into rows [R, length], dropping the rest.

    Raises BuildError when there is not even one row.
    """
    count = len(tokens) // length
    if count == 0:
        raise BuildError(f"{len(tokens)} tokens give no row of {length}; raise --tokens or sources")
    return tokens[: count * length].reshape(count, length)
