"""`tunesmith export`: writes a trained model as a Hugging Face folder, a PEFT adapter or GGUF files.

    hf/        weights, configs, tokenizer, chat template, model card     adapter/   files of PEFT, with a model card
    gguf/      NAME-TYPE.gguf, one per type, Modelfile, model card        DONE.json  settings, files, figures; last

Formats that cannot be written are refused before weights load. Files are written to a temporary folder, loaded back,
compared with the source and then renamed, so the output folder is complete or absent. An export that exists is reused.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from tunesmith.commands.export.gguf.files import MODELFILE, GgufPlan, build_modelfile, check_gguf_files, plan_gguf
from tunesmith.commands.export.model_card import Card, read_key, write_card
from tunesmith.commands.export.push import check_push, push_folder
from tunesmith.commands.export.verify import build_prompts, check_hf_folder, compute_logits
from tunesmith.commands.stage import ChooseModel, StageResult
from tunesmith.config import ExportSection
from tunesmith.errors import ConfigError, ModelError
from tunesmith.model.checkpoint import SMALL_FILES_BYTES, save_model_files
from tunesmith.model.load import check_model, check_vocabulary, load_model, load_tokenizer
from tunesmith.model.source.resolve import BASE_FINGERPRINT
from tunesmith.model.torch_modes import set_num_threads
from tunesmith.runs.result import ModelResult, require_path
from tunesmith.runs.trained_model import ExportSource, find_source
from tunesmith.runs.workspace import Workspace
from tunesmith.storage import check_free_space, new_folder, save_text, storage_errors

STORED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ExportResult(ModelResult):
    """Result of an export."""

    folder: Path
    name: str
    num_parameters: int
    hf: Path | None
    adapter: Path | None
    gguf: Mapping[str, Path]
    """GGUF files by type."""
    checks: Mapping[str, Mapping[str, float]]
    """Results of the comparison with the source, by file or folder; empty without verification."""
    pushed: str | None = None
    """Address of the repository that it was uploaded to."""

    @property
    def model_path(self) -> str:
        """Path of the exported model, or of the adapter if there is no other; ModelError with GGUF files only."""
        return require_path(self.hf or self.adapter)

    @property
    def metrics(self) -> dict[str, float]:
        """The checks as one mapping: `<file or folder>/<name>`."""
        return {f"{place}/{name}": value for place, found in self.checks.items() for name, value in found.items()}

    def list_facts(self) -> dict[str, str]:
        facts = {"name": f"{self.name}, {self.num_parameters:,} parameters"}
        for path in (self.hf, self.adapter, *self.gguf.values()):
            if path is not None:
                place = str(path.relative_to(self.folder))
                checks = ", ".join(f"{key} {value:.4g}" for key, value in self.checks.get(place, {}).items())
                facts[place] = f"{path} ({checks or 'not verified'})"
        return facts if self.pushed is None else facts | {"uploaded": self.pushed}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPlan:
    """Everything about an export that is known before weights load."""

    settings: ExportSection
    source: ExportSource
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype
    gguf: GgufPlan | None


def run_export(
    settings: ExportSection, *, out_dir: Path, push: str | None = None, is_public: bool = False
) -> ExportResult:
    """Export into the new folder `out_dir`; return the report of one that already holds this export.

    The result is uploaded as `push` (OWNER/NAME), if given, whether it was exported now or before.
    """
    if push is not None:
        check_push(settings, push, is_public=is_public)
    elif is_public:
        raise ConfigError("public has an effect only with push")
    root = Path(out_dir).expanduser().absolute()
    source = find_source(settings)
    workspace = Workspace(root, is_whole=True)
    # settings that can change the export: the source is compared separately, threads change only the speed
    options = settings.model_dump(mode="json", exclude={"path", "base_path", "num_cpu_threads"})
    inputs = {"settings": options, "source": source.describe()}
    record = workspace.find_result(inputs)
    if record is None:
        set_num_threads(settings.num_cpu_threads)
        plan = build_plan(settings, source)
        record = dict(inputs)
        with workspace, new_folder(root, record) as temporary:
            record["figures"] = write_formats(plan, temporary)
    report = build_report(root, record["figures"])
    if push is None:
        return report
    address = push_folder(Path(report.model_path), push, is_public=is_public)
    return dataclasses.replace(report, pushed=address)


def build_plan(settings: ExportSection, source: ExportSource) -> ExportPlan:
    """Validate everything that needs no weights."""
    if "adapter" in settings.formats and source.adapter is None:
        raise ConfigError(
            f"formats holds adapter, but path={settings.path!r} is a full model: export it as hf, or set path to the "
            "folder that holds adapter_config.json"
        )
    options: dict[str, Any] = {"base_path": settings.base_path, "trust_remote_code": settings.trust_remote_code}
    config = check_model(source.path, **options)
    tokenizer = load_tokenizer(source.path, chat_template=settings.chat_template, **options)
    gguf = None
    if "gguf" in settings.formats:
        gguf = plan_gguf(settings, source, config, tokenizer)
    return ExportPlan(
        settings=settings,
        source=source,
        config=config,
        tokenizer=tokenizer,
        dtype=choose_dtype(settings, config),
        gguf=gguf,
    )


def choose_dtype(settings: ExportSection, config: PretrainedConfig) -> torch.dtype:
    """Type of the exported weights; float32 for a model whose config names no type."""
    stored = config.dtype or torch.float32
    dtype: torch.dtype = stored if settings.dtype == "auto" else getattr(torch, settings.dtype)
    if dtype not in STORED_DTYPES:
        raise ModelError(f"the model's weights are stored as {dtype}; set dtype to float32, bfloat16 or float16")
    return dtype


def write_formats(plan: ExportPlan, folder: Path) -> dict[str, Any]:
    """Write every format, compare it with the source, write the model cards; return the figures."""
    settings, source = plan.settings, plan.source
    figures: dict[str, Any] = {"name": source.name, "formats": list(settings.formats), "gguf": {}, "checks": {}}
    if "adapter" in settings.formats:
        copy_adapter(source, plan.tokenizer, folder / "adapter")
    model = load_model(
        source.path,
        dtype=plan.dtype,
        device=torch.device("cpu"),
        trust_remote_code=settings.trust_remote_code,
        base_path=settings.base_path,
    )
    check_vocabulary(model, plan.tokenizer)
    check_finite(model)
    figures["num_parameters"] = sum(parameter.numel() for parameter in model.parameters())
    check_free_space(folder, estimate_bytes(plan, num_parameters=figures["num_parameters"]))
    if "hf" in settings.formats:
        save_model_files(folder / "hf", model, plan.tokenizer)
    if plan.gguf is not None:
        from tunesmith.commands.export.gguf.writer import write_gguf_files  # needs an optional package

        files = figures["gguf"] = write_gguf_files(plan.gguf, model, folder / "gguf")
        trained = None if source.run is None else read_key(source.run.settings, "model.max_model_len")
        text = build_modelfile(plan.gguf, plan.tokenizer, files=files, num_ctx=trained)
        save_text(folder / "gguf" / MODELFILE, text)
    if settings.has_verification:
        figures["checks"] = verify_formats(plan, model, folder)
    del model
    card = Card(settings=settings, source=source, config=plan.config, dtype=plan.dtype, figures=figures)
    for name in settings.formats:
        write_card(folder / name / "README.md", card, folder_format=name)
    return figures


def verify_formats(plan: ExportPlan, model: PreTrainedModel, folder: Path) -> dict[str, dict[str, float]]:
    """Compare the files with the model in memory. Converts the model to float32 in place if GGUF files are compared."""
    prompts = build_prompts(plan.tokenizer)
    checks: dict[str, dict[str, float]] = {}
    if "hf" in plan.settings.formats:
        expected, is_trusted = compute_logits(model, prompts), plan.settings.trust_remote_code
        checks["hf"] = check_hf_folder(folder / "hf", plan.tokenizer, prompts, expected, trust_remote_code=is_trusted)
    if plan.gguf is not None:
        expected = compute_logits(model.float(), prompts)
        checks |= check_gguf_files(plan.gguf, folder / "gguf", plan.tokenizer, prompts, expected)
    return checks


def copy_adapter(source: ExportSource, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Copy the files of PEFT; save the tokenizer with its chat template."""
    assert source.adapter is not None
    with storage_errors(folder, "write"):
        folder.mkdir()
        for file in sorted(source.adapter.folder.iterdir()):
            if file.name.startswith("adapter_") or file.name == BASE_FINGERPRINT:
                shutil.copyfile(file, folder / file.name)
        tokenizer.save_pretrained(folder)


