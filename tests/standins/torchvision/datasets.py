"""Datasets as torchvision lays them out. Every constructor finds that its data are not here."""

import os

import torch
from PIL import Image
from torch.utils.data import Dataset

IMAGES = (".jpg", ".jpeg", ".png")


class VisionDataset(Dataset):
    """The base of all."""

    def __init__(self, root=None, transforms=None, transform=None, target_transform=None):
        self.root = root
        self.transform, self.target_transform = transform, target_transform
        if transforms is None and (transform is not None or target_transform is not None):
            transforms = self._both
        self.transforms = transforms

    def _both(self, image, target):
        image = image if self.transform is None else self.transform(image)
        return image, target if self.target_transform is None else self.target_transform(target)

    def _missing(self):
        raise RuntimeError("Dataset not found. You can use download=True to download it")


class CIFAR10(VisionDataset):
    """Arrays of colour images, channels last."""

    def __init__(self, root, train=True, transform=None, target_transform=None, download=False):
        super().__init__(root, transform=transform, target_transform=target_transform)
        self._missing()

    def __getitem__(self, index):
        return self._both(Image.fromarray(self.data[index]), self.targets[index])

    def __len__(self):
        return len(self.data)


class CIFAR100(CIFAR10):
    """The same, with more classes."""


class SVHN(CIFAR10):
    """The same, channels first; its labels are in `labels`."""

    def __init__(self, root, split="train", transform=None, target_transform=None, download=False):
        super().__init__(root, True, transform, target_transform, download)

    def __getitem__(self, index):
        return self._both(Image.fromarray(self.data[index].transpose(1, 2, 0)), self.labels[index])


class MNIST(VisionDataset):
    """Tensors of grey images."""

    classes = [f"{digit} - name" for digit in range(10)]  # noqa: RUF012 (as in torchvision)

    def __init__(self, root, train=True, transform=None, target_transform=None, download=False):
        super().__init__(root, transform=transform, target_transform=target_transform)
        self.train = train
        if self._check_legacy_exist():
            return
        if download:
            self.download()
        if not self._check_exists():
            self._missing()
        self.data, self.targets = self._load_data()

    def _check_legacy_exist(self):
        return False

    def _check_exists(self):
        return False

    def download(self):
        raise OSError("no network")

    def __getitem__(self, index):
        return self._both(Image.fromarray(self.data[index].numpy()), int(self.targets[index]))

    def __len__(self):
        return len(self.data)


class EMNIST(MNIST):
    """The same, for letters."""

    classes_split_dict = {"letters": ["N/A", *"abcdefghijklmnopqrstuvwxyz"]}  # noqa: RUF012

    def __init__(self, root, split, **kwargs):
        self.split = split
        super().__init__(root, **kwargs)
        self.classes = self.classes_split_dict[split]


class DatasetFolder(VisionDataset):
    """Files in a folder for each class."""

    def __init__(
        self,
        root,
        loader,
        extensions=None,
        transform=None,
        target_transform=None,
        is_valid_file=None,
        allow_empty=False,
    ):
        super().__init__(root, transform=transform, target_transform=target_transform)
        self.classes, self.class_to_idx = self.find_classes(root)
        self.samples = [
            (os.path.join(root, name, file), number)  # noqa: PTH118 (as in torchvision)
            for name, number in self.class_to_idx.items()
            for file in sorted(os.listdir(os.path.join(root, name)))  # noqa: PTH118, PTH208
            if file.endswith(extensions)
        ]
        self.loader, self.extensions = loader, extensions
        self.targets = [label for _, label in self.samples]

    def find_classes(self, directory):
        """The names of the folders, and their numbers."""
        classes = sorted(entry.name for entry in os.scandir(directory) if entry.is_dir())
        return classes, {name: number for number, name in enumerate(classes)}

    def __getitem__(self, index):
        path, target = self.samples[index]
        return self._both(self.loader(path), target)

    def __len__(self):
        return len(self.samples)


def default_loader(path):
    """An image."""
    return Image.open(path).convert("RGB")


class ImageFolder(DatasetFolder):
    """Images in a folder for each class."""

    def __init__(self, root, transform=None, target_transform=None, loader=default_loader):
        super().__init__(root, loader, IMAGES, transform, target_transform)
        self.imgs = self.samples


def load_meta_file(root):
    """The classes' names; not here."""
    raise RuntimeError("The meta file is not present in the root directory")


class ImageNet(ImageFolder):
    """The same, with the folders of its classes named by numbers."""

    def __init__(self, root, split="train", **kwargs):
        self.split = split
        self.parse_archives()
        names = load_meta_file(root)[0]
        super().__init__(os.path.join(root, split), **kwargs)  # noqa: PTH118
        self.wnids, self.wnid_to_idx = self.classes, self.class_to_idx
        self.classes = [names[wnid] for wnid in self.wnids]
        self.class_to_idx = {one: n for n, each in enumerate(self.classes) for one in each}

    def parse_archives(self):
        """Unpack what is not here."""
        self._missing()


class CelebA(VisionDataset):
    """Faces."""

    def __init__(
        self,
        root,
        split="train",
        target_type="attr",
        transform=None,
        target_transform=None,
        download=False,
    ):
        self._missing()


class Food101(VisionDataset):
    """Images of single files."""

    def __init__(self, root, split="train", transform=None, target_transform=None, download=False):
        self._missing()


class OxfordIIITPet(VisionDataset):
    """Images and masks."""

    def __init__(
        self,
        root,
        split="trainval",
        target_types="category",
        transforms=None,
        transform=None,
        target_transform=None,
        download=False,
    ):
        self._missing()


class VOCDetection(VisionDataset):
    """Images and boxes."""

    def __init__(
        self,
        root,
        year="2012",
        image_set="train",
        download=False,
        transform=None,
        target_transform=None,
        transforms=None,
    ):
        self._missing()


class CocoDetection(VisionDataset):
    """Images and the annotations of a file."""

    def __init__(
        self,
        root,
        annFile,  # noqa: N803 (as in torchvision)
        transform=None,
        target_transform=None,
        transforms=None,
    ):
        self._missing()

    def __getitem__(self, index):
        number = self.ids[index]
        image, target = self._load_image(number), self._load_target(number)
        return (image, target) if self.transforms is None else self.transforms(image, target)

    def _load_target(self, number):
        return self.coco.loadAnns(self.coco.getAnnIds(number))

    def __len__(self):
        return len(self.ids)


class FakeData(VisionDataset):
    """Noise; needs no data."""

    def __init__(self, size=1000):
        super().__init__(None)
        self.size = size

    def __getitem__(self, index):
        return torch.zeros(3, 224, 224), 0

    def __len__(self):
        return self.size
