"""A fictional knowledge base and questions about it, written as JSON lines.

Everything is a function of the config: a document or region is rebuilt from its number, and generation holds one
region and the texts of its questions in memory. Train and test questions are about different regions, so they have no
entity in common; the documents of all regions are in one knowledge base.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from recipes.world.config import QuestionKind, Split, WorldConfig, build_config
from recipes.world.questions import Question, QuestionWriter
from recipes.world.region import (
    ENTITIES,
    NUM_STEMS,
    Entity,
    Fact,
    NameModel,
    Region,
    build_name_model,
    build_region,
    choose,
)
from recipes.world.schema import OPENINGS, PASSAGES, REFERENCES, RELATIONS
from tunesmith.errors import ConfigError

IRRELEVANT = (
    ("{name} moss", "{name} moss grows on {place}. It turns {colour} in {season}."),
    ("{name} stone", "{name} stone is found under {place}. Polished it looks {colour}."),
    ("{name} moth", "The {name} moth flies over {place} in {season}. Its wings are {colour}."),
    ("{name} soup", "{name} soup is a {colour} dish for {season}. Herbs from {place} go into it."),
    ("{name} knot", "The {name} knot ties {colour} cloth. It was first seen near {place} in {season}."),
)
PLACES = ("old walls", "wet meadows", "gravel banks", "tall pines", "salt marshes", "quiet ponds")
COLOURS = ("amber", "black", "blue", "brown", "crimson", "green", "grey", "white", "yellow")
SEASONS = ("spring", "early summer", "late summer", "autumn", "winter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One passage of the knowledge base."""

    document_id: str
    title: str
    text: str
    facts: tuple[Fact, ...]
    """What the text states; empty for an irrelevant passage."""


def write_passages(region: Region, *, seed: int, num_wordings: int) -> Iterator[tuple[Entity, list[Fact], str]]:
    """All passages of a region with their entity and facts, in a random order; each fact is stated in one of them."""
    rng = random.Random(f"{seed}/wording/{region.number}")
    passages = [
        (entity, [entity.facts[name] for name in relations if name in entity.facts])
        for entity in region.entities.values()
        for relations in PASSAGES[entity.kind]
    ]
    rng.shuffle(passages)
    for entity, facts in passages:
        rng.shuffle(facts)
        yield entity, facts, write_passage(entity, facts, num_wordings=num_wordings, rng=rng)


def write_passage(entity: Entity, facts: list[Fact], *, num_wordings: int, rng: random.Random) -> str:
    """An opening with the name, then a sentence for each fact."""
    alias = entity.aliases[0]
    sentences = [choose(rng, OPENINGS[entity.kind]).format(name=entity.name, alias=alias)]
    for fact in facts:
        subject = choose(rng, REFERENCES[entity.kind]).format(name=entity.name, alias=alias)
        text = choose(rng, RELATIONS[fact.relation].statements[:num_wordings]).format(s=subject, v=fact.value)
        sentences.append(text[0].upper() + text[1:])
    return " ".join(sentences)


def write_irrelevant(number: int, *, stem: int, seed: int, names: NameModel) -> Document:
    """A passage about an invented plant, stone, animal, dish or knot."""
    rng = random.Random(f"{seed}/irrelevant/{number}")
    title, text = rng.choice(IRRELEVANT)
    words = {
        "name": names.build_name(stem),
        "place": rng.choice(PLACES),
        "colour": rng.choice(COLOURS),
        "season": rng.choice(SEASONS),
    }
    return Document(document_id=f"d{number}", title=title.format(**words), text=text.format(**words), facts=())


