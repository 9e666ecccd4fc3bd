"""linux/records.py: a record behaves like `typing.NamedTuple`."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest

from ringfence.linux import records


class Plain(NamedTuple):
    name: str
    count: int = 3


Lean: Any = type("Plain", (records.NamedTuple,), {"__annotations__": {"name": "str", "count": "int"}, "count": 3})


@pytest.mark.parametrize("record", [Plain, Lean])
def test_a_record_is_a_tuple_with_named_fields_defaults_and_replacement(record: Any) -> None:
    one = record("a")
    assert (one.name, one.count) == one == ("a", 3) and one == record(name="a", count=3) == record("a", count=3)
    assert isinstance(one, tuple) and record._fields == ("name", "count")
    assert one._replace(name="b") == ("b", 3) and one._asdict() == {"name": "a", "count": 3}
    assert repr(one) == "Plain(name='a', count=3)" and hash(one) == hash(("a", 3))
    assert type(copy.copy(one)) is record and copy.deepcopy(one) == one
    with pytest.raises(AttributeError):
        one.name = "c"


@pytest.mark.parametrize("record", [Plain, Lean])
@pytest.mark.parametrize(
    ("values", "named"), [((), {}), (("a", 1, 2), {}), (("a",), {"name": "b"}), (("a",), {"other": 1}), ((), {"count": 1})]
)
def test_a_record_refuses_missing_doubled_and_unknown_fields(record: Any, values: tuple, named: dict) -> None:
    with pytest.raises(TypeError):
        record(*values, **named)
