"""Hold a share of the GPU's memory until the file ``go`` exists: ``hold.py SHARE FOLDER``.

If the file ``die`` exists, the first generation kills itself.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

share, folder = float(sys.argv[1]), Path(sys.argv[2])
total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
held = torch.ones(int(total * share), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(f"holding {held.numel() / 2**20:.0f} MiB in generation {generation}", flush=True)
if generation == 0 and (folder / "die").exists():
    os.kill(os.getpid(), signal.SIGKILL)
while not (folder / "go").exists():
    time.sleep(0.02)
