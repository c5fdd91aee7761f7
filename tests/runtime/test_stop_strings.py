"""Do stop strings end the text at the same place, and hold back the same tail, however the text was cut?"""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.stop_strings import StopMatcher

_ALPHABET = "ab<|"


def run(pieces: list[str], stops: tuple[str, ...], include: bool = False) -> tuple[str, str | None]:
    """All text shown, and the stop string that ended it."""
    matcher = StopMatcher(stops, include)
    shown = ""
    for piece in pieces:
        text, match = matcher.feed(piece)
        shown += text
        if match is not None:
            return shown, match.stop
    return shown + matcher.flush(), None


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The rule written plainly: the stop completed first, the longest of those completed together."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(_ALPHABET, max_size=30),
    stops=st.lists(st.text(_ALPHABET, min_size=1, max_size=4), min_size=1, max_size=3, unique=True),
    cuts=st.sets(st.integers(0, 30)),
)
def test_every_cut_gives_the_same_text_and_stop(text: str, stops: list[str], cuts: set[int]) -> None:
    bounds = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(bounds)]
    assert run(pieces, tuple(stops)) == first_stop(text, tuple(stops))


@settings(max_examples=200, deadline=None)
@given(text=st.text(_ALPHABET, max_size=20), stop=st.text(_ALPHABET, min_size=1, max_size=4))
def test_only_what_could_become_a_stop_is_held(text: str, stop: str) -> None:
    matcher = StopMatcher((stop,))
    shown = ""
    for i, char in enumerate(text):
        piece, match = matcher.feed(char)
        shown += piece
        if match is not None:
            return
        held = text[len(shown) : i + 1]
        longest = max(k for k in range(len(stop)) if text[: i + 1].endswith(stop[:k]))
        assert held == text[i + 1 - longest : i + 1]


def test_nothing_after_the_stop_leaks_from_one_piece() -> None:
    assert run(["hello STOP and more"], ("STOP",)) == ("hello ", "STOP")


def test_the_stop_string_is_shown_on_request() -> None:
    assert run(["hello ST", "OP and more"], ("STOP",), include=True) == ("hello STOP", "STOP")


def test_a_held_tail_is_released_at_the_end() -> None:
    assert run(["a <", "|im"], ("<|im_end|>",)) == ("a <|im", None)


def test_an_unarmed_match_is_passed_over() -> None:
    matcher = StopMatcher(("ab",))
    assert matcher.feed("xab", armed=False) == ("xab", None)
    text, match = matcher.feed("ab")
    assert text == "" and match is not None
