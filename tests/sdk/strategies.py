"""Hypothesis strategies for ids, texts and failures."""

from hypothesis import strategies as st

ids = st.binary(min_size=16, max_size=16)
indexes = st.integers(0, 2**32 - 1)
names = (
    st.text(min_size=1, max_size=32)
    .filter(lambda text: len(text.encode(errors="ignore")) in range(1, 128))
    .map(lambda text: text.encode(errors="replace").decode())
)
extras = st.fixed_dictionaries(
    {},
    optional={
        "metadata": st.dictionaries(names, names, min_size=1, max_size=3),
        "trace": st.lists(names, min_size=1, max_size=3),
    },
).filter(bool)
failures = st.tuples(st.integers(100, 999), names, names).map(lambda parts: [1, *parts])
