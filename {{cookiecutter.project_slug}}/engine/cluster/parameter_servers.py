"""Asynchronous training: parameter servers have the weights; each worker changes them without waiting for the others.

A gradient may be of weights that others have changed since, so no two runs give the same results. Keras's authors call
it unsupported with Keras 3 (keras#18624). Its advantage is that a lost worker costs nothing but time. The program runs
on the chief, which sends training steps to the workers and evaluates by itself.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NoReturn

import tensorflow as tf

from engine.cluster.environment import Cluster
from engine.cluster.peers import FROZEN, GONE, describe, did_not_join, lost, start_tensorflow
from engine.cluster.rendezvous import check_port
from engine.console import console
from engine.errors import CountedLoss, PeerLost
from engine.settings import Settings

SECONDS_WITHOUT_CHIEF = 5.0  # A chief that does not answer for this long has ended.
SECONDS_WITHOUT_WORKERS = 30.0  # A chief waits this long for workers that may be restarted, or are frozen.
SECONDS_BETWEEN_LOOKS = 1.0


def problems(settings: Settings, cluster: Cluster | None) -> Iterator[str]:
    """Yields why it cannot be: a cluster without parameter servers, or settings that need steps in an order."""
    if cluster is None or not all(cluster.addresses.get(job) for job in ("chief", "worker", "ps")):
        yield (
            "--strategy parameter_server needs a cluster with a chief, workers and ps in TF_CONFIG: use python "
            "launch.py --workers 2 --parameter-servers 1 -- ..."
        )
    for is_given, flag, why in (
        (settings.ema_decay, "--ema-decay", "the steps have no order in which to average"),
        (settings.deterministic, "--deterministic", "the order in which workers change the weights varies"),
        (settings.steps_per_epoch, "--steps-per-epoch", "each worker repeats its own examples"),
        (settings.precision == "mixed_float16", "--precision mixed_float16", "its loss scale needs steps in order"),
    ):
        if is_given:
            yield f"{flag} cannot be combined with --strategy parameter_server ({why}): remove it"


def start(cluster: Cluster, *, timeout: float) -> tuple[tf.distribute.Strategy, str]:
    """Returns the chief's strategy, and its size for the run summary, when all others have joined.

    Any other process serves the chief until that has ended, and then ends here. Raises PeerLost if a process does not
    join within `timeout` seconds.
    """
    check_port(cluster)
    if cluster.job != "chief":
        _serve(cluster, timeout)
    _wait_until_joined(cluster, (), timeout)

    def connect() -> tf.distribute.Strategy:
        return tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())

    strategy = start_tensorflow(cluster, timeout, connect)
    strategy.extended._allow_run_without_coordinator = True  # The chief evaluates by itself.
    threading.Thread(target=_end_without_others, args=(cluster,), daemon=True).start()
    return strategy, f"{len(cluster.addresses['worker'])} worker(s), asynchronous: each takes its own steps"


def _serve(cluster: Cluster, timeout: float) -> NoReturn:
    """Does what the chief sends, then ends the process."""
    # A server does not read tf.config.
    config = tf.compat.v1.ConfigProto(gpu_options=tf.compat.v1.GPUOptions(allow_growth=True))
    spec = tf.train.ClusterSpec(cluster.addresses)
    tf.distribute.Server(spec, cluster.job, cluster.index, protocol="grpc", config=config)
    console.print(f"{cluster.name} serves the chief ({cluster.processes()['chief 0']})")
    _wait_until_joined(cluster, ["chief 0"], timeout)
    answered = time.monotonic()
    while time.monotonic() < answered + SECONDS_WITHOUT_CHIEF:
        time.sleep(SECONDS_BETWEEN_LOOKS)
        if lost(cluster, ["chief 0"]).get("chief 0") != GONE:
            answered = time.monotonic()
    sys.stdout.flush()
    os._exit(0)  # TensorFlow's server cannot be stopped.


def _wait_until_joined(cluster: Cluster, names: Sequence[str], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while missing := lost(cluster, names):
        if time.monotonic() > deadline:
            raise did_not_join(cluster, [*missing], timeout)
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _end_without_others(cluster: Cluster) -> None:
    """Ends this process, the chief, when another one is frozen or all workers are gone.

    TensorFlow would wait for them without limit, where nothing can raise.
    """
    workers = {name for name in cluster.others() if name.startswith("worker")}
    healthy = time.monotonic()
    while True:
        time.sleep(SECONDS_BETWEEN_LOOKS)
        states = lost(cluster)
        if frozen := {name: state for name, state in states.items() if state == FROZEN}:
            # It does not end, and the others end with 0, so this end is counted.
            loss: PeerLost = CountedLoss(f"{describe(cluster, frozen)}: end it, then restart the cluster")
        elif workers <= states.keys():
            loss = PeerLost("all workers are gone: check their logs, then restart the cluster")
        else:
            healthy = time.monotonic()
        if time.monotonic() > healthy + SECONDS_WITHOUT_WORKERS:
            print(f"ERROR: {loss}", file=sys.stderr, flush=True)
            os._exit(loss.exit_code)
