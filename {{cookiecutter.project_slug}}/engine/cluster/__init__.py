"""Which processes and devices train together. Imports no other subpackage.

strategy      from --strategy to the tf.distribute strategy
environment   the cluster that TF_CONFIG, Slurm or Kubernetes describes, and the GPUs that this process sees
rendezvous    waits for all processes at start-up, before TensorFlow does
peers         which processes are lost, and how this one ends then, also while TensorFlow starts
workers       decisions that the processes take together while they train
parameter_servers  asynchronous training
launcher      python launch.py: a local cluster; and train.py as a process that sweep.py follows
ray_group     deploy/ray_train.py: a cluster of Ray
"""
