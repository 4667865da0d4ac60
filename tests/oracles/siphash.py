"""SipHash-2-4 of 8 bytes, written from its paper."""

MASK = (1 << 64) - 1


def siphash(number: int, key: bytes) -> int:
    """Of a number as 8 bytes, little-endian, under a key of 16 bytes."""
    k0, k1 = (int.from_bytes(key[at : at + 8], "little") for at in (0, 8))
    a, b = k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D
    c, d = k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573

    def rounds(times: int) -> None:
        nonlocal a, b, c, d
        for _ in range(times):
            a = a + b & MASK
            b = _rotated(b, 13) ^ a
            a = _rotated(a, 32)
            c = c + d & MASK
            d = _rotated(d, 16) ^ c
            a = a + d & MASK
            d = _rotated(d, 21) ^ a
            c = c + b & MASK
            b = _rotated(b, 17) ^ c
            c = _rotated(c, 32)

    for word in (number, 8 << 56):
        d ^= word
        rounds(2)
        a ^= word
    c ^= 0xFF
    rounds(4)
    return a ^ b ^ c ^ d


def _rotated(number: int, bits: int) -> int:
    return (number << bits | number >> (64 - bits)) & MASK
