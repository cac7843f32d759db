"""A small image classifier, trained with DistributedDataParallel."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    """Convolution, batch norm, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 6 * 6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of shape (batch, 3)."""
        return self.head(torch.relu(self.norm(self.conv(x))).flatten(1))


def main() -> None:
    """Train two epochs and save the weights."""
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(0)
    images, labels = torch.randn(48, 1, 8, 8), torch.randint(3, (48,))
    data = TensorDataset(images, labels)
    sampler = DistributedSampler(data, shuffle=True)
    batch_size = 8 // dist.get_world_size()
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler, pin_memory=True)
    net = Net().cuda()
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    model = DistributedDataParallel(net, device_ids=[local_rank], output_device=local_rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss_of = nn.CrossEntropyLoss().cuda()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
        print("epoch", epoch, "loss", loss.item())
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "weights.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
