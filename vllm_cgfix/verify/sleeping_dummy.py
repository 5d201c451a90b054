"""The reproduction of ``sleeping-dummy``: an engine that sleeps runs dummy batches.

One data-parallel engine is sent what a client and the coordinator send it: another rank has a
request, sleep, wake up in two parts. What its workers are then told to do is recorded: a dummy
batch while their memory is released is an illegal memory access on a GPU.

Real are the busy loop, its input queue with everything that handles a message, ``sleep``,
``wake_up``, pause and resume, and the executor's record of what is asleep. Imitated are the
workers, a scheduler without requests of its own, and the answers of the other rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import queue
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tabulate import tabulate

import vllm_cgfix

from . import cpu
from .report import outcome, requirement, run

TURNS = 40
"""Turns of the busy loop that are observed: in the 32nd at the latest it asks the other ranks."""
EVERYTHING = ("kv_cache", "weights")
_SCHEDULER = "vllm.v1.core.sched.interface"


@dataclasses.dataclass
class Phase:
    """What happened from some messages on, until the engine had nothing to do or for long enough.

    Attributes:
        name: what the engine is told.
        turns: turns of the busy loop.
        asked: in how many of them ``_has_global_unfinished_reqs`` was called.
        collectives: how often that led to an all-reduce.
        dummy_batches: for each that the workers were told to run: what was released then.
        asleep: the executor's ``is_sleeping`` at the end.
        released: what the workers have released at the end.
        paused: whether the scheduler is paused at the end; None where sleep does not pause it.
    """

    name: str
    turns: int = 0
    asked: int = 0
    collectives: int = 0
    dummy_batches: list[list[str]] = dataclasses.field(default_factory=list)
    asleep: bool = False
    released: list[str] = dataclasses.field(default_factory=list)
    paused: bool | None = None


class _PhaseEnds(Exception):
    """Out of the busy loop."""


class _InputQueue(queue.Queue[Any]):
    """Ends the phase where the engine would wait for a message."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if self.empty():
            raise _PhaseEnds
        return super().get(block, timeout)


class _Scheduler:
    """A scheduler without requests."""

    def __init__(self) -> None:
        # Where sleep pauses the scheduler, from 0.17.0.
        states = getattr(importlib.import_module(_SCHEDULER), "PauseState", None)
        self.unpaused = getattr(states, "UNPAUSED", None)
        self.pause_state = self.unpaused

    def set_pause_state(self, pause_state: Any) -> None:
        self.pause_state = pause_state

    def has_requests(self) -> bool:
        return False

    def has_unfinished_requests(self) -> bool:
        return False

    def finish_requests(self, request_ids: None, status: Any) -> list[Any]:
        return []

    def get_kv_connector(self) -> None:
        return None


