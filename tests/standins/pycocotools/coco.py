"""The calls that torchvision makes."""


class COCO:
    """Annotations, by image."""

    def __init__(self):
        self.dataset, self.imgs, self.anns = {}, {}, {}

    def createIndex(self):  # noqa: N802 (its name there)
        """Number what `dataset` holds."""
        self.imgs = {image["id"]: image for image in self.dataset["images"]}
        self.anns = {one["id"]: one for one in self.dataset["annotations"]}

    def getAnnIds(self, image):  # noqa: N802
        """The annotations of an image."""
        return [number for number, one in self.anns.items() if one["image_id"] == image]

    def loadAnns(self, numbers):  # noqa: N802
        """The annotations with these numbers."""
        return [self.anns[number] for number in numbers]
