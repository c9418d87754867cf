"""Variables that real schedulers set."""

from __future__ import annotations


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


# From `srun -N3 -n4`, Slurm 22.05: task 2, which is the first on the second node.
STEP = variables(
    "SLURMD_NODENAME=sl1 SLURM_CLUSTER_NAME=tests SLURM_CPUS_ON_NODE=1 SLURM_GTIDS=2"
    " SLURM_JOBID=7 SLURM_JOB_CPUS_PER_NODE=2,1(x2) SLURM_JOB_GID=0 SLURM_JOB_ID=7"
    " SLURM_JOB_NAME=sh SLURM_JOB_NODELIST=sl[0-2] SLURM_JOB_NUM_NODES=3 SLURM_JOB_PARTITION=all"
    " SLURM_LAUNCH_NODE_IPADDR=10.77.0.1 SLURM_LOCALID=0 SLURM_NNODES=3 SLURM_NODEID=1"
    " SLURM_NODELIST=sl[0-2] SLURM_NPROCS=4 SLURM_NTASKS=4 SLURM_PRIO_PROCESS=0 SLURM_PROCID=2"
    " SLURM_SRUN_COMM_HOST=10.77.0.1 SLURM_SRUN_COMM_PORT=38051 SLURM_STEPID=0 SLURM_STEP_ID=0"
    " SLURM_STEP_LAUNCHER_PORT=38051 SLURM_STEP_NODELIST=sl[0-2] SLURM_STEP_NUM_NODES=3"
    " SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=2,1(x2) SLURM_SUBMIT_HOST=sl0"
    " SLURM_TASKS_PER_NODE=2,1(x2) SLURM_TASK_PID=25071 SLURM_TOPOLOGY_ADDR=sl1"
    " SLURM_TOPOLOGY_ADDR_PATTERN=node SLURM_UMASK=0022"
)
# From `salloc -N1 -n2 : -N2 -n4 srun -n2 : -n3`: the first component is on sl2.
_HET = (
    "SLURM_HET_SIZE=2 SLURM_JOB_ID=1 SLURM_JOB_NODELIST_HET_GROUP_0=sl2"
    " SLURM_JOB_NODELIST_HET_GROUP_1=sl[0-1] SLURM_JOB_NUM_NODES_HET_GROUP_0=1"
    " SLURM_JOB_NUM_NODES_HET_GROUP_1=2 SLURM_NNODES_HET_GROUP_0=1 SLURM_NNODES_HET_GROUP_1=2"
    " SLURM_NTASKS_HET_GROUP_0=2 SLURM_NTASKS_HET_GROUP_1=4 SLURM_SUBMIT_HOST=sl0"
)
HET_SHELL = variables(f"{_HET} SLURM_NTASKS=3")
HET_STEP = variables(
    f"{_HET} SLURMD_NODENAME=sl0 SLURM_GTIDS=2,3 SLURM_JOB_NODELIST=sl[0-2] SLURM_JOB_NUM_NODES=3"
    " SLURM_LAUNCH_NODE_IPADDR=10.77.0.1 SLURM_LOCALID=0 SLURM_NNODES=3 SLURM_NODEID=1"
    " SLURM_NODELIST=sl[0-2] SLURM_NTASKS=5 SLURM_PROCID=2 SLURM_STEPID=0 SLURM_STEP_ID=0"
    " SLURM_STEP_NODELIST=sl[0-2] SLURM_STEP_NUM_NODES=3 SLURM_STEP_NUM_TASKS=5"
    " SLURM_STEP_TASKS_PER_NODE=2,1,2 SLURM_TASKS_PER_NODE=2,1,2"
)
# From the script of `sbatch -N2 -n3` itself.
BATCH = variables(
    "SLURMD_NODENAME=sl0 SLURM_CPUS_ON_NODE=2 SLURM_GTIDS=0 SLURM_JOBID=3 SLURM_JOB_ID=3"
    " SLURM_JOB_CPUS_PER_NODE=2,1 SLURM_JOB_NODELIST=sl[0-1] SLURM_JOB_NUM_NODES=2"
    " SLURM_LOCALID=0 SLURM_NNODES=2 SLURM_NODEID=0 SLURM_NODELIST=sl[0-1] SLURM_NPROCS=3"
    " SLURM_NODE_ALIASES=(null) SLURM_NTASKS=3 SLURM_PROCID=0 SLURM_SUBMIT_HOST=sl0"
    " SLURM_TASKS_PER_NODE=2,1 SLURM_TASK_PID=25872"
)
# From the command of `salloc -N2 --ntasks-per-node=2`.
SALLOC = variables(
    "SLURM_CLUSTER_NAME=tests SLURM_JOBID=4 SLURM_JOB_CPUS_PER_NODE=2(x2) SLURM_JOB_ID=4"
    " SLURM_JOB_NAME=interactive SLURM_JOB_NODELIST=sl[0-1] SLURM_JOB_NUM_NODES=2 SLURM_NNODES=2"
    " SLURM_NODELIST=sl[0-1] SLURM_NPROCS=4 SLURM_NTASKS=4 SLURM_NTASKS_PER_NODE=2"
    " SLURM_SUBMIT_HOST=sl0 SLURM_TASKS_PER_NODE=2(x2)"
)
# From the last process of `mpirun -H 10.77.0.1:2,10.77.0.2:2` on the first host, Open MPI 4.1.
MPI = variables(
    "OMPI_APP_CTX_NUM_PROCS=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2"
    " OMPI_COMM_WORLD_NODE_RANK=1 OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4"
    " OMPI_FIRST_RANKS=0 OMPI_MCA_ess_base_jobid=739835905 OMPI_MCA_orte_num_nodes=2"
    " OMPI_MCA_orte_hnp_uri=739835904.0;tcp://10.77.0.1,192.168.0.9:43537"
    " OMPI_MCA_orte_local_daemon_uri=739835904.1;tcp://10.77.0.2:34977"
    " OMPI_MCA_orte_precondition_transports=4136b6c6b552b7cb-492945d51d07d3de"
    " PMIX_NAMESPACE=739835905 PMIX_RANK=3"
)
# From the daemon that mpirun starts with srun on each other node of an allocation.
STEP_OF_DAEMON = variables(
    "SLURM_JOB_ID=8 SLURM_STEP_ID=0 SLURM_NNODES=1 SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_NODEID=0"
    " SLURM_LOCALID=0 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_NODELIST=sl1"
    " SLURM_STEP_TASKS_PER_NODE=1 SLURM_JOB_NODELIST=sl[0-1] SLURM_GTIDS=0"
)
SKY = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.9",
    "SKYPILOT_TASK_ID": "sky-2026-07-06-21-18-31-563597_mine_1",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
}
TRAINER = variables(
    "PET_NNODES=4 PET_NPROC_PER_NODE=auto PET_NODE_RANK=2 PET_MASTER_PORT=29500"
    " PET_MASTER_ADDR=run-node-0-0.run JOB_COMPLETION_INDEX=2 KUBERNETES_SERVICE_HOST=10.96.0.1"
)
PYTORCH_JOB = variables(
    "MASTER_ADDR=mnist-master-0 MASTER_PORT=23456 WORLD_SIZE=3 RANK=2 PYTHONUNBUFFERED=1"
    " KUBERNETES_SERVICE_HOST=10.96.0.1"
)
GROUP = variables(
    "LWS_LEADER_ADDRESS=vllm-0.vllm.default LWS_GROUP_SIZE=2 LWS_WORKER_INDEX=1"
    " KUBERNETES_SERVICE_HOST=10.96.0.1"
)

