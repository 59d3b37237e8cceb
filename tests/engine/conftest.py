"""Tests of the generated project's own modules, unrendered, in one process with five simulated devices."""

import sys

from rendering import PROJECT

sys.path.insert(0, str(PROJECT))

from engine.cluster.strategy import create_strategy

create_strategy("mirrored", simulated_devices=5)
