#!/usr/bin/env python3
"""Writes random_vectors.inc: known answers of the random hash, from big integers and nothing else.

    python3 tests/vectors/make_random_vectors.py > tests/vectors/random_vectors.inc

Sources: SplitMix64's finaliser with Stafford's variant 13 constants; "lowbias32" of C. Wellons'
hash-prospector; FNV-1a with 64 bits. How they are put together is described in zerofp8/random.h.
"""

M32 = (1 << 32) - 1
M64 = (1 << 64) - 1
GOLDEN64 = 0x9E3779B97F4A7C15
GOLDEN32 = 0x9E3779B9
GRANULE = 32


def mix64(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    return z ^ (z >> 31)


def lowbias32(x):
    x ^= x >> 16
    x = (x * 0x7FEB352D) & M32
    x ^= x >> 15
    x = (x * 0x846CA68B) & M32
    return x ^ (x >> 16)


def fnv1a(name):
    h = 0xCBF29CE484222325
    for byte in name.encode():
        h = ((h ^ byte) * 0x100000001B3) & M64
    return h


def random_key(seed, step, purpose, micro_batch, data_rank, name):
    key = mix64((seed + GOLDEN64) & M64)
    key = mix64(key ^ step)
    key = mix64(key ^ (purpose << 32) ^ micro_batch)
    key = mix64(key ^ data_rank)
    return mix64(key ^ fnv1a(name))


def random_bits(key, offset):
    granule, lane = divmod(offset, GRANULE)
    base = mix64((key + (granule + 1) * GOLDEN64) & M64) >> 32
    return lowbias32((base + lane * GOLDEN32) & M32)


def main():
    print("// Made by make_random_vectors.py; do not edit.")
    print("inline constexpr Lowbias32Vector kLowbias32Vectors[] = {")
    for x in (0, 1, 2, 0x12345678, 0x7FFFFFFF, 0x80000000, 0xDEADBEEF, M32):
        print(f"    {{0x{x:08X}u, 0x{lowbias32(x):08X}u}},")
    print("};\ninline constexpr Mix64Vector kMix64Vectors[] = {")
    for z in (0, 1, 2, GOLDEN64, 0x0123456789ABCDEF, 1 << 63, M64):
        print(f"    {{0x{z:016X}ull, 0x{mix64(z):016X}ull}},")
    print("};\ninline constexpr NameVector kNameVectors[] = {")
    for name in ("", "a", "b", "layers.0.weight", "layers.1.weight", "\u00e9"):
        text = "".join(f"\\x{b:02X}" if b > 126 else chr(b) for b in name.encode())
        print(f'    {{"{text}", 0x{fnv1a(name):016X}ull}},')
    print("};\ninline constexpr KeyVector kKeyVectors[] = {")
    for row in (
        (0, 0, 1, 0, 0, ""),
        (1, 7, 1, 0, 0, "layers.0.weight"),
        (1, 7, 2, 0, 0, "layers.0.weight"),
        (42, 1 << 40, 3, 511, 1023, "embed"),
        (M64, M64, 4, M32, M32, "head"),
    ):
        seed, step, purpose, micro, rank, name = row
        key = random_key(*row)
        for offset in (0, 1, 31, 32, 127, 128, (1 << 31) + 7, (1 << 40) + 33):
            print(
                f'    {{{seed}ull, {step}ull, {purpose}u, {micro}u, {rank}u, "{name}", '
                f"0x{key:016X}ull, {offset}ull, 0x{random_bits(key, offset):08X}u}},"
            )
    print("};")


if __name__ == "__main__":
    main()
