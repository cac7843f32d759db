"""Does a script get data that look real, and the same ones in every process?

torchvision's own classes are tested where it is installed, else those of tests/standins. Every
script runs as the runner runs it: nothing of this package is in its way or at its hand.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO

START = f"""
import json, runpy, sys
from migrate.runner import synthetic
synthetic.install(int(sys.argv[1]))
for name in [name for name in sys.modules if name.partition(".")[0] == "migrate"]:
    del sys.modules[name]
sys.path.append({str(REPO / "tests" / "standins")!r})
sys.path[0] = "."
found = runpy.run_path("train.py", run_name="__main__")
print(json.dumps(found["said"] | {{"used": synthetic.used()}}))
"""


def attempt(script: str, folder: Path, samples: int = 64) -> subprocess.CompletedProcess[str]:
    """The script in a process of its own, with made-up data."""
    (folder / "train.py").write_text(script)
    return subprocess.run(
        [sys.executable, "-c", START, str(samples)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


def ran(script: str, folder: Path, samples: int = 64) -> dict[str, Any]:
    """What the script leaves in `said`, and what was replaced."""
    done = attempt(script, folder, samples)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@functools.cache
def answered(script: str) -> dict[str, Any]:
    """The same, in an empty folder, once for all tests."""
    with tempfile.TemporaryDirectory() as folder:
        said = ran(script, Path(folder))
        said["files"] = sorted(path.name for path in Path(folder).iterdir())
        return said


ARRAYS = """
import random
import numpy as np
import torch
import torchvision
from PIL import Image
from torchvision.datasets import CIFAR10, FakeData

def state():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

class Pairs(CIFAR10):
    def __getitem__(self, index):
        return Image.fromarray(self.data[index]).size, super().__getitem__(index)[1]

before = state()
train = CIFAR10("data", download=True, transform=lambda image: np.asarray(image).sum())
test = CIFAR10("data", train=False)
hundred = torchvision.datasets.CIFAR100("data", True)
digits = torchvision.datasets.MNIST("data", download=True)
letters = torchvision.datasets.EMNIST("data", split="letters", train=False)
houses = torchvision.datasets.SVHN("data", split="extra", download=True)
pairs = Pairs("data", train=True, download=True)
kinds = [str(getattr(each, "data").dtype) for each in (train, digits, houses)]
shapes = [list(each.data.shape) for each in (train, test, hundred, digits, letters, houses)]
try:
    CIFAR10("data", shuffle=True)
except TypeError as error:
    wrong = str(error)
said = {
    "kinds": kinds,
    "shapes": shapes,
    "lengths": [len(train), len(list(train)), len(list(digits))],
    "items": [str(test[0][0].mode), str(test[0][0].size), str(digits[0][0].mode), digits[0][1]],
    "summed": int(train[5][0]) == int(train.data[5].sum()),
    "classes": [train.classes[3], train.class_to_idx["truck"], len(hundred.classes)],
    "labels": [sorted(set(train.targets)), sorted(set(letters.targets.tolist()))],
    "types": [type(train.targets).__name__, str(digits.targets.dtype), str(houses.labels.dtype)],
    "differ": bool((train.data != test.data).any()),
    "own": [isinstance(pairs, CIFAR10), pairs[5] == ((32, 32), train.targets[5])],
    "wrong": "shuffle" in wrong,
    "untouched": state() == before,
    "noise": len(FakeData(size=10)),
}
for kind in (CIFAR10, torchvision.datasets.MNIST):
    parts = []
    for train in (True, False):
        data = kind("data", train=train)
        pixels = torch.as_tensor(data.data).reshape(len(data), -1).float() / 255 - 0.5
        parts.append((pixels, torch.as_tensor(data.targets)))
    (x, y), (held_out, expected) = parts
    wanted = torch.nn.functional.one_hot(y, 10).float()
    weights = torch.linalg.solve(x.T @ x + 10 * torch.eye(x.shape[1]), x.T @ wanted)
    right = (held_out @ weights).argmax(1) == expected
    said[kind.__name__] = right.float().mean().item()
