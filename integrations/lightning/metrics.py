"""Metrics in the middle of an epoch: what ``self.log`` and torchmetrics have summed up so far, on this rank.

Lightning's own checkpoints have none of it, so that an epoch's mean is that of the batches after the resume. Here it is a part of
the snapshot, as is what callbacks (early stopping, schedules on a plateau) find in ``trainer.callback_metrics``.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from resilience.integrations.lightning import flavour

_LOG = logging.getLogger("resilience.lightning")
_REDUCTIONS = ("mean", "sum", "max", "min")
_PLAIN = (str, bool, int, type(None))
_FLAGS = ("_first_loop_iter", "_current_fx", "_epoch_end_reached", "_batch_idx", "_split_idx")
_KEPT = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


class Metrics:
    """A part of a snapshot."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._target: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return what has been summed up so far."""
        connector = self._trainer._logger_connector
        results = self._trainer.fit_loop.epoch_loop._results
        return {
            "results": {key: kept for key, one in results.items() if (kept := _kept(one)) is not None},
            "modules": {name: _metric_state(metric) for name, metric in self._metrics()},
            "flags": {
                name: value for name, value in vars(connector).items() if name in _FLAGS and isinstance(value, _PLAIN)
            },
            "kept": {name: _detached(vars(connector).get(name, {})) for name in _KEPT},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep a state until :meth:`resume`: what Lightning does before its first batch would reset some of it."""
        self._target = state
        self._set_kept(state)

    def resume(self) -> None:
        """Set everything to what it was."""
        state, self._target = self._target, None
        if state is None:
            return
        connector = self._trainer._logger_connector
        vars(connector).update({name: value for name, value in state["flags"].items() if name in vars(connector)})
        self._set_kept(state)
        for name, metric in self._metrics():
            _set_metric(metric, state["modules"].get(name))
        results = self._trainer.fit_loop.epoch_loop._results
        for key, kept in state["results"].items():
            made = self._result(kept)
            if made is not None:
                results[key] = made

    def _set_kept(self, state: dict[str, Any]) -> None:
        known = vars(self._trainer._logger_connector)
        known.update({name: dict(value) for name, value in state["kept"].items() if name in known})

    def _metrics(self) -> list[tuple[str, Any]]:
        """Return the torchmetrics of the module, by their place in it."""
        module = self._trainer.lightning_module
        return [(name, one) for name, one in module.named_modules() if _is_metric(one)]

    def _result(self, kept: dict[str, Any]) -> Any:
        """Return what ``self.log`` would have made, with its sum so far."""
        trainer = self._trainer
        homes = flavour.of(trainer, "trainer.connectors.logger_connector.result")
        meta = homes._Metadata(**kept["meta"], reduce_fx=getattr(torch, kept["reduce"]))
        meta.sync = homes._Sync(
            _should=kept["sync"], fn=trainer.strategy.reduce, _group=None, rank_zero_only=kept["rank_zero_only"]
        )
        made = homes._ResultMetric(meta, kept["value"] is not None)
        if kept["value"] is None:
            try:
                made.value = trainer.lightning_module.get_submodule(kept["meta"]["metric_attribute"])
            except AttributeError:
                return None
        else:
            vars(made).update(kept["value"])
        made._update_count, made.has_reset, made._forward_cache = 1, False, kept["forward"]
        return made.to(trainer.lightning_module.device)


def _kept(result: Any) -> dict[str, Any] | None:
    """Return what it takes to make a result again; ``None`` for one that was reset, or that a group of its own reduces."""
    meta, sync = result.meta, result.meta.sync
    if result.has_reset or sync._group is not None:
        return None
    fields = {
        field.name: getattr(meta, field.name)
        for field in dataclasses.fields(meta)
        if field.init and field.name not in ("reduce_fx", "_sync")
    }
    reduction = getattr(meta.reduce_fx, "__name__", "")
    if reduction not in _REDUCTIONS or not all(isinstance(value, _PLAIN) for value in fields.values()):
        return None
    if not result.is_tensor and meta.metric_attribute is None:
        return None
    sums = [name for name in ("value", "cumulated_batch_size") if result.is_tensor and name in vars(result)]
    forward = result._forward_cache
    return {
        "meta": fields,
        "reduce": reduction,
        "sync": bool(sync.should),
        "rank_zero_only": bool(sync.rank_zero_only),
        "value": {name: vars(result)[name].detach() for name in sums} or None,
        "forward": forward.detach() if isinstance(forward, torch.Tensor) else None,
    }


def _is_metric(module: Any) -> bool:
    return any(kind.__module__ == "torchmetrics.metric" for kind in type(module).__mro__)


def _metric_state(metric: Any) -> dict[str, Any]:
    states = {name: getattr(metric, name) for name in metric._defaults}
    return {"states": _detached(states), "updates": metric._update_count}


def _set_metric(metric: Any, state: dict[str, Any] | None) -> None:
    if state is None or state["states"].keys() != metric._defaults.keys():
        return
    for name, value in state["states"].items():
        setattr(metric, name, value)
    metric._update_count, metric._computed = state["updates"], None


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: _detached(item) for key, item in value.items()}
    return [_detached(item) for item in value] if isinstance(value, list) else value
