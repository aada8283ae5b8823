"""Entry point for foreign launchers: `torchrun cli.py sft …`, `deepspeed cli.py sft …`.

DeepSpeed's launcher inserts `--local_rank=N` before the subcommand; LOCAL_RANK is in the environment already.
"""

import sys

from lumina_ft.app import main

if __name__ == "__main__":
    sys.argv[1:] = [arg for arg in sys.argv[1:] if not arg.startswith("--local_rank")]
    main()
