"""Print the layout as seen by a rank, its DataLoader workers by start method, and its child."""

import json
import subprocess
import sys
from pathlib import Path

from layout_facts import facts
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from meshrun import data_shard


class Facts(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return facts()


def in_workers(method):
    loader = DataLoader(
        Facts(), batch_size=None, num_workers=2, multiprocessing_context=method, shuffle=False
    )
    return list(loader)


def in_child():
    program = Path(__file__).with_name("layout_facts.py")
    return json.loads(subprocess.check_output([sys.executable, program]))


def samples():
    part, parts = data_shard()
    return list(DistributedSampler(range(24), num_replicas=parts, rank=part, seed=5))


def main():
    found = {"samples": samples(), "here": [facts()], "child": [in_child()]}
    for method in sys.argv[1:]:
        found[method] = in_workers(method)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
