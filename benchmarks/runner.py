"""`python -m benchmarks CASE [CASE ...]`: run benchmarks and write results incrementally.

    python -m benchmarks speed --quick
    python -m benchmarks kernels step --json build/gpu.json
    python -m benchmarks load --base HEAD~3

With --json the document is written after every row; at the end a table (.md) and a plot (.png)
are written next to it. With --add the file's earlier rows are kept, except those that are measured
again (a failed arm's rows are replaced by any new row of that arm); machine and commit must be the
same, and all options except --only should be. --base also measures the package of another commit,
alternating with this one: base, this, base, this. Exit status: 0; 1 if a row failed; 2 for wrong
options.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.case import ROOT, Case
from benchmarks.report import describe, draw, markdown
from vllm_medusa.files import read_json, write_json
from vllm_medusa.job import Progress
from vllm_medusa.options import Options, add_flags, from_flags

CASES = {  # name -> (location of its `Case`, what it measures)
    "speed": (
        "compare.SPEED",
        "trees, chains and n-grams against plain vLLM, one request at a time",
    ),
    "load": ("compare.LOAD", "the automatic budget and static trees, by batch size"),
    "budgets": ("budgets.CASE", "the automatic budget and fixed ones, in turn in one engine"),
    "tau": ("compare.TAU", "tokens per step of dynamic and static trees, by number of nodes"),
    "tokens": ("compare.TOKENS", "tokens per step of drafters, by number of training tokens"),
    "noise": ("compare.NOISE", "tokens per step with and without shared noise, by temperature"),
    "lookup": ("compare.LOOKUP", "tokens per step of a drafter, of lookup and of both in one tree"),
    "drafters": ("compare.DRAFTERS", "tokens per step of several drafters in all forms"),
    "mtp": ("mtp.CASE", "tokens per step of chains and trees over an MTP module trained here"),
    "typical": ("typical.CASE", "typical acceptance: tokens per step and text quality"),
    "grammar": ("grammar.CASE", "steps saved by drafts for requests with a JSON schema"),
    "peers": ("peers.CASE", "other engines for CPUs, each with its own speculation, side by side"),
    "serve": ("serve.CASE", "a server under open load"),
    "soak": ("soak.CASE", "a server under thousands of mixed requests: answers, memory"),
    "profile": ("profile.CASE", "time per part of a decode step"),
    "kernels": ("kernels.CASE", "tree attention on a GPU against memory bandwidth and torch"),
    "step": ("step.CASE", "a whole decode step on a GPU, by the number of nodes"),
}
TURNS = 2  # of --base
_WHOLE = "the whole case"  # the name of a row without a result


class Lines(Progress):
    """Prints a case's messages on standard error."""

    def note(self, text: str) -> None:
        """Print it."""
        print(text, file=sys.stderr, flush=True)

    warn = note


def load(name: str) -> Case:
    """The case of a name, or the `CASE` of any other module."""
    module, _, attribute = CASES[name][0].partition(".") if name in CASES else (name, "", "CASE")
    package = "benchmarks." if name in CASES else ""
    case = getattr(import_module(package + module), attribute)
    assert isinstance(case, Case), name
    return case


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases of a command line; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    names: list[str] = []
    while words and (words[0] in CASES or (not names and not words[0].startswith("-"))):
        names.append(words.pop(0))
    try:
        cases = {name: load(name) for name in names}
    except ModuleNotFoundError as error:
        print(f"{error}; use one of {', '.join(CASES)}", file=sys.stderr)
        return 2
    parser = _parser(cases, quick="--quick" in words)
    args = parser.parse_args(words)
    if not cases:
        parser.error("a case is required")
    if args.add and (args.base or not args.json):
        parser.error("--add requires --json and excludes --base")
    try:
        options = {name: _options(case, args, len(cases)) for name, case in cases.items()}
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    document: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks", *names, *map(_without_folder, words)]),
        "machine": describe(args.commit),
        "cases": {},
    }
    kept: dict[str, Any] = {}
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        if args.add and args.json.exists():
            earlier = read_json(args.json)
            for key in ("cpu", "cores", "commit"):
                if (now := document["machine"][key]) != (then := earlier["machine"][key]):
                    parser.error(f"--add: {args.json} was measured with {key} {then}, not {now}")
            kept = earlier["cases"]
            document["command"] = f"{earlier['command']} && {document['command']}"
    for name, case in cases.items():
        before = kept.get(name, {"rows": []})["rows"]
        before, found = [row for row in before if row["name"] != _WHOLE], list[dict[str, Any]]()
        document["cases"][name] = {"options": _plain(options[name]), "rows": before}
        rows = _with_base(name, words, args.base) if args.base else _rows(case, options[name])
        for row in rows:
            before = [each for each in before if not _replaces(row, each)]
            found.append(row)
            document["cases"][name]["rows"] = [*before, *found]
            Lines().note(f"{name} {len(found)}: {_one_line(row)}")
            if args.json:
                write_json(args.json, document)
    text = markdown(document, cases)
    print(text, end="")
    if args.json:
        args.json.with_suffix(".md").write_text(text, encoding="utf-8")
        _draw(document, cases, args.json)
    every = [row for case in document["cases"].values() for row in case["rows"]]
    return int(not every or any("failed" in row for row in every))


