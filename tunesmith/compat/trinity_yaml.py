"""Read Trinity-RFT run files and translate them to Tunesmith run files.

Each key sets a key of ours, is accepted without effect, or is refused with the reason and the nearest alternative
(`trinity_rules`). A key that is absent takes our default. All refusals of a file are one error, with their lines. Files
of offline training, sft and dpo in mode train, become files of `tunesmith sft` and `prefer`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tunesmith.compat.trinity_algorithms import resolve_differences
from tunesmith.compat.trinity_draft import Draft, Rule, accept, allow, move, read_type, walk
from tunesmith.compat.trinity_rules import RULES
from tunesmith.compat.trinity_sections import (
    CLUSTER_KEYS,
    resolve_cluster,
    resolve_functions,
    resolve_task_pipeline,
)
from tunesmith.config import RunConfig
from tunesmith.errors import ConfigError
from tunesmith.runs.load_config import apply_override, describe_options, describe_unresolved, load_yaml

BUFFER = "buffer.trainer_input.experience_buffer"
COMMANDS = {"sft": "sft", "sft_is": "sft", "sft_phi": "sft", "dpo": "prefer"}
"""Algorithm on given rows -> the command that trains with it."""
COLUMNS = {"prompt_key": "prompt", "chosen_key": "chosen", "rejected_key": "rejected", "messages_key": "messages"}
KEPT = {
    "model": ("path", "max_model_len", "dtype", "lora", "chat_template"),
    "trainer": (
        "learning_rate", "warmup_steps", "warmup_ratio", "min_lr_ratio", "schedule", "betas", "weight_decay",
        "max_grad_norm", "max_tokens_per_row", "has_gradient_checkpointing",
    ),
    "monitor": ("trackers",),
}  # fmt: skip
"""Keys of translated sections that offline training has; the others are of sampling."""


def build_buffer_rules() -> Mapping[str, Rule]:
    columns: dict[str, Rule] = {
        f"format.{name}": allow(column, reason=f"rows have the field {column!r}; rename the column")
        for name, column in COLUMNS.items()
    }
    return columns | {
        "name": accept(),
        "storage_type": allow("file", reason="rows are read from files and from the hub"),
        "path": move("train_dataset.path"),
        "subset_name": move("train_dataset.name"),
        "split": move("train_dataset.split"),
        "schema_type": allow("sft", "dpo", reason="rows are conversations or pairs"),
        "format.prompt_type": allow("messages", "plaintext", reason="rows have messages, or text of pairs"),
        "enable_progress_bar": accept(),
        "total_epochs": accept("buffer.total_epochs is the number of epochs"),
    }


def find_command(values: Mapping[str, Any]) -> str | None:
    """The command that trains a file's algorithm on given rows; None if it samples."""
    draft = Draft(values)
    is_offline = (
        str(draft.find("mode", "both")).casefold() == "train" and draft.find(f"{BUFFER}.storage_type") == "file"
    )
    return COMMANDS.get(draft.find("algorithm.algorithm_type", "", kind=str)) if is_offline else None


def convert_to_offline(draft: Draft) -> dict[str, Any]:
    """The values of a file of `sft` or `prefer`, from those of a run file and its rows."""
    given = draft.values
    values: dict[str, Any] = {
        section: {name: each for name, each in given.get(section, {}).items() if name in names}
        for section, names in KEPT.items()
    }
    algorithm = draft.find("algorithm.algorithm_type")
    beta = given.get("algorithm", {}).get("loss_args", {}).get("beta")
    if beta is not None:
        values["terms_args"] = {"beta": beta}
    if draft.find("algorithm.kl_loss_fn_args.kl_coef"):
        draft.notes.append(
            "algorithm.kl_loss_fn_args has no effect: policy_loss_fn_args.beta bounds the distance of dpo"
        )
    if given.get("cluster"):
        draft.notes.append(f"cluster has no effect: `tunesmith {COMMANDS[algorithm]}` trains on one GPU")
    moved = {
        "train_dataset": given.get("train_dataset"),
        "num_epochs": given.get("total_epochs"),
        "max_steps": given.get("total_steps"),
        "max_rows_per_batch": draft.find("buffer.train_batch_size", kind=int),
        "save_interval_steps": given.get("save_interval_steps"),
        "keep_checkpoints": given.get("keep_checkpoints"),
        "seed": given.get("seed"),
        "algorithm_type": algorithm,
    }
    values |= {name: each for name, each in moved.items() if each is not None}
    if "max_rows_per_batch" in values:  # the rows alone limit a batch, as in Trinity-RFT
        length = read_type(values["model"].get("max_model_len", 0), "model.max_model_len", int)
        values |= {"max_tokens_per_batch": length * values["max_rows_per_batch"]} if length else {}
    return {name: each for name, each in values.items() if each not in ({}, None)}


