"""Options of jobs and their command lines, both defined by the fields of a dataclass.

    class Texts(Options):
        samples: Positive = option("texts per prompt", default=1)

    Texts(samples=0)   ValueError: samples is 0: input should be greater than or equal to 1

Types are pydantic's. `add_flags` and `from_flags` make a command line. Options that several
commands share are a base class with a ``title``, under which the help lists them.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cached_property
from inspect import get_annotations
from pathlib import Path
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NoReturn,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)


def _source(text: str) -> str:
    path = os.path.expanduser(text.strip())  # unlike Path.expanduser, accepts an unknown user
    if path and (path[0] not in "/.~" or os.path.exists(path)):
        return text
    raise ValueError("it does not exist; use an existing folder or file, or a hub model's name")


def check_model(text: str) -> str:
    """Return the name of a model's folder or of a hub model. Raises ValueError: it is neither."""
    path = os.path.expanduser(text)
    names = os.listdir(path) if os.path.isdir(path) else []
    is_gguf = "config.json" not in names and any(name.endswith(".gguf") for name in names)
    if os.path.isfile(path) or is_gguf:
        raise ValueError(
            "use the name of an existing folder with config.json, tokenizer and safetensors, or of "
            "a hub model (transformers converts a GGUF file to such a folder: "
            "AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=NAME).save_pretrained(TARGET), "
            "and its tokenizer likewise)"
        )
    return _source(text)


def _filled(path: object) -> object:
    if isinstance(path, str) and not path.strip():  # `Path` would use the current folder
        raise ValueError('the name is empty; name a file or folder, "." for the current folder')
    return path


Source = Annotated[
    str, BeforeValidator(str), AfterValidator(_source)
]  # a folder, a file or a hub name
Model = Annotated[str, BeforeValidator(str), AfterValidator(check_model)]  # folder, hub name
Text = Annotated[str, Field(min_length=1)]
Positive = Annotated[int, Field(ge=1)]
FromZero = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=1 << 32)]  # in vLLM, -1 means no seed
Above = Annotated[float, Field(gt=0)]
AtLeastZero = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def option(help: str = "", *names: str, default: Any = MISSING, **more: Any) -> Any:
    """A field of `Options`; without a default it is required.

    In the help, ``help`` is followed by the default, or by ``shown`` if given. ``names`` are
    additional names on the command line, such as "-o"; one with "--" replaces the field's own.
    ``metavar`` is the value's name in the help; ``positional`` makes it a positional argument.
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
            try:
                value = each.validator.validate_python(getattr(self, each.name))
            except ValidationError as error:
                value, reason = _first(error)
                raise ValueError(f"{each.name} is {value!r}: {reason}") from None
            object.__setattr__(self, each.name, value)
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
    title: str  # of its class
    type: Any  # as annotated
    item: Any  # its type, without None and an outer tuple
    default: Any  # `MISSING` for required ones
    more: dict[str, Any]  # arguments of `option`

    @property
    def flag(self) -> str:
        """Its name on the command line, such as "--max-tokens"."""
        own = [name for name in self.more["names"] if name.startswith("--")]
        return own[0] if own else f"--{self.name.replace('_', '-')}"

    @property
    def many(self) -> bool:
        """Whether it is a tuple of values."""
        return get_origin(self.type) is tuple

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values of a `Literal`."""
        return get_args(self.item) if get_origin(self.item) is Literal else ()

    @cached_property
    def validator(self) -> TypeAdapter[Any]:
        """The validator of its values."""
        return _adapter(self.type)

    def parse(self, text: str) -> Any:
        """Parse one value from the command line."""
        adapter = _adapter(self.item)
        try:
            if get_origin(self.item) is dict:
                return adapter.validate_json(text)
            return adapter.validate_python(text)
        except ValidationError as error:
            message = f"{text!r} is not allowed; {_first(error)[1]}"
            raise argparse.ArgumentTypeError(message) from None


def _adapter(hint: Any) -> TypeAdapter[Any]:
    kind: Any = Annotated[hint, BeforeValidator(_filled)] if hint is Path else hint
    return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False))


def _first(error: ValidationError) -> tuple[Any, str]:
    """The first invalid value, and the reason."""
    first = error.errors()[0]
    reason = first["msg"].removeprefix("Value error, ")
    return first["input"], reason[0].lower() + reason[1:]


def described(options: type[Options]) -> list[Described]:
    """All options of a class except those in its groups."""
    hints = get_type_hints(options, include_extras=True)
    found = []
    for each in fields(options):  # type: ignore[arg-type]
        if "flag" not in each.metadata:
            continue
        item = hints[each.name]
        if NoneType in get_args(item):
            (item,) = (one for one in get_args(item) if one is not NoneType)
        if get_origin(item) is tuple:
            item = get_args(item)[0]
        owner = next(c for c in options.__mro__ if each.name in get_annotations(c))
        found.append(
            Described(
                name=each.name,
                title=owner.__dict__.get("title", ""),
                type=hints[each.name],
                item=item,
                default=each.default if each.default_factory is MISSING else each.default_factory(),
                more=each.metadata["flag"],
            )
        )
    return found


def groups(options: type[Options]) -> Iterator[tuple[str, str, type[Options]]]:
    """(name, title, class) of a class's fields that hold nested options."""
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
    """Options of class ``kind``: values from ``own``, else same-named ones from ``options``."""
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
            values = () if each.item is bool else value if each.many else (value,)
            words.append(each.flag)
            words += (json.dumps(one) if isinstance(one, dict) else str(one) for one in values)
    for name, _, _ in groups(type(options)):
        words += command_line(getattr(options, name))
    return words


class Parser(argparse.ArgumentParser):
    """A parser whose error messages omit the usage."""

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

    Raises ValueError: options conflict; the parser has already rejected individual values.
    """
    values = {each.name: getattr(args, each.name) for each in described(options)}
    for name, _, kind in groups(options):
        values[name] = from_flags(kind, args)
    return options(**values)


def _add(parser: Any, each: Described) -> None:
    default = None if each.default is MISSING else each.default
    help, names, more = each.more["help"], [each.name], dict[str, Any]()
    if each.more.get("positional"):
        more = {} if each.default is MISSING else {"nargs": "?"}
    else:
        names = [each.flag, *(name for name in each.more["names"] if name != each.flag)]
        more = {"dest": each.name, "required": each.default is MISSING}
    if each.item is bool:
        parser.add_argument(*names, action="store_true", help=help or None, **more)
        return
    choices = f"{{{','.join(each.choices)}}}" if each.choices else None
    more["metavar"] = each.more.get("metavar", choices)
    if each.many:
        more["nargs"] = "+"
    shown = each.more.get("shown")
    if shown is None and default not in (None, (), "", {}):
        values = default if each.many else (default,)
        shown = " ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values)
    help = " ".join(filter(None, [help, shown and f"({shown})"])).replace("%", "%%")
    parser.add_argument(*names, type=each.parse, default=default, help=help or None, **more)