def check_finite(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise ModelError(
                f"the weights {name} are not finite in {parameter.dtype}: training diverged, or the type overflows; "
                "try dtype=float32"
            )


def estimate_bytes(plan: ExportPlan, *, num_parameters: int) -> int:
    """Estimated size of the export, including the temporary f32 file for quantization."""
    num_bytes = plan.dtype.itemsize if "hf" in plan.settings.formats else 0.0
    if plan.gguf is not None:
        num_bytes += plan.gguf.bytes_per_parameter
    return int(num_bytes * num_parameters) + SMALL_FILES_BYTES


def build_report(root: Path, figures: Mapping[str, Any]) -> ExportResult:
    formats = figures["formats"]
    return ExportResult(
        folder=root,
        name=figures["name"],
        num_parameters=figures["num_parameters"],
        hf=root / "hf" if "hf" in formats else None,
        adapter=root / "adapter" if "adapter" in formats else None,
        gguf={kind: root / "gguf" / file for kind, file in figures["gguf"].items()},
        checks=figures["checks"],
    )


def run_stage(settings: ExportSection, *, out_dir: Path, choose_model: ChooseModel) -> StageResult:
    report = run_export(settings, out_dir=out_dir)
    figures: dict[str, Any] = {"parameters": report.num_parameters}
    for path, checks in report.checks.items():
        figures |= {f"{path}: {name}": figure for name, figure in checks.items()}
    for written in (report.hf, report.adapter, *report.gguf.values()):
        if written is not None:
            figures[f"MB of {written.relative_to(report.folder)}"] = round(count_bytes(written) / 1e6, 1)
    return StageResult(model=report.hf, device="cpu", figures=figures)


def count_bytes(path: Path) -> int:
    """Size of a file, or of all files in a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)
