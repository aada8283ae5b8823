"""A running agent as its parent sees it: output, stop signals, and the certainty that nothing of it stays behind."""

import selectors
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import psutil

from lumina_ft.launch.signals import REPEAT_SECONDS, STOP_SIGNALS

_POLL_SECONDS = 0.2


class AgentProcess:
    """torchrun's agent, its ranks, and what the user wants of them.

    A signal is passed on to the ranks, never to the agent: that would kill them 30 seconds later. Agent and ranks are
    born with the stop signals blocked, so that one sent to every process of a job doesn't end the agent either.

    Attributes:
        signals: those that arrived, without repetitions of the same wish.
        killed_by: why everything was killed; empty if the ranks ended by themselves.
    """

    def __init__(self, command: list[str], env: dict[str, str], grace_seconds: float) -> None:
        self.signals: list[int] = []
        self.killed_by = ""
        self._grace_seconds = grace_seconds
        self._asked_at = 0.0
        # The ranks inherit the pipe: it ends when the last of them has.
        self._process = subprocess.Popen(
            command,
            env=env,
            bufsize=0,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # A Ctrl-C of the terminal shall reach the ranks through us only.
            start_new_session=True,
        )

    @classmethod
    @contextmanager
    def started(cls, command: list[str], env: dict[str, str], grace_seconds: float) -> Iterator["AgentProcess"]:
        """Start an agent, take this process's stop signals for it, and kill what is left of it at the end.

        Args:
            grace_seconds: time that the ranks have between a signal and their end.
        """
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            agent = cls(command, env, grace_seconds)
            previous = {number: signal.signal(number, agent._pass_on) for number in STOP_SIGNALS}
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            yield agent
        finally:
            agent._kill("")
            agent.wait()
            for number, handler in previous.items():
                signal.signal(number, handler)
            assert agent._process.stdout is not None
            agent._process.stdout.close()

    def output(self) -> Iterator[bytes]:
        """What agent and ranks print, as it comes, until all have ended; empty when a signal has arrived.

        Kills them when the grace is over.
        """
        assert self._process.stdout is not None
        told = 0
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while True:
                if selector.select(_POLL_SECONDS):
                    chunk = self._process.stdout.read(65536)
                    if not chunk:
                        return
                    yield chunk
                if told < len(self.signals):
                    told = len(self.signals)
                    yield b""
                if self.signals and time.monotonic() - self._asked_at >= self._grace_seconds:
                    self._kill(f"not done within parallel.grace_seconds={self._grace_seconds:g}")

    def wait(self) -> int:
        """Exit code of the agent."""
        return self._process.wait()

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        """First signal: the ranks shall finish their step, save and end. Second: they end at once."""
        now = time.monotonic()
        if not self.signals:
            self.signals.append(number)
            self._asked_at = now
            self._signal_ranks(number)
        elif now - self._asked_at >= REPEAT_SECONDS:
            self.signals.append(number)
            self._kill(f"killed by a second signal, {signal.Signals(number).name}")

    def _signal_ranks(self, number: int) -> None:
        with suppress(psutil.NoSuchProcess):
            ranks = psutil.Process(self._process.pid).children()
            for rank in ranks:
                with suppress(psutil.NoSuchProcess):
                    rank.send_signal(number)
            if not ranks:
                self._kill("no rank had started")

    def _kill(self, reason: str) -> None:
        """SIGKILL for the agent and its ranks, if it still lives; ranks don't outlive their agent."""
        if self._process.poll() is not None:
            return
        self.killed_by = self.killed_by or reason
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            # The agent first, or it could report the others as killed by nobody knows whom.
            for member in [root, *root.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    member.kill()