TRINITY_KEYS = frozenset({"buffer", "explorer", "synchronizer", "data_processor", "mode", "stages", "service"})
"""Top-level keys that only Trinity-RFT's files have."""
ALGORITHM = "algorithm.algorithm_type"
KEY = re.compile(r"[\w.\[\]-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A translated file."""

    values: dict[str, Any]
    """Nested values of our run file."""
    notes: tuple[str, ...]
    """Sentences for the user about settings that have another effect than in Trinity-RFT."""
    command: str = "tune"
    """The command whose file it is: tune, sft or prefer."""


def is_trinity_file(values: Mapping[str, Any]) -> bool:
    """Whether a run file has keys of Trinity-RFT; both kinds of files have a section `cluster`."""
    cluster = values.get("cluster")
    names = {f"cluster.{name}" for name in cluster} if isinstance(cluster, Mapping) else set()
    return not (TRINITY_KEYS.isdisjoint(values) and names.isdisjoint(CLUSTER_KEYS))


def load_trinity_file(path: Path, overrides: Sequence[str]) -> tuple[Translation, list[str]]:
    """Translate a file with the overrides of its own keys applied; also return the overrides of our keys.

    An override of a key of the file answers a refusal of it; null leaves the key out. The algorithm's name is always a
    key of the file: with the file's advantage and loss it may be another name of ours.
    """
    merged, own = load_yaml(path), []
    for override in overrides:
        key, _, value = override.partition("=")
        key = key.strip()
        is_theirs = find_item(merged, key) is not None or any(is_part(key, rule) for rule in RULES)
        if is_theirs and value.strip() not in ("null", "~", ""):
            if "[" in key:
                OmegaConf.update(merged, key, yaml.safe_load(value))
            else:
                apply_override(merged, override)
        elif is_theirs and (found := find_item(merged, key)) is not None:
            del found[0][found[1]]
        if not is_theirs or (is_own_key(key) and key != ALGORITHM):
            own.append(override)
    values, problems = resolve_interpolations(merged)
    return translate_trinity_file(values, lines=find_lines(path.read_text(encoding="utf-8")), problems=problems), own


def translate_trinity_file(
    values: Mapping[str, Any], *, lines: Mapping[str, int] | None = None, problems: Sequence[str] = ()
) -> Translation:
    """Translate a file; ConfigError has all of its problems, with their lines if `lines` has those of the keys."""
    draft = Draft(values, problems=list(problems))
    command = find_command(values)
    rules = {key: rule for key, rule in RULES.items() if command is None or not is_part(key, BUFFER)}
    if command is not None:
        rules |= {"mode": accept()} | {f"{BUFFER}.{name}": rule for name, rule in build_buffer_rules().items()}
    walk(draft, rules, values, parent="")
    resolvers = [resolve_lengths, resolve_task_pipeline]
    if command is None:
        resolvers += [resolve_cluster, resolve_functions, resolve_differences]
    for resolve in resolvers:
        with draft.collecting_problems():
            resolve(draft)
    if draft.problems:
        raise ConfigError(describe_problems(draft.problems, lines or {}))
    translated = draft.values if command is None else convert_to_offline(draft)
    return Translation(values=translated, notes=tuple(draft.notes), command=command or "tune")


def is_part(key: str, other: str) -> bool:
    """Whether a dotted key is another one, or a part of it, or has it as a part."""
    parts, others = (re.split(r"[.\[]", each) for each in (key, other))
    length = min(len(parts), len(others))
    return parts[:length] == others[:length]


def is_own_key(key: str) -> bool:
    names = (re.escape(knob.key).replace("<name>", "[^.]+") for knob in describe_options(RunConfig))
    return any(re.fullmatch(rf"{name}(\..*)?", key) for name in names)


def find_item(config: DictConfig, key: str) -> tuple[Any, str | int] | None:
    """The section or list that holds a key, and the key in it; None without the key. Resolves no interpolation."""
    parent, _, last = key.rpartition("[" if key.endswith("]") else ".")
    section = OmegaConf.select(config, parent) if parent else config
    if isinstance(section, ListConfig) and last.rstrip("]").isdigit():
        number = int(last.rstrip("]"))
        return (section, number) if number < len(section) else None
    return (section, last) if isinstance(section, DictConfig) and last in list(section.keys()) else None


def resolve_interpolations(config: DictConfig) -> tuple[dict[str, Any], list[str]]:
    """Plain values, and a problem for each interpolation that cannot be resolved, such as an unset variable."""
    problems: list[str] = []
    while True:
        try:
            values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
            assert isinstance(values, dict)
            return values, problems
        except OmegaConfBaseException as error:
            key, reason = str(error.full_key), describe_unresolved(error)
            if any(each.startswith(f"{key}: ") for each in problems):
                raise ConfigError(f"{key}: {reason}") from error
            problems.append(f"{key}: {reason}")
            OmegaConf.update(config, key, "")


def describe_problems(problems: Sequence[str], lines: Mapping[str, int]) -> str:
    described = [f"line {line}: {each}" if (line := find_line(each, lines)) else each for each in problems]
    if len(described) == 1:
        return described[0]
    remedy = "--set KEY=VALUE answers each, and --set KEY=null leaves a key out"
    return "\n".join([f"{len(described)} keys cannot be translated ({remedy}):", *(f"- {each}" for each in described)])


def find_line(problem: str, lines: Mapping[str, int]) -> int | None:
    """The line of the key with which a problem starts, or of the nearest section that has one."""
    match = KEY.match(problem)
    key = match[0].rstrip(".") if match else ""
    while key and key not in lines:
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return lines.get(key)


def find_lines(text: str) -> dict[str, int]:
    """The line of each dotted key of a YAML file; items of lists are `key[0]`."""
    lines: dict[str, int] = {}

    def walk_node(node: yaml.Node | None, prefix: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for name, value in node.value:
                key = f"{prefix}.{name.value}" if prefix else str(name.value)
                lines[key] = name.start_mark.line + 1
                walk_node(value, key)
        elif isinstance(node, yaml.SequenceNode):
            for number, item in enumerate(node.value):
                lines[f"{prefix}[{number}]"] = item.start_mark.line + 1
                walk_node(item, f"{prefix}[{number}]")

    walk_node(yaml.compose(text, Loader=yaml.SafeLoader), "")
    return lines


def resolve_lengths(draft: Draft) -> None:
    """Lengths of prompt, answer and context in tokens: two of them determine the third."""
    total, prompt, answer = (
        draft.find(f"model.{name}", kind=int) for name in ("max_model_len", "max_prompt_tokens", "max_response_tokens")
    )
    if prompt is None:
        return
    if total is None and answer is None:
        raise ConfigError(f"model.max_prompt_tokens={prompt} does not determine the context: set max_model_len too")
    if total is None:
        draft.set("model.max_model_len", prompt + answer, source="model.max_prompt_tokens")
    elif answer is None:
        draft.set("model.max_tokens", total - prompt, source="model.max_prompt_tokens")
    elif prompt + answer < total:
        raise ConfigError(
            f"model.max_prompt_tokens={prompt} is not supported: a prompt may use the whole context except "
            f"max_response_tokens; remove it, or set max_model_len={prompt + answer}"
        )
