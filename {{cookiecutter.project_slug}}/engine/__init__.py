"""The part of the training program that is the same for every task. Nothing to edit here.

Each file holds one idea and can be read alone. Nothing in this package imports `train` or `task`: what it needs
of them it is handed.
"""
