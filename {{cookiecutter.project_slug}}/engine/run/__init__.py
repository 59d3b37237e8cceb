"""One run: how far it is, and what it keeps on disk.

run              decides how a run begins, what is due, and when it ends
progress         counts and scores
state            the variables by name, and their values
checkpoints      saves and restores the state
initial_weights  --init-from
directory        the run's directory: whether it may be used
files            files that are written completely or not at all
report           console, metrics.csv, TensorBoard, curves.png
plan             what a run is: config.json, and the lines at its start
signals          SIGTERM and Ctrl-C
profile          --profile
evaluation       --evaluate-only, --evaluate-continuously
"""
