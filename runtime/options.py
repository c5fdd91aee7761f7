"""What does the command line ask for?

argparse to one frozen record, checked as a whole, with messages that name the flag and the way out. Runs
once, before anything else; reads no environment.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, cast

from cache_tiers.policy import POLICIES
from runtime.chips import CHIPS
from runtime.config_file import ConfigError, with_config
from runtime.folders import compiled_folder
from runtime.http_guard import is_loopback
from runtime.logs import LogFormat
from runtime.parsers.registry import AUTO, OFF, REASONING_PARSERS, TOOL_PARSERS
from runtime.tier_options import TierOptions

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB)?")
_UNIT_BYTES = {None: 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_MESH = re.compile(r"tp([1-9]\d{0,3})")
_REASONING_FIELDS = ("reasoning", "reasoning_content")
Schedule = Literal["balanced", "prefill", "decode"]
DraftChoice = Literal["auto", "mtp", "ngram", "off"]


@dataclass(frozen=True)
class ServerOptions:
    """One field per flag. None means that the default depends on the model or the machine."""

    model: str | None
    served_model_names: tuple[str, ...]
    host: str
    port: int
    mesh_ranks: int
    dtype: str | None
    max_model_tokens: int | None
    max_concurrency: int
    device_memory_bytes: int | None
    grid_tokens: int | None
    prefill_tokens: int
    schedule: Schedule
    priorities: bool
    decode_buckets_rows: tuple[int, ...] | None
    draft: DraftChoice
    draft_tokens: int | None
    deterministic: bool
    kernels: str
    kernels_strict: bool
    prefix_cache: bool
    settle_replies: bool
    reuse_generated: bool
    cache_policy: str
    tiers: TierOptions
    plan_only: bool
    plan_for: str | None
    api_keys: tuple[str, ...]
    metrics_keys: tuple[str, ...]
    admin_keys: tuple[str, ...]
    isolate_keys: bool
    enable_faults: bool
    show_page: bool
    allowed_hosts: tuple[str, ...]
    cors_origins: tuple[str, ...]
    insecure: bool
    chat_template: Path | None
    tool_parser: str
    reasoning_parser: str
    reasoning_fields: tuple[str, ...]
    keep_volatile_lines: bool
    compile_cache: Path | None
    max_waiting: int
    max_body_bytes: int
    stall_limit_s: float
    metrics_compat_vllm: bool
    log_format: LogFormat
    offline: bool


class _Parser(argparse.ArgumentParser):
    """One line on stderr and exit code 2 for whatever is wrong."""

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: {message}\n")
        sys.exit(2)

    def parse_known_flags(self, argv: Sequence[str]) -> argparse.Namespace:
        namespace, unknown = self.parse_known_args(argv)
        if unknown:
            self.error(self._unknown(unknown[0]))
        return namespace

    def _unknown(self, argument: str) -> str:
        if not argument.startswith("-"):
            return f"unexpected argument {argument!r}; every option is a flag (see {self.prog} --help)"
        flag = argument.partition("=")[0]
        flags = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
        close = difflib.get_close_matches(flag, flags, n=1, cutoff=0.6)
        hint = f"did you mean {close[0]}?" if close else f"see {self.prog} --help"
        return f"unknown flag {flag}; {hint}"


def parse_size(text: str) -> int:
    """Bytes of a size such as 512MiB or 2.5GiB; a bare number is bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; write 512MiB, 2GiB or the like (KiB, MiB, GiB)"
        )
    return int(float(match[1]) * _UNIT_BYTES[match[2]])


