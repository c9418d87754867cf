"""Run command lines of meshrun one after another, each in a fork of this process.

Reads ``[[word, ...], ...]`` from stdin; prints ``[[exit code, stdout, stderr], ...]``.
"""

import gc
import json
import os
import sys
import tempfile

import meshrun.__main__
import meshrun.app  # imported once for all forks
import meshrun.cli.command
import meshrun.cli.read
import meshrun.cli.run
import meshrun.report.page
import meshrun.report.progress
import meshrun.ssh.controller

gc.collect()
gc.freeze()  # a collection in a fork would copy the pages that it shares
gc.disable()
results = []
for words in json.load(sys.stdin):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.argv[1:] = words
            meshrun.__main__.main()
        _, status = os.waitpid(pid, 0)
        texts = [os.pread(each.fileno(), 1 << 20, 0).decode() for each in (out, err)]
        results.append([os.waitstatus_to_exitcode(status), *texts])
print(json.dumps(results))
