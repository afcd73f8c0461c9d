"""The model, its data, and what a client does with them, as in Flower's PyTorch quickstart.

Only the data are others: scikit-learn's digits, of the size of CIFAR-10's images, need no download.
"""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from datasets import Dataset, Features, Image, Value
from flwr_datasets.partitioner import IidPartitioner
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader
from torchvision.transforms import Compose, Normalize, ToTensor


class Net(nn.Module):
    """Two convolutions and three linear layers for images [n, 3, 32, 32]."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.view(-1, 16 * 5 * 5)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


pytorch_transforms = Compose([ToTensor(), Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))])


def apply_transforms(batch):
    """Make tensors of the images of a batch."""
    batch["img"] = [pytorch_transforms(img) for img in batch["img"]]
    return batch


def load_digits_dataset(split):
    """Return the "train" or "test" split as a Hugging Face Dataset of images and labels."""
    images, labels = load_digits(return_X_y=True)
    rows = slice(1500) if split == "train" else slice(1500, None)
    larger = np.kron(images[rows].reshape(-1, 8, 8), np.ones((1, 4, 4))) * (255 / 16)
    columns = {
        "img": [np.stack([one] * 3, axis=-1) for one in larger.astype(np.uint8)],
        "label": labels[rows],
    }
    return Dataset.from_dict(columns, features=Features(img=Image(), label=Value("int64")))


partitioner = None  # made once per process


def load_data(partition_id: int, num_partitions: int, batch_size: int):
    """Return the loaders of training and test samples of one client."""
    global partitioner
    if partitioner is None:
        partitioner = IidPartitioner(num_partitions=num_partitions)
        partitioner.dataset = load_digits_dataset("train")
    partition = partitioner.load_partition(partition_id)
    # a fifth of the client's samples is for its tests
    partition_train_test = partition.train_test_split(test_size=0.2, seed=42)
    partition_train_test = partition_train_test.with_transform(apply_transforms)
    trainloader = DataLoader(partition_train_test["train"], batch_size=batch_size, shuffle=True)
    testloader = DataLoader(partition_train_test["test"], batch_size=batch_size)
    return trainloader, testloader


def load_centralized_dataset():
    """Return a loader of the test samples that no client has."""
    return DataLoader(load_digits_dataset("test").with_transform(apply_transforms), batch_size=128)


def train(net, trainloader, epochs, lr, device):
    """Train the model; return the mean loss over all batches."""
    net.to(device)
    criterion = torch.nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    running_loss = 0.0
    for _ in range(epochs):
        for batch in trainloader:
            images, labels = batch["img"].to(device), batch["label"].to(device)
            optimizer.zero_grad()
            loss = criterion(net(images), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
    return running_loss / (epochs * len(trainloader))


def test(net, testloader, device):
    """Return the model's mean loss and its accuracy."""
    net.to(device)
    criterion = torch.nn.CrossEntropyLoss()
    correct, loss = 0, 0.0
    with torch.no_grad():
        for batch in testloader:
            images, labels = batch["img"].to(device), batch["label"].to(device)
            outputs = net(images)
            loss += criterion(outputs, labels).item()
            correct += (outputs.argmax(1) == labels).sum().item()
    return loss / len(testloader), correct / len(testloader.dataset)
