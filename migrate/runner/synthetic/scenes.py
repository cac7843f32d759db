"""torchvision's datasets of single image files, made up: classes, boxes, masks, captions, faces.

An image is made when it is asked for. CocoDetection and CocoCaptions keep their code, and get an
annotation file that is made up in memory.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from migrate.runner.synthetic.classes import construct, give_items, note, split_of
from migrate.runner.synthetic.images import Order, generator, labels, numbered, picture

VOC = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow",
    "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train",
    "tvmonitor",
)  # fmt: skip
COCO_GAPS = {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}
COCO_IDS = [number for number in range(1, 91) if number not in COCO_GAPS]
COCO_SIZE = (640, 480)
CITYSCAPES = {"semantic": "L", "instance": "I", "color": "RGBA"}


@dataclass(frozen=True)
class Sample:
    """One sample of a dataset, for those who make its target."""

    name: str
    split: str
    index: int
    label: int
    size: tuple[int, int]

    def boxes(self) -> list[list[int]]:
        """One to three boxes inside of the image, as left, top, right and bottom."""
        draw = generator(self.name, self.split, self.index, "boxes")
        made = []
        for _ in range(draw.integers(1, 4)):
            corners = [sorted(draw.integers(1, side // 2, 2)) for side in self.size]
            (left, right), (top, bottom) = corners
            made.append([int(left), int(top), int(right) + 8, int(bottom) + 8])
        return made

    def mask(self, classes: int, mode: str = "L", border: int = 0) -> Any:
        """An image of class numbers: 0 or `border`, and this sample's class in its boxes."""
        from PIL import Image, ImageDraw

        mask = Image.new("I" if mode == "I" else "L", self.size, border)
        pen = ImageDraw.Draw(mask)
        for box in self.boxes():
            pen.rectangle(box, fill=1 + self.label % max(classes - 1, 1))
        if mode == "P":
            mask.putpalette([level for level in range(256) for _ in range(3)])
            return mask
        return mask if mode == mask.mode else mask.convert(mode)


Target = Callable[[Any, Sample], Any]


@dataclass(frozen=True)
class Scenes:
    """A dataset of image files."""

    classes: int
    size: tuple[int, int]
    names: str = "classes"
    """The attribute that lists the classes; none if empty."""
    labels: str = "_labels"
    """The attribute that lists the labels."""
    mode: str = "RGB"
    target: Target = lambda dataset, sample: sample.label


def _one_or_all(kinds: list[str], targets: dict[str, Any]) -> Any:
    """The targets that the script chose: itself if it is one, else all of them."""
    chosen = tuple(targets[kind] for kind in kinds)
    return chosen[0] if len(chosen) == 1 else chosen or None


def _thing_or_outline(dataset: Any, sample: Sample) -> Any:
    import numpy as np

    outline = np.array(sample.boxes()[0], np.float64).reshape(2, 2).T
    return _one_or_all(dataset.target_type, {"category": sample.label, "annotation": outline})


def _pet(dataset: Any, sample: Sample) -> Any:
    targets = {"category": sample.label, "binary-category": sample.label % 2}
    if "segmentation" in dataset._target_types:
        targets["segmentation"] = sample.mask(3, border=2)
    return _one_or_all(dataset._target_types, targets)


def _face(dataset: Any, sample: Sample) -> Any:
    index = sample.index
    targets = {
        "attr": dataset.attr[index],
        "identity": dataset.identity[index, 0],
        "bbox": dataset.bbox[index],
        "landmarks": dataset.landmarks_align[index],
    }
    return _one_or_all(dataset.target_type, targets)


