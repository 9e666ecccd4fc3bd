"""The exception tree keeps its promises: builtin bases, hints in the text, and pickling without loss."""

from __future__ import annotations

import pickle

import pytest

from ringfence import errors


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_a_ringfence_error_with_message_and_hint(name: str) -> None:
    error = getattr(errors, name)("what", hint="do this")
    assert isinstance(error, errors.RingfenceError)
    assert str(error) == "what (hint: do this)"
    assert str(getattr(errors, name)("what")) == "what"


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_survives_pickling_with_all_its_fields(name: str) -> None:
    error = getattr(errors, name)("what", hint="do this")
    error.extra = [1]
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert again.__dict__ == error.__dict__
    assert str(again) == str(error)


def test_every_error_is_shown_in_the_tree_of_the_docstring() -> None:
    assert errors.__doc__ is not None
    for name in errors.__all__:
        assert name in errors.__doc__


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("InvalidArgumentError", ValueError),
        ("PolicyError", ValueError),
        ("NotFoundError", FileNotFoundError),
        ("PermissionDeniedError", PermissionError),
        ("FileConflictError", FileExistsError),
        ("NotEnoughSpaceError", OSError),
        ("TimeoutExceededError", TimeoutError),
    ],
)
def test_ordinary_except_clauses_catch_them(name: str, base: type[Exception]) -> None:
    with pytest.raises(base):
        raise getattr(errors, name)("what")


def test_a_dead_sandbox_is_no_command_failure() -> None:
    assert not issubclass(errors.SandboxDeadError, errors.CommandExitError)
    assert not issubclass(errors.CommandExitError, errors.SandboxDeadError)