def parse_options(argv: Sequence[str], version: str, cache_home: Path) -> ServerOptions:
    """Reads the flags. Ends the process with code 2 and one message for a flag that is wrong."""
    parser = _build_parser(version, cache_home)
    try:
        args = parser.parse_known_flags(with_config(argv, parser))
    except ConfigError as error:
        parser.error(str(error))
    if not is_loopback(args.host) and not args.api_key and not args.insecure:
        parser.error(
            f"--host {args.host} can be reached from other machines:"
            " add --api-key KEY, or --insecure to serve everyone"
        )
    if args.decode_buckets is not None and args.decode_buckets[-1] < args.max_concurrency:
        parser.error(
            f"--decode-buckets ends at {args.decode_buckets[-1]},"
            f" below --max-concurrency {args.max_concurrency};"
            " add a bucket that large, or lower --max-concurrency"
        )
    if args.deterministic and args.decode_buckets is not None:
        parser.error("--deterministic: decode batches have one size; leave --decode-buckets away")
    if args.deterministic and args.reuse_generated == "on":
        parser.error("--deterministic: what decode computed is not reused; leave --reuse-generated on away")
    if args.plan_for and not args.plan_only:
        parser.error(f"--plan-for {args.plan_for} plans and serves nothing; add --plan-only")
    _check_keys(parser, args)
    if args.served_model_name == ("*",):
        parser.error("--served-model-name: '*' needs a name beside it, such as my-model,*")
    return ServerOptions(
        model=args.model,
        served_model_names=args.served_model_name,
        host=args.host,
        port=args.port,
        mesh_ranks=args.mesh,
        dtype=None if args.dtype == "auto" else args.dtype,
        max_model_tokens=args.max_model_len,
        max_concurrency=args.max_concurrency,
        device_memory_bytes=args.device_memory,
        grid_tokens=args.grid_tokens,
        prefill_tokens=args.prefill_tokens,
        schedule=cast(Schedule, args.schedule),
        priorities=args.priorities == "on",
        decode_buckets_rows=args.decode_buckets,
        draft=cast(DraftChoice, args.draft),
        draft_tokens=args.draft_tokens,
        deterministic=args.deterministic,
        kernels=args.kernels,
        kernels_strict=args.kernels_strict,
        prefix_cache=args.prefix_cache == "on",
        settle_replies=args.settle_replies == "on",
        reuse_generated=args.reuse_generated == "on",
        cache_policy=args.cache_policy,
        tiers=_tiers(parser, args),
        plan_only=args.plan_only,
        plan_for=args.plan_for,
        api_keys=tuple(args.api_key),
        metrics_keys=tuple(args.metrics_key),
        admin_keys=tuple(args.admin_key),
        isolate_keys=args.isolate_keys,
        enable_faults=args.enable_faults,
        show_page=not args.no_ui,
        allowed_hosts=args.allowed_hosts,
        cors_origins=args.cors_origins,
        insecure=args.insecure,
        keep_volatile_lines=args.keep_volatile_lines,
        chat_template=args.chat_template,
        tool_parser=args.tool_parser,
        reasoning_parser=args.reasoning_parser,
        reasoning_fields=_REASONING_FIELDS if args.reasoning_field == "both" else (args.reasoning_field,),
        compile_cache=None if str(args.compile_cache) == "off" else args.compile_cache,
        max_waiting=args.max_waiting,
        max_body_bytes=args.max_body,
        stall_limit_s=args.stall_limit,
        metrics_compat_vllm=args.metrics_compat == "vllm",
        log_format=cast(LogFormat, args.log_format),
        offline=args.offline,
    )


def _tiers(parser: _Parser, args: argparse.Namespace) -> TierOptions:
    """What lies behind the device."""
    if args.prefix_cache == "off" and (args.host_cache or args.disk_cache):
        parser.error("--prefix-cache off: there is nothing to keep; leave --host-cache and --disk-cache away")
    if args.persist == "eager" and args.disk_cache is None:
        parser.error("--persist eager: there is no disk to write to; add --disk-cache DIR:SIZE")
    path, size_bytes = args.disk_cache or (None, 0)
    return TierOptions(
        host_bytes=args.host_cache,
        host_reserve_bytes=args.host_reserve,
        disk_path=path,
        disk_bytes=size_bytes,
        persist_eagerly=args.persist == "eager",
        transfer_rate_bytes_per_s=args.transfer_rate,
        drain_s=args.drain_seconds,
    )


def _check_keys(parser: _Parser, args: argparse.Namespace) -> None:
    """Flags about keys that make sense only together."""
    if args.enable_admin and not args.admin_key:
        parser.error("--enable-admin: the admin routes need a key of their own; add --admin-key KEY")
    if args.admin_key and not args.enable_admin:
        parser.error("--admin-key: the admin routes are off; add --enable-admin")
    if set(args.admin_key) & {*args.api_key, *args.metrics_key}:
        parser.error("--admin-key: this key is an --api-key or a --metrics-key too; take another one")
    if args.isolate_keys and not args.api_key:
        parser.error("--isolate-keys: there are no keys to tell apart; add --api-key KEY for each client")