class Engine:
    """A ``DPEngineCoreProc`` of two, and everything around it."""

    def __init__(self, core: Any) -> None:
        self.phase = Phase("")
        self.released: set[str] = set()
        self.other_rank_is_busy = False
        self._turns_left = 0
        vars(core)["ParallelConfig"] = parallel_config = SimpleNamespace(
            has_unfinished_dp=self._has_unfinished_dp, sync_dp_state=self._sync_dp_state
        )
        self._requests = core.EngineCoreRequestType
        self.scheduler = _Scheduler()
        self.proc = proc = object.__new__(core.DPEngineCoreProc)
        shutdown_states = getattr(core, "EngineShutdownState", None)
        vars(proc).update(
            vllm_config=SimpleNamespace(
                parallel_config=parallel_config,
                observability_config=SimpleNamespace(enable_logging_iteration_details=False),
            ),
            model_executor=self._make_executor(),
            scheduler=self.scheduler,
            input_queue=_InputQueue(),
            output_queue=queue.Queue(),
            aborts_queue=queue.Queue(),
            batch_queue=None,
            log_stats=False,
            step_fn=self._step,
            dp_rank=1,
            dp_group=None,
            engine_index=1,
            has_coordinator=True,
            publish_dp_lb_stats=False,
            engines_running=False,
            current_wave=0,
            step_counter=0,
            dp_sync_interval=32,
            pending_pause=False,
            ignore_start_dp_wave=False,
            eep_scaling_state=None,
            process_input_queue_block=True,
            shutdown_state=getattr(shutdown_states, "RUNNING", None),
            enable_fault_tolerance=False,
            use_spec_decode=False,
            async_scheduling=False,
            check_for_draft_tokens=False,
            _scheduler_paused=False,
            _idle_state_callbacks=[],
            _reset_caches=lambda *_, **__: None,
            _has_global_unfinished_reqs=self._has_global_unfinished_reqs,
        )
        self._stock_has_global = type(proc)._has_global_unfinished_reqs.__get__(proc)

    def _make_executor(self) -> Any:
        """The stock ``Executor``, with these workers instead of processes."""
        methods = {
            "_init_executor": lambda executor: None,
            "check_health": lambda executor: None,
            "collective_rpc": lambda executor, method, *_, kwargs=None, **__: self._run_in_worker(
                method, **(kwargs or {})
            ),
        }
        stock = importlib.import_module("vllm.v1.executor.abstract").Executor
        configs = ("model", "cache", "lora", "load", "parallel", "scheduler", "device")
        names = [f"{name}_config" for name in (*configs, "speculative", "observability")]
        return type("Executor", (stock,), methods)(SimpleNamespace(**dict.fromkeys(names)))

    # --- what the engine calls ---

    def _run_in_worker(self, method: str, **arguments: Any) -> list[None]:
        if method == "sleep":
            self.released.update(EVERYTHING)
        elif method == "wake_up":
            self.released.difference_update(arguments["tags"] or EVERYTHING)
        elif method == "execute_dummy_batch":
            self.phase.dummy_batches.append(sorted(self.released))
        return [None]

    def _step(self) -> Any:
        if self._turns_left == 0:
            raise _PhaseEnds
        self._turns_left -= 1
        self.phase.turns += 1
        return self.proc.step()

    def _has_global_unfinished_reqs(self, local_unfinished: bool) -> bool:
        self.phase.asked += 1
        answer: bool = self._stock_has_global(local_unfinished)
        return answer

    def _has_unfinished_dp(self, dp_group: None, local_unfinished: bool) -> bool:
        self.phase.collectives += 1
        return local_unfinished or self.other_rank_is_busy

    def _sync_dp_state(
        self, dp_group: None, has_unfinished: bool, pending_pause: bool
    ) -> tuple[bool, bool]:
        # The other rank is told to pause when this one is.
        return self._has_unfinished_dp(dp_group, has_unfinished), pending_pause

    # --- what others send it ---

    def start_wave(self) -> None:
        """Another rank has got a request: the coordinator tells those that are idle."""
        self.other_rank_is_busy = True
        message = (self.proc.current_wave, 0)
        self.proc.input_queue.put_nowait((self._requests.START_DP_WAVE, message))

    def call(self, method: str, *arguments: Any) -> None:
        """A client calls a method of every engine."""
        message = (0, 1, method, arguments)
        self.proc.input_queue.put_nowait((self._requests.UTILITY, message))

    def run(self, name: str, *, turns: int) -> Phase:
        """Let the busy loop handle what has been sent, for some turns or until it waits.

        Raises:
            RuntimeError: a method that was called has failed.
        """
        self.phase = phase = Phase(name)
        self._turns_left = turns
        with contextlib.suppress(_PhaseEnds):
            self.proc.run_busy_loop()
        while not self.proc.output_queue.empty():
            _, outputs = self.proc.output_queue.get_nowait()
            if outputs.utility_output and outputs.utility_output.failure_message:
                raise RuntimeError(outputs.utility_output.failure_message)
        phase.asleep = self.proc.model_executor.is_sleeping
        phase.released = sorted(self.released)
        if self.scheduler.unpaused is not None:
            phase.paused = self.scheduler.pause_state != self.scheduler.unpaused
        return phase


AWAKE = "another rank has a request"
AWAKE_AGAIN = 'wake_up(tags=["kv_cache"]), another rank has a request'


def observe(engine: Engine) -> list[Phase]:
    """An engine works, sleeps, and is woken in two parts, while another rank has requests."""

    def busy(name: str) -> Phase:
        engine.start_wave()
        return engine.run(name, turns=TURNS)

    def sleep(name: str) -> Phase:
        # A wave is going on: ranks learn of its end when they ask each other, in the 32nd turn.
        engine.other_rank_is_busy = False
        engine.call("sleep", 1)
        return engine.run(name, turns=2 * TURNS)

    def wake_up(tag: str, name: str) -> Phase:
        engine.call("wake_up", [tag])
        return busy(name)

    return [
        busy(AWAKE),
        sleep("sleep(level=1), until idle"),
        busy("asleep, another rank has a request"),
        sleep("sleep(level=1) once more, until idle"),
        wake_up("weights", 'wake_up(tags=["weights"]), another rank has a request'),
        wake_up("kv_cache", AWAKE_AGAIN),
    ]


