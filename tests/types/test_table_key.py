from __future__ import annotations

from bagpipe.types.table_key import signed, table_key

#: Stored rows depend on these keys.
GOLDEN_KEYS = {
    (0, "user", ""): -6856798112528620034,
    (-1, "item", ""): 6978326514433217922,
    (7, "user", "rounding"): -846534393671139248,
}


def test_keys_are_fixed_and_differ_by_seed_name_and_purpose() -> None:
    keys = {key: table_key(key[0], key[1], purpose=key[2]) for key in GOLDEN_KEYS}
    assert keys == GOLDEN_KEYS
    assert len({table_key(seed, name) for seed in range(-5, 5) for name in ("", "a", "ab")}) == 30


def test_signed_is_twos_complement() -> None:
    assert [signed(value, 8) for value in (0, 127, 128, 255, 256, -1)] == [0, 127, -128, -1, 0, -1]