NUM_PASSAGES = sum(len(PASSAGES[kind]) for kind in ENTITIES)
"""Passages about the original entities of a region."""
MAX_QUESTIONS_PER_REGION = 1000
"""More questions about 24 entities would be hard to find and hardly differ."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Documents, regions and questions of a config, built when they are asked for.

    The first `num_regions * passages_per_region` documents are passages in the order of the regions, the rest are
    irrelevant passages; with their share, `irrelevant_share`, at least, since regions are always complete.
    """

    config: WorldConfig

    def __post_init__(self) -> None:
        needed = sum(count > 0 for count in (self.config.num_train, self.config.num_test))
        if self.num_regions < needed:
            raise ConfigError(
                f"num_documents={self.config.num_documents} holds {self.num_regions} regions of "
                f"{self.passages_per_region} passages, but train and test questions need {needed}: raise num_documents "
                "or lower distractors_per_entity or irrelevant_share"
            )

    @property
    def passages_per_region(self) -> int:
        return NUM_PASSAGES * (1 + self.config.distractors_per_entity)

    @property
    def num_regions(self) -> int:
        return int(self.config.num_documents * (1 - self.config.irrelevant_share) / self.passages_per_region + 1e-9)

    @cached_property
    def names(self) -> NameModel:
        num_irrelevant = self.config.num_documents - self.num_regions * self.passages_per_region
        return build_name_model(num_stems=self.num_regions * NUM_STEMS + num_irrelevant, seed=self.config.seed)

    @cached_property
    def test_regions(self) -> frozenset[int]:
        """Regions of test questions: as large a share as theirs of all questions, but at least one of each split."""
        total = self.config.num_train + self.config.num_test
        if not self.config.num_test:
            return frozenset()
        share = round(self.num_regions * self.config.num_test / total)
        size = max(1, min(share, self.num_regions - (self.config.num_train > 0)))
        return frozenset(random.Random(f"{self.config.seed}/split").sample(range(self.num_regions), size))

    def build_region(self, number: int, *, edition: int = 0) -> Region:
        """The entities of a region. Edition 0 is the world; others use the same words for other names, facts and
        references, so that a model can learn to search and read from them, and no fact of the world."""
        return build_region(
            number,
            seed=(edition << 32) + self.config.seed,
            names=self.names,
            num_distractors=self.config.distractors_per_entity,
        )

    def build_passages(self, region: Region) -> list[Document]:
        """The passages of a region; all but the last documents of the world are such passages."""
        first = region.number * self.passages_per_region
        written = write_passages(region, seed=self.config.seed, num_wordings=self.config.num_wordings)
        return [
            Document(document_id=f"d{first + offset}", title=entity.name, text=text, facts=tuple(facts))
            for offset, (entity, facts, text) in enumerate(written)
        ]

    def build_document(self, number: int) -> Document:
        """Document `d<number>`, without the documents before it."""
        if not 0 <= number < self.config.num_documents:
            raise IndexError(f"document {number} of {self.config.num_documents}")
        region, offset = divmod(number, self.passages_per_region)
        if region < self.num_regions:
            return self.build_passages(self.build_region(region))[offset]
        stem = self.num_regions * NUM_STEMS + number - self.num_regions * self.passages_per_region
        return write_irrelevant(number, stem=stem, seed=self.config.seed, names=self.names)

    def iter_documents(self) -> Iterator[Document]:
        for number in range(self.num_regions):
            yield from self.build_passages(self.build_region(number))
        for number in range(self.num_regions * self.passages_per_region, self.config.num_documents):
            yield self.build_document(number)

    def iter_questions(self, split: Split) -> Iterator[Question]:
        """The questions of a split, by region, the kinds of a region mixed; ConfigError if there are too few."""
        for _, question in self.iter_questions_by_region(split):
            yield question

    def iter_questions_by_region(self, split: Split) -> Iterator[tuple[Region, Question]]:
        """As `iter_questions`, each with its region."""
        numbers = [each for each in range(self.num_regions) if (each in self.test_regions) == (split == "test")]
        random.Random(f"{self.config.seed}/order/{split}").shuffle(numbers)
        counts = {kind: self.config.count_questions(kind, split=split) for kind in self.config.kind_shares}
        total = sum(counts.values())
        needed = -(-total // MAX_QUESTIONS_PER_REGION)
        if needed > len(numbers):
            raise ConfigError(
                f"num_{split}={total} needs {needed} regions, at {MAX_QUESTIONS_PER_REGION} questions each, of the "
                f"{len(numbers)} for {split}: raise num_documents, which is {self.config.num_documents}"
            )
        for place, number in enumerate(numbers[:total]):
            region = self.build_region(number)
            rng = random.Random(f"{self.config.seed}/questions/{number}")
            writer = QuestionWriter(
                region,
                passage_ids={fact: each.document_id for each in self.build_passages(region) for fact in each.facts},
                split=split,
                min_hops=self.config.min_hops,
                max_hops=self.config.max_hops,
                rng=rng,
            )
            num_left = min(len(numbers), total) - place
            kinds = [kind for kind, count in counts.items() for _ in range(-(-count // num_left))]
            rng.shuffle(kinds)
            exhausted: set[QuestionKind] = set()
            for kind in kinds:
                question = None if kind in exhausted else writer.draw(kind)
                if question is None:
                    exhausted.add(kind)
                else:
                    counts[kind] -= 1
                    yield region, question
        if any(counts.values()):
            raise ConfigError(
                f"num_{split}={total}: {len(numbers)} regions have too few different questions, "
                f"{sum(counts.values())} are missing; raise num_documents, or lower num_{split}"
            )


def generate(out_dir: Path, **knobs: Any) -> dict[str, int]:
    """Write documents.jsonl, train.jsonl and test.jsonl; the keyword arguments are the fields of `WorldConfig`."""
    config = build_config(knobs)
    world = World(config=config)
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    figures = {"regions": world.num_regions}
    splits: tuple[Split, ...] = ("train", "test")
    for split in splits:
        with (out_dir / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            number = 0
            for number, question in enumerate(world.iter_questions(split), start=1):
                file.write(json.dumps(build_row(question, number=number - 1)) + "\n")
        figures[f"{split} questions"] = number
    with (out_dir / "documents.jsonl").open("w", encoding="utf-8") as file:
        for document in world.iter_documents():
            row = {"id": document.document_id, "title": document.title, "text": document.text}
            file.write(json.dumps(row) + "\n")
    return {"documents": config.num_documents, **figures}


def build_row(question: Question, *, number: int) -> dict[str, Any]:
    return {
        "id": f"{question.split}-{number}",
        "question": question.question,
        "answer": list(question.answer),
        "kind": question.kind,
        "hops": question.hops,
        "passages": list(question.passages),
        "entities": list(question.entities),
        "split": question.split,
    }