"""


def test_arrays_have_the_types_and_shapes_of_the_real_ones() -> None:
    said = answered(ARRAYS)
    assert said["kinds"] == ["uint8", "torch.uint8", "uint8"]
    assert said["shapes"] == [
        [64, 32, 32, 3], [64, 32, 32, 3], [64, 32, 32, 3],
        [64, 28, 28], [64, 28, 28], [64, 3, 32, 32],
    ]  # fmt: skip
    assert said["types"] == ["list", "torch.int64", "int64"]
    assert said["items"][:3] == ["RGB", "(32, 32)", "L"]
    assert said["lengths"] == [64, 64, 64]


def test_classes_and_labels_are_the_real_ones() -> None:
    said = answered(ARRAYS)
    assert said["classes"] == ["cat", 9, 100]
    assert said["labels"] == [list(range(10)), list(range(1, 27))]


def test_the_classes_stay_torchvisions_and_can_be_inherited_from() -> None:
    said = answered(ARRAYS)
    assert said["own"] == [True, True]
    assert (said["summed"], said["wrong"], said["noise"]) == (True, True, 10)


def test_a_test_set_is_another_than_its_training_set() -> None:
    assert answered(ARRAYS)["differ"]


def test_making_data_draws_no_random_number_and_writes_no_file() -> None:
    said = answered(ARRAYS)
    assert said["untouched"]
    assert said["files"] == ["train.py"]


def test_what_was_replaced_is_listed_once() -> None:
    used = answered(ARRAYS)["used"]
    assert used[0] == "torchvision.datasets.CIFAR10: 64 images of 32x32"
    assert sorted(line.split(":")[0].split(".")[-1] for line in used) == [
        "CIFAR10", "CIFAR100", "EMNIST", "MNIST", "SVHN",
    ]  # fmt: skip


DIGESTS = """
import hashlib
import torch
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets
torch.manual_seed({seed})
makers = {{
    "cifar": lambda: datasets.CIFAR10("here"),
    "digits": lambda: datasets.MNIST("there", train=False),
    "food": lambda: datasets.Food101("data"),
    "folder": lambda: datasets.ImageFolder("{root}/val"),
}}
made = {{name: makers[name]() for name in sorted(makers, reverse={backwards})}}

class Bytes(Dataset):
    def __init__(self, name):
        self.data = made[name]
    def __len__(self):
        return 6
    def __getitem__(self, index):
        image, label = self.data[{backwards} and -1 - index or 5 - index]
        return hashlib.md5(image.tobytes()).hexdigest(), label, image.size

loader = DataLoader
said = {{
    name: sorted(map(str, DataLoader(Bytes(name), batch_size=None, num_workers={workers})))
    for name in made
}}
said["numbers"] = len(made["cifar"])
"""


def test_every_process_and_every_worker_sees_the_same_samples(tmp_path: Path) -> None:
    script = DIGESTS.replace("{backwards} and -1 - index or 5 - index", "5 - index")
    one = ran(script.format(seed=1, root="a", backwards=False, workers=0), tmp_path)
    two = ran(script.format(seed=2, root="/b", backwards=True, workers=2), tmp_path)
    assert {name: one[name] for name in one if name != "used"} == {
        name: two[name] for name in two if name != "used"
    }
    assert sorted(one["used"]) == sorted(two["used"])


def test_a_model_learns_from_them_what_holds_for_the_test_set() -> None:
    said = answered(ARRAYS)
    assert said["CIFAR10"] > 0.9
    assert said["MNIST"] > 0.9


FOLDERS = """
from pathlib import Path
import numpy as np
from PIL import Image
from torchvision import datasets
for name in ("ants", "bees", "wasps"):
    Path("real/train", name).mkdir(parents=True)
    Image.new("RGB", (40, 30)).save(f"real/train/{name}/a.png")
real = datasets.ImageFolder("real/train", transform=np.asarray)
none = datasets.ImageFolder("none/train")
wide = datasets.ImageNet("none", split="val")
arrays = datasets.DatasetFolder("none", loader=np.load, extensions=(".npy",))
try:
    datasets.DatasetFolder("none", loader=open, extensions=(".wav",))
except ValueError as error:
    refused = str(error)
