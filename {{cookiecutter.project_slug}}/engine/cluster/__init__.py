"""Which processes and devices train together. Imports no other subpackage.

strategy      from --strategy to the tf.distribute strategy
environment   the cluster that TF_CONFIG, Slurm or Kubernetes describes
rendezvous    waits for all processes at start-up; detects lost ones
tensorflow_start  ends a start of TensorFlow that takes too long; keeps the signals that come meanwhile
workers       decisions that the processes take together while they train
parameter_servers  asynchronous training
devices       GPUs and simulated devices, as TensorFlow lists them
nvidia        GPUs, as the driver and the environment describe them
launcher      python launch.py: a local cluster
ray_group     deploy/ray_train.py: a cluster of Ray
train_process  train.py as a process that another program follows by its run's files
"""
