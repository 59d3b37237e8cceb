"""Writes files in order: at once, or in a thread while training continues."""

import concurrent.futures
from collections.abc import Callable


class Writer:
    """Writes files in order: at once, or in a thread while training continues."""

    def __init__(self, *, in_thread: bool = False) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1) if in_thread else None
        self._pending: list[concurrent.futures.Future] = []

    def submit(self, write: Callable[[], None]) -> None:
        """Calls `write`, unless one before it failed: a checkpoint may name weights that were not written."""
        if self._thread is None:
            write()
            return

        def write_after(before: list[concurrent.futures.Future]) -> None:
            for each in before:
                each.result()
            write()

        self._pending.append(self._thread.submit(write_after, list(self._pending)))

    def wait(self, *, at_most: int = 0) -> None:
        """Returns when at most `at_most` writes are pending. Raises CannotWrite, once, if a write failed."""
        if len(self._pending) > at_most:
            pending, self._pending = self._pending, []
            for each in pending:
                each.result()
