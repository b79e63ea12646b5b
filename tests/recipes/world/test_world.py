"""Worlds: every question has one answer in the documents, splits share no entity, output is reproducible."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections import Counter
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from world_solver import Solver, Triple, read_facts

from recipes.world import World, WorldConfig, generate
from recipes.world.config import build_config
from recipes.world.questions import Question
from recipes.world.records import build_record, state_fact, write_record, write_result
from recipes.world.schema import RELATIONS
from recipes.world.world import Document, build_row
from tunesmith.config import DatasetSection
from tunesmith.errors import ConfigError
from tunesmith.judges.answers import match_exact
from tunesmith.judges.transcript import read_transcript
from tunesmith.tasks.load import load_tasks

SMALL = WorldConfig(num_documents=600, num_train=300, num_test=150)
PAGE = Path(__file__).parents[3] / "docs" / "world.md"
KINDS = ("multi_hop", "comparison", "compute")


def draw_questions(config: WorldConfig) -> list[Question]:
    world = World(config=config)
    return [question for split in ("train", "test") for question in world.iter_questions(split)]


@cache
def build_questions() -> list[Question]:
    return draw_questions(SMALL)


@cache
def build_documents() -> dict[str, Document]:
    return {each.document_id: each for each in World(config=SMALL).iter_documents()}


@cache
def read_triples() -> dict[str, list[Triple]]:
    """The facts of each document, read from its text."""
    return {key: read_facts(each.title, each.text) for key, each in build_documents().items() if each.facts}


def test_brute_force_over_the_texts_finds_the_one_answer_of_every_question():
    solver = Solver(triple for triples in read_triples().values() for triple in triples)
    for question in build_questions():
        assert solver.answer(question.question) == {question.answer[0]}, question


def test_gold_passages_suffice_and_none_can_be_left_out():
    for question in build_questions():
        gold = [read_triples()[key] for key in question.passages]
        assert Solver(chain(*gold)).answer(question.question) == {question.answer[0]}
        for left_out in range(len(gold)):
            rest = Solver(chain(*gold[:left_out], *gold[left_out + 1 :]))
            assert rest.answer(question.question) != {question.answer[0]}, question


def test_texts_state_each_fact_once_and_as_it_is():
    stated: Counter[tuple[str, str]] = Counter()
    for key, triples in read_triples().items():
        document = build_documents()[key]
        assert {(document.title, fact.relation, str(fact.value)) for fact in document.facts} == set(triples)
        assert 2 <= len(triples) <= 4
        stated.update((subject, relation) for subject, relation, _ in triples)
    assert set(stated.values()) == {1}


def test_names_and_aliases_belong_to_one_entity():
    world = World(config=WorldConfig(num_documents=20_000, num_train=1, num_test=1, distractors_per_entity=5))
    called: Counter[str] = Counter()
    for number in range(0, world.num_regions, 3):
        for entity in world.build_region(number).entities.values():
            called.update({entity.name, *entity.aliases})
            if "river" in entity.facts:
                called[str(entity.facts["river"].value)] += 1
    assert set(called.values()) == {1}


def test_all_stems_of_a_name_model_differ():
    names = World(config=SMALL).names
    drawn = {names.build_name(number)[:-1] for number in range(names.space)}
    assert len(drawn) == names.space
    with pytest.raises(ValueError, match="outside of"):
        names.build_name(names.space)


def test_an_edition_has_the_same_words_and_other_names_and_facts():
    world = World(config=SMALL)
    original, other = world.build_region(0), world.build_region(0, edition=1)
    assert original == world.build_region(0, edition=0) and original != other
    for entity, edited in zip(original.originals, other.originals, strict=True):
        assert entity.name != edited.name and entity.facts.keys() == edited.facts.keys()


def test_a_record_states_every_fact_of_an_entity_in_a_line():
    (entity, *_) = World(config=SMALL).build_region(0).originals
    first, *lines = write_record(entity).splitlines()
    assert first == f"name {entity.name}"
    assert sorted(lines) == sorted(map(state_fact, entity.facts.values()))
    assert len({line.partition(" ")[0] for line in lines}) == len(lines) == len(entity.facts)
    assert write_result(entity) == f"{build_record(entity)['title']}\n{build_record(entity)['text']}"


def test_distractors_differ_by_one_letter_and_in_every_value():
    region = World(config=SMALL).build_region(0)
    distractors = [each for each in region.entities.values() if each.original]
    assert len(distractors) == len(region.originals) == 24
    for entity in distractors:
        original = region.entities[entity.original]
        assert len(entity.name) == len(original.name)
        assert sum(a != b for a, b in zip(entity.name, original.name, strict=True)) == 1
        assert set(entity.facts) == set(original.facts)
        assert all(fact.value != original.facts[name].value for name, fact in entity.facts.items())


def test_lives_are_plausible():
    for number in range(World(config=SMALL).num_regions):
        entities = World(config=SMALL).build_region(number).entities
        for entity in entities.values():
            if "founder" in entity.facts:
                born = entities[entity.facts["founder"].target].facts["birth_year"].value
                assert born + 22 <= entity.facts["firm_founded"].value <= born + 35
            if "author" in entity.facts:
                born = entities[entity.facts["author"].target].facts["birth_year"].value
                assert born + 22 <= entity.facts["work_year"].value <= born + 85
            if "mentor" in entity.facts:
                teacher = entities[entity.facts["mentor"].target]
                assert teacher.facts["birth_year"].value < entity.facts["birth_year"].value


def test_train_and_test_share_no_entity_and_no_name():
    sides: dict[str, set[str]] = {"train": set(), "test": set()}
    world = World(config=SMALL)
    for question in build_questions():
        region = world.build_region(int(question.entities[0].partition("/")[0][1:]))
        sides[question.split].update(question.entities)
        for entity_id in question.entities:
            assert entity_id in region.entities
            sides[question.split].update({region.entities[entity_id].name, *region.entities[entity_id].aliases})
    assert sides["train"] and sides["test"] and not sides["train"] & sides["test"]


def test_questions_do_not_contain_their_answer():
    for question in build_questions():
        for accepted in question.answer:
            is_named = re.search(rf"\b{re.escape(accepted)}\b", question.question) is not None
            assert not is_named or (question.kind == "comparison" and " or " in question.question), question


def test_accepted_answers_score_one():
    for question in build_questions()[:100]:
        for accepted in question.answer:
            assert match_exact({"answer": list(question.answer)}, read_transcript(f"#### {accepted}")) == 1.0


def test_yes_and_no_are_balanced_in_every_form():
    config = WorldConfig(num_documents=2000, num_train=1200, num_test=0, kind_shares={"comparison": 1})
    counts: Counter[tuple[bool, str]] = Counter()
    for question in draw_questions(config):
        counts["same" in question.question, question.answer[0]] += 1
    for is_equality in (True, False):
        num_yes, num_no = counts[is_equality, "yes"], counts[is_equality, "no"]
        assert abs(num_yes - num_no) <= World(config=config).num_regions and num_yes > 100


def test_sizes_kinds_and_hops_are_as_asked():
    counts = Counter((question.split, question.kind) for question in build_questions())
    assert [counts["train", kind] for kind in KINDS] == [150, 75, 75]
    assert sum(counts["test", kind] for kind in KINDS) == 150
    for kind in KINDS:
        assert {each.hops for each in build_questions() if each.kind == kind} == {1, 2, 3}
    config = WorldConfig(num_train=50, num_test=10, min_hops=2, max_hops=2, kind_shares={"compute": 1})
    assert {(each.kind, each.hops) for each in draw_questions(config)} == {("compute", 2)}
    assert len({each.question for each in build_questions()}) == 450


def test_a_document_is_rebuilt_alone():
    world = World(config=SMALL)
    documents = list(build_documents().values())
    assert len(documents) == 600 and len({each.document_id for each in documents}) == 600
    for number in (0, 71, 72, 575, 576, 599):
        assert world.build_document(number) == documents[number]
    with pytest.raises(IndexError, match="of 600"):
        world.build_document(600)


def test_with_one_wording_each_relation_is_stated_in_its_first_form():
    def count_first_forms(num_wordings: int) -> tuple[int, int]:
        world = World(config=WorldConfig(num_documents=200, num_wordings=num_wordings))
        stated = [
            RELATIONS[fact.relation].statements[0].split("{s}")[-1].format(v=fact.value) in document.text
            for document in world.iter_documents()
            for fact in document.facts
        ]
        return sum(stated), len(stated)

    found, total = count_first_forms(1)
    assert found == total > 200
    assert count_first_forms(3)[0] < 0.7 * total


def test_irrelevant_documents_name_no_entity():
    documents = list(build_documents().values())
    irrelevant = [each for each in documents if not each.facts]
    assert len(irrelevant) >= 60
    words = {word for each in documents if each.facts for word in each.title.split()}
    assert not any(each.title.split()[0] in words for each in irrelevant)


def test_files_are_a_function_of_the_knobs(tmp_path: Path):
    knobs = {"num_documents": 300, "num_train": 40, "num_test": 20}
    figures = generate(tmp_path / "a", **knobs, seed=3)
    generate(tmp_path / "b", **knobs, seed=3)
    generate(tmp_path / "c", **knobs, seed=4)
    assert figures == {"documents": 300, "regions": 3, "train questions": 40, "test questions": 20}
    for name in ("documents.jsonl", "train.jsonl", "test.jsonl"):
        first, second, other = ((tmp_path / folder / name).read_bytes() for folder in "abc")
        assert first == second != other
    documents = [json.loads(line) for line in (tmp_path / "a/documents.jsonl").read_text().splitlines()]
    assert [row["id"] for row in documents] == [f"d{number}" for number in range(300)]
    assert set(documents[0]) == {"id", "title", "text"}
    tasks = load_tasks(
        DatasetSection(path=str(tmp_path / "a/train.jsonl"), required_fields=["question", "answer"]), name="world"
    )
    row = tasks[0].row
    assert set(row) == {"id", "question", "answer", "kind", "hops", "passages", "entities", "split"}
    assert isinstance(row["answer"], list) and set(row["passages"]) <= {each["id"] for each in documents}


def test_the_documentation_shows_rows_of_the_default_world():
    world = World(config=WorldConfig())
    rows = [build_row(each, number=number) for number, each in enumerate(world.iter_questions("train"))]
    shown = [json.loads(line) for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith('{"id"')]
    questions = [each for each in shown if "question" in each]
    assert [each["kind"] for each in questions] == list(KINDS)
    for each in questions:
        row = rows[int(each["id"].removeprefix("train-"))]
        assert each == {key: row[key] for key in each}
    (document,) = [each for each in shown if "text" in each]
    assert document["text"] == world.build_document(int(document["id"][1:])).text


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**40),
    num_documents=st.integers(250, 600),
    distractors=st.integers(0, 2),
    irrelevant=st.floats(0, 0.2),
    hops=st.tuples(st.integers(1, 3), st.integers(1, 3)).map(sorted),
    kinds=st.sets(st.sampled_from(KINDS), min_size=1),
)
def test_any_world_is_consistent(seed, num_documents, distractors, irrelevant, hops, kinds):
    config = WorldConfig(
        seed=seed,
        num_documents=num_documents + 72 * distractors,
        num_train=12,
        num_test=6,
        distractors_per_entity=distractors,
        irrelevant_share=irrelevant,
        min_hops=hops[0],
        max_hops=hops[1],
        kind_shares=dict.fromkeys(kinds, 1.0),
    )
    documents = list(World(config=config).iter_documents())
    assert len(documents) == config.num_documents
    assert sum(not each.facts for each in documents) >= irrelevant * config.num_documents - 1
    solver = Solver(triple for each in documents if each.facts for triple in read_facts(each.title, each.text))
    questions = draw_questions(config)
    assert Counter(each.split for each in questions) == {"train": 12, "test": 6}
    for question in questions:
        assert solver.answer(question.question) == {question.answer[0]}
        assert hops[0] <= question.hops <= hops[1] and question.kind in kinds
    sides = [
        {name for each in questions if each.split == split for name in each.entities} for split in ("train", "test")
    ]
    assert not sides[0] & sides[1]


def test_memory_does_not_grow_with_the_documents():
    def measure_peak(num_documents: int) -> int:
        tracemalloc.start()
        for _ in World(config=WorldConfig(num_documents=num_documents, num_train=1, num_test=1)).iter_documents():
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    measure_peak(500)
    assert measure_peak(5000) < 1.5 * measure_peak(500) + 100_000


def test_wrong_knobs_are_one_sentence(tmp_path: Path):
    for knobs, message in (
        ({"num_documents": 100}, "num_documents=100 holds 1 regions"),
        ({"num_train": 50_000}, "num_train=50000 needs 50 regions, at 1000 questions each, of the 11 for train"),
        (
            {"num_train": 500, "max_hops": 1, "kind_shares": {"multi_hop": 1}, "num_documents": 200},
            "are missing; raise num_documents, or lower num_train",
        ),
        ({"min_hops": 3, "max_hops": 2}, "min_hops=3 is above max_hops=2"),
        ({"kind_shares": {"compute": 0}}, "not all 0"),
        ({"kind_shares": {"riddle": 1}}, "kind_shares"),
        ({"distractors": 2}, "did you mean 'distractors_per_entity'"),
        ({"irrelevant_share": 1.5}, "irrelevant_share=1.5"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)) as caught:
            generate(tmp_path, **knobs)
        assert "\n" not in str(caught.value)
    assert build_config({"seed": 7}).seed == 7
