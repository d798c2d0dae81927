"""Parts of a checkpoint: an optimizer is what its own ``load_state_dict`` would have made of it, in the memory that it had."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from resilience.checkpoint import encoding, shards
from resilience.checkpoint.optimizers import Names, Optimizer
from resilience.checkpoint.plan import Collector, make_plan
from resilience.checkpoint.reading import decode
from resilience.checkpoint.source import Shard, Source
from resilience.checkpoint.stager import copy as copied
from resilience.checkpoint.state import Module

Maker = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

MAKERS: dict[str, Maker] = {
    "adam": torch.optim.Adam,
    "adam, amsgrad": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "adam, fused": lambda parameters: torch.optim.Adam(parameters, fused=True),
    "adam, foreach": lambda parameters: torch.optim.Adam(parameters, foreach=True),
    "adam, two groups": lambda parameters: torch.optim.Adam(
        [{"params": parameters[:1], "lr": 0.5, "weight_decay": 0.1}, {"params": parameters[1:], "betas": (0.5, 0.6)}]
    ),
    "adam, a learning rate that is a tensor": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.25)),
    "adamw": torch.optim.AdamW,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adafactor": torch.optim.Adafactor,
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.5, centered=True),
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "sgd, momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "lbfgs": torch.optim.LBFGS,
}


def parameters_of(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    shapes = [(4, 3), (5,), (2, 2, 2), ()]
    return [torch.nn.Parameter(torch.randn(shape, generator=source).to(dtype)) for shape in shapes]


def stepped(make: Maker, seed: int, steps: int = 2, dtype: torch.dtype = torch.float32) -> torch.optim.Optimizer:
    """Return an optimizer that has made some steps, on parameters of its own."""
    parameters = parameters_of(seed, dtype)
    optimizer = make(parameters)
    for number in range(steps):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.1 * seed + number)
        optimizer.step(lambda: 1.0)
    return optimizer


def saved(part: Optimizer) -> tuple[Any, Source]:
    """Return an optimizer's state as it is found in a slot."""
    collector = Collector()
    values = encoding.encode(part.state(), "optimizer", collector.keep)
    made = make_plan(collector.found, 0, 1)
    slot = torch.zeros(made.data_bytes, dtype=torch.uint8)
    copied(made.targets(slot), made.sources(collector.found))
    source = Source()
    source.add(Shard(slot, shards.parse_header(made.header, made.data_bytes)), own=True)
    return decode(memoryview(values)), source


def alone(optimizer: torch.optim.Optimizer) -> Optimizer:
    return Optimizer("optimizer", optimizer, Names([]))


def restored(target: torch.optim.Optimizer, origin: torch.optim.Optimizer) -> None:
    alone(target).load(*saved(alone(origin)))


