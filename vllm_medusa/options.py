"""Options of jobs: a dataclass field defines an option's name, default, bounds and help text.

    class Texts(Options):
        samples: Positive = option("texts per prompt", default=1)

    Texts(samples=0)   ValueError: samples is 0; use a whole number from 1

A command line is made of the same fields (`vllm_medusa.flags`). Options that several commands
share are a base class with a ``title``, under which the help lists them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from inspect import get_annotations
from pathlib import Path
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)


@dataclass(frozen=True)
class Number:
    """Finite numbers from ``low`` to ``high``; ``above`` and ``below`` exclude the bound itself."""

    kind: type[int] | type[float]
    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False

    def allows(self, value: Any) -> bool:
        """Whether a value is allowed."""
        kinds = int if self.kind is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
            return False
        over = value > self.low if self.above else value >= self.low
        return over and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        parts = ["a whole number" if self.kind is int else "a number"]
        if math.isfinite(self.low):
            parts.append(f"{'above' if self.above else 'from'} {self.low:g}")
        if math.isfinite(self.high):
            parts.append(f"{'below' if self.below else 'to'} {self.high:.15g}")
        return " ".join(parts)


@dataclass(frozen=True)
class Place:
    """A folder, a file or a hub model; unambiguous paths must exist."""

    files: bool = True  # whether a file is allowed

    def allows(self, value: Any) -> bool:
        """Whether a value can be a name."""
        text = str(value).strip()
        path = Path(os.path.expanduser(text))  # unlike Path's, accepts an unknown user
        if path.is_file():
            return self.files
        return bool(text) and (text[0] not in "/.~" or path.exists())

    def __str__(self) -> str:
        if self.files:
            return "the name of an existing folder or file, or of a hub model"
        return (
            "the name of an existing folder with config.json, tokenizer and safetensors, or of a "
            "hub model (transformers makes such a folder of a GGUF file: "
            "AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=NAME).save_pretrained(TARGET), "
            "and its tokenizer likewise)"
        )


Source = Annotated[str, Place()]
Model = Annotated[str, Place(files=False)]
Positive = Annotated[int, Number(int, 1)]
FromZero = Annotated[int, Number(int, 0)]
Seed = Annotated[int, Number(int, 0, (1 << 32) - 1)]  # in vLLM, -1 means no seed
Above = Annotated[float, Number(float, 0, above=True)]
AtLeastZero = Annotated[float, Number(float, 0)]
Share = Annotated[float, Number(float, 0, 1, above=True)]  # (0, 1]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def option(help: str = "", *names: str, default: Any = MISSING, **more: Any) -> Any:
    """A field of `Options`; without a default it is required.

    ``help`` is followed by the default, or by ``shown`` instead. ``names`` are further names
    on the command line, such as "-o"; one with "--" replaces the field's own. ``metavar`` is the
    value's name in the help, ``positional`` an argument without a name.
    """
    metadata = {"flag": {"help": help, "names": names, **more}}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def group(title: str = "", *, factory: Any = MISSING) -> Any:
    """A field that holds nested options, under a title in the help.

    ``factory`` is their class, if all of them have defaults.
    """
    return field(default_factory=factory, metadata={"group": title})


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option, group))
class Options:
    """Base of all options: a frozen, keyword-only dataclass with validated values."""

    title: ClassVar[str] = ""  # title in the help of the options that a class defines
    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        for each in described(type(self)):
            if problem := each.problem(getattr(self, each.name)):
                raise ValueError(f"{each.name} is {problem}")
        self.check()

    def check(self) -> None:
        """Refuse conflicting options; override in subclasses.

        Raises ValueError: with the options, the allowed values and the remedy.
        """


T = TypeVar("T", bound=Options)


@dataclass(frozen=True)
class Described:
    """An option with its parsed type."""

    name: str
    flag: str  # its name on the command line, such as "--max-tokens"
    title: str  # of its class
    kind: Any  # its type, without None, bounds and an outer tuple
    bounds: Number | Place | None
    choices: tuple[Any, ...]  # of a `Literal`
    many: bool  # a tuple of such values
    optional: bool  # None is allowed
    default: Any  # `MISSING` for required ones
    more: dict[str, Any]  # arguments of `option`

    def problem(self, value: Any) -> str:
        """Describe why a value is invalid, to follow "is"; empty if it is valid."""
        if value is None and self.optional:
            return ""
        for one in value if self.many else (value,):
            if self.choices and one not in self.choices:
                return f"{one!r}; use one of {', '.join(map(str, self.choices))}"
            if self.bounds is not None and not self.bounds.allows(one):
                return f"{one!r}; use {self.bounds}"
        return ""


def described(options: type[Options]) -> Iterator[Described]:
    """All options of a class except those in its groups."""
    hints = get_type_hints(options, include_extras=True)
    for each in fields(options):  # type: ignore[arg-type]
        if "flag" not in each.metadata:
            continue
        more, hint = each.metadata["flag"], hints[each.name]
        own = [name for name in more["names"] if name.startswith("--")]
        owner = next(c for c in options.__mro__ if each.name in get_annotations(c))
        default = each.default if each.default_factory is MISSING else each.default_factory()
        bounds, choices = None, tuple[Any, ...]()
        if optional := NoneType in get_args(hint):
            (hint,) = (one for one in get_args(hint) if one is not NoneType)
        if many := get_origin(hint) is tuple:
            hint = get_args(hint)[0]
        if get_origin(hint) is Annotated:
            hint, bounds, *_ = get_args(hint)
        elif get_origin(hint) is Literal:
            choices = get_args(hint)
            hint = type(choices[0])
        yield Described(
            name=each.name,
            flag=own[0] if own else f"--{each.name.replace('_', '-')}",
            title=owner.__dict__.get("title", ""),
            kind=get_origin(hint) or hint,  # dict[str, Any]
            bounds=bounds,
            choices=choices,
            many=many,
            optional=optional,
            default=default,
            more=more,
        )


def groups(options: type[Options]) -> Iterator[tuple[str, str, type[Options]]]:
    """(name, title, class) of a class's fields that are options."""
    hints = get_type_hints(options)
    for each in fields(options):  # type: ignore[arg-type]
        if is_dataclass(hints[each.name]) and "group" in each.metadata:
            yield each.name, each.metadata["group"], hints[each.name]


def values_of(options: Options) -> dict[str, Any]:
    """All values by name, including those of groups."""
    values = {each.name: getattr(options, each.name) for each in described(type(options))}
    for name, _, _ in groups(type(options)):
        values |= values_of(getattr(options, name))
    return values


def taken(kind: type[T], options: Options, **own: Any) -> T:
    """Options of a class, with the same-named values of others, except ``own``."""
    known = {each.name for each in described(kind)}
    return kind(**{n: v for n, v in values_of(options).items() if n in known} | own)


def command_line(options: Options) -> list[str]:
    """The command-line arguments of these options; defaults are omitted."""
    words: list[str] = []
    for each in described(type(options)):
        value = getattr(options, each.name)
        if each.more.get("positional"):
            words.append(str(value))
        elif value != each.default:
            values = () if each.kind is bool else value if each.many else (value,)
            words.append(each.flag)
            words += (json.dumps(one) if isinstance(one, dict) else str(one) for one in values)
    for name, _, _ in groups(type(options)):
        words += command_line(getattr(options, name))
    return words
