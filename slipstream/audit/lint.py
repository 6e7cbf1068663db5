"""The source forms of the rules, looked for in named hot paths.

A function is hot if it carries the comment `# audit: hot` on its `def` line or the line above, the decorator `hot`,
or matches a pattern of the table ("file.py::Class.method", shell wildcards; `[tool.slipstream-audit] hot = [...]` in
pyproject.toml). Functions inside a hot function are hot. `# audit: ok REASON` on a line, and `with
allow_sync("REASON")`, are listed as allowed. What cannot be told from the source (see `kinds`) is not reported.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from slipstream.audit.kinds import Kind, Kinds, Names, keyword, to_device
from slipstream.audit.report import AuditError, Finding, Report, Site
from slipstream.audit.rules import BY_ID

_HOT = re.compile(r"#\s*audit:\s*hot\b")
_OK = re.compile(r"#\s*audit:\s*ok\s+(\S.*)")
_Function = ast.FunctionDef | ast.AsyncFunctionDef

# torch function -> rule, where no argument changes the verdict (host-only arguments aside).
_TORCH = {
    "nonzero": "nonzero",
    "argwhere": "nonzero",
    "masked_select": "masked-select",
    "unique": "unique",
    "unique_consecutive": "unique",
    "bincount": "bincount",
    "equal": "host-read",
    "allclose": "host-read",
}
_SYNCS = frozenset({"torch.cuda.synchronize", "torch.cuda.empty_cache", "torch.accelerator.synchronize"})
# method -> rule; reported unless the receiver is on the host.
_METHODS = {
    "item": "host-read",
    "tolist": "host-copy",
    "numpy": "host-copy",
    "cpu": "host-copy",
    "nonzero": "nonzero",
    "argwhere": "nonzero",
    "masked_select": "masked-select",
    "new_tensor": "tensor-literal",
}
# reported only if the receiver is known to be a tensor: other libraries use these names too.
_TENSOR_METHODS = {
    "unique": "unique",
    "unique_consecutive": "unique",
    "bincount": "bincount",
    "equal": "host-read",
    "allclose": "host-read",
}
_READING_BUILTINS = frozenset({"int", "float", "bool", "range", "print", "str", "repr", "complex"})


def lint_paths(paths: Iterable[str | Path], *, hot: Sequence[str] = (), every: bool = False) -> Report:
    """Lint files and folders. `counters["hot_functions"]` says how many functions were looked at.

    Raises AuditError for a path that does not exist or a file that does not parse.
    """
    report = Report("lint")
    for path in paths:
        path = Path(path)
        if not path.exists():
            raise AuditError(f"{path} does not exist")
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            report.merge(lint_source(file.read_text(encoding="utf-8"), str(file), hot=hot, every=every))
    return report


def lint_source(source: str, file: str = "<source>", *, hot: Sequence[str] = (), every: bool = False) -> Report:
    """Lint one module. `hot`: patterns as in the module's docstring; `every`: all functions are hot."""
    try:
        tree = ast.parse(source, file)
    except SyntaxError as error:
        raise AuditError(f"{file}:{error.lineno}: {error.msg}") from error
    report = Report("lint")
    lines = source.splitlines()
    names = Names(tree)
    count = 0
    covered: set[ast.AST] = set()  # functions inside a hot one: visited with it
    for qualname, function in _functions(tree):
        if function in covered:
            continue
        if every or _marked(function, lines) or _listed(file, qualname, hot):
            count += 1
            covered.update(ast.walk(function))
            _Visitor(report, file, lines, qualname, names, function).run()
    report.counters["hot_functions"] = count
    return report


def read_hot_table(pyproject: Path) -> list[str]:
    """The patterns in `[tool.slipstream-audit] hot`. Raises AuditError if they are not a list of strings."""
    table = tomllib.loads(pyproject.read_text(encoding="utf-8")).get("tool", {}).get("slipstream-audit", {})
    hot = table.get("hot", [])
    if not isinstance(hot, list) or not all(isinstance(h, str) for h in hot):
        raise AuditError(f"{pyproject}: [tool.slipstream-audit] hot must be a list of strings")
    return hot


