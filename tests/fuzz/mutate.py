"""Changes to files that know what a file is made of: what comes out still gets past the first
look of a reader.
"""

import gzip
import io
import json
import pickletools
import random
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    127,
    128,
    255,
    256,
    65535,
    65536,
    2**31 - 1,
    2**31,
    -(2**31),
    2**32,
    2**62,
    2**63 - 1,
    -(2**63),
    2**64,
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0.0,
    -0.5,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "x",
    "inf",
    "NaN",
    "../x",
    "\0",
    "a" * 300,
    "$(id)",
    [],
    {},
    [[]],
    [0],
    [-1],
    ["x"],
    {"a": 1},
    [2**31] * 4,
    *NUMBERS,
)
GADGETS = (
    b"cos\nsystem\n(S'true'\ntR",
    b"\x80\x04\x8c\x02os\x8c\x06system\x93",
    b"r\xff\xff\xff\x7f",
    b"j\xff\xff\xff\x7f",
    b"\x96\xff\xff\xff\xff\xff\xff\xff\x00",
    b"\x8a\xff" + b"\xff" * 255,
    b"\x86q\x00h\x00h\x00\x86" * 9,
    b"((((((((",
    b"I99999999999\n",
    b"L" + b"9" * 400 + b"L\n",
    b"Pid\n",
    b"Q",
    b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"2",
    b"0",
    b"1",
    b"b",
    b"R",
    b"\x81",
    b"\x92",
    b"\x90",
    b"\x82\x01",
    b"cnumpy\nndarray\n",
    b"cnumpy\ndtype\n",
    b"}",
    b"]",
    b")",
    b"s",
    b"u",
    b"e",
)

Change = Callable[[bytes, random.Random], bytes]


