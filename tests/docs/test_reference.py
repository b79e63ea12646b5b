"""Reference pages and key tables are complete and name existing keys, columns and fields of other libraries."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from markdown_pages import INLINE_CODE, ROOT, find_anchors, iter_prose
from typer.main import get_command

from tunesmith.cli import app
from tunesmith.commands.table import list_config_classes
from tunesmith.compat.trinity_rules import RULES
from tunesmith.config import RunConfig
from tunesmith.experience.store import SCHEMA
from tunesmith.runs.load_config import describe_options

DOCS = ROOT / "docs"
README = ROOT / "README.md"


def load_tables() -> ModuleType:
    """The hook that generates tables; it is not a package."""
    spec = importlib.util.spec_from_file_location("reference_tables", DOCS / "hooks" / "reference_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def list_knobs() -> set[str]:
    """Every key of every file, and the sections that hold them; `<name>` as in `describe_options`."""
    known: set[str] = set()
    for stage in list_config_classes().values():
        for option in describe_options(stage):
            parts = option.key.split(".")
            known |= {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return known


def read_columns(page: Path, first: str) -> list[tuple[list[str], list[str]]]:
    """Inline code of the first two columns of the tables whose first column is called `first`."""
    rows: list[tuple[list[str], list[str]]] = []
    is_table = False
    for _, line in iter_prose(page):
        cells = [cell.strip() for cell in line.replace("\\|", "").split("|")[1:-1]]
        if not line.startswith("|"):
            is_table = False
        elif cells[0] == first:
            is_table = True
        elif is_table and len(cells) > 1 and not cells[0].startswith("---"):
            rows.append((INLINE_CODE.findall(cells[0]), INLINE_CODE.findall(cells[1])))
    return rows


@pytest.mark.parametrize(
    ("page", "first"),
    [("trl", "TRL"), ("verl", "verl"), ("agentscope", "AgentScope")],
)
def test_key_tables_name_knobs_that_exist(page: str, first: str) -> None:
    knobs = list_knobs()
    rows = read_columns(DOCS / "coming_from" / f"{page}.md", first)
    assert len(rows) > 20
    unknown = [key for _, ours in rows for key in ours if key.split("=")[0] not in knobs]
    assert not unknown


def test_trl_table_names_fields_that_exist() -> None:
    trl = pytest.importorskip("trl")
    fields = {
        field.name for kind in (trl.GRPOConfig, trl.SFTConfig, trl.DPOConfig) for field in dataclasses.fields(kind)
    }
    unknown = [key for theirs, _ in read_columns(DOCS / "coming_from" / "trl.md", "TRL") for key in theirs]
    assert not [key for key in unknown if key not in fields]


def test_agentscope_table_lists_every_field() -> None:
    import tunesmith

    rows = read_columns(DOCS / "coming_from" / "agentscope.md", "AgentScope")
    listed = {key for theirs, _ in rows for key in theirs}
    for name in ("TunerModelConfig", "DatasetConfig", "AlgorithmConfig"):
        missing = [field for field in getattr(tunesmith, name).model_fields if f"{name}.{field}" not in listed]
        assert not missing, name


def test_trinity_tables_describe_every_rule_with_existing_keys() -> None:
    tables = load_tables()
    knobs, sections = (
        list_knobs(),
        re.findall(r"<!-- table: trinity (\S+) -->", (DOCS / "coming_from" / "trinity.md").read_text(encoding="utf-8")),
    )
    text = "\n".join(tables.render_trinity(section) for section in sections)
    assert sorted(re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)) == sorted(RULES)
    targets = {
        code.partition(":")[0]
        for line in text.splitlines()
        for code in INLINE_CODE.findall(line.split("|")[2])
        if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+(: \w+)?", code)
    }
    assert len(targets) > 40
    assert not [target for target in targets if target not in knobs and not target.startswith("algorithm.terms_args.")]


def test_run_file_page_has_a_table_for_every_section() -> None:
    page = DOCS / "reference" / "run_file.md"
    shown = set(re.findall(r"<!-- table: knobs tune (\S+) -->", page.read_text(encoding="utf-8"))) - {"."}
    sections = {option.key.split(".")[0] for option in describe_options(RunConfig) if "." in option.key}
    assert shown == sections
    assert sections <= find_anchors(page)


def test_tables_are_rendered_with_defaults_and_options() -> None:
    tables = load_tables()
    assert "| `trainer.learning_rate` | `float|null` | `null` |" in tables.render_knobs("tune", "trainer")
    assert "| `name` | `str|null` |" in (run := tables.render_knobs("tune", "."))
    assert "Experiment-&lt;YYYYmmddHHMMSS&gt;" in run
    assert "`--resume-from STEP`" in tables.render_commands()
    assert "::: tunesmith.tune" in tables.render_api("tunesmith")


def test_run_folder_page_lists_every_column_of_rollouts() -> None:
    rows = read_columns(DOCS / "reference" / "run_folder.md", "column")
    assert [name for names, _ in rows for name in names] == SCHEMA.names


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert not [page for page in pages if f": {page}\n" not in navigation]


def test_the_readme_lists_every_command_in_the_order_of_help():
    groups = {"environments", "model", "search"}  # typer lists them last
    commands = [name for name in get_command(app).commands if name not in groups]
    listed = dict.fromkeys(re.findall(r"^tunesmith ([\w-]+) .* {3}", README.read_text(), flags=re.MULTILINE))
    assert set(listed) == {*commands, *groups}
    assert [name for name in listed if name not in groups] == commands
