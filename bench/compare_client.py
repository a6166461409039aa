"""SGLang's own benchmark client, kept ready: one line of arguments in, one run of it.

`python -m sglang.benchmark.serving` takes a quarter of a minute to import, on the cores that serve.
This imports it once, before the measurements, and then runs its command line for each line of
JSON that comes in on standard input. Standard output says when; all that the client prints goes to
standard error.
"""

import json
import os
import sys
import traceback


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from sglang.benchmark import serving

    answers.write("ready\n")
    for line in sys.stdin:
        sys.argv = ["sglang.benchmark.serving", *json.loads(line)]
        try:
            serving.cli_main()
            answers.write("done\n")
        except (Exception, SystemExit):
            traceback.print_exc()
            answers.write("failed\n")


if __name__ == "__main__":
    main()
