#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""compile_commands.json on stdout: compdb.py COMPILER -- FLAGS… -- SOURCES…"""
import json
import os
import sys

compiler, rest = sys.argv[1], sys.argv[2:]
first = rest.index("--")
second = rest.index("--", first + 1)
flags = [f for f in rest[first + 1:second] if f not in ("-MMD", "-MP")]
json.dump([{"directory": os.getcwd(), "file": source,
            "arguments": [compiler, *flags, "-c", source]} for source in rest[second + 1:]],
          sys.stdout, indent=1)
