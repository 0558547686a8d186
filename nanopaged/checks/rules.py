"""Rules for options: what a value must be, and the sentence that refuses another one.

A rule stands beside the default of its option: `watermark: float = option(0.05, number(0.0, 0.9))`. It is a
function of (name, value) that returns the value as it is kept, or raises a TypeError or a ValueError, which
names the value, the limit and the way out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from nanopaged.checks.foreign_names import explain, options_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance  # a type checker's own module

Rule = Callable[[str, Any], Any]


def option(
    default: Any = MISSING,
    rule: Rule | None = None,
    check: Callable[[Any], None] | None = None,
    **options: Any,
) -> Any:
    """A field of a dataclass with a rule. Without a default, it must be given.

    Args:
        check: raises ValueError if the value does not go with the others; it gets all options.
    """
    return field(default=default, metadata={"rule": rule, "check": check}, **options)


def check_options(options: DataclassInstance) -> None:
    """Apply the rule of every field, then the checks."""
    for each in fields(options):
        value = each.metadata["rule"](each.name, getattr(options, each.name))
        object.__setattr__(options, each.name, value)
    for each in fields(options):
        if each.metadata["check"] is not None:
            each.metadata["check"](options)


_T = TypeVar("_T", bound="Options")


class Options:
    """The base of the classes of options: the error for an unknown keyword says what may have been meant."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # every class of options is a dataclass

    def __new__(cls: type[_T], *args: Any, **options: Any) -> _T:  # with Any, editors would show no options
        known = [option.name for option in fields(cls)]
        unknown = [name for name in options if name not in known]
        if unknown:
            raise TypeError(f"{cls.__name__} has no option {explain(unknown, known, options_of(cls))}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_options(self)


def require(condition: bool, message: str) -> None:
    """Raise ValueError unless the condition holds."""
    if not condition:
        raise ValueError(message)


def whole(minimum: int, hint: str = "") -> Rule:
    """A whole number of at least `minimum`; numpy's ints become Python's."""

    def rule(name: str, value: Any) -> int:
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
        require(value >= minimum, f"{name} is {value}, but must be at least {minimum}{hint}")
        return int(value)

    return rule


def number(low: float, high: float, hint: str = "", above: bool = False) -> Rule:
    """A number from `low` (or above it) to `high`. NaN fails both comparisons and is refused, too."""

    def rule(name: str, value: Any) -> float:
        if not isinstance(value, Real) or isinstance(value, bool):
            raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
        inside = (low < value if above else low <= value) and value <= high
        limits = f"must be above {low} and at most {high}" if above else f"must lie in [{low}, {high}]"
        require(inside, f"{name} is {value}, but {limits}{hint}")
        return value

    return rule


def one_of(choices: Iterable[str], names: dict[str, str] | None = None) -> Rule:
    """One of the choices. `names` are other names of some of them."""
    choices = tuple(choices)

    def rule(name: str, value: Any) -> str:
        value = str(value).removeprefix("torch.")  # torch.bfloat16
        value = (names or {}).get(value, value)
        require(value in choices, f"{name} is {value!r}, but must be one of {', '.join(choices)}")
        return value

    return rule


def boolean(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def true_false_or(word: str) -> Rule:
    """True, False, or a word."""

    def rule(name: str, value: Any) -> bool | str:
        if not isinstance(value, bool) and value != word:
            raise ValueError(f"{name} is {value!r}, but must be True, False or {word!r}")
        return value

    return rule


def optional(rule: Rule) -> Rule:
    """None, or what the rule takes."""
    return lambda name, value: None if value is None else rule(name, value)


def model(name: str, value: Any) -> str | Path | None:
    """A folder, a hub id, or None."""
    if value is not None and not isinstance(value, str | Path):
        raise TypeError(f"{name} must be a folder, a hub id or None, got {value!r}")
    return value


def device(name: str, value: Any) -> str:
    """The name of a device, or torch's own."""
    if type(value).__module__ == "torch":  # torch.device("cuda")
        value = str(value)
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a name such as 'cpu' or 'cuda:0', got {value!r}")
    return value


def new_file(name: str, value: Any) -> str | Path:
    """The name of a file in a folder that exists."""
    if not isinstance(value, str | Path):
        raise TypeError(f"{name} must be the name of a file such as 'run.html', got {value!r}")
    folder = Path(value).absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{name} is {str(value)!r}, but there is no folder {str(folder)!r}: make it first"
        )
    require(not Path(value).is_dir(), f"{name} is {str(value)!r}, which is a folder: name a file in it")
    return value


def texts(name: str, value: Any) -> tuple[str, ...]:
    """A text, or several; none of them empty. Kept as a tuple, so that params are hashable."""
    items = (value,) if isinstance(value, str) else _as_tuple(name, value)
    for text in items:
        if not isinstance(text, str):
            raise TypeError(f"{name} must be a string or a list of strings, got {text!r} in it")
        require(text != "", f"{name} has an empty string in it, which would stop at once")
    return items


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Several token ids. Kept as a tuple."""
    items = _as_tuple(name, value)
    for token_id in items:
        if not isinstance(token_id, Integral) or isinstance(token_id, bool):
            raise TypeError(f"{name} must be ints, got {token_id!r} among them")
        require(token_id >= 0, f"{name} has {token_id}, but token ids are at least 0")
    return tuple(int(token_id) for token_id in items)


def _as_tuple(name: str, value: Any) -> tuple:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list, got {value!r} ({type(value).__name__})")
    return tuple(value)


def min_at_most_max(params: Any) -> None:
    """The check of `min_tokens`."""
    require(
        params.max_tokens is None or params.min_tokens <= params.max_tokens,
        f"min_tokens is {params.min_tokens}, but max_tokens is only {params.max_tokens}",
    )
