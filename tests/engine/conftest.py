"""Tests of the generated project's own modules, unrendered, in one process with five simulated devices."""

import sys

from rendering import PROJECT

sys.path.insert(0, str(PROJECT))

from config import Config
from engine.cluster.strategy import create_strategy

create_strategy(Config(strategy="mirrored", simulated_devices=5))
