"""What an exception says in one line, where it was raised, whose mistake it is, and whether it may pass."""

import asyncio
import errno
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from engine import messages
from engine.errors import BadInput
from engine.messages import first_line, where_raised


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


def fails_in_its_text() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    raise Silent


def is_cancelled_by_a_connection() -> None:
    raise tf.errors.CancelledError(None, None, "gave up")


def is_cancelled_while_it_is_traced() -> None:
    tf.function(is_cancelled_by_a_connection)()


def is_cancelled_by_asyncio() -> None:
    raise asyncio.CancelledError("gave up")


SAID = {
    fails_in_its_text: ("Silent$", "fails_in_its_text"),
    is_cancelled_by_a_connection: ("CancelledError: gave up$", "is_cancelled_by_a_connection"),
    is_cancelled_while_it_is_traced: ("CancelledError: gave up$", "is_cancelled_by_a_connection"),
    is_cancelled_by_asyncio: ("CancelledError: gave up$", "is_cancelled_by_asyncio"),
    fails_in_a_graph: (r"InvalidArgumentError: indices\[1\] = 3 is not in \[0, 3\)$", "look_up"),
    fails_in_a_layer: (r"AttributeError: 'Broken' object has no attribute 'nothing'$", "call"),
    fails_with_a_long_text: (r"ValueError: first line, (long )+.* \.\.\.$", "fails_with_a_long_text"),
}


@pytest.mark.parametrize("fails", SAID, ids=lambda fails: fails.__name__)
def test_one_line_says_what_failed_and_where(fails: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "PROJECT", Path(__file__).parent)
    said, function = SAID[fails]
    with pytest.raises(BaseException) as raised:
        fails()
    assert re.match(said, first_line(raised.value)), first_line(raised.value)
    place = re.fullmatch(r"test_messages\.py:(\d+) (\S+)", where_raised(raised.value))
    assert place, where_raised(raised.value)
    assert place[2].endswith(function)
    assert messages.is_users(raised.value)


def test_cancelled_coroutine_in_a_hook_ends_with_a_line() -> None:
    """In a graph, where AutoGraph does not say in which line."""
    with pytest.raises(BadInput) as rejected, messages.user_errors_named():
        tf.function(is_cancelled_by_asyncio)()
    assert str(rejected.value) == "task.py is_cancelled_by_asyncio: CancelledError: gave up"


def test_connection_that_breaks_in_a_step_is_not_the_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then an operation raises, and TensorFlow's text names the line of the user's that made the operation."""
    monkeypatch.setattr(messages, "PROJECT", Path(__file__).parent)
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        fails_in_a_graph()
    assert messages.is_users(raised.value)
    lost = tf.errors.UnavailableError(None, None, str(raised.value))
    assert not messages.is_users(lost.with_traceback(raised.value.__traceback__))


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
        code = compile(f"def step_{number}():\n    {body}", str(messages.PROJECT / file), "exec")
        exec(code, call)  # noqa: S102
        body = f"step_{number}()"
    with pytest.raises(type(problem)) as raised:
        eval(body, call)
    assert messages.is_users(raised.value) is is_users


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
        assert messages.may_pass(problem) is passes, problem
