"""`NamedTuple` without `typing` and `collections`.

Guards against the price of a start: those two modules, and what they import, cost a process more than everything
else the launcher and the zygote load together. For type checkers it is the real one:

    if TYPE_CHECKING:
        from typing import NamedTuple
    else:
        from ringfence.linux.records import NamedTuple

A record is a tuple with named fields, defaults, `_replace` and `_asdict`. Standard library only.
"""

from __future__ import annotations

TYPE_CHECKING = False  # of `typing`, which costs more than the rest of a start together
if TYPE_CHECKING:
    from typing import Any, ClassVar


class NamedTuple(tuple):
    """Base of records: each annotated name of the subclass is a field, a value given to it its default."""

    __slots__ = ()
    _fields: ClassVar[tuple[str, ...]] = ()
    _field_defaults: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        from _collections import _tuplegetter  # type: ignore[attr-defined]  # what namedtuple's own fields are

        cls._fields = tuple(cls.__annotations__)
        cls._field_defaults = {name: cls.__dict__[name] for name in cls._fields if name in cls.__dict__}
        for position, name in enumerate(cls._fields):
            setattr(cls, name, _tuplegetter(position, None))

    def __new__(cls, *values: Any, **named: Any) -> Any:
        if named or len(values) != len(cls._fields):
            values += tuple(cls._rest(len(values), named))
        return tuple.__new__(cls, values)

    @classmethod
    def _rest(cls, given: int, named: dict[str, Any]) -> list[Any]:
        """The values after the first `given`, from keywords and defaults. Raises TypeError."""
        missing = cls._fields[given:]
        if given > len(cls._fields) or set(named) - set(missing):
            raise TypeError(f"{cls.__name__} takes {', '.join(cls._fields)}, each once")
        values = {**cls._field_defaults, **named}
        try:
            return [values[name] for name in missing]
        except KeyError as error:
            raise TypeError(f"{cls.__name__} needs {error}") from None

    def _replace(self, **named: Any) -> Any:
        """A copy with other values in the named fields."""
        return type(self)(**{**self._asdict(), **named})

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self._fields, self))

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._asdict().items())})"
