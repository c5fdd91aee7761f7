"""Does the command line give the right options, and one clear message where it is wrong?"""

from pathlib import Path

import pytest

from runtime.options import ServerOptions, parse_options, parse_size

CACHE = Path("cache")


def parse(*arguments: str) -> ServerOptions:
    return parse_options(arguments, "1.2.3", CACHE)


def test_the_defaults_serve_the_bundled_model_to_this_machine() -> None:
    options = parse()
    assert (options.model, options.host, options.port, options.mesh_ranks) == (None, "127.0.0.1", 8000, 1)
    assert options.device_memory_bytes is None and options.dtype is None
    assert options.compile_cache == CACHE / "strata-serve" / "compiled"
    assert options.max_body_bytes == 64 * 2**20 and options.prefill_tokens == 2048


def test_flags_reach_their_fields() -> None:
    options = parse(
        *("--model", "org/name@v1", "--served-model-name", "a, b", "--mesh", "tp4", "--dtype", "bfloat16"),
        *("--device-memory", "1.5GiB", "--api-key", "k1", "--api-key", "k2", "--decode-buckets", "1,8,32"),
        *("--host", "0.0.0.0", "--cors-origins", "https://a.example,http://b:3000", "--compile-cache", "off"),
    )
    assert options.model == "org/name@v1" and options.served_model_names == ("a", "b")
    assert (options.mesh_ranks, options.dtype) == (4, "bfloat16")
    assert options.device_memory_bytes == 3 * 2**29
    assert options.api_keys == ("k1", "k2") and options.decode_buckets_rows == (1, 8, 32)
    assert options.cors_origins == ("https://a.example", "http://b:3000")
    assert options.compile_cache is None


def test_priorities_are_off_unless_asked_for() -> None:
    assert not parse().priorities and parse("--priorities", "on").priorities


def test_the_caches_flags() -> None:
    options = parse()
    assert options.prefix_cache and options.settle_replies and options.cache_policy == "recency"
    assert not options.reuse_generated
    assert not (options.isolate_keys or options.enable_faults or options.admin_keys)
    options = parse(
        *("--prefix-cache", "off", "--settle-replies", "off", "--cache-policy", "lru", "--api-key", "a"),
        *(
            "--reuse-generated",
            "on",
            "--isolate-keys",
            "--enable-admin",
            "--admin-key",
            "b",
            "--enable-faults",
        ),
    )
    assert not options.prefix_cache and not options.settle_replies and options.cache_policy == "lru"
    assert (
        options.reuse_generated
        and options.isolate_keys
        and options.enable_faults
        and options.admin_keys == ("b",)
    )


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("7", 7), ("1KiB", 1024), ("512MiB", 2**29), ("2.5 GiB", 5 * 2**29), ("1TiB", 2**40)],
)
def test_sizes_take_binary_units(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modle", "x"], "did you mean --model?"),
        (["--max-model-length=5"], "did you mean --max-model-len?"),
        (["--zzz"], "--help"),
        (["some/dir"], "unexpected argument 'some/dir'"),
        (["--port", "70000"], "--port: '70000' must be a whole number from 0 to 65535"),
        (["--port", "x"], "--port"),
        (["--device-memory", "2GB"], "--device-memory: '2GB' is no size; write 512MiB, 2GiB"),
        (["--mesh", "4"], "--mesh: '4' is no mesh; write tp1"),
        (["--grid-tokens", "100"], "--grid-tokens: 100 is not a multiple of 64; try 64"),
        (["--dtype", "float16"], "--dtype"),
        (["--max-model-len", "1"], "--max-model-len"),
        (["--max-concurrency", "0"], "--max-concurrency"),
        (["--decode-buckets", "4,2"], "--decode-buckets"),
        (["--decode-buckets", "1,2"], "below --max-concurrency 32"),
        (["--host", "0.0.0.0"], "add --api-key KEY, or --insecure"),
        (["--served-model-name", "*"], "needs a name beside it"),
        (["--served-model-name", "a,,b"], "--served-model-name"),
        (["--cors-origins", "*"], "--cors-origins: '*' is no origin"),
        (["--api-key", "with space"], "--api-key"),
        (["--chat-template", "no/such/file"], "--chat-template: there is no file no/such/file"),
        (["--stall-limit", "nan"], "--stall-limit"),
        (["--cache-policy", "best"], "--cache-policy: invalid choice: 'best' (choose from"),
        (["--prefix-cache", "yes"], "--prefix-cache"),
        (["--enable-admin"], "--enable-admin: the admin routes need a key of their own; add --admin-key KEY"),
        (["--admin-key", "k"], "--admin-key: the admin routes are off; add --enable-admin"),
        (["--enable-admin", "--admin-key", "k", "--api-key", "k"], "--admin-key: this key is an --api-key"),
        (["--isolate-keys"], "--isolate-keys: there are no keys to tell apart"),
        (["--model"], "--model"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_command_line_ends_with_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(*arguments)
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert message in error and error.count("\n") == 1


def test_other_machines_may_call_with_a_key_or_insecurely() -> None:
    assert parse("--host", "0.0.0.0", "--api-key", "k").host == "0.0.0.0"
    assert parse("--host", "::", "--insecure").insecure


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--version")
    assert caught.value.code == 0 and "1.2.3" in capsys.readouterr().out
