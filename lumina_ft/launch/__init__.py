"""Starting a run: checks before any process is spawned, the run directory, one torchrun per stage, the ranks' entry.

    local.py          parent process: `lumina-ft sft`; per stage one agent
    agent_process.py  the agent as its parent sees it: output, stop signals, certain end
    agent.py          torchrun without its tracebacks; starts the ranks
    rank.py           what a rank executes
    signals.py        a rank's SIGTERM and SIGINT
    foreign.py        the same run under torchrun or deepspeed

Only `agent.py` and `rank.py` may import torch.
"""
