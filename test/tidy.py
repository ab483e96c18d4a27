#!/usr/bin/env python3
"""Layout rules; see tidy.sh.  Functions are found by the project's own style: a line that starts in column 0 and a '{' alone in column 0."""
import pathlib
import re
import statistics
import sys

MAY = {
    "base": {"base"},
    "ipc": {"base", "ipc"},
    "kernels": {"base", "kernels"},
    "data": {"base", "data"},
    "actors": {"base", "ipc", "data", "kernels", "actors"},
    "runtime": {"base", "ipc", "data", "runtime"},
    "bench": {"base", "ipc", "data", "kernels", "bench"},
}
FILE_MAX, FUNCTION_MAX = 600, 70
# Longer than the hard stop, with the reason.  This list may only shrink.
LONG_FUNCTIONS = {}
LONG_FILES = {}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b")

bad, lengths = [], []


def includes(path, room, lines):
    for n, line in enumerate(lines, 1):
        m = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
        if not m:
            continue
        target = m.group(1)
        other = target.split("/")[0]
        if other in MAY and room in MAY and other not in MAY[room]:
            bad.append(f"{path}:{n}: {room}/ may not include {target}")
        if target.endswith("_pvt.h") and other != room:
            bad.append(f"{path}:{n}: private header {target} of another room")


def functions(path, lines):
    start = None
    for n, line in enumerate(lines, 1):
        if line.startswith("{"):
            start = n
        elif line.startswith("}") and start is not None:
            if line.rstrip() == "}":
                name = next((l for l in reversed(lines[max(0, start - 6):start - 1]) if re.match(r"\w", l)), "?")
                m = re.search(r"(\w+)\s*\(", name)
                name = m.group(1) if m else "?"
                size = n - start + 1
                lengths.append(size)
                if size > FUNCTION_MAX and size > LONG_FUNCTIONS.get(f"{path}:{name}", 0):
                    bad.append(f"{path}:{start}: {name} has {size} lines, at most {FUNCTION_MAX}")
            start = None


def main():
    for path in sorted(pathlib.Path(".").glob("*/**/*")):
        room = path.parts[0]
        if path.suffix not in (".c", ".h", ".cu", ".cuh") or (room not in MAY and room != "test"):
            continue
        lines = path.read_text(encoding="utf-8").split("\n")
        includes(str(path), room, lines)
        functions(str(path), lines)
        if len(lines) > FILE_MAX and len(lines) > LONG_FILES.get(str(path), 0):
            bad.append(f"{path}:1: {len(lines)} lines, at most {FILE_MAX}")
        for n, line in enumerate(lines, 1):
            if UNFINISHED.search(line):
                bad.append(f"{path}:{n}: {line.strip()[:80]}")
            if len(line) > 150:
                bad.append(f"{path}:{n}: line of {len(line)} characters")
    for text in bad:
        print(text)
    if lengths:
        print(f"tidy: {len(lengths)} functions, median {statistics.median(lengths):.0f} lines; {len(bad)} violations")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