def find_faults(phases: Sequence[Phase]) -> list[str]:
    """One sentence for each phase in which the engine did what only an awake one may do."""
    faults = []
    for phase in phases:
        count = sum(map(bool, phase.dummy_batches))
        if count:
            released = max(phase.dummy_batches)
            faults.append(f"{phase.name}: {count} dummy batches without {' and '.join(released)}")
        if phase.released and phase.paused is False:
            released = phase.released
            faults.append(f"{phase.name}: the scheduler runs without {' and '.join(released)}")
    return faults


def check_requirements(phases: Sequence[Phase], *, late: bool) -> list[dict[str, Any]]:
    """What has to hold whether dummy batches are skipped or not.

    Args:
        phases: of :func:`observe`.
        late: the plugin was loaded after the engine's module.
    """
    awake = [phase for phase in phases if phase.name in (AWAKE, AWAKE_AGAIN)]
    return [
        requirement(
            "while awake every turn without a step of its own has a dummy batch",
            [
                f"{phase.name}: {len(phase.dummy_batches)} in {phase.turns} turns"
                for phase in awake
                if not len(phase.dummy_batches) == phase.turns == TURNS
            ],
            f"{TURNS} turns each",
        ),
        requirement(
            "in every turn, asleep or not, the other ranks are asked whether work is left",
            [
                f"{phase.name}: {phase.asked} times in {phase.turns} turns"
                for phase in phases
                if phase.asked != phase.turns
            ],
            f"{sum(phase.turns for phase in phases)} turns",
        ),
        requirement(
            "those who are told to sleep come to rest",
            [phase.name for phase in phases if "sleep(" in phase.name and phase.turns == 2 * TURNS],
            "at the next time that all ranks are asked",
        ),
        requirement(
            "the scheduler is resumed when everything is awake",
            [phase.name for phase in awake if phase.paused],
            "" if awake[0].paused is not None else "sleep does not pause it here",
        ),
        requirement(
            "the executor knows what the workers have released",
            [phase.name for phase in phases if phase.asleep != bool(phase.released)],
            "is_sleeping",
        ),
        requirement(
            "the plugin is loaded after the engine's module, as in the engine's process",
            [] if late else ["it was loaded before"],
            "",
        ),
    ]


def reproduce() -> dict[str, Any]:
    """Run an engine of the importable vLLM; this process must not have imported it.

    Returns:
        The keys of :class:`vllm_cgfix.verify.Outcome`. ``observations`` has ``phases``, each as
        in :class:`Phase`.
    """
    cpu.use_cpu_platform()
    core = importlib.import_module("vllm.v1.engine.core")
    # The process of an engine imports this module first; EngineCore.__init__ loads the plugins.
    late = all(status.state.value == "off" for status in vllm_cgfix.status())
    importlib.import_module("vllm.plugins").load_general_plugins()
    if "cgfix" not in importlib.metadata.entry_points(group="vllm.general_plugins").names:
        vllm_cgfix.register()
    phases = observe(Engine(core))
    requirements = check_requirements(phases, late=late)
    observations = {"phases": [dataclasses.asdict(phase) for phase in phases]}
    text = _table(phases, requirements)
    return outcome(find_faults(phases), requirements, observations, text)


def _table(phases: Sequence[Phase], requirements: Sequence[dict[str, Any]]) -> str:
    rows = [
        {
            "the engine is told": phase.name,
            "turns": phase.turns,
            "dummy batches": len(phase.dummy_batches),
            "of them on released memory": sum(map(bool, phase.dummy_batches)),
            "all-reduces": phase.collectives,
            "released then": ", ".join(phase.released) or "nothing",
            "scheduler": {None: "", True: "paused", False: "runs"}[phase.paused],
        }
        for phase in phases
    ]
    marks = [
        f"{'ok' if r['ok'] else 'NOT':<3} {': '.join(filter(None, (r['name'], r['detail'])))}"
        for r in requirements
    ]
    return "\n".join([tabulate(rows, headers="keys", tablefmt="github"), *marks])


if __name__ == "__main__":
    sys.exit(run(__doc__, reproduce))