def _parser(cases: dict[str, Case], quick: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=" ".join(["python -m benchmarks", *(list(cases) or ["CASE [CASE ...]"])]),
        description=__doc__,
        epilog="cases:\n" + "\n".join(f"  {name:10} {text}" for name, (_, text) in CASES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--quick", action="store_true", help="a reduced run of some minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    parser.add_argument("--add", action="store_true", help="keep rows of an earlier --json")
    parser.add_argument("--base", metavar="COMMIT", help="alternate with another commit")
    parser.add_argument("--commit", help="the measured commit, for a copy without git")
    if len(cases) == 1:
        ((name, case),) = cases.items()
        add_flags(parser.add_argument_group(f"options of {name}"), case.options)
        if quick:
            parser.set_defaults(**case.quick)
    return parser


def _options(case: Case, args: argparse.Namespace, cases: int) -> Options:
    """Options of the command line; the defaults if there are several cases."""
    if cases > 1:
        return case.options(**(case.quick if args.quick else {}))
    return from_flags(case.options, args)


def _rows(case: Case, options: Options) -> Iterator[dict[str, Any]]:
    """The rows of a case; if it fails, the last one has the reason."""
    try:
        for row in case.run(options, Lines()):
            yield row.to_dict()
    except (Exception, KeyboardInterrupt) as error:  # if interrupted, keep the rows so far
        yield {"name": _WHOLE, "failed": f"{type(error).__name__}: {error}"}


def _with_base(name: str, words: Sequence[str], base: str) -> Iterator[dict[str, Any]]:
    """The rows of a case with the package of another commit and with this one's, alternating."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--base", "--json"):
        parser.add_argument(option)
    words = parser.parse_known_args(words)[1]
    with package_of(base) as folder, tempfile.TemporaryDirectory() as results:
        for turn in range(TURNS):
            for commit, package in ((base, folder), ("this", ROOT)):
                where = {"of_commit": commit, "turn": turn + 1}
                file = Path(results) / f"{turn}-{commit == base}.json"
                command = [sys.executable, "-m", "benchmarks", name, *words, "--json", str(file)]
                paths = [str(package), str(ROOT), os.environ.get("PYTHONPATH", "")]
                environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
                environment["PYTHONSAFEPATH"] = "1"  # the current folder must not precede them
                done = subprocess.run(
                    command, env=environment, stdout=subprocess.DEVNULL, check=False
                )
                if file.exists():
                    rows = json.loads(file.read_text(encoding="utf-8"))["cases"][name]["rows"]
                    yield from (where | row for row in rows)
                else:
                    reason = f"the case ended with status {done.returncode} without a row"
                    yield where | {"name": _WHOLE, "failed": reason}


@contextlib.contextmanager
def package_of(commit: str) -> Iterator[Path]:
    """A folder with only the package of a commit, to be first on PYTHONPATH."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        tree, path = Path(folder, "worktree"), Path(folder, "path")
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            path.mkdir()
            (path / "vllm_medusa").symlink_to(tree / "vllm_medusa")
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=False)


def _draw(document: dict[str, Any], cases: dict[str, Case], path: Path) -> None:
    for name, case in cases.items():
        picture = path.with_suffix(".png") if len(cases) == 1 else path.with_suffix(f".{name}.png")
        if case.plot is not None:
            try:
                draw(document["cases"][name]["rows"], case.plot, picture)
            except Exception as error:  # do not lose a run because of a plot
                Lines().note(f"no plot: {type(error).__name__}: {error}")


def _replaces(row: dict[str, Any], earlier: dict[str, Any]) -> bool:
    if "failed" in earlier:  # a row without a load says that the arm did not start
        return row.get("arm", row["name"]) == earlier.get("arm", earlier["name"])
    return bool(row["name"] == earlier["name"])


def _plain(options: Options) -> dict[str, Any]:
    """JSON values without local folders."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return [plain(each) for each in value]
        return _without_folder(str(value)) if isinstance(value, Path) else value

    return {name: plain(value) for name, value in vars(options).items()}


def _without_folder(word: str) -> str:
    return Path(word).name if word.startswith("/") else word


def _one_line(row: dict[str, Any]) -> str:
    shown = {k: v for k, v in row.items() if isinstance(v, str | int | float)}
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {str(value)[:200]}"
        for key, value in shown.items()
    )
