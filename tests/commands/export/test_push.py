"""Uploads to a local stand-in for the hub: what arrives, and one sentence for each refusal."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from typer.testing import CliRunner

from exported_models import save_tiny
from hub_server import TOKEN, serve_hub
from tunesmith import export, hub
from tunesmith.cli import app
from tunesmith.commands.export.push import push_folder
from tunesmith.errors import ConfigError, ModelError
from tunesmith.storage import save_json


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen2", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def server(monkeypatch):
    with serve_hub() as state:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", state.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        hub.probe.cache_clear()
        yield state
    hub.probe.cache_clear()


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_folder_arrives_whole_and_private(source, server, tmp_path):
    report = export(source, out=tmp_path / "out", push="me/tiny")
    assert report.pushed == f"{server.url}/me/tiny"
    assert server.is_private == {"me/tiny": True}
    assert server.files["me/tiny"] == read_files(tmp_path / "out" / "hf")
    assert len(server.objects) == 1  # the weights
    again = export(source, out=tmp_path / "out", push="me/tiny")  # the export is there, the repository too
    assert again.pushed == report.pushed and server.is_private == {"me/tiny": True}


def test_the_command_uploads_in_public_if_asked(source, server, tmp_path):
    arguments = ["export", str(source), "--out", str(tmp_path / "out"), "--push", "me/open", "--public"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert f"{server.url}/me/open" in result.output and server.is_private == {"me/open": False}
    for name, is_public, found in (("me/open", False, "public: add --public"), ("me/shut", True, "private: remove")):
        server.is_private["me/shut"] = True
        with pytest.raises(ConfigError, match=f"push='{name}' exists on the hub and is {found}"):
            export(source, out=tmp_path / "out", push=name, is_public=is_public)


def test_an_adapter_with_a_local_base_is_uploaded_with_a_warning(server, tmp_path, caplog):
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_json(folder / "adapter_config.json", {"base_model_name_or_path": str(tmp_path)})
    assert push_folder(folder, "me/adapter", is_public=False) == f"{server.url}/me/adapter"
    assert server.files["me/adapter"] == read_files(folder)
    assert f"names the local folder {tmp_path} as its base" in caplog.text


def test_what_cannot_be_uploaded_is_refused_before_anything_is_written(source, server, tmp_path, monkeypatch):
    def refused(match: str, *, error: type = ModelError, push: str | None = "me/tiny", **options: object) -> None:
        hub.probe.cache_clear()
        with pytest.raises(error, match=match):
            export(source, out=tmp_path / "out", push=push, **options)
        assert not (tmp_path / "out").exists() and not server.is_private

    refused("push='tiny' must be OWNER/NAME", error=ConfigError, push="tiny")
    refused("push='a/b/c' must be OWNER/NAME", error=ConfigError, push="a/b/c")
    refused("uploads the format hf or adapter", error=ConfigError, formats=["gguf"])
    refused("public has an effect only with push", error=ConfigError, push=None, is_public=True)
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    refused("the token is not valid")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    refused("needs a token that may write: set HF_TOKEN, or run hf auth login")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused("HF_HUB_OFFLINE is set; unset it")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    refused("http://127.0.0.1:9 cannot be reached")


def test_a_token_that_may_not_write_keeps_the_export(source, server, tmp_path):
    server.read_only = True
    with pytest.raises(ModelError, match="may not write to 'them'; the same command tries again, without a second"):
        export(source, out=tmp_path / "out", push="them/tiny")
    assert (tmp_path / "out" / "DONE.json").is_file()
