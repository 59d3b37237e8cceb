"""Measures how record files are read from storage that answers late: the first batch, and the rate after it.

    python benchmarks/late_storage.py [--milliseconds 0 5 20] [--batch-sizes 64 1024 127] [--folder ...]

It writes 268 MB of TFRecord files into --folder, once: records of 1 KB. Then it starts a process for each row, into
which a library is loaded that lets every read of such a file wait; it needs a C compiler, and Linux. The files are in
the cache of the system, and the shuffle has 64 MB. A batch of 127 has one segment, those of 64 and 1,024 have 64.
"""

import argparse
import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "{{cookiecutter.project_slug}}"))

FILES, RECORDS_PER_FILE, BYTES_OF_RECORD = 16, 16_384, 1000
SHUFFLE_BYTES = 2**26
SECONDS = 8.0
LIBRARY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static atomic_long reads;
static ssize_t late(const char *symbol, int file, void *to, size_t size, off_t offset) {
  ssize_t (*read_now)(int, void *, size_t, off_t) = dlsym(RTLD_NEXT, symbol);
  char link[32], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t length = readlink(link, path, sizeof path);
  if (length > 9 && !memcmp(path + length - 9, ".tfrecord", 9)) {
    ++reads;
    usleep(atoi(getenv("LATE_MICROSECONDS")));
  }
  return read_now(file, to, size, offset);
}
ssize_t pread(int file, void *to, size_t size, off_t offset) { return late("pread", file, to, size, offset); }
ssize_t pread64(int file, void *to, size_t size, off_t offset) { return late("pread64", file, to, size, offset); }
long reads_so_far(void) { return reads; }
"""


def write_files(folder: Path) -> None:
    import tensorflow as tf

    folder.mkdir(parents=True, exist_ok=True)
    for number in range(FILES):
        path = folder / f"{number:02}.tfrecord"
        if not path.exists():
            with tf.io.TFRecordWriter(str(path)) as writer:
                for _ in range(RECORDS_PER_FILE):
                    writer.write(os.urandom(BYTES_OF_RECORD))


def measure(folder: Path, size: int, position: float) -> None:
    """Prints how one process reads batches of `size` from a position (0 to 1) in a pass on."""
    import tensorflow as tf

    from engine.data import Records
    from engine.data.examples import Shard, input_options

    reads_so_far = ctypes.CDLL(os.environ["LD_PRELOAD"]).reads_so_far
    examples = Records(str(folder / "*.tfrecord")).examples("load_examples", SHUFFLE_BYTES)
    steps = examples.length // size
    first = tf.constant(int(position * steps) * size, tf.int64)
    start = time.perf_counter()
    stream = examples.one_by_one(Shard(size, slice(0, size), steps * size), first, tf.constant(7, tf.int64))
    batches = iter(stream.batch(size).with_options(input_options()))
    next(batches)
    until_first, reads_before, start = time.perf_counter() - start, reads_so_far(), time.perf_counter()
    taken, seconds = 0, 0.0
    while seconds < SECONDS and next(batches, None) is not None:
        taken, seconds = taken + size, time.perf_counter() - start
    together = (reads_so_far() - reads_before) * int(os.environ["LATE_MICROSECONDS"]) / 1e6 / seconds
    print(f"{until_first:6.2f} s  {taken / seconds:9,.0f} records/s  {together:5.1f} reads at a time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--milliseconds", type=float, nargs="+", default=[0, 5, 20])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[64, 1024, 127])
    parser.add_argument("--folder", type=Path, default=Path("build/benchmarks/late"))
    parser.add_argument("--measure", type=float, nargs=2, help=argparse.SUPPRESS)  # The row of this process.
    options = parser.parse_args()
    if options.measure:
        measure(options.folder, int(options.measure[0]), options.measure[1])
        return
    write_files(options.folder)
    source, library = options.folder / "late.c", options.folder.absolute() / "late.so"
    source.write_text(LIBRARY)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    print("batch  starts at  a read waits  first batch  then")
    for size in options.batch_sizes:
        for position in (0.0, 0.9):
            for wait in options.milliseconds:
                print(f"{size:5}  {position:9.0%}  {wait:9g} ms  ", end="", flush=True)
                late = {"LD_PRELOAD": str(library), "LATE_MICROSECONDS": str(int(1000 * wait))}
                row = ["--measure", str(size), str(position), "--folder", str(options.folder)]
                environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **late}
                subprocess.run([sys.executable, __file__, *row], env=environment, check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
