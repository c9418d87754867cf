"""Connect to the store as scripts do: through the variables, and by its address."""

import os

import torch.distributed as dist

address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
place = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method="env://")
dist.barrier()
print("met through env", flush=True)
store, _, _ = next(dist.rendezvous(f"tcp://{place}", rank, world_size))
store.set(f"own {rank}", "")
store.wait([f"own {other}" for other in range(world_size)])
print("met through tcp", flush=True)
dist.barrier()