def _functions(tree: ast.AST, prefix: str = "") -> Iterable[tuple[str, _Function]]:
    """Functions with their qualified names, outermost first; those inside another function come with it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + node.name, node
            yield from _functions(node, f"{prefix}{node.name}.<locals>.")
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        else:
            yield from _functions(node, prefix)


def _marked(function: _Function, lines: Sequence[str]) -> bool:
    first = min([function.lineno, *(d.lineno for d in function.decorator_list)])
    near = [lines[function.lineno - 1], lines[first - 2] if first >= 2 else ""]
    return any(_HOT.search(line) for line in near) or any(_tail(d) == "hot" for d in function.decorator_list)


def _listed(file: str, qualname: str, hot: Sequence[str]) -> bool:
    path = Path(file).as_posix()
    for pattern in hot:
        where, _, name = pattern.rpartition("::")
        if fnmatchcase(qualname, name) and (not where or fnmatchcase(path, where) or fnmatchcase(path, f"*/{where}")):
            return True
    return False


def _tail(node: ast.expr) -> str:
    """The last name of `audit.hot`, `hot` or a call of either."""
    if isinstance(node, ast.Call):
        return _tail(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


class _Visitor(ast.NodeVisitor):
    """Walks one hot function in source order."""

    def __init__(
        self, report: Report, file: str, lines: Sequence[str], qualname: str, names: Names, function: _Function
    ) -> None:
        self.report, self.file, self.lines, self.qualname = report, file, lines, qualname
        self.function = function
        self.names = names
        self.kinds = Kinds(names, function)
        self.reason = ""

    def run(self) -> None:
        for decorator in self.function.decorator_list:
            if isinstance(decorator, ast.Call) and _tail(decorator) == "allow_sync":
                self.reason = _text(decorator)
        for statement in self.function.body:
            self.visit(statement)

    def found(self, rule_id: str, node: ast.AST, detail: str = "") -> None:
        line = getattr(node, "lineno", 0)
        code = self.lines[line - 1].strip() if 0 < line <= len(self.lines) else ""
        ok = _OK.search(code)
        site = Site(self.file, line, self.qualname, code)
        if self.reason or ok:
            self.report.allow(self.reason or (ok.group(1) if ok else ""), site, rule_id)
            return
        rule = BY_ID[rule_id]
        text = detail or (ast.unparse(node) if isinstance(node, ast.expr) else "")
        self.report.add(Finding(rule_id, rule.severity, text, rule.explain, rule.fix, [site]))

    # --- statements --------------------------------------------------------------------------------------

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        _Visitor(self.report, self.file, self.lines, f"{self.qualname}.<locals>.{node.name}", self.names, node).run()

    def visit_With(self, node: ast.With) -> None:
        before = self.reason
        for item in node.items:
            if isinstance(item.context_expr, ast.Call) and _tail(item.context_expr) == "allow_sync":
                self.reason = _text(item.context_expr)
        self.generic_visit(node)
        self.reason = before

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._store(target, node.value)
            self.kinds.bind(target, self.kinds.of(node.value))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
            self.kinds.bind(node.target, self.kinds.of(node.value))

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self.kinds.bind(node.target, "tensor" if self.kinds.is_tensor(node.iter) else None)
        for statement in [*node.body, *node.orelse]:
            self.visit(statement)

    def visit_If(self, node: ast.If) -> None:
        self._truth(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._truth(node.test)
        self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        self._truth(node.test)
        self.generic_visit(node)

    # --- expressions -------------------------------------------------------------------------------------

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._truth(node.test)
        self.generic_visit(node)

    def visit_FormattedValue(self, node: ast.FormattedValue) -> None:
        if self.kinds.is_tensor(node.value):
            self.found("host-read", node.value, "a tensor is formatted")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.ctx, ast.Load):
            self._index(node)
        self.generic_visit(node)

    def _truth(self, node: ast.expr) -> None:
        if isinstance(node, ast.BoolOp):
            for value in node.values:
                self._truth(value)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self._truth(node.operand)
        elif self.kinds.is_tensor(node):
            self.found("host-read", node, f"the truth of `{ast.unparse(node)}` is read")

    def _store(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Subscript) and not isinstance(value, (ast.Constant, ast.UnaryOp)):
            self._index(target)

    def _index(self, node: ast.Subscript) -> None:
        if self.kinds.of(node.value) == "host":
            return
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if any(self.kinds.of(p) == "mask" for p in parts):
            self.found("boolean-index", node)
        if self.kinds.is_tensor(node.value) and any(isinstance(p, ast.List) for p in parts):
            self.found("host-index", node)

    def visit_Call(self, node: ast.Call) -> None:
        full = self.names.dotted(node.func)
        if full.startswith("torch."):
            self._torch_call(full, node)
        elif isinstance(node.func, ast.Attribute):
            self._method(node.func, node)
        elif (
            isinstance(node.func, ast.Name)
            and node.func.id in _READING_BUILTINS
            and node.func.id not in self.names.aliases
        ):
            if any(self.kinds.is_tensor(a) for a in node.args):
                self.found("host-read", node)
        self.generic_visit(node)

    def _torch_call(self, full: str, node: ast.Call) -> None:
        name = full.rsplit(".", 1)[1]
        pin = keyword(node, "pin_memory")
        if isinstance(pin, ast.Constant) and pin.value is True:
            self.found("pin-memory", node)
        if full in _SYNCS:
            self.found("explicit-sync", node)
        elif full == "torch.compile":
            self.found("recompile", node)
        elif name in ("tensor", "as_tensor", "asarray"):
            self._literal(node)
        elif node.args and all(self.kinds.of(a) == "host" for a in node.args):
            return
        elif name == "where" and len(node.args) == 1 and not node.keywords:
            self.found("nonzero", node)
        elif name == "repeat_interleave":
            self._repeat(node, node.args[1:] or node.args)
        elif name in _TORCH:
            self.found(_TORCH[name], node)

    def _literal(self, node: ast.Call) -> None:
        data = node.args[0] if node.args else keyword(node, "data")
        parts: list[ast.expr] = data.elts if isinstance(data, (ast.List, ast.Tuple)) else []
        if isinstance(data, ast.ListComp):
            parts = [data.elt]
        if any(self.kinds.is_tensor(p) for p in parts):
            self.found("tensor-from-scalars", node)
        elif self.kinds.of(node) == "tensor" and not (data is not None and self.kinds.is_tensor(data)):
            self.found("tensor-literal", node)

    def _repeat(self, node: ast.Call, repeats: Sequence[ast.expr]) -> None:
        if keyword(node, "output_size") is None and repeats and self.kinds.is_tensor(repeats[0]):
            self.found("repeat-interleave", node)

    def _method(self, func: ast.Attribute, node: ast.Call) -> None:
        method, owner = func.attr, self.kinds.of(func.value)
        if method in ("synchronize", "query") and not node.args:
            if "event" in ast.unparse(func.value).lower():
                self.found("event-wait" if method == "synchronize" else "event-query", node)
            elif method == "synchronize":
                self.found("explicit-sync", node)
        elif method == "pin_memory":
            self.found("pin-memory", node)
        elif method == "repeat_interleave" and owner != "host":
            self._repeat(node, node.args)
        elif self._upload(func, node, owner):
            self.found("pageable-copy", node)
        elif (
            method == "to" and owner in ("tensor", "mask") and self.kinds.of(node) == "host" and not _non_blocking(node)
        ):
            self.found("host-copy", node)
        elif (
            owner != "host"
            and method in _METHODS
            and (method == "new_tensor" or len(node.args) <= (method == "masked_select"))
        ):
            self.found(_METHODS[method], node)
        elif owner in ("tensor", "mask") and method in _TENSOR_METHODS:
            self.found(_TENSOR_METHODS[method], node)

    def _upload(self, func: ast.Attribute, node: ast.Call, owner: Kind) -> bool:
        if func.attr == "copy_":
            return owner != "host" and bool(node.args) and self._pageable(node.args[0])
        return func.attr in ("to", "cuda") and to_device(node) and self._pageable(func.value)

    def _pageable(self, node: ast.expr) -> bool:
        """A host tensor that nothing says is pinned. Plain host values have no `.to`, so `host` is enough."""
        text = ast.unparse(node)
        return self.kinds.of(node) == "host" and "pin" not in text and "staging" not in text


def _non_blocking(node: ast.Call) -> bool:
    value = keyword(node, "non_blocking")
    return isinstance(value, ast.Constant) and value.value is True


def _text(node: ast.Call) -> str:
    """The reason given to allow_sync, or a remark that it is not a literal."""
    first = node.args[0] if node.args else keyword(node, "reason")
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else "a computed reason"