def _build_parser(version: str, cache_home: Path) -> _Parser:
    parser = _Parser(
        prog="strata-serve",
        description="Serves a model over an OpenAI-compatible API. `strata-serve chat` talks to a server.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"strata-serve {version}")
    parser.add_argument("--config", metavar="FILE", help="TOML with the flags' names; flags given here win")
    _add_model_flags(parser)
    _add_engine_flags(parser, cache_home)
    _add_tier_flags(parser)
    _add_server_flags(parser)
    return parser


def _add_model_flags(parser: _Parser) -> None:
    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--model", metavar="DIR|ORG/NAME[@REV]", help="a model folder, or a name on the Hugging Face hub")
    add("--served-model-name", type=_names, default=(), metavar="A,B", help="names clients use; * takes any")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of weights and cache")
    add("--max-model-len", type=_count(2), metavar="N", help="tokens of a prompt and its answer together")
    add("--chat-template", type=_existing_file, metavar="FILE", help="a jinja file instead of the model's")
    add("--tool-parser", choices=(AUTO, OFF, *TOOL_PARSERS), default=AUTO, help="form of tool calls")
    add("--reasoning-parser", choices=(AUTO, OFF, *REASONING_PARSERS), default=AUTO, help="form of thinking")
    add(
        "--reasoning-field",
        choices=("both", *_REASONING_FIELDS),
        default="both",
        help="name of an answer's thinking",
    )
    add(
        "--keep-volatile-lines",
        action="store_true",
        help="keep system lines that some clients change with each request",
    )
    add("--offline", action="store_true", help="use only what has been downloaded before")


def _add_engine_flags(parser: _Parser, cache_home: Path) -> None:
    group = parser.add_argument_group("engine")
    add = group.add_argument
    add("--mesh", type=_mesh, default=1, metavar="tpN", help="shard over N devices (on CPU: makes N)")
    add("--device-memory", type=_size_or_auto, default=None, metavar="SIZE|auto", help="per device")
    add("--max-concurrency", type=_count(1, 4096), default=32, metavar="N", help="sequences at once")
    add("--grid-tokens", type=_grid, metavar="G", help="grid of the prefix cache, a multiple of 64")
    add("--prefill-tokens", type=_count(64), default=2048, metavar="N", help="prompt tokens per step")
    add("--schedule", choices=("balanced", "prefill", "decode"), default="balanced")
    add("--priorities", choices=("on", "off"), default="off", help="requests may say how urgent they are")
    add("--decode-buckets", type=_buckets, metavar="1,2,4", help="batch sizes of decode steps")
    add("--kernels", choices=("auto", "reference", "xla", "gpu", "tpu"), default="auto")
    add("--kernels-strict", action="store_true", help="start only if every kernel's tiles are recorded")
    add("--prefix-cache", choices=("on", "off"), default="on", help="reuse prompts' beginnings")
    add("--settle-replies", choices=("on", "off"), default="on", help="cache replies while idle")
    add("--reuse-generated", choices=("on", "off"), default="off", help="cache what decode steps computed")
    add("--draft", choices=("auto", "mtp", "ngram", "off"), default="auto", help="who drafts tokens ahead")
    add(
        "--draft-tokens",
        type=_draft_tokens,
        default=None,
        metavar="auto|0..7",
        help="of a sequence in one step (auto: as many as pay)",
    )
    add("--deterministic", action="store_true", help="the same tokens whatever else runs; costs speed")
    add("--cache-policy", choices=POLICIES, default="recency", help="what is evicted first")
    add("--plan-only", action="store_true", help="print the memory plan and exit")
    add(
        "--plan-for",
        choices=CHIPS,
        help="with --plan-only: plan for chips that are not here, from config.json alone",
    )
    add(
        "--compile-cache",
        type=Path,
        default=compiled_folder(cache_home),
        metavar="DIR|off",
        help="where compiled programs are kept (default: %(default)s)",
    )


def _add_tier_flags(parser: _Parser) -> None:
    group = parser.add_argument_group("cache behind the device")
    add = group.add_argument
    add(
        "--host-cache",
        type=_size_or_auto,
        default=None,
        metavar="SIZE|auto|0",
        help="pinned host memory (auto)",
    )
    add(
        "--host-reserve",
        type=parse_size,
        default=1 << 30,
        metavar="SIZE",
        help="host memory left alone (1GiB)",
    )
    add(
        "--disk-cache",
        type=_folder_and_size,
        metavar="DIR:SIZE",
        help="keep prefixes there, over restarts too",
    )
    add("--persist", choices=("on-evict", "eager"), default="on-evict", help="when they are written to disk")
    add("--transfer-rate", type=_rate, metavar="SIZE|max|auto", help="of stores and restores, per second")
    add(
        "--drain-seconds",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="for writing to disk at the end (10)",
    )


def _add_server_flags(parser: _Parser) -> None:
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=_count(0, 65535), default=8000, help="0 takes a free one (default: %(default)s)")
    add("--api-key", type=_key, action="append", default=[], metavar="KEY", help="may be given several times")
    add("--metrics-key", type=_key, action="append", default=[], metavar="KEY", help="opens /metrics alone")
    add("--isolate-keys", action="store_true", help="each API key has a prefix cache of its own")
    add("--enable-admin", action="store_true", help="serve /admin/..., with --admin-key alone")
    add("--admin-key", type=_key, action="append", default=[], metavar="KEY", help="opens /admin/ alone")
    add("--no-ui", action="store_true", help="serve no page at /")
    add("--enable-faults", action="store_true", help="allow test switches in requests")
    add("--allowed-hosts", type=_names, default=(), metavar="A,B", help="more Host headers to accept")
    add("--cors-origins", type=_origins, default=(), metavar="A,B", help="web pages that may call")
    add("--insecure", action="store_true", help="allow other machines to call without a key")
    add("--max-waiting", type=_count(1, 10**6), default=1024, metavar="N", help="requests that may queue")
    add("--max-body", type=parse_size, default=64 * 2**20, metavar="SIZE", help="of a request (64MiB)")
    add("--stall-limit", type=_seconds, default=60.0, metavar="S", help="/health turns red after S s stuck")
    add("--metrics-compat", choices=("off", "vllm"), default="off", help="more names in /metrics")
    add("--log-format", choices=("text", "json"), default="text", help="of a line; json is one object")