def _voc_boxes(dataset: Any, sample: Sample) -> Any:
    wide, high = sample.size
    sides = ("xmin", "ymin", "xmax", "ymax")
    things = [
        {
            "name": VOC[sample.label],
            "pose": "Unspecified",
            "truncated": "0",
            "difficult": "0",
            "bndbox": {side: str(place) for side, place in zip(sides, box, strict=True)},
        }
        for box in sample.boxes()
    ]
    size = {"width": str(wide), "height": str(high), "depth": "3"}
    name = f"{sample.index:06d}.jpg"
    inner = {"folder": "VOC", "filename": name, "size": size, "segmented": "0", "object": things}
    return {"annotation": inner}


def _street(dataset: Any, sample: Sample) -> Any:
    kinds = dataset.target_type
    targets = {kind: sample.mask(34, CITYSCAPES[kind]) for kind in kinds if kind in CITYSCAPES}
    if "polygon" in kinds:
        wide, high = sample.size
        targets["polygon"] = {"imgWidth": wide, "imgHeight": high, "objects": []}
    return _one_or_all(kinds, targets)


def _captions(dataset: Any, sample: Sample) -> list[str]:
    return [f"a picture of thing {sample.label}, seen {number} times" for number in range(1, 6)]


SCENES = {
    "Caltech101": Scenes(101, (300, 200), "categories", "y", target=_thing_or_outline),
    "Caltech256": Scenes(257, (350, 300), "categories", "y"),
    "CelebA": Scenes(10, (178, 218), "", target=_face),
    "Cityscapes": Scenes(33, (2048, 1024), "", target=_street),
    "DTD": Scenes(47, (500, 450)),
    "FER2013": Scenes(7, (48, 48), mode="L"),
    "FGVCAircraft": Scenes(100, (1000, 700)),
    "Flickr30k": Scenes(10, (500, 375), "", target=_captions),
    "Flickr8k": Scenes(10, (500, 375), "", target=_captions),
    "Flowers102": Scenes(102, (600, 500)),
    "Food101": Scenes(101, (512, 512)),
    "GTSRB": Scenes(43, (48, 48), ""),
    "Imagenette": Scenes(10, (500, 375)),
    "LFWPeople": Scenes(5749, (250, 250), "", "targets"),
    "LSUN": Scenes(10, (342, 256)),
    "Omniglot": Scenes(964, (105, 105), "", mode="L"),
    "OxfordIIITPet": Scenes(37, (500, 375), target=_pet),
    "PCAM": Scenes(2, (96, 96), ""),
    "Places365": Scenes(365, (256, 256), labels="targets"),
    "RenderedSST2": Scenes(2, (448, 448)),
    "StanfordCars": Scenes(196, (600, 400)),
    "SUN397": Scenes(397, (500, 375)),
    "VOCDetection": Scenes(20, (500, 375), "", target=_voc_boxes),
    "VOCSegmentation": Scenes(20, (500, 375), "", target=lambda _, sample: sample.mask(21, "P")),
}


def replace(here: dict[str, Any], order: Order) -> None:
    """Change these classes of torchvision.datasets in place."""
    for name in here.keys() & SCENES.keys():
        _make_up(here[name], SCENES[name], order)
    for name in here.keys() & {"CocoDetection", "CocoCaptions"}:
        _annotate(here[name], order)


def _make_up(kind: Any, spec: Scenes, order: Order) -> None:
    name = kind.__name__

    def fill(self: Any, given: dict[str, Any]) -> None:
        self._part, self._synthetic = split_of(given), order.samples
        self._target_types = self.target_type = _kinds_of_targets(given)
        names = _class_names(kind, spec, given)
        self._labels = labels(name, self._part, order.samples, len(names))
        files = [f"{index:06d}.jpg" for index in range(order.samples)]
        self._samples = self.imgs = list(zip(files, self._labels, strict=True))
        self._image_files = self._images = self.images = self.filename = files
        setattr(self, spec.labels, self._labels)
        self.class_to_idx = {each: number for number, each in enumerate(names)}
        if spec.names:
            setattr(self, spec.names, names)
        if name == "CelebA":
            _describe_faces(self)
        note(order, name, spec.size)

    def item(self: Any, index: int) -> tuple[Any, Any]:
        sample = Sample(name, self._part, index, self._labels[index], spec.size)
        image = picture(name, self._part, index, sample.label, spec.size, spec.mode)
        return image, spec.target(self, sample)

    construct(kind, fill)
    give_items(kind, item)


