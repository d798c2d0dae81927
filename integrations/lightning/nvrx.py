"""The names that users of NVRx's Lightning callbacks bring along: thin forms of :class:`callback.Hooks`.

``FaultToleranceCallback`` and ``FaultToleranceSectionsCallback`` take the parameters that they know. Both are watched by heartbeats
and by sections here, need no timeouts to be given, and take no snapshots; for those there is ``ResilienceCallback``.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from resilience.integrations.lightning import policy
from resilience.integrations.lightning.callback import Hooks

from resilience import config
from resilience.errors import ConfigError
from resilience.pulse.rank_monitor_client import RankMonitorClient

_STATE = "_ft_state_.json"
_FOLDER = "ft_state"


class FaultTolerance(Hooks):
    """``autoresume``: make the file that ``FAULT_TOL_FINISHED_FLAG_FILE`` names when training is complete.

    ``calculate_timeouts``: calculate timeouts from what was seen, and keep them for later jobs in ``exp_dir`` (by default
    ``ft_state`` below the trainer's log directory). Without it they are learned all the same, for this job.
    ``simulated_fault_params``: see :class:`SimulatedFaultParams`. ``logger_name``: what is said goes to this logger.
    """

    def __init__(
        self,
        autoresume: bool,
        calculate_timeouts: bool,
        simulated_fault_params: Any = None,
        exp_dir: str | os.PathLike[str] | None = None,
        logger_name: str | None = "nemo_logger.FaultToleranceCallback",
    ) -> None:
        Hooks.__init__(self, snapshots=False, simulated_fault_params=simulated_fault_params)
        if autoresume and config.finished_flag_file() is None:
            raise ConfigError(
                f"autoresume=True needs {config.ENV_FINISHED_FLAG_FILE} in the environment: the file that is made when training is "
                "complete. Nothing was set up."
            )
        self._leaves_mark = autoresume
        self._calculates = calculate_timeouts
        self._exp_dir = exp_dir
        self._logger = logging.getLogger(logger_name)
        self._client: RankMonitorClient | None = None
        self._file: Path | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """See base class. What an earlier job has calculated is in force from here on."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self._client = RankMonitorClient()
        self._client.init_workload_monitoring()
        if self._calculates:
            given = (
                self._exp_dir
                if self._exp_dir is not None
                else Path(trainer.log_dir or trainer.default_root_dir) / _FOLDER
            )
            self._file = Path(given) / _STATE
            if self._file.exists():
                self._client.load_state_dict(json.loads(self._file.read_text()))
                self._logger.info("timeouts of an earlier job are in force: %s", self._client.section_timeouts)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """See base class."""
        if stage == "fit":
            self._calculate(trainer)
        super().teardown(trainer, pl_module, stage)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """See base class."""
        if isinstance(exception, SystemExit) and not exception.code:
            self._calculate(trainer)  # an end in good order; after a failure what was seen means little
        super().on_exception(trainer, pl_module, exception)

    def _calculate(self, trainer: Any) -> None:
        known, self._client = self._client, None
        if known is None or self._file is None:
            return
        known.calculate_and_set_hb_timeouts(skip_if_not_ready=True)
        known.calculate_and_set_section_timeouts(skip_if_not_ready=True)
        if trainer.is_global_zero:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            partial = self._file.with_name(f".{_STATE}.{os.getpid()}")
            partial.write_text(json.dumps(known.state_dict()))
            partial.replace(self._file)


class FaultToleranceSections(FaultTolerance):
    """The same, with ``exc_handling_policy``: a function from an exception to a ``WorkloadControlRequest``."""

    def __init__(  # noqa: PLR0917 - theirs
        self,
        autoresume: bool,
        calculate_timeouts: bool,
        simulated_fault_params: Any = None,
        exp_dir: str | os.PathLike[str] | None = None,
        logger_name: str | None = "nemo_logger.FaultToleranceCallback",
        exc_handling_policy: policy.Policy = None,
    ) -> None:
        super().__init__(autoresume, calculate_timeouts, simulated_fault_params, exp_dir, logger_name)
        policy.check(exc_handling_policy)
        self._policy = exc_handling_policy
