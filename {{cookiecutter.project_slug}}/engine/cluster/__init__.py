"""Which processes and devices train together. Imports nothing of the other rooms.

strategy      from --strategy to the tf.distribute strategy
environment   the cluster that TF_CONFIG, Slurm or Kubernetes describes
rendezvous    waits for all processes at start-up; detects lost ones
workers       what the processes decide together while they train
parameter_servers  parameter servers
devices       GPUs and simulated devices, as TensorFlow has them
nvidia        GPUs, as the driver and the environment describe them
launcher      python launch.py
"""
