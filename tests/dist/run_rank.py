"""Runs a rank script the way ranks of a training run are: what remains when it is done is not torn down.

Destructors of process groups and their threads, in whatever order the interpreter ends in, abort a process now and then
although all its work is done. Arguments: the script and its own.
"""

import os
import runpy
import sys
import traceback

status = 0
try:
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as error:
    status = error.code if isinstance(error.code, int) else int(error.code is not None)
except BaseException:
    traceback.print_exc()
    status = 1
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
