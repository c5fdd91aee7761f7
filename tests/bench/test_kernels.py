"""Does `bench kernels` run its programs and report what they need? Tiny cases; no figure is judged here."""

import json

from bench import kernels
from pallas_kernels.linear_recurrence.programs import programs

QUICK = ["--rounds", "1", "--sample-s", "0.001", "--floor-mib", "1", "--matrix-side", "64"]


def test_kernels_reports_bytes_operations_and_shares(capsys):
    """In place, with indices that stay in their arrays, and the tile beside the token loop."""
    flags = ["--kernel", "linear_recurrence", "--case", "tiny-kimi_linear", "--program", "decode"]
    assert kernels.main([*flags, "--program", "tile", "--token-loop", *QUICK, "--json"]) == 0
    decode, tile = json.loads(capsys.readouterr().out)["results"]
    (program,) = [p for p in programs() if (p.case, p.name) == ("tiny-kimi_linear", "decode")]
    # 3 sequences of 8 heads: state rows of 16 x 16 read and written; q, k, v, decays and out of 16 each, and beta.
    assert decode["bytes"] == program.moved_bytes == 4 * 3 * 8 * (2 * 256 + 5 * 16 + 1)
    assert decode["operations"] == 6 * 3 * 8 * 256
    assert decode["bound"] in ("bytes", "operations")
    assert decode["share_of_floor"]["median"] > 0 and tile["token_loop"]["cpu_ratio"] > 0


def test_people_get_a_line_a_program(capsys):
    flags = ["--kernel", "row_copy", "--case", "tiny", "--program", "scatter_pages"]
    assert kernels.main([*flags, *QUICK]) == 0
    assert "row_copy.scatter_pages tiny [auto]" in capsys.readouterr().out