def _count(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"-?\d{1,12}", text) or not low <= int(text) <= high:
            bound = f"from {low} to {high}" if high < 2**31 - 1 else f"of at least {low}"
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number {bound}")
        return int(text)

    return parse


def _draft_tokens(text: str) -> int | None:
    return None if text == "auto" else _count(0, 7)(text)


def _grid(text: str) -> int:
    value = _count(64)(text)
    if value % 64:
        raise argparse.ArgumentTypeError(f"{value} is not a multiple of 64; try {value // 64 * 64 or 64}")
    return value


def _mesh(text: str) -> int:
    match = _MESH.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no mesh; write tp1, tp2, tp4 ...")
    return int(match[1])


def _size_or_auto(text: str) -> int | None:
    return None if text == "auto" else parse_size(text)


def _folder_and_size(text: str) -> tuple[Path, int]:
    folder, colon, size = text.rpartition(":")
    if not colon or not folder:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a folder and a size such as /var/cache/strata:100GiB"
        )
    return Path(folder).expanduser(), parse_size(size)


def _rate(text: str) -> float | None:
    if text == "auto":
        return None
    return math.inf if text == "max" else float(parse_size(text) or 1)


def _buckets(text: str) -> tuple[int, ...]:
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or values[0] < 1 or list(values) != sorted(set(values)):
        raise argparse.ArgumentTypeError(f"{text!r} must be rising whole numbers such as 1,2,4,8")
    return values


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name in it")
    return names


def _origins(text: str) -> tuple[str, ...]:
    for origin in _names(text):
        if not re.fullmatch(r"https?://[^/\s*]+", origin):
            raise argparse.ArgumentTypeError(
                f"{origin!r} is no origin; write https://host or http://host:port"
            )
    return _names(text)


def _key(text: str) -> str:
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise argparse.ArgumentTypeError("a key must be printable ASCII without spaces")
    return text


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive number of seconds")
    return value


def _existing_file(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return path