def raw(data: bytes, rng: random.Random) -> bytes:
    """Bits, bytes, numbers and blocks, anywhere."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        size = len(found)
        place = rng.randrange(size) if size else 0
        match rng.randrange(8):
            case 0 if size:
                found[place] ^= 1 << rng.randrange(8)
            case 1 if size:
                found[place] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 2:
                form = rng.choice(("<H", ">H", "<I", ">I", "<Q", ">Q"))
                number = rng.choice(NUMBERS) % (1 << 8 * struct.calcsize(form))
                found[place : place + struct.calcsize(form)] = struct.pack(form, number)
            case 3:
                del found[place:]
            case 4:
                del found[place : place + rng.randrange(1, 64)]
            case 5:
                other = rng.randrange(size) if size else 0
                found[place:place] = found[other : other + rng.randrange(1, 256)]
            case 6:
                found[place:place] = rng.randbytes(rng.randrange(1, 32))
            case _:
                found += rng.randbytes(rng.randrange(1, 64))
    return bytes(found)


def value(content: Any, rng: random.Random) -> Any:
    """One node of a JSON value replaced, removed, repeated or moved."""
    nodes: list[tuple[Any, Any]] = []
    waiting = [content]
    while waiting:
        node = waiting.pop()
        entries = (
            node.items()
            if isinstance(node, dict)
            else enumerate(node)
            if isinstance(node, list)
            else ()
        )
        for key, entry in entries:
            nodes.append((node, key))
            waiting.append(entry)
    if not nodes:
        return rng.choice(VALUES)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        holder, key = rng.choice(nodes)
        other, place = rng.choice(nodes)
        try:
            match rng.randrange(7):
                case 0:
                    del holder[key]
                case 1 if isinstance(holder, list):
                    holder.insert(key, holder[key])
                case 2:
                    holder[key] = other[place]
                case 3:
                    holder[key], other[place] = other[place], holder[key]
                case 4 if isinstance(holder[key], int) and not isinstance(holder[key], bool):
                    holder[key] += rng.choice((-1, 1, 2, -2, 100))
                case _:
                    holder[key] = rng.choice(VALUES)
        except (KeyError, IndexError):
            continue
    return content


def text_of(content: Any) -> bytes:
    try:
        return json.dumps(content).encode()
    except (ValueError, RecursionError):  # a value was put into itself
        return b"[" * 2000


def json_file(data: bytes, rng: random.Random) -> bytes:
    try:
        content = json.loads(data)
    except ValueError:
        return raw(data, rng)
    return raw(data, rng) if rng.random() < 0.1 else text_of(value(content, rng))


def npy(data: bytes, rng: random.Random) -> bytes:
    """Another header, or other bytes."""
    if rng.random() < 0.4 or data[:6] != b"\x93NUMPY":
        return raw(data, rng)
    (length,) = struct.unpack("<H", data[8:10])
    header = data[10 : 10 + length].decode("latin1")
    rest = data[10 + length :]
    kinds = (
        "'<f16'",
        "'|O'",
        "'<f8'",
        "'<c8'",
        "'|S9'",
        "'<U4'",
        "'|V8'",
        "'>i8'",
        "'<f2'",
        "'<m8'",
        "'?'",
    )
    old, new = rng.choice(
        [
            ("'shape': (", f"'shape': ({rng.choice(NUMBERS)}, "),
            ("'shape': (6", f"'shape': ({rng.choice(NUMBERS)}"),
            (
                "'|u1'",
                rng.choice(kinds),
            ),
            ("'<i8'", rng.choice(("'<f8'", "'|O'", "'<u8'", "'|u1'", "'<f16'", "'|b1'"))),
            ("False", rng.choice(("True", "None", "1", "'x'"))),
            ("}", rng.choice(("", "}}", "'a': (", ", 'more': 1}", "L}"))),
            ("(", "(" * rng.choice((2, 50, 5000))),
        ]
    )
    header = header.replace(old, new, 1)
    version = rng.choice((b"\x01\x00",) * 6 + (b"\x02\x00", b"\x03\x00", b"\x00\x00"))
    wide = (
        struct.pack("<I", len(header))
        if version == b"\x02\x00"
        else struct.pack("<H", len(header) % 65536)
    )
    return b"\x93NUMPY" + version + wide + header.encode("latin1") + rest


def pickled(data: bytes, rng: random.Random) -> bytes:
    """Opcodes left out, repeated and moved, hostile ones put in between."""
    if rng.random() < 0.3:
        return raw(data, rng)
    try:
        places = [place for _, _, place in pickletools.genops(data) if place is not None]
    except Exception:
        return raw(data, rng)
    places.append(len(data))
    pieces = [data[start:stop] for start, stop in pairwise(places)]
    for _ in range(rng.choice((1, 1, 2, 4))):
        place = rng.randrange(len(pieces))
        match rng.randrange(4):
            case 0:
                pieces.insert(place, rng.choice(GADGETS))
            case 1:
                del pieces[place]
            case 2:
                pieces.insert(place, rng.choice(pieces))
            case _:
                pieces[place] = raw(pieces[place], rng)
        if not pieces:
            break
    return b"".join(pieces)


def archive(data: bytes, rng: random.Random, inside: Callable[[str], Change]) -> bytes:
    """A ZIP file with a changed member, and correct checksums; or with its own structure
    changed.
    """
    if rng.random() < 0.15:
        return raw(data, rng)
    with zipfile.ZipFile(io.BytesIO(data)) as old:
        members = [(info.filename, old.read(info)) for info in old.infolist()]
    place = rng.randrange(len(members))
    name, content = members[place]
    match rng.randrange(12):
        case 0:
            del members[place]
        case 1:
            members.append((name, content))
        case 2:
            members[place] = rng.choice(members)[0], content
        case 3:
            members[place] = name, rng.choice(members)[1]
        case _:
            members[place] = name, inside(name)(content, rng)
    kind = zipfile.ZIP_DEFLATED if rng.random() < 0.1 else zipfile.ZIP_STORED
    target = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(target, "w", kind) as new:
        warnings.simplefilter("ignore")
        for name, content in members:
            new.writestr(zipfile.ZipInfo(name), content, kind)
    return raw(target.getvalue(), rng) if rng.random() < 0.1 else target.getvalue()


def npz(data: bytes, rng: random.Random) -> bytes:
    return archive(data, rng, lambda name: npy)


def pt(data: bytes, rng: random.Random) -> bytes:
    return archive(data, rng, lambda name: pickled if name.endswith(".pkl") else raw)


def safetensors(data: bytes, rng: random.Random) -> bytes:
    """Another header in front of the same bytes."""
    if rng.random() < 0.3:
        return raw(data, rng)
    (length,) = struct.unpack("<Q", data[:8])
    header = json_file(data[8 : 8 + length], rng)
    size = rng.choice((len(header),) * 9 + NUMBERS) % 2**64
    return struct.pack("<Q", size) + header + data[8 + length :]


def zipped(change: Change) -> Change:
    """A change to what is inside a `.gz` file, or to the file."""

    def run(data: bytes, rng: random.Random) -> bytes:
        return (
            raw(data, rng)
            if rng.random() < 0.4
            else gzip.compress(change(gzip.decompress(data), rng), mtime=0)
        )

    return run


def image(data: bytes, rng: random.Random) -> bytes:
    """Bytes anywhere; in a PNG also whole chunks, with correct checksums."""
    if data[:4] != b"\x89PNG" or rng.random() < 0.4:
        return raw(data, rng)
    chunks = []
    place = 8
    while place + 12 <= len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        chunks.append([data[place + 4 : place + 8], data[place + 8 : place + 8 + length]])
        place += 12 + length
    chosen = rng.choice(chunks)
    match rng.randrange(4):
        case 0:
            chosen[1] = raw(chosen[1], rng)
        case 1:
            chunks.remove(chosen)
        case 2:
            chunks.insert(
                1,
                [
                    rng.choice((b"iCCP", b"zTXt", b"tRNS", b"PLTE", b"eXIf", b"acTL")),
                    zlib.compress(bytes(9999)),
                ],
            )
        case _:
            sizes = [rng.choice((0, 1, 8, 30000, 2**31 - 1)) for _ in range(2)]
            chunks[0][1] = (
                struct.pack(">2I", *sizes)
                + bytes(rng.choice((1, 2, 4, 8, 16)) for _ in range(2))
                + bytes(3)
            )
    body = b"".join(
        struct.pack(">I", len(c)) + n + c + struct.pack(">I", zlib.crc32(n + c)) for n, c in chunks
    )
    return data[:8] + body


def protobuf(data: bytes, rng: random.Random) -> bytes:
    """Another graph: operators, attributes, names, shapes and types of weights."""
    import onnx
    from onnx import helper

    if rng.random() < 0.15:
        return raw(data, rng)
    model = onnx.load_from_string(data)
    graph = model.graph
    names = [name for node in graph.node for name in (*node.input, *node.output)]
    for _ in range(rng.choice((1, 1, 2, 3))):
        node = rng.choice(graph.node)
        tensor = rng.choice(graph.initializer)
        match rng.randrange(11):
            case 0:
                node.op_type = rng.choice(ONNX_OPERATORS)
            case 1 if node.input:
                node.input[rng.randrange(len(node.input))] = rng.choice((*names, ""))
            case 2:
                node.output[rng.randrange(len(node.output))] = rng.choice(names)
            case 3 if node.attribute:
                entry = rng.choice(node.attribute)
                new = rng.choice(
                    (
                        1,
                        -1,
                        0,
                        2**31,
                        2**62,
                        0.5,
                        "same",
                        [1],
                        [0, 0],
                        [-1] * 4,
                        [2**31] * 2,
                        [1.5],
                        ["x"],
                    )
                )
                entry.CopyFrom(helper.make_attribute(entry.name, new))
            case 4:
                word = rng.choice(
                    (
                        "axis",
                        "axes",
                        "group",
                        "pads",
                        "strides",
                        "dilations",
                        "kernel_shape",
                        "perm",
                        "keepdims",
                        "to",
                    )
                )
                node.attribute.append(
                    helper.make_attribute(
                        word, rng.choice((0, 1, -1, 7, 2**40, [0], [1, 1], [-1, 2**40], []))
                    )
                )
            case 5:
                tensor.dims[:] = [
                    rng.choice((0, 1, 2, 3, 4, 6, -1, 2**31, 2**62))
                    for _ in range(rng.randrange(5))
                ]
            case 6:
                tensor.data_type = rng.randrange(0, 26)
            case 7:
                tensor.raw_data = raw(tensor.raw_data, rng)
            case 8:
                graph.node.remove(node)
                if not graph.node:
                    break
            case 9:
                graph.node.append(node)
            case _:
                sizes = rng.choice((graph.input, graph.output))[0].type.tensor_type.shape.dim
                if sizes:
                    rng.choice(sizes).dim_value = rng.choice((0, -1, 2, 3, 1000, 2**31, 2**62))
    return model.SerializeToString()


ONNX_OPERATORS = """
    Abs Add And ArgMax AveragePool BatchNormalization Cast Clip Concat Constant ConstantOfShape
    Conv ConvTranspose CumSum Div Einsum Elu Erf Exp Expand Flatten Gather GatherND Gelu Gemm
    GlobalAveragePool GlobalMaxPool GRU Identity If InstanceNormalization LayerNormalization
    LeakyRelu Log Loop LRN LSTM MatMul Max MaxPool Mean Min Mod Mul Neg NonZero OneHot Pad Pow
    Range Reciprocal ReduceMax ReduceMean ReduceSum Relu Reshape Resize RNN Scan Scatter Shape
    Sigmoid Slice Softmax SpaceToDepth Split Sqrt Squeeze Sub Sum Tanh Tile TopK Transpose
    Unsqueeze Upsample Where
