"""Examples that are streamed, though they are few."""

import pytest

from engine.data import examples


def stream(patch: pytest.MonkeyPatch, buffer_size: int) -> None:
    """Keeps no examples in memory, and shuffles so many at a time, until the patch is undone."""
    patch.setattr(examples, "BYTES_IN_MEMORY", 0)
    patch.setattr(examples.DatasetExamples, "buffer_size", buffer_size)
