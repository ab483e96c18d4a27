#!/usr/bin/env bash
# The layout rules of docs/design.md section 3: include directions, private headers, lengths, and words that mean "not finished".
# usage: test/tidy.sh        exit 0 or 1; prints each violation as file:line
set -euo pipefail
cd "$(dirname "$0")/.."
exec python3 test/tidy.py
