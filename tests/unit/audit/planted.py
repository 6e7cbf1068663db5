"""Reads the `# plant:` marks of the planted forms and compares them with a report."""

import inspect

import planted_forms


def span(function):
    """First and last line of a form."""
    lines, start = inspect.getsourcelines(function)
    return start, start + len(lines) - 1


def marked(function):
    """(line, rule id) of a planted form; "host-*" stands for any rule with that prefix."""
    lines, start = inspect.getsourcelines(function)
    (hit,) = [(start + i, line.split("# plant:")[1].strip()) for i, line in enumerate(lines) if "# plant:" in line]
    return hit


def check_planted(name, report):
    """The marked line breaks the marked rule, and nothing else in the form is reported."""
    function = planted_forms.PLANTS[name]
    line, rule = marked(function)
    first, last = span(function)
    shelf = report.notes if name in planted_forms.NOTES else report.findings
    here = [f for f in shelf if f.site.file == inspect.getsourcefile(function) and first <= f.line <= last]
    got = [(f.line, f.rule) for f in here]
    assert got, f"{name}: nothing found, expected {rule} in line {line}"
    assert all(at == line and (r == rule or (rule.endswith("*") and r.startswith(rule[:-1]))) for at, r in got), got
    assert here[0].explain and here[0].fix and here[0].detail
    assert here[0].stack[0].function == name


def check_clean(name, report):
    """No finding and no note inside the form."""
    function = planted_forms.CLEAN[name]
    first, last = span(function)
    inside = [f for f in report.findings + report.notes if f.site.file == inspect.getsourcefile(function)]
    got = [(f.line, f.rule, f.detail) for f in inside if first <= f.line <= last]
    assert not got
