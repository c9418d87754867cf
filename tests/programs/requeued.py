"""Trains until SIGTERM, then saves and ends well; in a later run of the job it only says so."""

import os
import signal

run = os.environ.get("SLURM_RESTART_COUNT", "0")
# Slurm signals every process of a step, and meshrun its ranks: it may come twice.
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print(f"trains in run {run} with secret {os.environ['MESHRUN_SECRET'][:8]}", flush=True)
if run == "0":
    signal.sigwait([signal.SIGTERM])
    print(f"saved in run {run}", flush=True)
