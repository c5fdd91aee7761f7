"""Does `--model ORG/NAME[@REV]` become a local folder, and does every way it can fail say what to do?"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from model import hub
from model.hub import HubError, HubModel, parse_hub_name, resolve_model
from tests.hub_mirror import COMMIT, Mirror, Repository, running_mirror

WEIGHTS = bytes(range(256)) * 4096 * 24  # 24 MiB: the library writes in pieces of 10 MiB


def a_repository(**faults) -> Repository:
    files = {
        "config.json": b"{}",
        "tokenizer.json": b'{"a": 1}',
        "model.safetensors": WEIGHTS,
        "chat_template.jinja": b"{{ messages }}",
        "pytorch_model.bin": b"never wanted",
        "original/consolidated.safetensors": b"never wanted",
        "README.md": b"# a model",
    }
    return Repository(files, **faults)


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    with running_mirror({"acme/tiny": a_repository()}) as running:
        yield running


def test_names() -> None:
    assert parse_hub_name("acme/tiny") == HubModel("acme/tiny", "main")
    assert parse_hub_name("acme/tiny-2.5_b@v1.0") == HubModel("acme/tiny-2.5_b", "v1.0")
    for wrong in ("tiny", "./acme/tiny", "/acme/tiny", "a/b/c", "acme/tiny@", "../acme", "", "https://x/y"):
        with pytest.raises(HubError, match="there is no folder"):
            parse_hub_name(wrong)


def test_an_existing_folder_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("acme/tiny", endpoint="http://127.0.0.1:9") == Path("acme/tiny")
    (tmp_path / "acme" / "file").write_text("x")
    for spec in ("acme/file", str(tmp_path / "acme" / "file")):
        with pytest.raises(HubError, match="is a file"):
            resolve_model(spec)


def test_downloads_what_a_model_needs_and_keeps_it(mirror: Mirror, tmp_path: Path) -> None:
    for revision in ("", "@main", f"@{COMMIT}"):
        folder = resolve_model(
            f"acme/tiny{revision}", cache_dir=tmp_path, endpoint=mirror.url, progress=False
        )
        names = {path.name for path in folder.iterdir()}
        assert names == {"config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"}
        assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert len(mirror.downloads("model.safetensors")) == 1
    assert resolve_model("acme/tiny", cache_dir=tmp_path, offline=True) == folder


def test_progress_is_shown(mirror: Mirror, tmp_path: Path, capsys) -> None:
    resolve_model("acme/tiny", cache_dir=tmp_path, endpoint=mirror.url)
    assert "4/4" in capsys.readouterr().err


def test_a_dropped_connection_resumes_where_it_was(mirror: Mirror, tmp_path: Path) -> None:
    mirror.repositories["acme/tiny"].cut_once_at_bytes = {"model.safetensors": 15_000_000}
    folder = resolve_model("acme/tiny", cache_dir=tmp_path, endpoint=mirror.url, progress=False)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert mirror.downloads("model.safetensors") == ["", f"bytes={10 * 2**20}-"]


def test_a_second_run_fetches_only_what_is_missing(mirror: Mirror, tmp_path: Path) -> None:
    repository = mirror.repositories["acme/tiny"]
    repository.broken_files = {"tokenizer.json"}
    with pytest.raises(HubError, match=r"could not be downloaded from .*410.*finished files are kept"):
        resolve_model("acme/tiny", cache_dir=tmp_path, endpoint=mirror.url, progress=False)
    with pytest.raises(HubError, match="only partly downloaded: run once without --offline"):
        resolve_model("acme/tiny", cache_dir=tmp_path, offline=True)
    repository.broken_files = set()
    resolve_model("acme/tiny", cache_dir=tmp_path, endpoint=mirror.url, progress=False)
    assert len(mirror.downloads("model.safetensors")) == 1


def test_gated(mirror: Mirror, tmp_path: Path) -> None:
    mirror.repositories["acme/tiny"].gated = True
    with pytest.raises(
        HubError, match=r"gated: accept its terms at http.*/acme/tiny, then run `hf auth login`"
    ):
        resolve_model("acme/tiny", cache_dir=tmp_path, endpoint=mirror.url, progress=False)


@pytest.mark.parametrize("token", [None, "hf_some_token"])
def test_missing_repository(
    mirror: Mirror, tmp_path: Path, token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(HubError, match="has no repository acme/other, or it is private"):
        resolve_model("acme/other", cache_dir=tmp_path, endpoint=mirror.url, progress=False)


def test_missing_revision(mirror: Mirror, tmp_path: Path) -> None:
    with pytest.raises(HubError, match="acme/tiny has no branch, tag or commit 'v9'"):
        resolve_model("acme/tiny@v9", cache_dir=tmp_path, endpoint=mirror.url, progress=False)


def test_repository_without_weights_for_us(mirror: Mirror, tmp_path: Path) -> None:
    del mirror.repositories["acme/tiny"].files["model.safetensors"]
    with pytest.raises(HubError, match=r"holds no config\.json with \*\.safetensors"):
        resolve_model("acme/tiny", cache_dir=tmp_path, endpoint=mirror.url, progress=False)


def test_no_room_is_said_before_anything_is_downloaded(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "free_bytes", lambda folder: 1000)
    with pytest.raises(HubError, match=r"needs 0\.29 GB more in .*, and 0\.00 GB are free"):
        resolve_model("acme/tiny", cache_dir=tmp_path, endpoint=mirror.url, progress=False)
    assert not mirror.downloads("model.safetensors")


def test_no_network(mirror: Mirror, tmp_path: Path) -> None:
    nobody = "http://127.0.0.1:9"
    with pytest.raises(
        HubError, match=r"could not be downloaded from http://127\.0\.0\.1:9.*Check the network"
    ):
        resolve_model("acme/tiny", cache_dir=tmp_path, endpoint=nobody, progress=False)
    with pytest.raises(HubError, match="not in the local cache: run once without --offline"):
        resolve_model("acme/tiny", cache_dir=tmp_path, offline=True)
    downloaded = resolve_model("acme/tiny", cache_dir=tmp_path, endpoint=mirror.url, progress=False)
    assert resolve_model("acme/tiny", cache_dir=tmp_path, endpoint=nobody, progress=False) == downloaded


def test_room_is_measured_where_the_folder_will_be(tmp_path: Path) -> None:
    assert hub.free_bytes(tmp_path / "not" / "yet") > 0
