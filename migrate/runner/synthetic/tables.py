"""The columns of well-known data sets of the Hugging Face hub, and how their cells are made up.

`KNOWN` maps a name, or name/configuration, to its table; `OWNERS` says under whose name the hub
has it as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from migrate.runner.synthetic.images import CIFAR10, encoded, generator, numbered, picture

_COMMON = """
the a of and to in is was it that for on with as at by this from they we an be have not are one all
some more when there can time people first new good day old little own right long small next early
"""
_TOPICS = """
river mountain garden winter kitchen market engine bridge music school doctor letter horse island
museum captain forest window village theatre ocean teacher station planet machine painter castle
bicycle soldier mirror library temple desert farmer thunder harbour violin carpet orchard lantern
feather pepper saddle tunnel compass ladder basket velvet marble copper
"""
COMMON = _COMMON.split()
TOPICS = _TOPICS.split()


@dataclass(frozen=True)
class Row:
    """One row, for the columns that make its cells."""

    name: str
    split: str
    index: int
    label: int

    def words(self, count: int, column: str) -> list[str]:
        """About that many words, a third of them on the topic of the row's label."""
        draw = generator(self.name, self.split, self.index, column)
        mine = [TOPICS[(5 * self.label + number) % len(TOPICS)] for number in range(5)]
        length = int(draw.integers(max(1, count // 2), count + count // 2 + 1))
        known = mine * (len(COMMON) // 10) + COMMON
        return [known[place] for place in draw.integers(0, len(known), length)]


@dataclass(frozen=True)
class Column:
    """A column: its type in Hugging Face's terms, and its cell in a row."""

    feature: Callable[[Any], Any]
    value: Callable[[Row], Any]


@dataclass(frozen=True)
class Table:
    """A data set."""

    columns: dict[str, Column]
    splits: Sequence[str] = ("train", "test")
    classes: int = 2


def text(count: int, column: str = "text") -> Column:
    """A few sentences of about `count` words."""
    return Column(_string, lambda row: _sentences(row.words(count, column)))


def number(first: int = 0) -> Column:
    """The row's number."""
    return Column(lambda hf: hf.Value("int32"), lambda row: first + row.index)


def label(names: Sequence[str], hidden: Sequence[str] = ()) -> Column:
    """The row's label; -1 in the splits whose labels nobody tells."""
    return Column(
        lambda hf: hf.ClassLabel(names=list(names)),
        lambda row: -1 if row.split in hidden else row.label % len(names),
    )


def image(size: tuple[int, int], mode: str = "RGB") -> Column:
    """An image, as the bytes of its file."""
    kind = "PNG" if max(size) < 100 else "JPEG"

    def value(row: Row) -> dict[str, Any]:
        made = picture(row.name, row.split, row.index, row.label, size, mode)
        return {"bytes": encoded(made, kind), "path": None}

    return Column(lambda hf: hf.Image(), value)


def score() -> Column:
    """A number between 0 and 5."""
    return Column(lambda hf: hf.Value("float32"), lambda row: float(row.label % 6))


def answers() -> Column:
    """SQuAD's: the answer is the first words of the context."""
    return Column(
        lambda hf: {
            "text": _list(hf, hf.Value("string")),
            "answer_start": _list(hf, hf.Value("int32")),
        },
        lambda row: {"text": [_sentences(row.words(100, "context"))[:12]], "answer_start": [0]},
    )


def pair(*languages: str) -> Column:
    """A sentence for each language, of the same words as ever."""
    return Column(
        lambda hf: hf.Translation(languages=list(languages)),
        lambda row: {each: _sentences(row.words(15, each)) for each in languages},
    )


def tokens(count: int) -> Column:
    """A list of words."""
    return Column(lambda hf: _list(hf, hf.Value("string")), lambda row: row.words(count, "tokens"))


def tags(names: Sequence[str], count: int) -> Column:
    """A tag for each of the words of `tokens(count)`: of the same class wherever it is used."""

    def value(row: Row) -> list[int]:
        return [len(word) % len(names) for word in row.words(count, "tokens")]

    return Column(lambda hf: _list(hf, hf.ClassLabel(names=list(names))), value)


def article() -> Column:
    """A line of an encyclopedia: nothing, a title, or a paragraph."""

    def value(row: Row) -> str:
        if row.index % 4 == 0:
            return ""
        if row.index % 4 == 1:
            return f" = {' '.join(row.words(2, 'title'))} = \n"
        return f" {' '.join(row.words(90, 'text'))} . \n"

    return Column(_string, value)


def _string(hf: Any) -> Any:
    return hf.Value("string")


def _list(hf: Any, feature: Any) -> Any:
    return hf.Sequence(feature)


def _sentences(words: list[str]) -> str:
    starts = range(0, len(words), 12)
    return " ".join(f"{' '.join(words[start : start + 12]).capitalize()}." for start in starts)


def _classified(
    count: int, names: Sequence[str], splits: Sequence[str] = ("train", "test"), **more: Column
) -> Table:
    return Table({"text": text(count), "label": label(names), **more}, splits, len(names))


def _glue(first: str, second: str, names: Sequence[str], **more: Any) -> Table:
    splits = more.get("splits", ("train", "validation", "test"))
    hidden = [split for split in splits if split.startswith("test")]
    columns = {name: text(20, name) for name in (first, second) if name}
    columns["label"] = label(names, hidden) if names else score()
    return Table({**columns, "idx": number()}, splits, len(names) or 6)


def _pictures(
    size: tuple[int, int],
    names: Sequence[str],
    splits: Sequence[str] = ("train", "test"),
    columns: Sequence[str] = ("image", "label"),
    mode: str = "RGB",
) -> Table:
    made = {columns[0]: image(size, mode), columns[1]: label(names)}
    return Table(made, splits, len(names))


THREE = ("train", "validation", "test")
NLI = ("entailment", "neutral", "contradiction")
TWO = ("not_entailment", "entailment")
DIGITS = [str(digit) for digit in range(10)]
STARS = ("1 star", "2 star", "3 stars", "4 stars", "5 stars")
FEELINGS = ("sadness", "joy", "love", "anger", "fear", "surprise")
NEWS = ("World", "Sports", "Business", "Sci/Tech")
NER = ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC")
MNLI_SPLITS = (
    "train", "validation_matched", "validation_mismatched", "test_matched", "test_mismatched",
)  # fmt: skip
WIKITEXT = ("wikitext-2-raw-v1", "wikitext-2-v1", "wikitext-103-raw-v1", "wikitext-103-v1")
TWEETS = {"emoji": 20, "emotion": 4, "hate": 2, "irony": 2, "offensive": 2, "sentiment": 3}
PLAIN_TEXT = Table({"text": text(120)}, ("train",))
SQUAD = Table(
    {
        "id": Column(_string, lambda row: f"{row.split}-{row.index:06d}"),
        "title": text(3, "title"),
        "context": text(100, "context"),
        "question": text(10, "question"),
        "answers": answers(),
    },
    ("train", "validation"),
)
KNOWN: dict[str, Table] = {
    "ag_news": _classified(40, NEWS),
    "alpaca": Table(
        {name: text(20, name) for name in ("instruction", "input", "output", "text")}, ("train",)
    ),
    "amazon_polarity": Table(
        {"label": label(("negative", "positive")), "title": text(5, "title"), "content": text(80)}
    ),
    "beans": _pictures((500, 500), numbered(3), THREE, ("image", "labels")),
    "bookcorpus": PLAIN_TEXT,
    "cats_vs_dogs": _pictures((500, 375), ("cat", "dog"), ("train",), ("image", "labels")),
    "cifar10": _pictures((32, 32), CIFAR10, columns=("img", "label")),
    "cifar100": Table(
        {
            "img": image((32, 32)),
            "fine_label": label(numbered(100)),
            "coarse_label": label(numbered(20)),
        },
        classes=100,
    ),
    "cnn_dailymail": Table(
        {"article": text(300), "highlights": text(40, "highlights"), "id": text(1, "id")}, THREE
    ),
    "conll2003": Table(
        {
            "id": Column(_string, lambda row: str(row.index)),
            "tokens": tokens(14),
            "pos_tags": tags(numbered(47), 14),
            "chunk_tags": tags(numbered(23), 14),
            "ner_tags": tags(NER, 14),
        },
        THREE,
    ),
    "dbpedia_14": Table(
        {"label": label(numbered(14)), "title": text(3, "title"), "content": text(50)}, classes=14
    ),
    "emotion": _classified(18, FEELINGS, THREE),
    "fashion_mnist": _pictures((28, 28), numbered(10), mode="L"),
    "food101": _pictures((512, 512), numbered(101), ("train", "validation")),
    "glue/ax": _glue("premise", "hypothesis", NLI, splits=("test",)),
    "glue/cola": _glue("sentence", "", ("unacceptable", "acceptable")),
    "glue/mnli": _glue("premise", "hypothesis", NLI, splits=MNLI_SPLITS),
    "glue/mrpc": _glue("sentence1", "sentence2", ("not_equivalent", "equivalent")),
    "glue/qnli": _glue("question", "sentence", TWO[::-1]),
    "glue/qqp": _glue("question1", "question2", ("not_duplicate", "duplicate")),
    "glue/rte": _glue("sentence1", "sentence2", TWO[::-1]),
    "glue/sst2": _glue("sentence", "", ("negative", "positive")),
    "glue/stsb": _glue("sentence1", "sentence2", ()),
    "glue/wnli": _glue("sentence1", "sentence2", TWO),
    "gsm8k": Table(
        {
            "question": text(45, "question"),
            "answer": Column(_string, lambda row: f"{' '.join(row.words(30, 'answer'))}\n#### 7"),
        }
    ),
    "imagenet-1k": _pictures((500, 375), numbered(1000), THREE),
    "imdb": Table(
        {"text": text(230), "label": label(("neg", "pos"), ["unsupervised"])},
        ("train", "test", "unsupervised"),
    ),
    "mnist": _pictures((28, 28), DIGITS, mode="L"),
    "opus_books": Table({"id": number(), "translation": pair("en", "fr")}, ("train",)),
    "openwebtext": PLAIN_TEXT,
    "rotten_tomatoes": _classified(21, ("neg", "pos"), THREE),
    "samsum": Table(
        {"id": text(1, "id"), "dialogue": text(90, "dialogue"), "summary": text(20, "summary")},
        THREE,
    ),
    "snli": Table(
        {"premise": text(14, "premise"), "hypothesis": text(8, "hypothesis"), "label": label(NLI)},
        ("test", "validation", "train"),
        3,
    ),
    "squad": SQUAD,
    "squad_v2": SQUAD,
    "sst2": Table(
        {
            "idx": number(),
            "sentence": text(20, "sentence"),
            "label": label(("negative", "positive"), ["test"]),
        },
        THREE,
    ),
    "svhn/cropped_digits": _pictures((32, 32), DIGITS, ("train", "test", "extra")),
    "tiny-imagenet": _pictures((64, 64), numbered(200), ("train", "valid")),
    "TinyStories": Table({"text": text(170)}, ("train", "validation")),
    "trec": Table(
        {
            "text": text(10),
            "coarse_label": label(("ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM")),
            "fine_label": label(numbered(50)),
        },
        classes=50,
    ),
    "xsum": Table(
        {"document": text(300), "summary": text(22, "summary"), "id": text(1, "id")}, THREE
    ),
    "yelp_polarity": _classified(130, ("1", "2")),
    "yelp_review_full": Table({"label": label(STARS), "text": text(130)}, classes=5),
}
KNOWN |= {f"tweet_eval/{name}": _classified(20, numbered(n), THREE) for name, n in TWEETS.items()}
KNOWN |= {
    f"wikitext/{name}": Table({"text": article()}, ("test", "train", "validation"))
    for name in WIKITEXT
}
OWNERS: dict[str, Sequence[str]] = {
    "ag_news": ("fancyzhx", "wangrongsheng"),
    "alpaca": ("tatsu-lab",),
    "amazon_polarity": ("fancyzhx",),
    "beans": ("AI-Lab-Makerere",),
    "bookcorpus": ("bookcorpus",),
    "cats_vs_dogs": ("microsoft",),
    "cifar10": ("uoft-cs",),
    "cifar100": ("uoft-cs",),
    "cnn_dailymail": ("abisee",),
    "conll2003": ("eriktks",),
    "dbpedia_14": ("fancyzhx",),
    "emotion": ("dair-ai",),
    "fashion_mnist": ("zalando-datasets",),
    "food101": ("ethz",),
    "glue": ("nyu-mll",),
    "gsm8k": ("openai",),
    "imagenet-1k": ("ILSVRC",),
    "imdb": ("stanfordnlp",),
    "mnist": ("ylecun",),
    "openwebtext": ("Skylion007",),
    "opus_books": ("Helsinki-NLP",),
    "rotten_tomatoes": ("cornell-movie-review-data",),
    "samsum": ("Samsung", "knkarthick"),
    "snli": ("stanfordnlp",),
    "squad": ("rajpurkar",),
    "squad_v2": ("rajpurkar",),
    "sst2": ("stanfordnlp",),
    "svhn": ("ufldl-stanford",),
    "tiny-imagenet": ("zh-plus", "Maysee"),
    "TinyStories": ("roneneldan",),
    "trec": ("CogComp",),
    "tweet_eval": ("cardiffnlp",),
    "wikitext": ("Salesforce",),
    "xsum": ("EdinburghNLP",),
    "yelp_polarity": ("fancyzhx",),
    "yelp_review_full": ("Yelp",),
}
