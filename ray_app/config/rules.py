"""Rules about settings, for all classes of options: ranges and choices of single fields, and combinations.

The type of a field has its range, as in `epochs: PositiveInt`, and the reference shows it. A `Rule` is a combination of
fields that is refused. Every check returns problems, so that `refuse` names all of them at once.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, cast, get_args, get_origin, get_type_hints

from ray_app.errors import ConfigError


class NumberRange(NamedTuple):
    """The numbers that a field allows: at least `ge`, greater than `gt`, at most `le`, below `lt`."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def allows(self, value: float) -> bool:
        """Returns whether a number is in the range; NaN never is."""
        bounds = zip(self, (operator.ge, operator.gt, operator.le, operator.lt), strict=True)
        return all(compare(value, bound) for bound, compare in bounds if bound is not None)

    def __str__(self) -> str:
        """Returns the range in words, such as `at least 0 and below 1`."""
        bounds = zip(self, ("at least", "greater than", "at most", "below"), strict=True)
        return " and ".join(
            "finite" if bound == math.inf else f"{words} {bound:.12g}" for bound, words in bounds if bound is not None
        )


PositiveInt = Annotated[int, NumberRange(ge=1)]
NonNegativeInt = Annotated[int, NumberRange(ge=0)]
PositiveFloat = Annotated[float, NumberRange(gt=0)]
FinitePositiveFloat = Annotated[float, NumberRange(gt=0, lt=math.inf)]
NonNegativeFloat = Annotated[float, NumberRange(ge=0)]
Fraction = Annotated[float, NumberRange(ge=0, le=1)]


class FieldType(NamedTuple):
    """What the type of a field allows: plain types, choices, and the range of its numbers."""

    types: frozenset[Any]
    choices: tuple[Any, ...] = ()
    range: NumberRange | None = None


def read_type(hint: Any) -> FieldType:
    """Returns what a type with its annotations allows."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return FieldType(frozenset(), parts)
    if origin is Annotated:
        return read_type(parts[0])._replace(range=next((part for part in parts if isinstance(part, NumberRange)), None))
    if not parts or origin in (list, dict):
        return FieldType(frozenset({hint}))
    types, choices, ranges = zip(*map(read_type, parts), strict=True)
    return FieldType(frozenset[Any]().union(*types), sum(choices, ()), next(filter(None, ranges), None))


@lru_cache
def field_types(section: type) -> Mapping[str, FieldType]:
    """Returns what each field of a class of options allows, by its name."""
    return {name: read_type(hint) for name, hint in get_type_hints(section, include_extras=True).items()}


def find_empty_fields(settings: Any, prefix: str = "") -> list[str]:
    """Returns a problem for each field that is empty and must have a value."""
    kind: Any = type(settings)
    return [
        f"{prefix}{name} is empty; set a value, or remove the line for the default, {getattr(kind, name)!r}."
        for name, allowed in field_types(kind).items()
        if getattr(settings, name) is None and NoneType not in allowed.types
    ]


def check_fields(settings: Any, prefix: str = "") -> list[str]:
    """Returns a problem for each field with a value that is not among its choices or not in its range."""
    problems, kind = list[str](), cast(Any, type(settings))
    for name, (_, choices, limits) in field_types(kind).items():
        value = getattr(settings, name)
        if limits is not None and isinstance(value, int | float):
            if not limits.allows(value):
                problems.append(f"{prefix}{name} is {value}; it must be {limits}.")
        elif choices and value is not None and value not in choices:
            number = "a number or " if limits else ""
            problems.append(f"{prefix}{name} is {value!r}; it must be {number}one of {', '.join(choices)}.")
    return problems


def value_of(settings: Any, field: str) -> Any:
    """Returns the value of a field by its dotted name."""
    return operator.attrgetter(field)(settings)


class Rule(NamedTuple):
    """A field must keep its default where `when` holds.

    Args:
        field: Dotted name of the field.
        when: Whether settings in which the field has not its default are refused.
        reason: Why, and what to do: the end of a sentence that begins with `FIELD is VALUE`. The settings are `c` in
            it, as in `{c.train.reduction}`.
    """

    field: str
    when: Callable[[Any], object]
    reason: str

    def is_broken(self, settings: Any) -> bool:
        """Returns whether the settings break the rule."""
        section, _, name = self.field.rpartition(".")
        default = getattr(type(value_of(settings, section) if section else settings), name, None)
        return bool(value_of(settings, self.field) != default and self.when(settings))

    def explain(self, settings: Any) -> str:
        """Returns what is wrong, why, and what to do."""
        value = value_of(settings, self.field)
        words = "set" if value is True else value if str(value).isidentifier() else repr(value)
        return f"{self.field} is {words}{self.reason.format(c=settings)}"


def find_broken_rules(settings: Any, rules: Iterable[Rule]) -> list[str]:
    """Returns a problem for each rule that the settings break."""
    return [rule.explain(settings) for rule in rules if rule.is_broken(settings)]


def refuse(problems: list[str], subject: str = "configuration") -> None:
    """Raises `ConfigError` with all problems, one per line, if there are any."""
    if problems:
        raise ConfigError(f"The {subject} is refused:\n" + "\n".join(f"  - {problem}" for problem in problems))