# ---- Systems that tests do not start, except for MPICH: as documented, unless marked as recorded.

# From the last process of `mpiexec.hydra -n 2`, MPICH 4.0.2; recorded.
HYDRA = variables("HYDI_CONTROL_FD=7 MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1 PMI_FD=8 PMI_RANK=1"
                  " PMI_SIZE=2 MPIR_CVAR_CH3_INTERFACE_HOSTNAME=vm")  # fmt: skip
# Likewise Intel MPI 2021.18; recorded.
INTEL = variables(
    "HYDRA_BSTRAP_LAUNCHER=ssh HYDRA_BSTRAP_NODE_ID=0 HYDRA_LAUNCH_TYPE=2 I_MPI_HYDRA_TOPOLIB=ipl2"
    " I_MPI_HYDRA_UUID=f8480000-70de-a5f8-e360-060001a10935 I_MPI_PIN_INFO=1 MPI_LOCALNRANKS=2"
    " MPI_LOCALRANKID=1 PMI_FD=11 PMI_RANK=1 PMI_SIZE=2"
)
# From the last process of `prterun -np 2`, PRRTE 3, and `mpirun -np 2`, Open MPI 5.0.11; recorded.
PRRTE = variables(
    "PMIX_HOSTNAME=vm PMIX_NAMESPACE=prterun-vm-18539@1 PMIX_RANK=1 PMIX_SECURITY_MODE=native"
    " PMIX_SERVER_URI41=prterun-vm-18539@0.0;tcp4://127.0.0.1:57455 PMIX_VERSION=5.0.11rc1"
    " PRTE_LAUNCHED=1"
)
MPI_5 = {**PRRTE, **variables(
    "OMPI_COMMAND=env OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2"
    " OMPI_COMM_WORLD_NODE_RANK=1 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2"
    " OMPI_MCA_num_procs=2 OMPI_UNIVERSE_SIZE=2 OMPI_WORLD_SIZE=2 PRTE_SHARED_FS=FALSE"
)}  # fmt: skip
# MVAPICH2's mpispawn.
MVAPICH = variables("MV2_COMM_WORLD_RANK=3 MV2_COMM_WORLD_SIZE=4 MV2_COMM_WORLD_LOCAL_RANK=1"
                    " MV2_COMM_WORLD_LOCAL_SIZE=2 PMI_ID=3")  # fmt: skip