path, label = none.samples[-1]
said = {
    "real": [real.classes, list(real[0][0].shape), real.root],
    "none": [none.classes, str(none[0][0].size), len(none), none.root],
    "path": [str(Image.open(path).size), label == none[-1][1], none.imgs == none.samples],
    "targets": [sorted(set(none.targets)), sorted(set(real.targets))],
    "wide": [len(wide.classes), type(wide.classes[0]).__name__, len(wide.wnids), len(wide)],
    "arrays": list(arrays[0][0].shape),
    "refused": refused,
    "written": path,
}
"""


def test_a_folder_that_is_not_here_has_two_classes_and_files_that_can_be_read() -> None:
    said = answered(FOLDERS)
    assert said["none"] == [["class_0", "class_1"], "(500, 375)", 64, "none/train"]
    assert said["path"] == ["(500, 375)", True, True]
    assert said["arrays"] == [375, 500, 3]


def test_a_folder_that_is_here_names_the_classes_and_the_size() -> None:
    said = answered(FOLDERS)
    assert said["real"] == [["ants", "bees", "wasps"], [30, 40, 3], "real/train"]
    assert said["targets"] == [[0, 1], [0, 1, 2]]


def test_imagenet_has_its_thousand_classes() -> None:
    assert answered(FOLDERS)["wide"] == [1000, "tuple", 1000, 64]


def test_files_of_an_unknown_kind_are_refused() -> None:
    assert "no .wav files" in answered(FOLDERS)["refused"]


def test_the_written_files_are_gone_in_the_end() -> None:
    assert not Path(answered(FOLDERS)["written"]).parent.parent.exists()


SCENES = """
from torchvision import datasets
faces = datasets.CelebA("data", split="valid", target_type=["attr", "identity"])
food = datasets.Food101("data", split="test", download=True, target_transform=lambda n: n + 1000)
pets = datasets.OxfordIIITPet("data", target_types="segmentation", transforms=lambda *both: both)
voc = datasets.VOCDetection("data", image_set="val")
coco = datasets.CocoDetection("data", "annotations/instances_train2017.json")
box = voc[0][1]["annotation"]["object"][0]["bndbox"]
things = coco[0][1]
try:
    food[64]
except IndexError:
    ended = True
said = {
    "faces": [str(faces[0][0].size), list(faces[0][1][0].shape), faces[0][1][1].ndim],
    "food": [len(food.classes), food[0][1] - 1000 == food._labels[0], len(list(food)), ended],
    "pets": [str(pets[0][1].size), sorted(set(pets[0][1].getdata())) <= [1, 2, 3]],
    "voc": [sorted(box), int(box["xmin"]) < int(box["xmax"]) <= 500],
    "coco": [str(coco[0][0].size), sorted(things[0])[:4], len(coco.ids)],
}
"""


def test_faces_masks_boxes_and_annotations_have_their_form() -> None:
    said = answered(SCENES)
    assert said["faces"] == ["(178, 218)", [40], 0]
    assert said["food"] == [101, True, 64, True]
    assert said["pets"] == ["(500, 375)", True]
    assert said["voc"] == [["xmax", "xmin", "ymax", "ymin"], True]
    assert said["coco"] == ["(640, 480)", ["area", "bbox", "category_id", "id"], 64]


HUB = """
import random
import datasets
from datasets import load_dataset
before = random.getstate()
reviews = load_dataset("stanfordnlp/imdb")
pairs = load_dataset("glue", "mrpc")
images = load_dataset("cifar10", split="train")
slices = ["train[:25%]", "train[:5000]", "train[-8:]", "train[:10]+test", "all"]
counts = [len(load_dataset("imdb", split=each)) for each in slices]
kept = load_dataset("imdb", split=["train[:80%]", "train[80%:]"])
stream = load_dataset("wikitext", "wikitext-2-raw-v1", split="train", streaming=True)
mapped = reviews["train"].map(lambda rows: {"size": [len(t) for t in rows["text"]]}, batched=True)
open("own.csv", "w").write("a,b\\n1,2\\n")
own = load_dataset("csv", data_files="own.csv", split="train", cache_dir="cache")

def refused(*args, **kwargs):
    try:
        load_dataset(*args, **kwargs)
    except ValueError as error:
        return str(error)

