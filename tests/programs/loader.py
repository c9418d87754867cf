"""Use DataLoader workers of the given start methods beside the mesh."""

import sys

import torch
from torch.utils.data import DataLoader, Dataset

from meshrun import MeshError, current_mesh


class Numbers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        try:
            current_mesh()
        except MeshError:
            return torch.tensor(index)
        raise AssertionError("a loader worker was given the mesh")


def main():
    current_mesh()
    for method in sys.argv[1:]:
        loader = DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context=method)
        print(method, int(sum(batch.sum() for batch in loader)), flush=True)


if __name__ == "__main__":
    main()
