"""Does a TOML file ask for the same as the flags of its names, and is what is wrong in it said with its name?"""

from pathlib import Path

import pytest

from runtime.options import ServerOptions, parse_options

FILE = """
model = "org/name"
served-model-name = ["a", "b"]
device-memory = "20GiB"
max-concurrency = 64
decode-buckets = [1, 8, 64]
settle-replies = false
priorities = true
enable-admin = true
admin-key = "secret"
api-key = ["k1", "k2"]
stall-limit = 12.5
insecure = false
"""


def parse(folder: Path, text: str, *arguments: str) -> ServerOptions:
    (folder / "strata.toml").write_text(text, encoding="utf-8")
    return parse_options(["--config", str(folder / "strata.toml"), *arguments], "1", Path("cache"))


def test_a_file_says_what_the_flags_say(tmp_path: Path) -> None:
    flags = [
        *("--model", "org/name", "--served-model-name", "a,b", "--device-memory", "20GiB"),
        *("--max-concurrency", "64", "--decode-buckets", "1,8,64", "--settle-replies", "off"),
        *(
            "--priorities",
            "on",
            "--enable-admin",
            "--admin-key",
            "secret",
            "--api-key",
            "k1",
            "--api-key",
            "k2",
        ),
        *("--stall-limit", "12.5"),
    ]
    assert parse(tmp_path, FILE) == parse_options(flags, "1", Path("cache"))


def test_the_command_line_wins(tmp_path: Path) -> None:
    options = parse(tmp_path, FILE, "--model", "other", "--stall-limit=1", "--settle-replies", "on")
    assert (options.model, options.stall_limit_s, options.settle_replies) == ("other", 1.0, True)
    assert options.max_concurrency == 64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle = 'x'", "unknown name modle; did you mean model?"),
        ("port = 'http'", "--port: 'http' must be a whole number"),
        ("insecure = 'yes'", "insecure must be true or false"),
        ("port = true", "port must not be true or false"),
        ("[server]\nport = 1", "unknown name server"),
        ("model = {a = 1}", "model must be a text, a number, or a list of these"),
        ("help = true", "unknown name help"),
        ("config = 'again.toml'", "unknown name config"),
        ("port = ", "Invalid value"),
        ("host = '0.0.0.0'", "add --api-key KEY"),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(tmp_path, text)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert message in told and "Traceback" not in told


def test_a_missing_file_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--config", "no/such.toml"], ["--config"]):
        with pytest.raises(SystemExit) as ended:
            parse_options(arguments, "1", Path("cache"))
        assert ended.value.code == 2 and "--config" in capsys.readouterr().err
