"""Train, evaluate, save and go on: image classification with data parallelism.

    meshrun --mesh dp=2 examples/images.py

There are ten classes of 28x28 images: a pattern for each, under noise. Loader workers make them,
and each rank reads its own part. With a folder, each epoch is saved there; the next launch goes on
from the last one, on any number of ranks:

    meshrun --mesh dp=2 examples/images.py checkpoints
    meshrun --mesh dp=4 examples/images.py checkpoints 6
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from meshrun import current_mesh, data_shard


class Images(Dataset):
    """Images by their numbers, each made when it is read and always the same."""

    def __init__(self, numbers: range) -> None:
        """Make the patterns that all images of a class share."""
        self.numbers = numbers
        self.patterns = torch.randn(10, 1, 28, 28, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        """Return how many images there are."""
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return an image and its class."""
        generator = torch.Generator().manual_seed(self.numbers[index])
        label = self.numbers[index] % 10
        return self.patterns[label] + 5 * torch.randn(1, 28, 28, generator=generator), label


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> float:
    """Go through the loader once; return the mean loss of all ranks."""
    mesh = current_mesh("dp")
    model.train()
    total = torch.zeros((), device=mesh.device_type)
    for images, labels in loader:
        logits = model(images.to(mesh.device_type))
        loss = nn.functional.cross_entropy(logits, labels.to(mesh.device_type))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total, group=mesh.get_group())
    return total.item() / len(loader) / mesh.size()


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> float:
    """Return the share of images that get their own class, over all ranks."""
    mesh = current_mesh("dp")
    model.eval()
    counts = torch.zeros(2, device=mesh.device_type)  # right ones, all
    for images, labels in loader:
        right = model(images.to(mesh.device_type)).argmax(1) == labels.to(mesh.device_type)
        counts += torch.stack([right.sum(), torch.tensor(len(labels), device=right.device)])
    dist.all_reduce(counts, group=mesh.get_group())
    return (counts[0] / counts[1]).item()


def load_last(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Take over what the last complete epoch in a folder left; return its number, or 0."""
    epochs = [int(path.parent.name) for path in folder.glob("*/.metadata")]  # is written last
    if epochs:
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / str(max(epochs)))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return max(epochs, default=0)


def save(folder: Path, epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write an epoch, every rank a part of it."""
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / str(epoch))


def main() -> None:
    """Train up to an epoch, and print loss and accuracy from one rank."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    last = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    mesh, (part, parts) = current_mesh("dp"), data_shard()
    data, unseen = Images(range(2000)), Images(range(2000, 2500))
    sampler = DistributedSampler(data, num_replicas=parts, rank=part)
    loader = DataLoader(data, 64 // parts, sampler=sampler, num_workers=1, persistent_workers=True)
    # A sampler would repeat images to make the parts even; those would count twice here.
    own = Subset(unseen, range(part, len(unseen), parts))
    unseen_loader = DataLoader(own, 64, num_workers=1)

    torch.manual_seed(0)  # every rank begins with the same weights
    network = nn.Sequential(
        nn.Flatten(), nn.Linear(28 * 28, 128), nn.ReLU(), nn.Linear(128, 10)
    ).to(mesh.device_type)
    model = DistributedDataParallel(network, device_mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    done = load_last(folder, model, optimizer) if folder else 0
    accuracy = evaluate(model, unseen_loader)
    if part == 0:
        print(f"epoch {done}: accuracy {accuracy:.1%}")
    for epoch in range(done + 1, last + 1):
        sampler.set_epoch(epoch)  # another order each time
        loss = train(model, optimizer, loader)
        accuracy = evaluate(model, unseen_loader)
        if part == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.1%}")
        if folder:
            save(folder, epoch, model, optimizer)


if __name__ == "__main__":
    main()