""".split()  # noqa: SIM905


def lines(data: bytes, rng: random.Random) -> bytes:
    """A text file, line by line."""
    if rng.random() < 0.3:
        return raw(data, rng)
    found = data.split(b"\n")
    place = rng.randrange(len(found))
    words = (
        b"../../etc/passwd",
        b"/etc/passwd",
        b"class0",
        b"class0/none.png",
        b"class9/x.png",
        b"\xff\xfe",
        b"class0\\x",
        b"\0",
    )
    found[place] = rng.choice(
        (*words, found[place] + b" 3", found[place] + b" " + b"9" * 5000, b"", rng.choice(found))
    )
    return b"\n".join(found)


EXPRESSIONS = (
    b"( ) [ ] ; < > <= >= == != = + - * and or assert declare-const declare-fun declare-network "
    b"declare-input declare-output declare-hidden vnnlib-version <1.0> <2.0> Real X_0 Y_0 X_1 Y_9 "
    b"X[0,0] X[9] Y[1] Y X 1e308 1e309 -1e400 1e401 1e99999999 .5 5. -0 0 1 00001 NaN inf \\xff"
).split()


def expressions(data: bytes, rng: random.Random) -> bytes:
    """A text of nested brackets: words changed, parts repeated, nested or packed."""
    if rng.random() < 0.2:
        return raw(data, rng)
    words = data.replace(b"(", b" ( ").replace(b")", b" ) ").split(b" ")
    for _ in range(rng.choice((1, 1, 2, 5))):
        place = rng.randrange(len(words))
        match rng.randrange(6):
            case 0 | 1:
                words[place] = rng.choice(EXPRESSIONS)
            case 2:
                words.insert(place, rng.choice(EXPRESSIONS))
            case 3:
                del words[place]
                words = words or [b"("]
            case 4:
                end = min(len(words), place + rng.randrange(1, 40))
                words[place:place] = words[place:end] * rng.choice((1, 2, 50))
            case _:
                deep = rng.choice((3, 65, 5000))
                word = rng.choice((b"(and", b"(or", b"(-", b"(+", b"(* 1e300"))
                words[place:place] = [word] * deep
    text = b" ".join(words)
    return gzip.compress(text) if rng.random() < 0.1 else text
