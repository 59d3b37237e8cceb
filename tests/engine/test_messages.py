"""What an exception says in one line, where it was raised, whose mistake it is, and whether it may pass."""

import errno
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from engine import errors
from engine.errors import BadInput, first_line, where_raised


def fails_in_a_graph() -> tf.Tensor:
    @tf.function
    def look_up(index):
        return tf.gather(tf.zeros([3]), index)

    return look_up(tf.constant([1, 3]))


def fails_in_a_layer() -> Any:
    class Broken(keras.layers.Layer):
        def call(self, features):
            return features + self.nothing

    return Broken()(keras.Input((3,)))


def fails_with_a_long_text() -> None:
    raise ValueError("first line, " + 100 * "long " + "\nsecond line")


def is_cancelled_by_a_connection() -> None:
    raise tf.errors.CancelledError(None, None, "gave up")


def is_cancelled_while_it_is_traced() -> None:
    tf.function(is_cancelled_by_a_connection)()


SAID = {
    is_cancelled_by_a_connection: ("CancelledError: gave up$", "is_cancelled_by_a_connection"),
    is_cancelled_while_it_is_traced: ("CancelledError: gave up$", "is_cancelled_by_a_connection"),
    fails_in_a_graph: (r"InvalidArgumentError: indices\[1\] = 3 is not in \[0, 3\)$", "look_up"),
    fails_in_a_layer: (r"AttributeError: 'Broken' object has no attribute 'nothing'$", "call"),
    fails_with_a_long_text: (r"ValueError: first line, (long )+.* \.\.\.$", "fails_with_a_long_text"),
}


@pytest.mark.parametrize("fails", SAID, ids=lambda fails: fails.__name__)
def test_one_line_says_what_failed_and_where(fails: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "PROJECT", Path(__file__).parent)
    said, function = SAID[fails]
    with pytest.raises(Exception) as raised:
        fails()
    assert re.match(said, first_line(raised.value)), first_line(raised.value)
    place = re.fullmatch(r"test_messages\.py:(\d+) (\S+)", where_raised(raised.value))
    assert place, where_raised(raised.value)
    assert place[2].endswith(function)
    assert errors.is_users(raised.value)


def test_connection_that_breaks_in_a_step_is_not_the_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then an operation raises, and TensorFlow's text names the line of the user's that made the operation."""
    monkeypatch.setattr(errors, "PROJECT", Path(__file__).parent)
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        fails_in_a_graph()
    assert errors.is_users(raised.value)
    lost = tf.errors.UnavailableError(None, None, str(raised.value))
    assert not errors.is_users(lost.with_traceback(raised.value.__traceback__))


def out_of_memory() -> Exception:
    return tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")


@pytest.mark.parametrize(
    ("files", "make", "is_users"),
    [
        ("train.py task.py helper/losses.py", ValueError, True),
        ("train.py engine/model/gradients.py engine/tracing.py", TypeError, True),  # A step of other arguments.
        ("train.py engine/run/training.py", ValueError, False),
        ("train.py task.py engine/model/gradients.py", ValueError, False),
        ("train.py engine/run/training.py task.py", BadInput, False),
        # The epochs in train.py are the user's to change, and memory may run out in its steps.
        ("train.py", ValueError, True),
        ("train.py", out_of_memory, False),
    ],
)
def test_whose_mistake_an_exception_is(files: str, make: Callable[[], Exception], is_users: bool) -> None:
    problem = make()
    call: dict[str, Any] = {"problem": problem}
    body = "raise problem"
    for number, file in enumerate(reversed(files.split())):
        code = compile(f"def step_{number}():\n    {body}", str(errors.PROJECT / file), "exec")
        exec(code, call)  # noqa: S102
        body = f"step_{number}()"
    with pytest.raises(type(problem)) as raised:
        eval(body, call)
    assert errors.is_users(raised.value) is is_users


MAY_PASS = [
    (OSError(errno.ETIMEDOUT, "x"), True),
    (TimeoutError("x"), True),
    (tf.errors.UnknownError(None, None, "/mnt/a; Input/output error"), True),
    (tf.errors.UnavailableError(None, None, "x"), True),
    (tf.errors.UnknownError(None, None, "ReadTimeoutError: HTTPSConnectionPool"), True),
    (PermissionError(errno.EACCES, "x"), False),
    (tf.errors.DataLossError(None, None, "corrupted record at 12"), False),
    (tf.errors.NotFoundError(None, None, "/mnt/a; No such file or directory"), False),
]


def test_faults_that_may_pass_are_those_of_networks_and_disks() -> None:
    for problem, passes in MAY_PASS:
        assert errors.may_pass(problem) is passes, problem
