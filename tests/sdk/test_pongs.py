"""What pongs say while an event loop is blocked."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.sdk.pongs import Blocking, pack_blocking, read_blocking


def test_a_pong_says_what_blocks_the_loop() -> None:
    blocking = Blocking(2500, "shop/charge", "/srv/shop.py:41")

    assert read_blocking(pack_blocking(blocking)) == blocking


@given(st.integers(0, 2**40), st.text(max_size=300), st.text(max_size=600))
def test_it_fits_a_control_frame_whatever_the_names_are(milliseconds: int, handler: str, place: str) -> None:
    said = pack_blocking(Blocking(milliseconds, handler, place))

    assert len(said) <= 125
    assert read_blocking(said) is not None


def test_of_a_long_path_the_end_stays() -> None:
    said = read_blocking(pack_blocking(Blocking(1, "s" * 128 + "/charge", "/very/deep" * 40 + "/shop.py:41")))

    assert said is not None
    assert said.handler.startswith("…") and said.handler.endswith("/charge")
    assert said.place.startswith("…") and said.place.endswith("/shop.py:41")


@given(st.binary(max_size=200))
def test_any_other_pong_says_nothing(data: bytes) -> None:
    read_blocking(data)

    assert read_blocking(b"") is None
    assert read_blocking(b"ping") is None