def told(value: Any) -> Any:
    """Return something that is equal only for what is the same in type, device, dtype, shape and every bit."""
    if isinstance(value, torch.Tensor):
        assert value.is_contiguous()
        raw = value.detach().reshape(-1).view(torch.uint8).tolist()
        return type(value), value.device, value.dtype, value.shape, value.requires_grad, raw
    if isinstance(value, dict):
        return type(value), [(told(key), told(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [told(item) for item in value]
    return type(value), value


def whole(optimizer: torch.optim.Optimizer) -> Any:
    """Return everything that an optimizer's steps depend on."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    state = {numbers[id(parameter)]: value for parameter, value in optimizer.state.items()}
    groups = [{**group, "params": [numbers[id(one)] for one in group["params"]]} for group in optimizer.param_groups]
    return told(state), told(groups), told(optimizer.defaults), type(optimizer.state)


def tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    entries = [entry for entry in optimizer.state.values() if isinstance(entry, dict)]
    return [value for entry in entries for value in entry.values() if isinstance(value, torch.Tensor)]


# -- the same as torch's own way --------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 3], ids=["without a state", "with a state"])
@pytest.mark.parametrize("name", list(MAKERS))
def test_optimizer_is_bit_for_bit_what_torch_would_have_loaded(name: str, steps: int) -> None:
    origin, ours, theirs = stepped(MAKERS[name], 1), *(stepped(MAKERS[name], 2, steps) for _ in range(2))
    theirs.load_state_dict(copy.deepcopy(origin.state_dict()))
    restored(ours, origin)
    assert whole(ours) == whole(theirs)


@pytest.mark.parametrize("name", list(MAKERS))
def test_restored_optimizer_makes_the_same_next_step(name: str) -> None:
    origin, target = stepped(MAKERS[name], 1), stepped(MAKERS[name], 2)
    restored(target, origin)
    for one, other in zip(origin.param_groups, target.param_groups, strict=True):
        for parameter, twin in zip(one["params"], other["params"], strict=True):
            with torch.no_grad():
                twin.copy_(parameter)
            parameter.grad, twin.grad = torch.ones_like(parameter), torch.ones_like(parameter)
    for optimizer in (origin, target):
        optimizer.step(lambda: 1.0)
    for one, other in zip(origin.param_groups, target.param_groups, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one["params"], other["params"], strict=True))


@pytest.mark.parametrize("there", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["adam", "adam, fused", "sgd, momentum"])
def test_state_of_another_type_is_brought_to_the_type_that_torch_wants(
    name: str, kept: torch.dtype, there: torch.dtype
) -> None:
    origin = stepped(MAKERS[name], 1, dtype=kept)
    ours, theirs = (stepped(MAKERS[name], 2, dtype=there) for _ in range(2))
    theirs.load_state_dict(copy.deepcopy(origin.state_dict()))
    restored(ours, origin)
    assert whole(ours) == whole(theirs)


def test_state_of_higher_precision_than_its_parameters_is_loaded_as_torch_does() -> None:
    """What is there fits what was saved, and torch brings both to the type of the parameter all the same."""
    origin, ours, theirs = (stepped(torch.optim.Adam, seed, dtype=torch.bfloat16) for seed in (1, 2, 2))
    for optimizer in (origin, ours, theirs):
        for entry in optimizer.state.values():
            entry["exp_avg"] = entry["exp_avg"].float() + 1e-5
    theirs.load_state_dict(copy.deepcopy(origin.state_dict()))
    restored(ours, origin)
    assert whole(ours) == whole(theirs)


def test_state_that_was_kept_in_another_form_is_not_taken_for_its_bytes() -> None:
    origin, ours, theirs = stepped(torch.optim.Adam, 1), stepped(torch.optim.Adam, 2), stepped(torch.optim.Adam, 2)
    for optimizer, dtype in ((origin, torch.float8_e8m0fnu), (ours, torch.uint8)):
        entry = next(iter(optimizer.state.values()))
        entry["exp_avg"] = torch.full((4, 3), 4.0).to(dtype)
    theirs.load_state_dict(copy.deepcopy(origin.state_dict()))
    restored(ours, origin)
    assert whole(ours) == whole(theirs)


def test_setting_that_an_older_checkpoint_does_not_know_gets_its_default() -> None:
    origin, ours, theirs = stepped(torch.optim.Adam, 1), stepped(torch.optim.Adam, 2), stepped(torch.optim.Adam, 2)
    for name in ("foreach", "fused", "capturable"):
        del origin.param_groups[0][name]
    theirs.load_state_dict(copy.deepcopy(origin.state_dict()))
    restored(ours, origin)
    assert whole(ours) == whole(theirs)
    assert ours.param_groups[0]["fused"] is None


def test_parameter_without_a_state_has_none_afterwards() -> None:
    origin, ours, theirs = stepped(torch.optim.Adam, 1), stepped(torch.optim.Adam, 2), stepped(torch.optim.Adam, 2)
    del origin.state[origin.param_groups[0]["params"][1]]
    theirs.load_state_dict(copy.deepcopy(origin.state_dict()))
    restored(ours, origin)
    assert whole(ours) == whole(theirs)
    assert len(ours.state) == 3


# -- in place ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adam", "adam, fused", "adam, two groups", "sgd, momentum", "rmsprop"])
def test_state_that_is_there_is_written_in_place(name: str) -> None:
    target = stepped(MAKERS[name], 2)
    before = tensors_of(target)
    restored(target, stepped(MAKERS[name], 1))
    assert [id(tensor) for tensor in tensors_of(target)] == [id(tensor) for tensor in before]
    assert len(before) >= 4


def tied(optimizer: torch.optim.Optimizer) -> None:
    one, other, *_ = optimizer.state.values()
    one["exp_avg"] = one["exp_avg_sq"]
    other["exp_avg"] = other["exp_avg_sq"]


def parts_of_one(optimizer: torch.optim.Optimizer) -> None:
    first = next(iter(optimizer.state.values()))
    both = torch.cat([first["exp_avg"], first["exp_avg_sq"]])
    first["exp_avg"], first["exp_avg_sq"] = both.split(4)


def overlapping(optimizer: torch.optim.Optimizer) -> None:
    first = next(iter(optimizer.state.values()))
    room = torch.zeros(20)
    first["exp_avg"], first["exp_avg_sq"] = room[:12].view(4, 3), room[6:18].view(4, 3)


def the_parameter_itself(optimizer: torch.optim.Optimizer) -> None:
    parameter, entry = next(iter(optimizer.state.items()))
    entry["exp_avg"] = parameter.detach()


def spread(optimizer: torch.optim.Optimizer) -> None:
    entry = next(iter(optimizer.state.values()))
    entry["exp_avg"] = torch.ones(1, 1).expand(4, 3)


def turned(optimizer: torch.optim.Optimizer) -> None:
    entry = next(iter(optimizer.state.values()))
    entry["exp_avg"] = torch.ones(3, 4).t()


def with_gradient(optimizer: torch.optim.Optimizer) -> None:
    entry = next(iter(optimizer.state.values()))
    entry["exp_avg"] = torch.ones(4, 3, requires_grad=True)


def of_another_shape(optimizer: torch.optim.Optimizer) -> None:
    entry = next(iter(optimizer.state.values()))
    entry["exp_avg"], entry["exp_avg_sq"] = torch.ones(12), torch.ones(4, 3, dtype=torch.bfloat16)


def of_another_kind(optimizer: torch.optim.Optimizer) -> None:
    entry = next(iter(optimizer.state.values()))
    entry["exp_avg"], entry["exp_avg_sq"] = 5, torch.nn.Parameter(torch.ones(4, 3), requires_grad=False)


ODD = [
    tied,
    parts_of_one,
    overlapping,
    the_parameter_itself,
    spread,
    turned,
    with_gradient,
    of_another_shape,
    of_another_kind,
]


@pytest.mark.parametrize("change", ODD, ids=lambda change: change.__name__)
def test_memory_that_somebody_else_looks_into_is_not_written(change: Callable[[torch.optim.Optimizer], None]) -> None:
    origin, ours, theirs = stepped(torch.optim.Adam, 1), stepped(torch.optim.Adam, 2), stepped(torch.optim.Adam, 2)
    change(ours)
    parameters = [parameter.detach().clone() for parameter in ours.param_groups[0]["params"]]
    theirs.load_state_dict(copy.deepcopy(origin.state_dict()))
    restored(ours, origin)
    assert whole(ours) == whole(theirs)
    assert all(torch.equal(one, two) for one, two in zip(parameters, ours.param_groups[0]["params"], strict=True))


def test_memory_outside_the_optimizer_is_not_written() -> None:
    target, outside = stepped(torch.optim.Adam, 2), torch.zeros(40)
    next(iter(target.state.values()))["exp_avg"] = outside[:12].view(4, 3)
    restored(target, stepped(torch.optim.Adam, 1))
    assert not outside.any()


def test_what_was_one_tensor_is_one_again() -> None:
    origin, target = stepped(torch.optim.Adam, 1), stepped(torch.optim.Adam, 2)
    tied(origin)
    restored(target, origin)
    one, other, *_ = target.state.values()
    assert one["exp_avg"] is one["exp_avg_sq"]
    assert other["exp_avg"] is other["exp_avg_sq"]
    assert torch.equal(one["exp_avg"], next(iter(origin.state.values()))["exp_avg_sq"])


def test_restored_state_shares_no_memory_with_the_slot() -> None:
    for steps in (0, 2):
        target = stepped(torch.optim.Adam, 2, steps)
        tree, source = saved(alone(stepped(torch.optim.Adam, 1)))
        alone(target).load(tree, source)
        before = [tensor.clone() for tensor in tensors_of(target)]
        for pieces in source._found.values():
            for shard, piece in pieces:
                shard.view(piece.name).fill_(77)
        assert all(torch.equal(one, other) for one, other in zip(before, tensors_of(target), strict=True))


# -- who else has a word ----------------------------------------------------------------------------------------------


class Careful(torch.optim.Adam):  # type: ignore[misc]
    """One that looks at what it is given before it lets go of what it has."""

    def load_state_dict(self, state_dict: Any) -> None:
        for tensor in tensors_of(self):
            tensor.zero_()
        super().load_state_dict(state_dict)


class Wordy(torch.optim.Adam):  # type: ignore[misc]
    def state_dict(self) -> Any:
        return {**super().state_dict(), "more": [1, 2]}


def zero(optimizer: torch.optim.Optimizer, state_dict: Any = None) -> None:
    assert state_dict is None or type(state_dict["param_groups"][0]["params"]) is list
    for tensor in tensors_of(optimizer):
        tensor.zero_()


def hooked(kind: str) -> torch.optim.Optimizer:
    optimizer = stepped(Careful if kind == "class" else Wordy if kind == "state_dict" else torch.optim.Adam, 2)
    if kind == "before":
        optimizer.register_load_state_dict_pre_hook(zero)
    if kind == "instance":
        usual = optimizer.load_state_dict

        def load(state_dict: Any) -> None:
            zero(optimizer, state_dict)
            usual(state_dict)

        optimizer.load_state_dict = load
    return optimizer


@pytest.mark.parametrize("kind", ["class", "state_dict", "before", "instance"])
def test_whoever_has_a_word_is_given_tensors_that_are_not_the_optimizers_yet(kind: str) -> None:
    origin, ours, theirs = stepped(torch.optim.Adam, 1), hooked(kind), stepped(torch.optim.Adam, 2)
    theirs.load_state_dict(copy.deepcopy(origin.state_dict()))
    before = {id(tensor) for tensor in tensors_of(ours)}
    restored(ours, origin)
    assert whole(ours) == whole(theirs)
    assert not before & {id(tensor) for tensor in tensors_of(ours)}


def test_hook_after_loading_sees_the_loaded_state() -> None:
    origin, target = stepped(torch.optim.Adam, 1), stepped(torch.optim.Adam, 2)
    seen: list[Any] = []
    target.register_load_state_dict_post_hook(lambda optimizer: seen.append(whole(optimizer)[0]))
    restored(target, origin)
    assert seen == [whole(origin)[0]]


# -- names, and how long it takes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [["abc"], ["cab"], ["bc", "a"], ["cb", "a"]])
@pytest.mark.parametrize("usual", [True, False])
def test_state_follows_the_name_of_its_parameter_and_not_its_number(groups: list[str], usual: bool) -> None:
    def part(groups: list[str]) -> tuple[Optimizer, dict[str, torch.Tensor]]:
        parameters = {name: torch.nn.Parameter(torch.zeros(3)) for name in "abc"}
        optimizer = torch.optim.Adam([{"params": [parameters[name] for name in group]} for group in groups])
        for number, parameter in enumerate(parameters.values()):
            parameter.grad = torch.full((3,), number + 1.0)
        optimizer.step()
        module = Module("m", torch.nn.ParameterDict(parameters), replicated=False)
        module.state()
        return Optimizer("o", optimizer, Names([module])), parameters

    (one, origin), (other, target) = part(["ab", "c"] if len(groups) == 2 else ["abc"]), part(groups)
    for entry in other.optimizer.state.values():
        entry["exp_avg"].zero_()
    if not usual:
        other.optimizer.register_load_state_dict_pre_hook(lambda optimizer, state_dict: None)
    other.load(*saved(one))
    for name in "abc":
        wanted = one.optimizer.state[origin[name]]["exp_avg"]
        assert torch.equal(other.optimizer.state[target[name]]["exp_avg"], wanted), name
        assert wanted.any()


@pytest.mark.parametrize("sizes", [[2, 1], [1, 1, 1], [3, 1], [3]])
def test_groups_of_other_parameters_are_said(sizes: list[int]) -> None:
    def optimizer(sizes: list[int]) -> torch.optim.Optimizer:
        return torch.optim.Adam([{"params": [torch.zeros(1) for _ in range(size)]} for size in sizes])

    (said,) = alone(optimizer([1, 2])).check(*saved(alone(optimizer(sizes))), strict=True)
    assert "grouped in another way" in said or "#3" in said


def named(model: torch.nn.Module, make: Maker) -> Optimizer:
    """Return the part of an optimizer that has stepped, of a model called m."""
    optimizer = make(list(model.parameters()))
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    module = Module("m", model, replicated=False)
    module.state()
    return Optimizer("o", optimizer, Names([module]))


def test_settings_follow_their_parameters_where_groups_are_in_another_order() -> None:
    model = torch.nn.Linear(2, 3)
    groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": 0.25}]
    one = named(model, lambda _: torch.optim.SGD(groups))
    other = named(model, lambda _: torch.optim.SGD([{**groups[1], "lr": 9.0}, {**groups[0], "lr": 9.0}]))
    tree, source = saved(one)
    assert other.check(tree, source, strict=True) == []
    other.load(tree, source)
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.25, 0.5]


def test_optimizer_of_another_kind_is_refused_or_left_as_it_is() -> None:
    model = torch.nn.Linear(2, 3)
    tree, source = saved(named(model, torch.optim.Adam))
    other = named(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    before = copy.deepcopy(other.optimizer.state_dict())
    assert other.check(tree, source, strict=True) == [
        "o is a torch.optim.sgd.SGD, in the checkpoint a torch.optim.adam.Adam"
    ]
    assert other.check(tree, source, strict=False) == other.check(tree, source, strict=True)
    other.load(tree, source)
    assert str(other.optimizer.state_dict()) == str(before)


def test_kindred_optimizer_takes_the_state_over_if_not_strict() -> None:
    model = torch.nn.Linear(2, 3)
    tree, source = saved(named(model, torch.optim.Adam))
    other = named(model, torch.optim.AdamW)
    assert "in the checkpoint a torch.optim.adam.Adam" in other.check(tree, source, strict=True)[0]
    assert other.check(tree, source, strict=False) == []
    other.load(tree, source)
    assert other.optimizer.param_groups[0]["weight_decay"] == 0


def test_parameters_that_were_replaced_keep_their_names() -> None:
    """Identities are used again: names by what was there once would go to whoever came after."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(1)) for _ in range(4)])
    module = Module("m", model, replicated=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    part = Optimizer("o", optimizer, Names([module]))
    for round_ in range(20):
        for number in (3, 1, 0, 2) if round_ % 2 else (0, 2, 1, 3):
            model[number] = torch.nn.Parameter(torch.zeros(1))
        optimizer.param_groups[0]["params"] = [model[number] for number in (2, 0, 3, 1)]
        module.state()
        assert part.order() == ["m.2", "m.0", "m.3", "m.1"]


def test_time_grows_with_the_number_of_parameters_and_not_with_its_square() -> None:
    def best(count: int) -> float:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True) for _ in range(count)], momentum=0.9)
        for parameter in optimizer.param_groups[0]["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.ones(1)
        part, times = alone(optimizer), []
        for _ in range(3):
            tree, source = saved(part)
            began = time.process_time()
            part.load(tree, source)
            times.append(time.process_time() - began)
        return min(times)

    small, large = best(1_000), best(16_000)
    assert large < 60 * small  # 16 where it is linear, 256 where it is not
