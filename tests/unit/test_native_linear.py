"""Laws of the native linear kernels: right against float64, exact storage, rows that do not feel their company.

Never asserts a time, and skips where no compiler can build the library.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest

F32, BF16, BF12, I8, I4 = range(5)
KINDS = {"f32": F32, "bf16": BF16, "bf12": BF12, "i8": I8, "i4": I4}
SHAPES = [(1, 32), (33, 32), (70, 64), (31, 50), (100, 576), (40, 1000), (300, 896), (64, 4864)]


@pytest.fixture(scope="module")
def native() -> ctypes.CDLL:
    module = pytest.importorskip("dspark.model.native")
    lib = module.library()
    if lib is None:
        pytest.skip("no C++ compiler: the native library cannot be built")
    pointer, i32, i64, size = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_size_t
    lib.dspark_packed_bytes.restype, lib.dspark_packed_bytes.argtypes = size, [i32, i64, i64]
    lib.dspark_pack.restype, lib.dspark_pack.argtypes = size, [i32, i64, i64, pointer, pointer, i32]
    lib.dspark_linear.restype = i32
    lib.dspark_linear.argtypes = [pointer, i32, i64, i64, pointer, pointer, i32, pointer, i32]
    return lib


def to_bf16(value: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16 bits (uint16), to nearest even."""
    bits = np.ascontiguousarray(value, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A packed layer [n, k] and the library that multiplies by it."""

    lib: ctypes.CDLL
    kind: int
    n: int
    k: int
    blob: np.ndarray
    used: int

    def __call__(self, x: np.ndarray, *, bias: np.ndarray | None = None, threads: int = 2) -> np.ndarray:
        x = np.ascontiguousarray(x, np.float32)
        out = np.full((len(x), self.n), np.nan, np.float32)
        pointer = None if bias is None else bias.ctypes.data
        status = self.lib.dspark_linear(
            self.blob.ctypes.data, self.kind, self.n, self.k, pointer, x.ctypes.data, len(x), out.ctypes.data, threads
        )
        assert status == 0
        return out


def pack(lib: ctypes.CDLL, kind: int, weight: np.ndarray, *, threads: int = 2) -> Packed:
    """`weight`: float32 [n, k], or bfloat16 bits (uint16) for BF16 and BF12."""
    n, k = weight.shape
    room = lib.dspark_packed_bytes(kind, n, k)
    memory = np.zeros(room + 64, np.uint8)
    start = -memory.ctypes.data % 64
    blob = memory[start : start + room]
    if kind in (BF16, BF12) and weight.dtype != np.uint16:
        weight = to_bf16(weight)
    weight = np.ascontiguousarray(weight)
    used = lib.dspark_pack(kind, n, k, weight.ctypes.data, blob.ctypes.data, threads)
    assert used <= room
    return Packed(lib=lib, kind=kind, n=n, k=k, blob=blob, used=used)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def bits(value: np.ndarray) -> np.ndarray:
    return value.view(np.uint32)


def quantised_rows(x: np.ndarray) -> np.ndarray:
    """Symmetric int8 along the last axis, back in float64."""
    scale = np.abs(x).max(-1, keepdims=True).astype(np.float64) / 127
    return np.rint(x / np.where(scale > 0, scale, 1)) * scale


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_matches_float64(native: ctypes.CDLL, kind: int, shape: tuple[int, int]) -> None:
    n, k = shape
    weight, x, bias = normal(n, k, scale=0.02), normal(77, k, seed=1), normal(n, seed=2)
    if kind in (BF16, BF12):
        exact = from_bf16(to_bf16(x)).astype(np.float64) @ from_bf16(to_bf16(weight)).astype(np.float64).T
    elif kind == I8:
        exact = quantised_rows(x) @ quantised_rows(weight).T
    else:
        exact = x.astype(np.float64) @ weight.astype(np.float64).T
    layer = pack(native, kind, weight)
    # 4-bit weights of a normal law lose 8 % of their norm; int8 ties may round the other way than in float64.
    bound = {F32: 3e-6, BF16: 3e-6, BF12: 3e-6, I8: 1e-3, I4: 0.13}[kind]
    assert np.linalg.norm(layer(x) - exact) <= bound * np.linalg.norm(exact)
    assert np.linalg.norm(layer(x, bias=bias) - exact - bias) <= bound * np.linalg.norm(exact) + 1e-5
    assert np.isfinite(layer(x)).all()


@pytest.mark.parametrize("shape", [(31, 50), (100, 576), (40, 4864)], ids=str)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_rows_do_not_feel_their_company(native: ctypes.CDLL, kind: int, shape: tuple[int, int]) -> None:
    n, k = shape
    layer, x, bias = pack(native, kind, normal(n, k, scale=0.02)), normal(600, k, seed=1), normal(n, seed=2)
    x[3] *= 1000.0  # a neighbour with an outlier must not change anybody's scale
    full = layer(x, bias=bias)
    for rows in [*range(1, 41), 64, 300, 513]:
        for first in (0, 600 - rows):
            part = layer(x[first : first + rows], bias=bias, threads=1 + rows % 3)
            assert np.array_equal(bits(part), bits(full[first : first + rows])), (rows, first)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_columns_do_not_feel_the_split(native: ctypes.CDLL, kind: int) -> None:
    weight, x = normal(200, 224, scale=0.02), normal(9, 224, seed=1)
    whole = pack(native, kind, weight)(x, threads=1)
    for threads in (2, 3, 5, 16):
        assert np.array_equal(bits(pack(native, kind, weight)(x, threads=threads)), bits(whole))
    for first, last in ((0, 1), (5, 70), (33, 200)):
        part = pack(native, kind, weight[first:last])(x)
        assert np.array_equal(bits(part), bits(whole[:, first:last]))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_blob_does_not_depend_on_threads(native: ctypes.CDLL, kind: int) -> None:
    weight = normal(130, 160)
    one, three = pack(native, kind, weight, threads=1), pack(native, kind, weight, threads=3)
    assert one.used == three.used
    assert np.array_equal(one.blob[: one.used], three.blob[: three.used])


def weird_weights(name: str) -> np.ndarray:
    """bfloat16 bits [70, 320] that strain a table of 16 exponents."""
    rng = np.random.default_rng(3)
    weight = to_bf16(normal(70, 320, seed=4, scale=0.02))
    if name == "zeros":
        weight[:] = 0
    elif name == "signed zeros":
        weight[:] = rng.integers(0, 2, weight.shape, np.uint16) << 15
    elif name == "denormals":
        weight[rng.random(weight.shape) < 0.3] &= 0x807F
    elif name == "outliers":
        hit = rng.random(weight.shape) < 0.01
        weight[hit] = to_bf16(normal(int(hit.sum()), seed=5, scale=1e20))
    elif name == "every exponent":
        random = rng.integers(0, 1 << 16, weight.shape, np.uint16)
        weight = np.where((random >> 7 & 255) > 200, random & np.uint16(0xBFFF), random).astype(np.uint16)
    elif name == "rows of many scales":
        weight = to_bf16(from_bf16(weight) * 2.0 ** rng.integers(-30, 30, (70, 1)).astype(np.float32))
    return weight


@pytest.mark.parametrize(
    "name", ["plain", "zeros", "signed zeros", "denormals", "outliers", "every exponent", "rows of many scales"]
)
def test_bf12_is_bitwise_bf16(native: ctypes.CDLL, name: str) -> None:
    weight = weird_weights(name)
    plain, small = pack(native, BF16, weight), pack(native, BF12, weight)
    for rows in (1, 2, 7, 8, 17, 40, 70, 600):
        x = normal(rows, weight.shape[1], seed=rows)
        assert np.array_equal(bits(plain(x)), bits(small(x))), rows


def test_bf12_stores_every_bit(native: ctypes.CDLL) -> None:
    """Unit vectors read single weights back."""
    weight = weird_weights("outliers")
    read = pack(native, BF12, weight)(np.eye(weight.shape[1], dtype=np.float32)).T
    # Hardware dot products flush denormals, of which these weights have none; -0 + 0 is 0.
    assert np.array_equal(read, from_bf16(weight))


def test_bf12_takes_three_quarters(native: ctypes.CDLL) -> None:
    layer = pack(native, BF12, normal(512, 2048, scale=0.02))
    assert layer.used * 8 < 12.3 * 512 * 2048


@pytest.mark.parametrize("kind", [I8, I4])
def test_zero_and_tiny_rows(native: ctypes.CDLL, kind: int) -> None:
    weight, x = normal(40, 96), normal(3, 96, seed=1)
    weight[5], x[0] = 0, 0
    x[1] *= 1e-30
    out = pack(native, kind, weight)(x)
    assert (out[0] == 0).all() and (out[:, 5] == 0).all()
    exact = x[1].astype(np.float64) @ weight.astype(np.float64).T
    assert np.linalg.norm(out[1] - exact) < 0.15 * np.linalg.norm(exact)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_nan_stays_in_its_row(native: ctypes.CDLL, kind: int) -> None:
    layer, x = pack(native, kind, normal(40, 96)), normal(5, 96, seed=1)
    clean = layer(x)
    x[2, 40] = np.nan
    out = layer(x)
    assert np.isnan(out[2]).all()
    others = [0, 1, 3, 4]
    assert np.array_equal(bits(out[others]), bits(clean[others]))


def test_i4_beats_the_naive_grid(native: ctypes.CDLL) -> None:
    """The search over scales must lose less than rounding with max / 7."""
    weight = normal(64, 512, scale=0.02)
    read = pack(native, I4, weight)(np.eye(512, dtype=np.float32)).T
    groups = weight.reshape(64, 16, 32)
    scale = np.abs(groups).max(-1, keepdims=True) / 7
    naive = (np.rint(groups / scale) * scale).reshape(weight.shape)
    assert np.linalg.norm(read - weight) < 0.93 * np.linalg.norm(naive - weight)


def test_refuses_senseless_shapes(native: ctypes.CDLL) -> None:
    assert native.dspark_packed_bytes(99, 4, 4) == 0
    assert native.dspark_packed_bytes(F32, 0, 4) == 0
    assert native.dspark_packed_bytes(F32, 4, 0) == 0
