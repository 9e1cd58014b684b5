"""Options of jobs: a dataclass field is the one place of a name, a default, bounds and a help text.

    class Texts(Options):
        samples: Positive = option("of each prompt", default=1)

    Texts(samples=0)   ValueError: samples is 0; use a whole number from 1

A command line is made of the same fields (`vllm_medusa.cli.flags`), so the two can't drift apart.
Options that belong together are a dataclass of their own, a field of the larger one: a function
takes what it needs and no more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypedDict,
    TypeVar,
    Union,
    Unpack,
    dataclass_transform,
    get_args,
    get_origin,
    overload,
)
from typing import get_type_hints as hints_of

T = TypeVar("T")


@dataclass(frozen=True)
class Number:
    """Numbers from ``low`` to ``high``; ``above`` and ``below`` leave the end itself out."""

    kind: type[int] | type[float]
    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False

    def allows(self, value: Any) -> bool:
        """Whether a value is such a number; infinities and NaN never are."""
        kinds = int if self.kind is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            return False
        over = value > self.low if self.above else value >= self.low
        under = value < self.high if self.below else value <= self.high
        return math.isfinite(value) and over and under

    def __str__(self) -> str:
        parts = []
        if math.isfinite(self.low):
            parts.append(f"{'above' if self.above else 'from'} {self.low:g}")
        if math.isfinite(self.high):
            parts.append(f"{'below' if self.below else 'to'} {self.high:.15g}")
        return " ".join(["a whole number" if self.kind is int else "a number", *parts])


@dataclass(frozen=True)
class Place:
    """Texts that name a folder, a file or a model of the hub: what is clearly a path is there."""

    def allows(self, value: Any) -> bool:
        """Whether a value can name anything."""
        text = str(value).strip()  # a path will do
        return bool(text) and (text[0] not in "/.~" or Path(text).expanduser().exists())

    def __str__(self) -> str:
        return "the name of a folder or a file that is there, or of a model of the hub"


Source = Annotated[str, Place()]
Positive = Annotated[int, Number(int, 1)]
FromZero = Annotated[int, Number(int, 0)]
Seed = Annotated[int, Number(int, 0, (1 << 32) - 1)]  # vLLM takes -1 for none
Above = Annotated[float, Number(float, 0, above=True)]
AtLeastZero = Annotated[float, Number(float, 0)]
Share = Annotated[float, Number(float, 0, 1, above=True)]  # (0, 1]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Flag:
    """What a command line needs to know of a field beside its type and default."""

    help: str = ""  # a few words; the default is added by itself
    names: tuple[str, ...] = ()  # others, such as "-o"; one with "--" replaces the field's own
    metavar: str | None = None  # what stands for the value in the help
    parse: Callable[[str], Any] | None = None  # text to value; raises ValueError
    shown: str | None = None  # the default in words, where the value says too little; "" shows none
    positional: bool = False  # an argument without a name
    repeat: bool = False  # of a tuple, "--stop A --stop B" instead of "--stop A B"
    joined: str = ""  # of a tuple, what stands between its values in one word, as "," in "0.3,0.7"


class _More(TypedDict, total=False):
    """Attributes of `Flag` that an option may give by name."""

    metavar: str
    parse: Callable[[str], Any]
    shown: str
    positional: bool
    repeat: bool
    joined: str


@overload
def option(help: str = ..., *names: str, default: T, **more: Unpack[_More]) -> T: ...
@overload
def option(help: str = ..., *names: str, **more: Unpack[_More]) -> Any: ...
def option(help: str = "", *names: str, default: Any = MISSING, **more: Any) -> Any:
    """A field with a `Flag`; without a default it is required.

    A default stands here alone; a list or dict is copied for each object. All else is `Flag`'s.
    """
    flag = {"flag": Flag(help, names, **more)}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=flag)
    return field(default=default, metadata=flag)


@overload
def group(title: str = ..., *, factory: Callable[[], T]) -> T: ...
@overload
def group(title: str = ...) -> Any: ...
def group(title: str = "", *, factory: Any = MISSING) -> Any:
    """A field that holds options of their own, under a title in the help.

    ``factory`` is their class, if all in it have defaults.
    """
    return field(default_factory=factory, metadata={"group": title})


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option, group))
class Options:
    """Base of all options: a frozen dataclass, given by name, whose values are checked."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        """Refuse a value outside its bounds, then let the class check what goes together."""
        for each in described(type(self)):
            if problem := each.problem(getattr(self, each.name)):
                raise ValueError(f"{each.name} is {problem}")
        self.check()

    def check(self) -> None:
        """Refuse options that contradict each other; for subclasses.

        Raises:
            ValueError: naming them, what is allowed and the remedy.

        """


@dataclass(frozen=True)
class Described:
    """A field with its type taken apart."""

    name: str
    kind: Any  # its type, without None, bounds and a tuple around it
    bounds: Number | Place | None  # which of its values are allowed; None: all
    choices: tuple[Any, ...]  # of a `Literal`
    many: bool  # it is a tuple of such values
    optional: bool  # None is allowed
    flag: Flag  # for the command line
    default: Any  # `MISSING` for required ones

    def problem(self, value: Any) -> str:
        """What is wrong with a value, in words that follow "is"; empty: nothing."""
        if value is None and self.optional:
            return ""
        for one in value if self.many else (value,):
            if self.choices and one not in self.choices:
                return f"{one!r}; use one of {', '.join(map(str, self.choices))}"
            if self.bounds is not None and not self.bounds.allows(one):
                return f"{one!r}; use {self.bounds}"
        return ""


def described(options: type[Options]) -> tuple[Described, ...]:
    """All options of a class but those in its groups."""
    hints = hints_of(options, include_extras=True)
    return tuple(
        _describe(each.name, hints[each.name], each.metadata["flag"], _default_of(each))
        for each in fields(options)  # type: ignore[arg-type]
        if "flag" in each.metadata
    )


def groups(options: type[Options]) -> Iterator[tuple[str, str, type[Options]]]:
    """(name, title, class) of the options that are fields of a class."""
    hints = hints_of(options)
    for each in fields(options):  # type: ignore[arg-type]
        if is_dataclass(hints[each.name]) and "group" in each.metadata:
            yield each.name, each.metadata["group"], hints[each.name]


def _default_of(each: Any) -> Any:
    return each.default if each.default_factory is MISSING else each.default_factory()


def _describe(name: str, hint: Any, flag: Flag, default: Any) -> Described:
    bounds, many, optional, choices = None, False, False, ()
    while True:
        origin, args = get_origin(hint), get_args(hint)
        if origin in (Union, UnionType):
            optional = True
            (hint,) = (one for one in args if one is not NoneType)
        elif origin is Annotated:
            bounds = next((note for note in args[1:] if isinstance(note, Number | Place)), None)
            hint = args[0]
        elif origin is tuple:
            many, hint = True, args[0]
        elif origin is Literal:
            choices, hint = args, type(args[0])
        else:
            kind = origin or hint  # dict[str, Any] is dict
            return Described(name, kind, bounds, choices, many, optional, flag, default)


def values_of(options: Options) -> dict[str, Any]:
    """All values by name, those of groups too."""
    values = {each.name: getattr(options, each.name) for each in described(type(options))}
    for name, _, _ in groups(type(options)):
        values |= values_of(getattr(options, name))
    return values


def command_line(options: Options) -> list[str]:
    """The words of a command that would be given these options; those at their default left out."""
    words: list[str] = []
    for each in described(type(options)):
        value = getattr(options, each.name)
        if each.flag.positional:
            words.append(str(value))
        elif value != each.default:
            words += _words(each, value)
    for name, _, _ in groups(type(options)):
        words += command_line(getattr(options, name))
    return words


def flag_name(each: Described) -> str:
    """The long name of an option: of ``max_tokens`` "--max-tokens", unless it has its own."""
    own = [name for name in each.flag.names if name.startswith("--")]
    return own[0] if own else f"--{each.name.replace('_', '-')}"


def _words(each: Described, value: Any) -> list[str]:
    name = flag_name(each)
    if each.kind is bool:
        return [name]
    values = value if each.many else (value,)
    texts = [json.dumps(one) if isinstance(one, dict) else str(one) for one in values]
    if each.many and each.flag.joined:
        return [name, each.flag.joined.join(texts)]
    if each.many and each.flag.repeat:
        return [word for text in texts for word in (name, text)]
    return [name, *texts]
