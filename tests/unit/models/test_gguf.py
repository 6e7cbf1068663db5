"""The GGUF reader against the `gguf` package, which writes the files; damaged files."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import ModelLoadError, SlipstreamError, UnsupportedError
from slipstream.models.gguf import GGUFFile
from slipstream.models.gguf_blocks import INT4, dequantize, read_int4, read_int8

WRITABLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "F32")


def random_values(rows: int, columns: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def random_blocks(kind: str, rows: int, columns: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Blocks with every bit random but the float16 scales, for the types that `gguf` reads and does not write."""
    rng = np.random.default_rng(1)
    _, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    blocks = rng.integers(0, 256, (rows * columns // 256, size), dtype=np.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind]
    for at in places:
        scale = rng.uniform(0.001, 0.01, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scale[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)


def write(path: Path, tensors: dict[str, tuple[Any, str]], **metadata: Any) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in metadata.items():
        name = key.replace("__", ".")
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_string(name, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=Kind[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", WRITABLE)
def test_types_that_gguf_writes(tmp_path: Path, kind: str) -> None:
    data = gguf.quants.quantize(random_values(6, 256), Kind[kind])
    file = GGUFFile(write(tmp_path / "x.gguf", {"w": (data, kind), "v": (random_values(1, 5)[0], "F32")}))
    assert file.tensors["w"].shape == (6, 256)
    assert file.tensors["w"].type == kind
    want = gguf.quants.dequantize(data, Kind[kind])
    assert torch.equal(dequantize(file.raw("w"), kind).float(), torch.from_numpy(want))
    assert torch.equal(dequantize(file.raw("w", 2, 5), kind).float(), torch.from_numpy(want[2:5]))
    assert torch.equal(dequantize(file.raw("v"), "F32").flatten(), torch.from_numpy(random_values(1, 5)[0]))


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants(kind: str) -> None:
    blocks = random_blocks(kind, 4, 512)
    want = torch.from_numpy(gguf.quants.dequantize(blocks, Kind[kind]))
    torch.testing.assert_close(dequantize(blocks, kind), want, rtol=1e-6, atol=1e-7)


def test_integer_codes() -> None:
    for kind in ("Q4_0", "Q4_1"):
        blocks = read_int4(gguf.quants.quantize(random_values(6, 256), Kind[kind]), kind)
        assert blocks.codes_NK.shape == (6, 256)
        assert int(blocks.codes_NK.max()) == 15
        assert int(blocks.codes_NK.min()) == 0
    assert read_int4(random_blocks("Q4_K", 4, 512), "Q4_K").scale_NG.shape == (4, 16)
    assert read_int8(gguf.quants.quantize(random_values(6, 256), Kind.Q8_0)).codes_NK.abs().max() == 127
    assert set(INT4) == {"Q4_0", "Q4_1", "Q4_K"}


def test_metadata(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "a__int": 7, "a__float": 0.5, "a__bool": True, "a__text": "zwölf", "a__ints": [1, -2, 3],
        "a__texts": ["x", "", "ÿ"], "a__floats": [0.5, 1.5],
    }  # fmt: skip
    file = GGUFFile(write(tmp_path / "x.gguf", {"v": (random_values(1, 8), "F32")}, **values))
    for key, value in values.items():
        assert file.metadata[key.replace("__", ".")] == value
    assert file.metadata["general.architecture"] == "llama"


def test_other_types_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"IQ4_NL.*Q4_K"):
        dequantize(np.zeros((1, 18), np.uint8), "IQ4_NL")
    path = write(tmp_path / "x.gguf", {"w": (random_values(1, 8), "F32")})
    raw = bytearray(path.read_bytes())
    at = raw.index(b"w", 60) + 1 + 4 + 8 * 2
    assert struct.unpack("<I", raw[at : at + 4]) == (0,)
    raw[at : at + 4] = struct.pack("<I", 777)
    path.write_bytes(raw)
    with pytest.raises(UnsupportedError, match="unknown type id 777"):
        GGUFFile(path)


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (b"", "is empty"),
        (b"GG", "truncated"),
        (b"hello world", "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(16), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "truncated or damaged"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62) + bytes(40), "truncated or damaged"),
    ],
)
def test_files_that_are_not_gguf(tmp_path: Path, content: bytes, shown: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=shown):
        GGUFFile(path)
    with pytest.raises(ModelLoadError, match="cannot be read"):
        GGUFFile(tmp_path / "absent.gguf")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "x.gguf"
    tensors = {"w": (random_values(4, 32), "F32"), "q": (gguf.quants.quantize(random_values(4, 32), Kind.Q4_0), "Q4_0")}
    return write(path, tensors, a__texts=["one", "two"], a__int=3).read_bytes()


def test_every_truncation_is_an_error(tmp_path: Path, small: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(small)
    last = GGUFFile(path).tensors["q"]
    for size in range(last.offset + last.size):
        path.write_bytes(small[:size])
        with pytest.raises(ModelLoadError):
            GGUFFile(path)


@given(data=st.data())
def test_flipped_bytes_never_escape(
    tmp_path_factory: pytest.TempPathFactory, small: bytes, data: st.DataObject
) -> None:
    """Whatever a damaged header says, the reader answers with values or with its own error."""
    raw = bytearray(small)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) // 2))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    path.write_bytes(raw)
    try:
        file = GGUFFile(path)
    except SlipstreamError:
        return
    for tensor in file.tensors.values():
        assert 0 <= tensor.offset <= tensor.offset + tensor.size <= len(raw)
