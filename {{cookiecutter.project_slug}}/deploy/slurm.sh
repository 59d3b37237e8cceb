#!/bin/bash
# Trains on the nodes that Slurm gives: sbatch deploy/slurm.sh --epochs 30
#
# What follows the script's name goes to train.py. Submit it in the project's folder, with the environment activated, on
# a file system that the nodes share. One process per node uses all devices of the node. docs/clusters.md has more.

#SBATCH --job-name=training
# A range, as sbatch --nodes=2-4, takes as many as are free whenever the job starts.
#SBATCH --nodes=2
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append

# The whole node. On a node that jobs share, replace this line by --cpus-per-task=16.
#SBATCH --exclusive
# For GPUs, remove one # of the next line, and set the number in each node.
##SBATCH --gpus-per-node=8

# Slurm sends SIGTERM 120 s before the time limit. train.py saves and exits with 42, and this script puts the job back
# into the queue, where it resumes. Leave enough time for a save: Slurm may send the signal a minute earlier, not later.
#SBATCH --signal=TERM@120
#SBATCH --requeue

# What your site needs goes here, for example:
# module load cuda
# source .venv/bin/activate
# export NCCL_SOCKET_IFNAME=ib0

# A requeued job keeps its number. So --fresh starts a new run once, and then resumes it.
export TRAINING_START_ID=slurm-$SLURM_JOB_ID
job=$SLURM_JOB_ID
# srun ends with the highest code of the processes. 43 and 44, of those that have lost another one, would hide its 2 or 3.
train='trap : TERM; python -u train.py "$@"; code=$?; case $code in 43 | 44) code=1 ;; esac; exit "$code"'

# Each job of an array (sbatch --array=0-9 deploy/slurm.sh) has its own run directory and seed.
if [ -n "$SLURM_ARRAY_TASK_ID" ]; then
    set -- --run-dir "runs/$SLURM_ARRAY_TASK_ID" --seed "$SLURM_ARRAY_TASK_ID" "$@"
    # The last job of an array has the number of the array: by that number all its jobs would be requeued.
    job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
fi

number_of_nodes() { squeue --noheader --jobs="$job" --format=%D; }
# With sbatch --no-kill a node that fails leaves the job, and the loop continues on the others.
while true; do
    nodes=$(number_of_nodes)
    nodes=${nodes:-$SLURM_JOB_NUM_NODES} # Slurm's controller may be away for a while.
    # Since Slurm 22.05 srun does not take --cpus-per-task from the job. A process that loses a peer ends by itself and
    # says which; --wait ends whatever is left after 60 s.
    srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --distribution=block --kill-on-bad-exit=0 --wait=60 \
        ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} bash -c "$train" train.py "$@"
    code=$?
    case $code in 0 | 2 | 3 | 42) break ;; esac
    left=$(number_of_nodes)
    [ "${left:-$nodes}" -lt "$nodes" ] && [ "$left" -ge 1 ] || break
    echo "slurm.sh: $((nodes - left)) of $nodes nodes failed; resuming on $left"
done

# 42: stopped by a signal with the state saved. 0, 2 (bad input) and 3 (a loss that is not finite) are final. After
# anything else, as a process that was killed, the job is tried again, but at most 20 times in a row without running for
# ten minutes. A file beside the log has a line for each of these failures.
failures=slurm-$job.failures
[ "$SECONDS" -lt 600 ] || rm -f "$failures"
case $code in
0 | 2 | 3) rm -f "$failures" ;;
42) scontrol requeue "$job" ;;
*)
    echo "exit code $code" >>"$failures" && [ "$(wc -l <"$failures")" -le 20 ] && scontrol requeue "$job"
    ;;
esac
exit "$code"
