#!/bin/bash
# mesh dp=4,tp=8: 32 ranks on 4 nodes x 8

#SBATCH --job-name=train
#SBATCH --chdir=/home/me/run
# A requeued job appends to the same file.
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
# One meshrun per node; it starts the ranks of that node.
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
# Ranks get 150 s before the time limit to save and exit; Slurm may signal up to a minute earlier.
#SBATCH --signal=TERM@150
# Slurm may requeue the job if it is preempted or loses a node.
#SBATCH --requeue
# From --submit-arg.
#SBATCH --partition=gpu
#SBATCH -t 4:00:00 -A vision

# The secret by which the nodes recognize each other, new for each run of the job.
export MESHRUN_SECRET=$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n')

# Launchers exit together: wait 60 s for the others. --kill-on-bad-exit=1 would kill them at once
# and lose their exit codes. --export=ALL passes this environment, even if sbatch got another one.
# Since Slurm 22.05, srun does not inherit --cpus-per-task.
srun --nodes=4 --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    --kill-on-bad-exit=0 --wait=60 --export=ALL \
    python /home/me/meshrun/start.py launcher \
    --mesh dp=4,tp=8 \
    --device cuda \
    --nnodes 4 \
    --shutdown-timeout 120 \
    train.py --note 'it'"'"'s $HOME'
code=$?

# 75: preempted, and every rank exited with 0 after SIGTERM: requeue. 69: a node was lost, or the
# nodes did not find each other: requeue up to ten times. Any other code ends the job.
if [ "$code" -eq 75 ] || { [ "$code" -eq 69 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 10 ]; }; then
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$code"
