"""Build a command line from the fields of `Options`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import MISSING
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from vllm_medusa.options import Described, Options, described, groups

T = TypeVar("T", bound=Options)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Print the message and end the process."""
        self.exit(2, f"{self.prog}: error: {message}\nSee {self.prog} --help.\n")


def add_flags(parser: Any, options: type[Options], titled: dict[str, Any] | None = None) -> None:
    """Add a flag for each option; options with the same title share a help group."""
    titled = {} if titled is None else titled

    def under(title: str) -> Any:
        if title and title not in titled:
            titled[title] = parser.add_argument_group(title)
        return titled[title] if title else parser

    for each in described(options):
        _add(under(each.title), each)
    for _, title, kind in groups(options):
        add_flags(under(title), kind, titled)


def from_flags(options: type[T], args: argparse.Namespace) -> T:
    """Options from a parsed command line.

    Raises ValueError: options conflict; single invalid values are rejected by the parser.
    """
    values = {each.name: getattr(args, each.name) for each in described(options)}
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    for name, _, kind in groups(options):
        values[name] = from_flags(kind, args)
    return options(**values)


def _add(parser: Any, each: Described) -> None:
    default = None if each.default is MISSING else each.default
    help, names, more = each.more["help"], [each.name], dict[str, Any]()
    if not each.more.get("positional"):
        names = [each.flag, *(name for name in each.more["names"] if name != each.flag)]
        more = {"dest": each.name, "required": each.default is MISSING}
    if each.kind is bool:
        parser.add_argument(*names, action="store_true", help=help or None, **more)
        return
    if each.choices:
        more["choices"] = each.choices
    elif "metavar" in each.more:
        more["metavar"] = each.more["metavar"]
    if each.many:
        more["nargs"] = "+"
    shown = each.more.get("shown")
    if shown is None and default not in (None, (), "", {}):
        values = default if each.many else (default,)
        shown = " ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values)
    help = " ".join(filter(None, [help, shown and f"({shown})"])).replace("%", "%%")
    parser.add_argument(*names, type=_parser(each), default=default, help=help or None, **more)


def _parser(each: Described) -> Callable[[str], Any]:
    """Return the parser of an option's text."""

    def parse(text: str) -> Any:
        try:
            value = _KINDS.get(each.kind, each.kind)(text)
            if each.bounds is None or each.bounds.allows(value):
                return value
        except ValueError as error:
            if each.kind in _KINDS:
                raise argparse.ArgumentTypeError(str(error)) from None
        raise argparse.ArgumentTypeError(
            f"{text!r} is not allowed; use {each.bounds or 'a number'}"
        )

    return parse


def _path(text: str) -> Path:
    if not text.strip():  # which `Path` takes for the current folder
        raise ValueError("the name is empty; name a file or folder, or . for the current folder")
    return Path(text)


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at {error.pos + 1}") from None
    if not isinstance(value, dict):
        raise ValueError("use a JSON object such as '{\"enforce_eager\": true}'")
    return value


_KINDS: dict[Any, Callable[[str], Any]] = {Path: _path, dict: _json}
