"""AutoGraph for the hooks alone: the engine's own code has nothing to convert, and each function would take 30 ms."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

# Imported outside any function that is being traced, so that it does not say what those around a hook ask for.
_status = tf.__internal__.autograph.control_status_ctx()


def converted(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a hook that AutoGraph converts when it is traced, also where a function of the engine's calls it."""
    return tf.__internal__.autograph.tf_convert(hook, _status)