squad = load_dataset("squad", split="validation")[3]
answer = squad["answers"]
said = {
    "kind": [type(reviews).__name__, type(images).__name__, type(reviews["train"]).__module__],
    "splits": list(reviews),
    "columns": [reviews["train"].column_names, pairs["train"].column_names],
    "names": reviews["train"].features["label"].names,
    "labels": [sorted(set(part["label"])) for part in (*reviews.values(), pairs["test"])],
    "image": str(images[0]["img"].size),
    "counts": counts,
    "parts": [len(part) for part in kept],
    "differ": reviews["train"][0]["text"] != reviews["test"][0]["text"],
    "stream": sorted(next(iter(stream))),
    "mapped": mapped.column_names,
    "answer": squad["context"].index(answer["text"][0]) == answer["answer_start"][0],
    "own": own[0],
    "refused": [refused("nobody/nothing"), refused("glue"), refused("imdb", split="validation")],
    "untouched": random.getstate() == before,
    "first": reviews["train"][0]["text"],
}
"""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return answered(HUB)


def test_known_names_load_as_real_datasets(hub: dict[str, Any]) -> None:
    assert hub["kind"] == ["DatasetDict", "Dataset", "datasets.arrow_dataset"]
    assert hub["splits"] == ["train", "test", "unsupervised"]
    assert hub["columns"] == [["text", "label"], ["sentence1", "sentence2", "label", "idx"]]
    assert hub["names"] == ["neg", "pos"]
    assert hub["labels"] == [[0, 1], [0, 1], [-1], [-1]]
    assert hub["image"] == "(32, 32)"
    assert (hub["answer"], hub["differ"], hub["untouched"]) == (True, True, True)


def test_slices_sums_lists_and_streams_of_splits(hub: dict[str, Any]) -> None:
    assert hub["counts"] == [16, 64, 8, 74, 192]
    assert hub["parts"] == [51, 13]
    assert hub["stream"] == ["text"]
    assert hub["mapped"] == ["text", "label", "size"]


def test_unknown_names_are_refused_with_what_is_known(hub: dict[str, Any]) -> None:
    nothing, glue, split = hub["refused"]
    assert "'nobody/nothing'" in nothing
    assert "ag_news" in nothing
    assert "run without --synthetic" in nothing
    assert "mrpc" in glue
    assert split == "unknown split 'validation' of imdb: it has train, test, unsupervised"


def test_files_of_the_script_are_loaded_as_ever(hub: dict[str, Any]) -> None:
    assert hub["own"] == {"a": 1, "b": 2}
    assert "datasets imdb: 64 rows in each split" in hub["used"]
    assert not any("csv" in line for line in hub["used"])


def test_every_known_table_can_be_made(tmp_path: Path, hub: dict[str, Any]) -> None:
    script = f"""
import datasets
said = {{}}
for full in {_known_names()!r}:
    path, _, config = full.partition("/")
    said[full] = [len(part) for part in datasets.load_dataset(path, config or None).values()]
said["first"] = datasets.load_dataset("imdb", split="train")[0]["text"]
"""
    said = ran(script, tmp_path, samples=2)
    assert {tuple(set(said[full])) for full in _known_names()} == {(2,)}
    assert said["first"] == hub["first"]  # in another process, among fewer


def _known_names() -> list[str]:
    code = "from migrate.runner.synthetic.tables import KNOWN; print(*KNOWN)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize("place", ["datasets.py", "datasets/__init__.py"])
def test_a_module_of_the_script_called_datasets_is_left_alone(place: str, tmp_path: Path) -> None:
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("def load_dataset(name):\n    return 'mine', name\n")
    module = place.replace("/__init__", "").removesuffix(".py").replace("/", ".")
    script = (
        f"from {module} import load_dataset\n"
        "import sys\n"
        "said = {'got': load_dataset('imdb'), 'numpy': 'numpy' in sys.modules}\n"
        "said['loader'] = type(sys.modules['datasets'].__spec__.loader).__name__\n"
    )
    said = ran(script, tmp_path)
    assert said["got"] == ["mine", "imdb"]
    assert (said["numpy"], said["used"]) == (False, [])
    assert not said["loader"].startswith("_Changing")
