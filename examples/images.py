"""Image classification with data parallelism: train, evaluate, save and resume.

    meshrun --mesh dp=2 examples/images.py

Ten classes of 28x28 images, each a pattern under noise. Loader workers make the images, and each
rank reads its own part. If you name a folder, each epoch is saved there, and the next launch
continues from the last one, on any number of ranks:

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
    """Images made when they are read; an image depends on its number alone."""

    def __init__(self, numbers: range) -> None:
        """Make one pattern per class."""
        self.numbers = numbers
        self.patterns = torch.randn(10, 1, 28, 28, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return an image and its class."""
        generator = torch.Generator().manual_seed(self.numbers[index])
        label = self.numbers[index] % 10
        return self.patterns[label] + 5 * torch.randn(1, 28, 28, generator=generator), label


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> float:
    """Train for one epoch; return the mean loss over all ranks."""
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
    """Return the accuracy over the images of all ranks."""
    mesh = current_mesh("dp")
    model.eval()
    counts = torch.zeros(2, device=mesh.device_type)  # correct, all
    for images, labels in loader:
        correct = model(images.to(mesh.device_type)).argmax(1) == labels.to(mesh.device_type)
        counts += torch.stack([correct.sum(), torch.tensor(len(labels), device=correct.device)])
    dist.all_reduce(counts, group=mesh.get_group())
    return (counts[0] / counts[1]).item()


def load_last(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the last complete epoch of a folder and return its number, or 0 if there is none."""
    epochs = [int(path.parent.name) for path in folder.glob("*/.metadata")]  # written last
    if epochs:
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / str(max(epochs)))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return max(epochs, default=0)


def save(folder: Path, epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save an epoch; each rank writes its part."""
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / str(epoch))


def main() -> None:
    """Train to the last epoch, and print loss and accuracy from one rank."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    last = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    mesh, (part, parts) = current_mesh("dp"), data_shard()
    data, unseen = Images(range(2000)), Images(range(2000, 2500))
    sampler = DistributedSampler(data, num_replicas=parts, rank=part)
    loader = DataLoader(data, 64 // parts, sampler=sampler, num_workers=1, persistent_workers=True)
    # A DistributedSampler would repeat images to make the parts even, and count them twice.
    own = Subset(unseen, range(part, len(unseen), parts))
    unseen_loader = DataLoader(own, 64, num_workers=1)

    torch.manual_seed(0)  # the same weights on every rank
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
        sampler.set_epoch(epoch)  # a new order for each epoch
        loss = train(model, optimizer, loader)
        accuracy = evaluate(model, unseen_loader)
        if part == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.1%}")
        if folder:
            save(folder, epoch, model, optimizer)


if __name__ == "__main__":
    main()
