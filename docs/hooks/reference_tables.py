"""MkDocs hook: reference tables that are generated from the code, so that they cannot differ from it.

A page names a table in a comment, which is invisible on GitHub and is replaced by the table on the site:

    <!-- table: knobs tune algorithm -->     the knobs of a section of a file; `.`: those outside of sections, `*`: all
    <!-- table: commands -->                 every command with its arguments and options
    <!-- table: algorithms -->               every algorithm with its arguments and defaults
    <!-- table: api tunesmith -->            the public names of a module, with their docstrings
    <!-- table: trinity model -->            what becomes of each key of a section of Trinity-RFT's files
"""

from __future__ import annotations

import ast
import html
import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MARKER = re.compile(r"^<!-- table: ([a-z]+)((?: \S+)*) -->$", re.MULTILINE)
ROOT = Path(__file__).parents[2]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the markers of a page."""
    return MARKER.sub(lambda match: TABLES[match[1]](*match[2].split()), markdown)


def render_knobs(stage: str, section: str) -> str:
    """Key, type, default, condition and description of each knob of a section, nested sections included."""
    from tunesmith.commands.settings import find_config_class
    from tunesmith.runs.load_config import Knob, describe_options

    def is_listed(option: Knob) -> bool:
        first, dot, _ = option.key.partition(".")
        return section == "*" or (not dot if section == "." else first == section and bool(dot))

    rows = [
        (
            f"`{each.key}`",
            f"`{each.type}`",
            f"`{each.default}`",
            f"`{each.needs}`" if each.needs else "",
            " ".join(each.description.split()),
        )
        for each in describe_options(find_config_class(stage))
        if is_listed(each)
    ]
    return render_table(("key", "type", "default", "needs", "meaning"), rows)


def render_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    def escape(cell: str) -> str:
        parts = cell.split("`")  # every second part is code, in which nothing is special
        return "`".join(
            part if number % 2 else html.escape(part).replace("|", "&#124;") for number, part in enumerate(parts)
        )

    lines = [head, ("---",) * len(head), *([escape(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def render_commands() -> str:
    """A section for each command: its help text, usage, arguments and options."""
    return "\n\n".join(render_command(name, command) for name, command in iter_commands())


def iter_commands() -> Iterator[tuple[str, Any]]:
    """Every command of the command line by its full name."""
    import typer.main

    from tunesmith.cli import app

    def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        if not hasattr(command, "commands"):
            yield name, command
            return
        for part, inner in command.commands.items():
            yield from walk(f"{name} {part}", inner)

    yield from walk("tunesmith", typer.main.get_command(app))


def render_command(name: str, command: Any) -> str:
    rows = []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            first = f"`{parameter.name.upper()}`" + ("" if parameter.required else " (optional)")
        else:
            value = "" if parameter.is_flag else f" {parameter.metavar or 'VALUE'}"
            first = f"`{', '.join(parameter.opts)}{value}`" + (" (required)" if parameter.required else "")
        rows.append((first, " ".join((getattr(parameter, "help", None) or "").split())))
    help_text = " ".join((command.help or "").split())
    return f"## {name}\n\n{help_text}\n\n{render_table(('argument or option', 'meaning'), rows)}"


def render_algorithms() -> str:
    """A section for each algorithm: aggregation, arguments and defaults."""
    from tunesmith.algorithms.algorithm import describe_algorithms

    return f"```text\n{describe_algorithms()}\n```"


def render_api(module: str) -> str:
    """The public names of a module, functions first; mkdocstrings renders their docstrings."""
    path = ROOT / module.replace(".", "/") / "__init__.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = [str(name) for name in ast.literal_eval(node.value)]
            ordered = sorted(names, key=lambda name: (not name.islower(), names.index(name)))
            return "\n\n".join(f"::: {module}.{name}" for name in ordered)
    raise ValueError(f"{path} has no __all__")


def render_trinity(section: str) -> str:
    """Key and effect of each rule of `compat/trinity_rules.py` for a section; `.`: those outside of sections."""
    from tunesmith.compat.trinity_rules import RULES, SECTIONS

    def is_listed(key: str) -> bool:
        owner = max((name for name in SECTIONS if key.startswith(f"{name}.")), key=len, default=".")
        return owner == section

    rows = [(f"`{key}`", describe_rule(rule)) for key, rule in RULES.items() if is_listed(key)]
    return render_table(("Trinity-RFT", "in Tunesmith"), rows)


def render_examples(_: str) -> str:
    """Each example file of Trinity-RFT: the command that runs it, what it needs besides, or what is refused."""
    from tunesmith.compat.trinity_sections import REWARDS, WORKFLOWS
    from tunesmith.compat.trinity_yaml import translate_trinity_file
    from tunesmith.errors import ConfigError

    rows, refused = [], 0
    for name, values in load_examples():
        try:
            translation = translate_trinity_file(values)
        except ConfigError as error:
            *_, problems = str(error).partition("\n") if "keys cannot be translated" in str(error) else (str(error),)
            keys = ", ".join(f"`{re.split('[= ]', each.removeprefix('- '))[0]}`" for each in problems.splitlines())
            rows.append((name, "", f"refused: {keys}"))
            refused += 1
            continue
        given = {kind: translation.values.get(kind) for kind in ("workflow", "judge")}
        functions = [f"`{spec.partition(':')[2]}`" for spec in given.values() if spec is not None]
        known = [each for each in functions if each.strip("`") in (*WORKFLOWS, *REWARDS)]
        missing = "" if given["workflow"] or translation.command != "tune" else "needs `--workflow`"
        if len(known) < len(functions):
            missing = ", ".join(filter(None, (missing, "needs `--judge`")))
        what = "; ".join(filter(None, (f"built in: {', '.join(known)}" if known else "", missing)))
        rows.append(
            (name, f"`tunesmith {translation.command}`", f"{what or 'as it is'}; {len(translation.notes)} notes")
        )
    accepted = f"{len(rows) - refused} of {len(rows)} files are accepted."
    return f"{accepted}\n\n{render_table(('example', 'command', 'in Tunesmith'), rows)}"


def load_examples() -> list[tuple[str, dict[str, Any]]]:
    """Name and nested values of each summary in `tests/compat/trinity_examples.jsonl`."""
    examples = []
    for line in (ROOT / "tests" / "compat" / "trinity_examples.jsonl").read_text(encoding="utf-8").splitlines():
        summary = json.loads(line)
        values: dict[str, Any] = {}
        for key, value in summary["keys"].items():
            *parents, last = key.split(".")
            section = values
            for parent in parents:
                section = section.setdefault(parent, {})
            section[last] = value
        examples.append((summary["file"], values))
    return examples


TRANSLATED = {
    "read_mode": "`both`, `colocate`; the others are noted with the command for them, `serve` is refused",
    "read_algorithm": "`algorithm.algorithm_type`: the three keys together name the algorithm",
    "read_warmup_ratio": "`trainer.warmup_ratio`",
    "read_save_interval": "`save_interval_steps`; 0 is refused, because a run needs checkpoints to be resumed",
    "read_prefix_caching": "`engine.has_prefix_cache`; false is slow for conversations, which a note says",
    "read_loss_args": "`algorithm.loss_args`, `algorithm.terms_args`, `algorithm.loss_aggregation`",
    "read_advantage_args": "`algorithm.advantage_args`",
    "read_kl_name": "`algorithm.kl_estimator`; `none` sets `algorithm.kl_coef` to 0",
    "read_kl_args": "`algorithm.kl_coef`, `algorithm.kl_adaptive`",
    "read_penalty_name": "`algorithm.terms_args`: a KL in the reward, of `ppo`, `reinforceplusplus` and `rloo` only",
    "read_penalty_args": "`algorithm.terms_args`",
    "read_entropy_name": "only `default`, `none`",
    "read_entropy_args": "`algorithm.entropy_coef`",
    "read_sample_strategy": "only `default`, `warmup`, and `mix` with `mix` or `mix_chord`",
    "read_sample_strategy_args": "`algorithm.expert.ratio`",
    "read_correction": "`algorithm.correction`",
    "read_lora_configs": "`model.lora`",
    "read_tinker": "`model.lora`: an adapter, trained in this process",
    "read_trainer_config": "verl's options: those of memory have no effect; `trainer.has_gradient_checkpointing`, "
    "`algorithm.critic.learning_rate`",
    "read_train_batch_size": "`trainer.num_minibatches`",
    "read_taskset": "`train_dataset`; `repeat_times` is `algorithm.group_size`, `rollout_args` are keys of `model`",
    "read_tasksets": "`train_dataset`, or several in `train_datasets`",
    "read_eval_tasksets": "`eval_datasets`",
    "read_task_pipeline": "`train_dataset.operators`, if all have a counterpart; others are refused by name",
    "read_replay": "`experience.replay`, if `reuse_cooldown_time` is set",
    "read_auxiliary_buffers": "`algorithm.expert`, of `mix` and `mix_chord`",
    "read_operators": "`experience.operators`",
    "read_auxiliary_models": "`auxiliary_models`",
    "read_auto_tool_choice": "false: `model.tool_call_parser: none`",
    "read_sync_style": "no effect: every step samples with the newest policy",
}
"""Effects of the rules that are functions of their own."""


def describe_rule(rule: Any) -> str:
    """The effect of a rule, from the arguments of the function that built it."""
    kind, given = rule.__qualname__.partition(".")[0], inspect.getclosurevars(rule).nonlocals
    match kind:
        case "move" | "move_count":
            return f"`{given['target']}`"
        case "move_for_critic":
            return f"`{given['target']}`, with `ppo` only"
        case "accept":
            return f"no effect: {given['note']}" if given["note"] else "no effect"
        case "allow" if [] in given["values"]:
            return f"refused unless empty: {given['reason']}"
        case "allow":
            allowed = ", ".join(f"`{value}`" for value in given["values"])
            return f"only {allowed}: {given['reason']}"
        case _:
            return TRANSLATED[kind]


TABLES: dict[str, Callable[..., str]] = {
    "knobs": render_knobs,
    "commands": render_commands,
    "algorithms": render_algorithms,
    "api": render_api,
    "trinity": render_trinity,
    "trinity-examples": render_examples,
}
