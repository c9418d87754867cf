#!/bin/bash
# mesh dp=64: up to 64 ranks on 2 to 8 nodes x 8

#SBATCH --job-name=train
#SBATCH --chdir=/home/me/run
# A requeued job appends to the same file.
#SBATCH --output=%x-%A_%a.out
#SBATCH --open-mode=append
# The job continues if a node fails.
#SBATCH --no-kill
# One meshrun per node; it starts the ranks of that node.
#SBATCH --nodes=2-8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
# Ranks get 60 s before the time limit to save and exit; Slurm may signal up to a minute earlier.
#SBATCH --signal=TERM@60
# Slurm may requeue the job if it is preempted or loses a node.
#SBATCH --requeue
# From --submit-arg.
#SBATCH --array=0-3

# The secret by which the nodes recognize each other, new for each run of the job.
export MESHRUN_SECRET=$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n')

# Nodes that fail are left out, and the others continue without a time limit. --export=ALL passes
# this environment, even if sbatch got another one.
# Since Slurm 22.05, srun does not inherit --cpus-per-task.
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    --kill-on-bad-exit=0 --no-kill --wait=0 --export=ALL \
    '--container-image=nvcr.io#nvidia/pytorch:1' \
    --container-mounts=/home/me/run,/data:/data \
    --container-workdir=/home/me/run \
    meshrun \
    --mesh dp=1:64 \
    --nproc-per-node 8 \
    --nnodes 2:8 \
    train.py --note 'it'"'"'s $HOME'
code=$?

# 75: preempted, and every rank exited with 0 after SIGTERM: requeue. 69: a node was lost, or the
# nodes did not find each other: requeue up to ten times. Any other code ends the job.
if [ "$code" -eq 75 ] || { [ "$code" -eq 69 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 10 ]; }; then
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$code"