# HPE Cray's PALS with PBS: the second process of `mpiexec -n 2 --ppn 1`.
PALS = variables(
    "PALS_APID=0b5c7d0f-5e2c-4d8a-9f7e-1c2d3e4f5a6b PALS_RANKID=1 PALS_NODEID=1 PALS_LOCAL_RANKID=0"
    " PALS_LOCAL_SIZE=1 PALS_DEPTH=1 PALS_SPOOL_DIR=/var/run/palsd/0b5c7d0f PMI_RANK=1 PMI_SIZE=2"
    " PMI_LOCAL_RANK=0 PMI_LOCAL_SIZE=1 PMI_UNIVERSE_SIZE=2"
)
# flux-environment(7): `flux run -N 2 -n 2`.
FLUX = variables(
    "FLUX_JOB_ID=f2fw4RMkTmP9 FLUX_JOB_SIZE=2 FLUX_JOB_NNODES=2 FLUX_TASK_RANK=1"
    " FLUX_TASK_LOCAL_ID=0 FLUX_URI=local:///run/flux/local PMI_FD=20 PMI_RANK=1 PMI_SIZE=2"
)
# LSF with the Job Step Manager: `jsrun --nrs 2 --rs_per_host 1`; its launch node comes first.
JSRUN = variables(
    "LSB_JOBID=1234 LSB_DJOB_RANKFILE=/ranks LSB_MCPU_HOSTS=x JSM_NAMESPACE_RANK=1"
    " JSM_NAMESPACE_SIZE=2 JSM_NAMESPACE_LOCAL_RANK=0 JSM_NAMESPACE_LOCAL_SIZE=1 PMIX_RANK=1"
    " PMIX_NAMESPACE=1-26841 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2"
    " OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1"
)
# From the scripts of jobs on two hosts.
LSF = {"LSB_JOBID": "1234", "LSB_JOBINDEX": "0", "LSB_MCPU_HOSTS": "n1 8 n2 8",
       "LSB_DJOB_NUMPROC": "16"}  # fmt: skip
PBS = variables("PBS_JOBID=5.server PBS_NODEFILE=/nodes PBS_NODENUM=0 PBS_TASKNUM=1"
                " PBS_ENVIRONMENT=PBS_BATCH PBS_O_HOST=login")  # fmt: skip
GRIDENGINE = variables("JOB_ID=7 SGE_TASK_ID=undefined PE=mpi PE_HOSTFILE=/pe NHOSTS=2 NSLOTS=16"
                       " QUEUE=all.q REQUEST=x")  # fmt: skip
