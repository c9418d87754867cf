#!/bin/bash
# mesh dp=4,tp=8: 32 ranks on 4 nodes x 8

#SBATCH --job-name=train
#SBATCH --chdir=/home/me/run
# A job that is requeued goes on in the same file.
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
# One meshrun a node; it starts that node's ranks.
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
# Before the time limit ranks have 150 s to save and end; Slurm may signal a minute early.
#SBATCH --signal=TERM@150
# Preempted, or a node was lost: Slurm may start the job again.
#SBATCH --requeue
# As given by --submit-arg.
#SBATCH --partition=gpu
#SBATCH -t 4:00:00 -A vision

# What the nodes know each other by, drawn anew for each run of the job.
export MESHRUN_SECRET=$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n')

# Launchers end together, so 60 s after the first no other is of use; to kill them at once, as
# --kill-on-bad-exit=1 does, would take their exit codes. --export=ALL hands them this environment,
# whatever sbatch was told.
# From Slurm 22.05 on, srun has to be told of the cores again.
srun --nodes=4 --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    --kill-on-bad-exit=0 --wait=60 --export=ALL \
    python /home/me/meshrun/start.py launcher \
    --mesh dp=4,tp=8 \
    --device cuda \
    --nnodes 4 \
    --shutdown-timeout 120 \
    train.py --note 'it'"'"'s $HOME'
code=$?

# 75: SIGTERM came and every rank ended well by itself, so the job is to go on later. 69: a node
# was lost, or the nodes did not meet; that is tried again ten times.
if [ "$code" -eq 75 ] || { [ "$code" -eq 69 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 10 ]; }; then
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$code"
