"""What record files cost at scale: the bytes that each of many workers reads, and the index of many records.

    python benchmarks/records_at_scale.py [--records 100_000_000]

The bytes are calculated by the engine's own rule for the segments of a pass; the index is made of a real file.
"""

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "{{cookiecutter.project_slug}}"))

import numpy as np
import tensorflow as tf

from engine.data.record_index import index_files
from engine.data.records import segment_count

EXAMPLES_PER_WORKER = 32
AT_ONCE = 1_000_000  # Records that are written together.


def bytes_read(workers: int, bytes_of_record: int) -> list[float]:
    """Returns, for each worker, the bytes that it reads for each byte that it uses."""
    size = workers * EXAMPLES_PER_WORKER
    per_segment = size // segment_count(size, size * bytes_of_record)
    firsts = np.arange(workers) * EXAMPLES_PER_WORKER
    ends = firsts + EXAMPLES_PER_WORKER
    segments = -(-ends // per_segment) - firsts // per_segment
    return (segments * per_segment / EXAMPLES_PER_WORKER).tolist()


def write(path: Path, records: int) -> None:
    """Writes a file of records of one byte."""
    with tf.io.TFRecordWriter(str(path)) as writer:
        writer.write(b"0")
    record = path.read_bytes()
    with path.open("wb") as file:
        for first in range(0, records, AT_ONCE):
            file.write(record * min(AT_ONCE, records - first))


def memory() -> int:
    """Returns the memory of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=100_000_000)
    options = parser.parse_args()
    print(f"Bytes read for each byte used, {EXAMPLES_PER_WORKER} examples of a batch for each worker (at most):")
    for workers in (2, 64, 100, 1000):
        for size in (1_000, 16_000, 110_000):
            found = bytes_read(workers, size)
            print(f"  {workers:5} workers, records of {size // 1000:3} KB: {np.mean(found):.2f} ({max(found):.2f})")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "data.tfrecord")
        write(path, options.records)
        for what in ("made", "read again"):
            before, peak_before = memory(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            started = time.perf_counter()
            (index,) = index_files([str(path)], Path(folder, "indexes"))
            seconds = time.perf_counter() - started
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - peak_before
            print(
                f"The index of {index.length:,} records, {what}: {seconds:.1f} s, {memory() - before:,} bytes kept, "
                f"{peak:,} more at the peak, {next(Path(folder, 'indexes').iterdir()).stat().st_size:,} on disk"
            )


if __name__ == "__main__":
    main()
