"""A small image classifier, trained with nn.DataParallel."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


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
    torch.manual_seed(0)
    images, labels = torch.randn(48, 1, 8, 8), torch.randint(3, (48,))
    loader = DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=True, pin_memory=True)
    model = nn.DataParallel(Net().cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss_of = nn.CrossEntropyLoss().cuda()
    for epoch in range(2):
        for x, y in loader:
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
        print("epoch", epoch, "loss", loss.item())
    torch.save(model.module.state_dict(), "weights.pt")


if __name__ == "__main__":
    main()
