"""The interpreter inside the sandbox: runs one program and reports how it ended.

`sandbox.run` passes the text of this file to a new interpreter with `-c`, so it imports only the standard library. The
request is one JSON object on standard input; the report is one on standard output, which the program cannot print to.
"""

import json
import os
import resource
import sys


def main() -> None:
    """Reads the request, sets the limits, runs the program and writes the report."""
    request = json.load(sys.stdin)
    report = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    for name, most in request["limits"].items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]  # may be lower already, and cannot be raised
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    error = None
    try:
        exec(compile(request["program"], "<program>", "exec"), {"__name__": "__main__"})
    except BaseException as failure:  # `SystemExit` too: a program that ends early has not run its tests
        error = f"{type(failure).__name__}: {failure}".removesuffix(": ")[:300]
    # The secret comes with the request, so a program that writes a report without reading its caller has none.
    json.dump({"secret": request["secret"], "error": error}, report)
    report.flush()
    os._exit(0)  # without waiting for threads that the program left behind


if __name__ == "__main__":
    main()
