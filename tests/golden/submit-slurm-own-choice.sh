#!/bin/bash
# mesh dp=2,tp=4: 8 ranks on 2 nodes x 4

#SBATCH --job-name=train
#SBATCH --chdir=/home/me/run
# A requeued job appends to the same file.
#SBATCH --open-mode=append
# One meshrun per node; it starts the ranks of that node.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
# Ranks get 60 s before the time limit to save and exit; Slurm may signal up to a minute earlier.
#SBATCH --signal=TERM@60
# From --submit-arg.
#SBATCH --exclusive
#SBATCH --no-requeue --output=logs/%j.txt

# The secret by which the nodes recognize each other, new for each run of the job.
export MESHRUN_SECRET=$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n')

# Launchers exit together: wait 60 s for the others. --kill-on-bad-exit=1 would kill them at once
# and lose their exit codes. --export=ALL passes this environment, even if sbatch got another one.
srun --nodes=2 --ntasks-per-node=1 \
    --kill-on-bad-exit=0 --wait=60 --export=ALL \
    python /home/me/meshrun/start.py launcher \
    --mesh dp=2,tp=4 \
    --device cpu \
    --nnodes 2 \
    train.py --note 'it'"'"'s $HOME'
