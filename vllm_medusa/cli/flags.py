"""A command line from the fields of `Options`: every name, bound and default stands there alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import MISSING
from pathlib import Path
from typing import Any, TypeVar

from vllm_medusa.options import Described, Options, described, flag_name, groups

T = TypeVar("T", bound=Options)


def add_flags(parser: Any, options: type[Options], titled: dict[str, Any] | None = None) -> None:
    """Add a flag for each option; groups of one title become one group of the help."""
    titled = {} if titled is None else titled
    for each in described(options):
        _add(parser, each)
    for _, title, kind in groups(options):
        if title and title not in titled:
            titled[title] = parser.add_argument_group(title)
        add_flags(titled[title] if title else parser, kind, titled)


def from_flags(options: type[T], args: argparse.Namespace) -> T:
    """Options from a parsed command line.

    Raises:
        ValueError: options that contradict each other; a single one is refused by the parser.

    """
    values = {each.name: getattr(args, each.name) for each in described(options)}
    values |= {n: tuple(v) for n, v in values.items() if isinstance(v, list)}
    for name, _, kind in groups(options):
        values[name] = from_flags(kind, args)
    return options(**values)


def _add(parser: Any, each: Described) -> None:
    flag = each.flag
    default = None if each.default is MISSING else each.default
    names, more = [each.name], dict[str, Any]()
    if not flag.positional:
        names = [flag_name(each), *(name for name in flag.names if name != flag_name(each))]
        more = {"dest": each.name, "required": each.default is MISSING}
    if each.kind is bool:
        parser.add_argument(*names, action="store_true", help=flag.help or None, **more)
        return
    if each.choices:
        more["choices"] = each.choices
    elif flag.metavar:
        more["metavar"] = flag.metavar
    if each.many and flag.repeat:
        more["action"] = _Repeat
    elif each.many and not flag.joined:
        more["nargs"] = "+"
    parser.add_argument(
        *names, type=_parser(each), default=default, help=_help(each, default) or None, **more
    )


class _Repeat(argparse.Action):
    """Add a value to a tuple; the first replaces the default."""

    def __call__(self, parser: Any, args: Any, value: Any, option: str | None = None) -> None:
        before = getattr(args, self.dest)
        setattr(args, self.dest, (value,) if before is self.default else (*before, value))


def _help(each: Described, default: Any) -> str:
    """The help with the default behind it, as "(512)"."""
    shown = each.flag.shown
    if shown is None:
        if default is None or default == () or default == "" or default == {}:
            return each.flag.help
        values = default if each.many else (default,)
        shown = " ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values)
    return " ".join(filter(None, [each.flag.help, shown and f"({shown})"])).replace("%", "%%")


def _parser(each: Described) -> Callable[[str], Any]:
    """Text to a value of an option; of a joined one to all of them."""

    def parse(text: str) -> Any:
        if each.flag.joined:
            return tuple(one(part) for part in text.split(each.flag.joined))
        return one(text)

    def one(text: str) -> Any:
        try:
            value = (each.flag.parse or _KINDS.get(each.kind, each.kind))(text)
        except ValueError as error:
            known = each.bounds is not None or each.kind not in _KINDS
            words = each.bounds or "a number" if known and not each.flag.parse else None
            raise argparse.ArgumentTypeError(
                f"{text!r} is not allowed; use {words}" if words else str(error)
            ) from None
        if each.bounds is not None and not each.flag.parse and not each.bounds.allows(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not allowed; use {each.bounds}")
        return value

    return parse


def _path(text: str) -> Path:
    """Parse a path; `Path` takes no name at all for the current folder."""
    if not text.strip():
        raise ValueError("the name is empty; name a file or folder, . for the current one")
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