def _kinds_of_targets(given: dict[str, Any]) -> list[str]:
    kinds = given.get("target_types", given.get("target_type", []))
    return [kinds] if isinstance(kinds, str) else list(kinds)


def _class_names(kind: Any, spec: Scenes, given: dict[str, Any]) -> list[str]:
    """Those that the script chose, or the class knows, or numbered ones."""
    chosen = given.get("classes", getattr(kind, "classes", None))
    return numbered(spec.classes) if chosen is None or isinstance(chosen, str) else list(chosen)


def _describe_faces(dataset: Any) -> None:
    """The columns of CelebA; how a face looks depends on its label alone."""
    import torch

    looks = [generator("CelebA", "looks", label).integers(0, 2, 40) for label in range(10)]
    wide = torch.tensor([[40, 60, 100, 120]], dtype=torch.int64, device="cpu")
    rows = torch.tensor(dataset._labels, dtype=torch.int64, device="cpu")
    table = torch.tensor([each.tolist() for each in looks], dtype=torch.int64, device="cpu")
    dataset.attr = table[rows]
    dataset.attr_names = [f"attribute_{number:02d}" for number in range(40)]
    dataset.identity = rows[:, None] + 1
    dataset.bbox = wide.repeat(len(rows), 1)
    dataset.landmarks_align = wide.repeat(len(rows), 3)[:, :10]


def _annotate(kind: Any, order: Order) -> None:
    name = kind.__name__

    def fill(self: Any, given: dict[str, Any]) -> None:
        file = Path(given["annFile"]).name
        self._part = file
        self.coco = importlib.import_module("pycocotools.coco").COCO()
        self.coco.dataset = _annotations(file, order.samples, captions=name == "CocoCaptions")
        self.coco.createIndex()
        self.ids = sorted(self.coco.imgs.keys())
        note(order, name, COCO_SIZE)

    def load(self: Any, id: int) -> Any:  # noqa: A002 (its name in torchvision)
        return picture("coco", self._part, id, id % 10, COCO_SIZE)

    construct(kind, fill)
    kind._load_image = load


def _annotations(file: str, samples: int, captions: bool) -> dict[str, Any]:
    """What COCO's file of this name would say of images that are numbered from 1."""
    images = [
        {"id": n, "file_name": f"{n:012d}.jpg", "width": COCO_SIZE[0], "height": COCO_SIZE[1]}
        for n in range(1, samples + 1)
    ]
    said: list[dict[str, Any]] = []
    for number in range(1, samples + 1):
        sample = Sample("coco", file, number, number % 10, COCO_SIZE)
        if captions or "captions" in file:
            said += [{"image_id": number, "caption": line} for line in _captions(None, sample)]
        else:
            said += [_thing(sample, box, "keypoints" in file) for box in sample.boxes()]
    for number, one in enumerate(said, 1):
        one["id"] = number
    categories = [{"id": n, "name": f"class_{n:02d}", "supercategory": "thing"} for n in COCO_IDS]
    return {"info": {}, "images": images, "annotations": said, "categories": categories}


def _thing(sample: Sample, box: list[int], person: bool) -> dict[str, Any]:
    left, top, right, bottom = box
    wide, high = right - left, bottom - top
    thing = {
        "image_id": sample.index,
        "category_id": COCO_IDS[0 if person else sample.label],
        "bbox": [float(left), float(top), float(wide), float(high)],
        "area": float(wide * high),
        "iscrowd": 0,
        "segmentation": [[left, top, right, top, right, bottom, left, bottom]],
    }
    if person:
        thing |= {"keypoints": [left, top, 2] * 17, "num_keypoints": 17}
    return thing