FILES = {
    "/nodes": "n1.site\n" * 8 + "n2.site\n" * 8,
    "/pe": "n1 8 all.q@n1 UNDEFINED\nn2 4 all.q@n2 UNDEFINED\nn2 4 long.q@n2 UNDEFINED\n",
    "/ranks": "launch\n" + "n1\n" * 4 + "n2\n" * 4,
    "/run/determined/info/rendezvous.json":
        '{"container_addrs": ["10.0.0.4", "10.0.0.9"], "container_rank": 1,'
        ' "container_slot_counts": [8, 8]}',
}  # fmt: skip
SAGEMAKER = {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "8",
             "TRAINING_JOB_NAME": "mine-2026-07-06"}  # fmt: skip
AWS_BATCH = {
    "AWS_BATCH_JOB_ID": "b6ecbc5e-1b9f#2", "AWS_BATCH_JOB_ATTEMPT": "1",
    "AWS_BATCH_JOB_NODE_INDEX": "2", "AWS_BATCH_JOB_NUM_NODES": "3",
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "1",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.4",
}  # fmt: skip
AZURE_ML = variables("AZUREML_NODE_COUNT=2 NODE_RANK=1 MASTER_ADDR=10.0.0.4 MASTER_PORT=6105"
                     " AZUREML_RUN_ID=calm_root_1 RANK=1 WORLD_SIZE=2 LOCAL_RANK=0")  # fmt: skip
AZURE_OLD = variables("AZUREML_NODE_COUNT=2 AZ_BATCHAI_TASK_INDEX=1 AZUREML_RUN_ID=calm_root_1"
                      " AZ_BATCH_MASTER_NODE=10.0.0.4:6000")  # fmt: skip
VERTEX = {
    "CLUSTER_SPEC": '{"cluster":{"workerpool0":["cmle-training-workerpool0-4c-0:2222"],'
    '"workerpool1":["cmle-training-workerpool1-4c-0:2222","cmle-training-workerpool1-4c-1:2222"]},'
    '"environment":"cloud","task":{"type":"workerpool1","index":1},"open_ports":[3333]}',
    "CLOUD_ML_JOB_ID": "7136",
}
VOLCANO = variables(
    "VC_TASK_INDEX=1 VK_TASK_INDEX=1 VC_MASTER_HOSTS=job-master-0.job VC_MASTER_NUM=1"
    " VC_WORKER_HOSTS=job-worker-0.job,job-worker-1.job VC_WORKER_NUM=2"
)
DSTACK = {
    "DSTACK_RUN_NAME": "mine", "DSTACK_NODE_RANK": "1", "DSTACK_NODES_NUM": "2",
    "DSTACK_NODES_IPS": "10.0.0.4\n10.0.0.9", "DSTACK_MASTER_NODE_IP": "10.0.0.4",
    "DSTACK_GPUS_PER_NODE": "8", "DSTACK_GPUS_NUM": "16",
}  # fmt: skip
DETERMINED = variables("DET_TASK_TYPE=TRIAL DET_ALLOCATION_ID=1.e7c0.1 DET_TASK_ID=1.e7c0"
                       " DET_SLOT_IDS=[0] DET_TRIAL_ID=1")  # fmt: skip
TPU = variables("TPU_WORKER_ID=1 TPU_WORKER_HOSTNAMES=job-0-0.job,job-0-1.job"
                " JOB_COMPLETION_INDEX=1 KUBERNETES_SERVICE_HOST=10.96.0.1")  # fmt: skip
SLICES = {**TPU, **variables("MEGASCALE_NUM_SLICES=3 MEGASCALE_SLICE_ID=2"
                             " MEGASCALE_COORDINATOR_ADDRESS=job-a-0-0.job:8080")}  # fmt: skip

# From an actor of Ray 2.60.
RAY_WORKER = variables(
    "RAY_JOB_ID=04000000 RAY_RAYLET_PID=13668 RAY_CLIENT_MODE=0 RAY_LD_PRELOAD_ON_WORKERS=0"
    " OMP_NUM_THREADS=2"
)
# For the entry point of a job, according to job_supervisor.py of Ray 2.60.
RAY_JOB = variables(
    'RAY_ADDRESS=10.0.0.4:6379 RAY_JOB_CONFIG_JSON_ENV_VAR={"runtime_env":{},"metadata":{}}'
)
