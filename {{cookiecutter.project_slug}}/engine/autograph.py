"""AutoGraph for the hooks alone: the engine's own code has nothing to convert, and to find that out takes long."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

# Taken here, where nothing is being traced: within a trace it would say what the functions around a hook ask for.
_status = tf.__internal__.autograph.control_status_ctx()


def converted(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a hook that AutoGraph converts when it is traced, also where a function of the engine's calls it."""
    return tf.__internal__.autograph.tf_convert(hook, _status)
