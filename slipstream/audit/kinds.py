"""What an expression most likely is, from the source alone: the linter's guard against false alarms.

`tensor` and `mask` (a boolean tensor) are on the device as far as one can tell, `host` is a Python value, a numpy
array or a host tensor, None is unknown. Only what is written in the same function counts: annotations, names,
assignments above. Names: a shape suffix (`tokens_R`) means tensor; `_np`, `_cpu`, `_host`, `_list` mean host.
"""

from __future__ import annotations

import ast
import re
from typing import Literal

Kind = Literal["tensor", "mask", "host"] | None

_SHAPE_SUFFIX = re.compile(r"^[a-z][a-z0-9_]*_[A-Z]{1,5}$")
_HOST_SUFFIX = ("_np", "_cpu", "_host", "_list", "_ub")
_FACTORIES = frozenset("tensor as_tensor asarray zeros ones empty full arange rand randn randint eye linspace".split())
_NOT_TENSORS = re.compile(
    r"^torch\.(is_|get_|set_|manual_seed|device$|dtype$|finfo|iinfo|Size|Generator|compile|load|save|no_grad|"
    r"inference_mode|cuda\.|jit\.|library\.|profiler\.|utils\.|nn\.(?!functional)|backends\.|distributed\.|numel|"
    r"accelerator\.|compiler\.|ops\.load)"
)
_TO_HOST = frozenset("cpu numpy tolist item equal allclose".split())
_METADATA = frozenset(
    "size dim numel nelement stride element_size data_ptr is_contiguous ndimension get_device storage_offset "
    "shape dtype device ndim is_cuda requires_grad layout itemsize nbytes names is_pinned is_floating_point".split()
)
_TO_MASK = frozenset("eq ne gt ge lt le logical_and logical_or logical_not isnan isinf isfinite bool isin".split())
_HOST_BUILTINS = frozenset(
    "len int float bool str range sorted list tuple dict set enumerate zip repr isinstance".split()
)


