#!/bin/bash
# mesh dp=2,tp=4: 8 ranks on 2 nodes x 4

#SBATCH --job-name=train
#SBATCH --chdir=/home/me/run
# A job that is requeued goes on in the same file.
#SBATCH --open-mode=append
# One meshrun a node; it starts that node's ranks.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
# Before the time limit ranks have 60 s to save and end; Slurm may signal a minute early.
#SBATCH --signal=TERM@60
# As given by --submit-arg.
#SBATCH --exclusive
#SBATCH --no-requeue --output=logs/%j.txt

# What the nodes know each other by, drawn anew for each run of the job.
export MESHRUN_SECRET=$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n')

# Launchers end together, so 60 s after the first no other is of use; to kill them at once, as
# --kill-on-bad-exit=1 does, would take their exit codes. --export=ALL hands them this environment,
# whatever sbatch was told.
srun --nodes=2 --ntasks-per-node=1 \
    --kill-on-bad-exit=0 --wait=60 --export=ALL \
    python /home/me/meshrun/start.py launcher \
    --mesh dp=2,tp=4 \
    --device cpu \
    --nnodes 2 \
    train.py --note 'it'"'"'s $HOME'
