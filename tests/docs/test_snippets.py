"""Snippets of README.md and docs/: programs run, settings are valid, commands exist. The rest is marked with a reason.

`markdown_pages` documents the directives. A snippet that is not run is a skipped test, so the summary lists its reason.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from markdown_pages import PAGES, ROOT, Snippet, find_snippets, iter_inline_code
from omegaconf import OmegaConf
from shell_commands import check_line, find_errors, is_shell, iter_commands

from forked_programs import LOG, start_forked_programs
from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.commands.run.config import PipelineConfig, plan_stages
from tunesmith.commands.table import list_config_classes
from tunesmith.compat.trinity_yaml import is_trinity_file, translate_trinity_file
from tunesmith.config import AlgorithmSection, PreferenceConfig, RunConfig, Section, SftConfig
from tunesmith.errors import ConfigError
from tunesmith.experience.table import build_operators
from tunesmith.runs.load_config import build_section

SNIPPETS = [snippet for page in PAGES for snippet in find_snippets(page)]
LANGUAGES = {"python", "yaml", "json", "jsonl", "bash", "text", ""}
REQUIRED: dict[str, dict[str, Any]] = {
    "tune": {"model": {"path": "model"}, "eval_datasets": {"test": {"path": "data"}}},
    "sft": {"model": {"path": "model", "lora": {}}, "train_dataset": {"path": "data"}},
    "prefer": {"model": {"path": "model"}, "train_dataset": {"path": "data"}},
    "prepare": {"data": {"path": "data"}},
    "eval": {"models": {"a": "model"}, "eval_datasets": {"test": {"path": "data"}}},
    "export": {"path": "model"},
    "run": {},
    "collect": {"model": {"path": "model"}},
    "pass_rate": {"model": {"path": "model"}},
}
"""Required keys of each file, which an excerpt may leave out."""

RUN_BY_OTHERS = {
    "README.md": "tests/docs/test_readme.py",
    "docs/algorithms.md": "tests/recipes/test_own_algorithm_recipe.py",
    "docs/pipeline.md": "tests/recipes/test_own_algorithm_recipe.py",
    "docs/python.md": "tests/api/test_python_guide.py",
}
"""Pages whose programs are run by a test of their own."""


def select(*languages: str) -> list[Any]:
    found = [each for each in SNIPPETS if find_language(each) in languages]
    return [pytest.param(each, id=each.place) for each in found]


def find_language(snippet: Snippet) -> str:
    """The language of a snippet; a block without one is a block of shell lines if it starts with a command."""
    if not snippet.language:
        return "bash" if is_shell(snippet.text) else "text"
    return {"sh": "bash", "console": "bash", "shell": "bash"}.get(snippet.language, snippet.language)


@pytest.mark.parametrize("snippet", [pytest.param(each, id=each.place) for each in SNIPPETS])
def test_snippet_has_a_known_language(snippet: Snippet) -> None:
    assert find_language(snippet) in LANGUAGES, f"{snippet.place}: {snippet.language!r} is not among {LANGUAGES}"


@pytest.mark.parametrize("snippet", select("python"))
def test_python_snippet_is_run_or_says_why_not(snippet: Snippet) -> None:
    ast.parse(snippet.text, filename=snippet.place)
    if "not run" in snippet.directives:
        assert snippet.directives["not run"], f"{snippet.place}: `not run` needs a reason"
        pytest.skip(f"{snippet.place}: {snippet.directives['not run']}")
    other = RUN_BY_OTHERS.get(snippet.page.relative_to(ROOT).as_posix())
    if other is not None:
        assert snippet.page.name in (ROOT / other).read_text(encoding="utf-8")
        return
    name = snippet.directives.get("file")
    runs = [each for each in find_snippets(snippet.page) if each.is_run]
    is_run = snippet.is_run or (name is not None and any(Path(name).stem in each.text for each in runs))
    assert is_run, f"{snippet.place}: mark the program with `run`, or with `not run` and the reason"


@pytest.mark.parametrize("snippet", select("json", "jsonl"))
def test_json_snippet_is_json(snippet: Snippet) -> None:
    try:
        json.loads(snippet.text)
    except json.JSONDecodeError:
        for line in snippet.text.splitlines():
            json.loads(line)


@pytest.mark.parametrize("snippet", select("bash"))
def test_shell_snippet_names_existing_commands_and_options(snippet: Snippet) -> None:
    errors = find_errors(snippet.text)
    assert not errors, f"{snippet.place}:\n" + "\n".join(errors)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_in_the_text_exist(page: Path) -> None:
    errors = [
        f"{page.name}:{line}: {code}: {error}"
        for line, code in iter_inline_code(page)
        if code.startswith(("tunesmith ", "make ", "python -m benchmarks.", "python tests/", "python recipes/"))
        if (error := check_line(f"{code} ...")) is not None
    ]
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize("snippet", select("yaml"))
def test_yaml_snippet_is_valid(snippet: Snippet, monkeypatch: pytest.MonkeyPatch) -> None:
    if "not run" in snippet.directives:
        pytest.skip(f"{snippet.place}: {snippet.directives['not run']}")
    for name in re.findall(r"\$\{oc\.env:(\w+)\}", snippet.text):
        monkeypatch.setenv(name, "value")
    for text in split_alternatives(snippet.text):
        check_settings(text, kind=snippet.directives.get("config"))


def split_alternatives(text: str) -> list[str]:
    """A block that repeats its first key shows alternatives, one per repetition."""
    keys = re.findall(r"^(\w+):", text, re.MULTILINE)
    if not keys or keys.count(keys[0]) == 1:
        return [text]
    return [part for part in re.split(rf"^(?={keys[0]}:)", text, flags=re.MULTILINE) if part.strip()]


def check_settings(text: str, *, kind: str | None) -> None:
    """Validate the text as the file, or an excerpt of the file, of the command whose keys it has."""
    given = OmegaConf.create(text)
    plain = OmegaConf.to_container(given, resolve=False)
    assert isinstance(plain, dict)
    if is_trinity_file(plain) and not set(plain) <= set(PipelineConfig.model_fields):
        check_components(build_section(RunConfig, translate_trinity_file(plain).values))
        return
    classes = list_config_classes()
    kinds = [kind] if kind is not None else [each for each in classes if set(plain) <= set(classes[each].model_fields)]
    assert kinds, f"no command has all of the keys {sorted(map(str, plain))}"
    errors = []
    for each in kinds:
        merged = OmegaConf.to_container(OmegaConf.merge(OmegaConf.create(REQUIRED[each]), given), resolve=True)
        assert isinstance(merged, dict)
        try:
            check_components(build_section(classes[each], merged))
        except ConfigError as error:
            errors.append(f"{each}: {error}")
        else:
            return
    pytest.fail("\n".join(errors))


def check_components(config: Section) -> None:
    """Check what only the code that uses a section checks: names and arguments of algorithms, operators and stages."""
    match config:
        case RunConfig():
            resolve_algorithm(drop_own_functions(config.algorithm))
            build_operators(config.experience, load=lambda spec: lambda groups, **args: (groups, {}))
        case PreferenceConfig() | SftConfig():
            terms_args = getattr(config, "terms_args", {})
            resolve_algorithm(AlgorithmSection(algorithm_type=config.algorithm_type, terms_args=terms_args))
        case PipelineConfig():
            plan_stages(config)


def drop_own_functions(section: AlgorithmSection) -> AlgorithmSection:
    """The section without the functions that a page names but that do not exist, and without their arguments."""
    own = [key for key in ("advantage", "loss") if getattr(section, key, None) is not None]
    return section.model_copy(update=dict.fromkeys(own) | {f"{key}_args": {} for key in own})


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name != "README.md" and any(each.is_run for each in find_snippets(page))],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_programs_of_a_page_run_in_order(page: Path, tmp_path: Path, pocket_folder: str) -> None:
    """The snippets marked `run`, in the order of the page, in a folder with its files and models/pocket."""
    shutil.copytree(pocket_folder, tmp_path / "models" / "pocket")
    for number, snippet in enumerate(find_snippets(page)):
        language = find_language(snippet)
        name = snippet.directives.get("file", f"snippet_{number}.py")
        if "file" in snippet.directives or (snippet.is_run and language == "python"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(snippet.replaced_text, encoding="utf-8")
        if snippet.is_run and language in ("python", "bash"):
            lines = [f"python {name}"] if language == "python" else iter_commands(snippet.replaced_text)
            for command in map(shlex.split, lines):
                status = start_forked_programs().run(command, folder=tmp_path)
                log = (tmp_path / LOG).read_text(encoding="utf-8", errors="replace")
                assert status == 0, f"{snippet.place}: {command} ended with {status}:\n{log[-8000:]}"