class Names:
    """Import aliases of a module: what a dotted expression is called at home."""

    def __init__(self, tree: ast.AST) -> None:
        self.aliases: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for a in node.names:
                    self.aliases[a.asname or a.name.split(".")[0]] = a.name if a.asname else a.name.split(".")[0]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for a in node.names:
                    self.aliases[a.asname or a.name] = f"{node.module}.{a.name}"

    def dotted(self, node: ast.expr) -> str:
        """The full name of `np.sum` is "numpy.sum"; "" for what is not a chain of imported names."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, "")
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""


class Kinds:
    """The kinds of the names of one function, filled in while its statements are visited in order."""

    def __init__(self, names: Names, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.names = names
        self.env: dict[str, Kind] = {}
        a = function.args
        for arg in [*a.posonlyargs, *a.args, *a.kwonlyargs]:
            if arg.annotation is not None:
                self.env[arg.arg] = _annotated(arg.annotation)

    def bind(self, target: ast.expr, kind: Kind) -> None:
        if isinstance(target, ast.Name):
            self.env[target.id] = kind
        elif isinstance(target, (ast.Tuple, ast.List)):
            for t in target.elts:
                self.bind(t, kind)  # topk, sort, unbind return tensors

    def of(self, node: ast.expr) -> Kind:
        """The kind of an expression."""
        match node:
            case ast.Name():
                return self._name(node.id)
            case ast.Constant() | ast.JoinedStr() | ast.Dict() | ast.Lambda():
                return "host"
            case ast.List() | ast.Tuple():
                return "host"
            case ast.Call():
                return self._call(node)
            case ast.Attribute():
                return self._attribute(node)
            case ast.Subscript():
                return self.of(node.value)
            case ast.Compare():
                return self._compare(node)
            case ast.BinOp():
                return _join([self.of(node.left), self.of(node.right)])
            case ast.UnaryOp():
                return "host" if isinstance(node.op, ast.Not) else self.of(node.operand)
            case ast.IfExp():
                return _join([self.of(node.body), self.of(node.orelse)])
            case ast.NamedExpr():
                return self.of(node.value)
        return None

    def is_tensor(self, node: ast.expr) -> bool:
        return self.of(node) in ("tensor", "mask")

    def _name(self, name: str) -> Kind:
        if name.endswith(_HOST_SUFFIX):
            return "host"
        if name in self.env:
            return self.env[name]
        return "tensor" if _SHAPE_SUFFIX.match(name) else None

    def _attribute(self, node: ast.Attribute) -> Kind:
        if node.attr in _METADATA or node.attr.endswith(_HOST_SUFFIX):
            return "host"
        if _SHAPE_SUFFIX.match(node.attr):
            return "tensor"
        return self.of(node.value) if self.names.dotted(node) == "" else None

    def _compare(self, node: ast.Compare) -> Kind:
        if any(isinstance(op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)) for op in node.ops):
            return "host"
        sides = [self.of(side) for side in [node.left, *node.comparators]]
        return "mask" if {"tensor", "mask"} & set(sides) else _join(sides)

    def _call(self, node: ast.Call) -> Kind:
        full = self.names.dotted(node.func)
        if full.startswith("numpy"):
            return "host"
        if full.startswith("torch."):
            return self._torch_call(full, node)
        if isinstance(node.func, ast.Name):
            return "host" if node.func.id in _HOST_BUILTINS else None
        if not isinstance(node.func, ast.Attribute):
            return None
        method, owner = node.func.attr, self.of(node.func.value)
        if method in _TO_HOST or method in _METADATA:
            return "host"
        if method == "to" and node.args and is_cpu(node.args[0]):
            return "host"
        if method in ("to", "cuda") and owner == "host" and to_device(node):
            return "tensor"
        if method in _TO_MASK and owner in ("tensor", "mask"):
            return "mask"
        return "tensor" if owner == "mask" else owner

    def _torch_call(self, full: str, node: ast.Call) -> Kind:
        name = full.rsplit(".", 1)[1]
        if _NOT_TENSORS.match(full):
            return None
        if name in ("from_numpy", "equal", "allclose"):
            return "host"
        device = keyword(node, "device")
        if device is not None:
            return "host" if is_cpu(device) else "tensor"
        if name in _FACTORIES:
            return "host"
        kinds = [self.of(a) for a in node.args]
        if (
            kinds
            and all(k == "host" for k in kinds)
            and not any(isinstance(a, (ast.List, ast.Tuple)) for a in node.args)
        ):
            return "host"
        return "mask" if name in _TO_MASK else "tensor"


def _join(kinds: list[Kind]) -> Kind:
    if any(k in ("tensor", "mask") for k in kinds):
        return "mask" if all(k == "mask" for k in kinds) else "tensor"
    return "host" if all(k == "host" for k in kinds) else None


def _annotated(node: ast.expr) -> Kind:
    text = ast.unparse(node).strip("'\"")
    if re.fullmatch(r"(torch\.)?Tensor( \| None)?", text):
        return "tensor"
    return "host" if re.match(r"(int|float|bool|str|list|tuple|dict|np\.|numpy\.)", text) else None


def keyword(node: ast.Call, name: str) -> ast.expr | None:
    """The value of a keyword argument, or None."""
    return next((k.value for k in node.keywords if k.arg == name), None)


def is_cpu(node: ast.expr) -> bool:
    """Whether the expression is literally the CPU device."""
    if isinstance(node, ast.Constant):
        return node.value == "cpu"
    return isinstance(node, ast.Call) and bool(node.args) and is_cpu(node.args[0])


def to_device(node: ast.Call) -> bool:
    """Whether `.to(...)`, `.cuda()` may move to another device: not if only a dtype is given."""
    assert isinstance(node.func, ast.Attribute)
    if node.func.attr == "cuda":
        return True
    target = keyword(node, "device") or (node.args[0] if node.args else None)
    if target is None or is_cpu(target):
        return False
    return "dtype" not in (text := ast.unparse(target)) and not re.match(
        r"torch\.(u?int|float|b|half|long|double)", text
    )
