"""The model, its data, and what a client does with them, as in Flower's PyTorch quickstart."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """A small convolutional network for 8x8 digits."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding=1)
        self.fc = nn.Linear(16 * 4 * 4, 10)

    def forward(self, x):
        x = torch.max_pool2d(torch.relu(self.conv(x)), 2)
        return self.fc(x.flatten(1))


def load_data(partition_id, num_partitions):
    """Return a client's loaders of training and test samples: two label-sorted shards (non-IID)."""
    images, labels = load_digits(return_X_y=True)
    shards = np.array_split(np.argsort(labels, kind="stable"), 2 * num_partitions)
    rows = np.concatenate([shards[partition_id], shards[partition_id + num_partitions]])
    rows = np.random.default_rng(0).permutation(rows)
    inputs = torch.tensor(images[rows] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    targets = torch.tensor(labels[rows])
    cut = len(rows) // 5
    train, test = slice(cut, None), slice(cut)
    return (
        DataLoader(TensorDataset(inputs[train], targets[train]), batch_size=16, shuffle=True),
        DataLoader(TensorDataset(inputs[test], targets[test]), batch_size=16),
    )


def train(net, loader, epochs, lr):
    """Train the model; return the mean loss over all batches."""
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    losses = []
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


def test(net, loader):
    """Return the model's mean loss and its accuracy."""
    net.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for images, labels in loader:
            outputs = net(images)
            loss += nn.functional.cross_entropy(outputs, labels, reduction="sum").item()
            correct += (outputs.argmax(1) == labels).sum().item()
    return loss / len(loader.dataset), correct / len(loader.dataset)
