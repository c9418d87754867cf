"""Real parts of many-node launches on one machine: hosts, Slurm, MPIs, Grid Engine."""
