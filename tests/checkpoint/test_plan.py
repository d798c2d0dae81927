"""Plans: every kind of tensor goes through a slot and comes back bit for bit, and what can't is named before anything is copied."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from resilience.checkpoint import encoding, garbage, plan, shards
from resilience.checkpoint.encoding import DecodingError, EncodingError
from resilience.checkpoint.plan import LEADER, OWN, SHARED, Collected, Collector, Plan, make_plan
from resilience.checkpoint.reading import decode
from resilience.checkpoint.source import Ref, Shard, Source
from resilience.checkpoint.stager import copy
from resilience.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings(
    "ignore:ComplexHalf support is experimental:UserWarning",
    "ignore:torch.quantize_per_tensor:UserWarning",
    "ignore:.*nested tensors is in prototype:UserWarning",
    "ignore:Sparse CSR tensor support is in beta:UserWarning",
    "ignore:.*[Ss]parse invariant checks:UserWarning",
)

ODD = [torch.complex128, torch.complex32, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.bits8, torch.uint4]


def bits(tensor: torch.Tensor) -> bytes:
    flat = (
        torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        if tensor.dtype in plan.NAMES
        else tensor.contiguous()
    )
    if flat.dtype in (torch.complex128, torch.complex32):
        flat = torch.view_as_real(flat.resolve_conj())
    return bytes(flat.flatten().view(torch.uint8).tolist())


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return a tensor of any bytes at all (a truth value is 0 or 1)."""
    source = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=source)
    raw = raw % 2 if dtype == torch.bool else raw
    if dtype in (torch.complex128, torch.complex32):
        half = torch.float64 if dtype == torch.complex128 else torch.float16
        return torch.view_as_complex(raw.view(half).view(*shape, 2))
    return raw.view(dtype).view(shape)


Owner = Callable[[torch.Tensor], int]


def collected(state: Any, owner: Owner = lambda tensor: OWN) -> tuple[Collected, bytes]:
    collector = Collector()
    collector.owner = owner
    return collector.found, encoding.encode(state, "state", collector.keep)


def staged(
    state: Any, world: int = 1, owner: Owner = lambda tensor: OWN, rank: int = 0
) -> tuple[Source, Any, list[Plan]]:
    """Do what the ranks of a node do with a state that is the same on all, and open what ``rank`` would find."""
    source, plans = Source(), []
    for peer in range(world):
        found, values = collected(state, owner)
        made = make_plan(found, peer, world)
        slot = torch.full((shards.aligned(made.data_bytes),), 0xEE, dtype=torch.uint8)
        copy(made.targets(slot), made.sources(found))
        source.add(Shard(slot, shards.parse_header(made.header, made.data_bytes)), peer == rank)
        plans.append(made)
        if peer == rank:
            mine = decode(memoryview(values))
    return source, mine, plans


def there_and_back(state: Any, world: int = 1, owner: Owner = lambda tensor: OWN) -> Any:
    source, values, _ = staged(state, world, owner)
    return source.fresh(values)


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert bits(found) == bits(wanted)


# -- every kind of tensor ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("dtype", [*plan.NAMES, *ODD], ids=str)
def test_tensor_of_any_dtype_comes_back_bit_for_bit(dtype: torch.dtype, world: int) -> None:
    shapes = [(), (0,), (1,), (7,), (3, 0), (5, 4), (2, 3, 2)]
    state = {str(shape): noise(shape, dtype, seed) for seed, shape in enumerate(shapes)}
    for owner in (OWN, SHARED, LEADER):
        found = there_and_back(state, world, lambda tensor, owner=owner: owner)  # type: ignore[misc]
        for name, tensor in state.items():
            assert_same(found[name], tensor)


def views() -> dict[str, torch.Tensor]:
    base, complex_one = noise((6, 8), torch.int32), torch.randn(6, 4, dtype=torch.complex64)
    wide = torch.randn(6, 4, dtype=torch.complex128)
    return {
        "transposed": base.t(),
        "strided": base[1::2, ::3],
        "from the middle": base[2:4],
        "expanded": base[:, :1].expand(6, 5),
        "expanded over rows": base[:1].expand(9, 8),
        "permuted": noise((2, 3, 4), torch.float64).permute(2, 0, 1),
        "conjugated": complex_one.conj(),
        "conjugated and transposed": complex_one.mH,
        "negated": complex_one.conj().imag,
        "negated complex": torch._neg_view(complex_one),
        "conjugated, wide": wide.conj(),
        "negated, wide": torch._neg_view(wide),
        "conjugated, negated and transposed, wide": torch._neg_view(wide.conj()).t(),
        "channels last": noise((2, 3, 4, 5), torch.float32).to(memory_format=torch.channels_last),
        "float8, transposed": noise((4, 6), torch.float8_e8m0fnu).t(),
        "needs a gradient": torch.randn(3, 3, requires_grad=True),
        "of a graph": torch.randn(3, 3, requires_grad=True) * 2,
        "parameter": torch.nn.Parameter(torch.randn(4, 3)),
        "parameter of complex128": torch.nn.Parameter(torch.randn(4, 3, dtype=torch.complex128)),
        "buffer": torch.nn.Buffer(torch.randn(4, 3)),
    }


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", list(views()))
def test_view_comes_back_as_what_it_shows(name: str, world: int) -> None:
    tensor = views()[name]
    wanted = tensor.detach().resolve_conj().resolve_neg().clone()
    for owner in (OWN, SHARED):
        found = there_and_back([tensor], world, lambda tensor, owner=owner: owner)[0]  # type: ignore[misc]
        assert_same(found, wanted)
        assert not found.requires_grad


@pytest.mark.parametrize("kind", [torch.quint8, torch.qint8, torch.qint32], ids=str)
def test_tensor_quantized_as_a_whole_comes_back(kind: torch.dtype) -> None:
    tensor = torch.quantize_per_tensor(torch.randn(5, 3), 0.1, 3, kind)
    found = there_and_back({"q": tensor}, 2, lambda tensor: SHARED)["q"]
    assert (found.dtype, found.q_scale(), found.q_zero_point()) == (kind, tensor.q_scale(), 3)
    assert torch.equal(found.int_repr(), tensor.int_repr())


def arrays() -> dict[str, Any]:
    base = numpy.arange(24, dtype=numpy.float64).reshape(4, 6)
    frozen = base.copy()
    frozen.flags.writeable = False
    return {
        **{str(kind): numpy.arange(6).astype(kind).reshape(2, 3) for kind in "?bBhHiIlLefdFD"},
        "longdouble": numpy.arange(3, dtype=numpy.longdouble) / 3,
        "not writable": frozen,
        "negative strides": base[::-1, ::-2],
        "strided": base[::2, 1::2],
        "fortran": numpy.asfortranarray(base),
        "broadcast": numpy.broadcast_to(base[:1], (5, 6)),
        "big-endian": base.astype(">f8"),
        "field of a record": numpy.zeros(3, dtype=[("a", "i1"), ("b", "f4")])["b"],
        "scalar": numpy.array(5, dtype=numpy.int32),
        "empty": numpy.zeros((3, 0), dtype=numpy.int16),
        "text": numpy.array(["a", "bc"]),
        "times": numpy.array(["2024-01-01"], dtype="datetime64[s]"),
    }


@pytest.mark.parametrize("name", list(arrays()))
def test_numpy_array_comes_back_as_one_and_is_writable(name: str) -> None:
    array = arrays()[name]
    found = there_and_back({"a": array})["a"]
    assert type(found) is numpy.ndarray
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()
    assert found.flags.writeable


def test_numbers_of_arrays_are_in_the_slot_and_not_in_the_values() -> None:
    found, values = collected({"a": numpy.zeros(100_000)})
    assert found.tensors[0].shape == (100_000,)
    assert len(values) < 100


def test_mapped_file_is_kept_as_an_array(tmp_path: Path) -> None:
    mapped = numpy.memmap(tmp_path / "file", dtype=numpy.int32, mode="w+", shape=(4,))
    mapped[:] = [1, 2, 3, 4]
    assert there_and_back({"a": mapped})["a"].tolist() == [1, 2, 3, 4]


def test_random_states_go_on_after_a_slot() -> None:
    state = {"torch": torch.Generator().manual_seed(5).get_state(), "numpy": numpy.random.RandomState(5).get_state()}
    found = there_and_back(state)
    generator, older = torch.Generator(), numpy.random.RandomState()
    generator.set_state(found["torch"])
    older.set_state(found["numpy"])
    assert torch.equal(torch.rand(3, generator=generator), torch.rand(3, generator=torch.Generator().manual_seed(5)))
    assert older.random_sample() == numpy.random.RandomState(5).random_sample()


# -- names ------------------------------------------------------------------------------------------------------------


def test_tied_parameter_is_stored_once_and_is_one_again() -> None:
    weight, wide = torch.nn.Parameter(torch.randn(4, 4)), torch.randn(2, dtype=torch.complex128)
    array = numpy.arange(3)
    state = {"embedding": weight, "head": {"weight": weight}, "wide": [wide, wide], "arrays": (array, array)}
    found, _ = collected(state)
    assert found.names == ["state.embedding", "state.wide.0", "state.arrays.0"]
    again = there_and_back(state)
    assert again["embedding"] is again["head"]["weight"]
    assert again["wide"][0] is again["wide"][1]
    assert again["arrays"][0] is again["arrays"][1]


def test_arrays_that_are_gone_lend_nobody_their_identity() -> None:
    """A state may make arrays as it is walked through; an id that is used twice must not be taken for one array."""
    collector = Collector()
    kept = {collector.keep(numpy.full(2, number)[::-1], f"a{number}") for number in range(50)}
    assert len(kept) == 50
    assert [int(tensor[0]) for tensor in collector.found.tensors] == list(range(50))


def test_names_that_would_be_the_same_are_told_apart() -> None:
    tensors = [torch.full((1,), number) for number in range(5)]
    state = {"a": {"b": tensors[0]}, "a.b": tensors[1], 1: tensors[2], "1": tensors[3], "a.b#2": tensors[4]}
    found = there_and_back(state)
    assert [int(found["a"]["b"]), *(int(found[key]) for key in ("a.b", 1, "1", "a.b#2"))] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("key", ["__metadata__", "\ud800", "", "a\0b", 'quote"', "ä" * 300, "line\nbreak"])
def test_any_key_can_name_a_tensor(key: str) -> None:
    collector = Collector()
    values = encoding.encode(
        {key: torch.ones(2)}, "state", lambda node, path: collector.keep(node, path.removeprefix("state."))
    )
    made = make_plan(collector.found, 0, 1)
    slot = torch.zeros(made.data_bytes, dtype=torch.uint8)
    copy(made.targets(slot), made.sources(collector.found))
    source = Source()
    source.add(Shard(slot, shards.parse_header(made.header, made.data_bytes)), own=True)
    found = source.fresh(decode(memoryview(values)))
    assert list(found) == [key]
    assert found[key].tolist() == [1, 1]


def test_tensors_as_keys_and_in_sets_come_back_as_tensors() -> None:
    state = {torch.ones(2): "key", (torch.zeros(1), 1): "pair", "set": {torch.full((3,), 5)}}
    found = there_and_back(state)
    one, (zero, _), _ = found
    assert (one.tolist(), zero.tolist()) == ([1, 1], [0])
    assert [tensor.tolist() for tensor in found["set"]] == [[5, 5, 5]]


def test_many_tensors_in_one_place_have_names_of_their_own() -> None:
    found, _ = collected({torch.ones(1) for _ in range(3_000)})
    assert len(set(found.names)) == 3_000


def plain_tensors() -> dict[Any, Any]:
    return {str(number): torch.nn.Parameter(torch.full((2,), float(number))) for number in range(40)}


def tied() -> dict[Any, Any]:
    tensors = plain_tensors()
    return {**tensors, "again": tensors["7"]}


LONG: dict[str, Callable[[], dict[Any, Any]]] = {
    "parameters": plain_tensors,
    "with a buffer": lambda: {**plain_tensors(), "mean": torch.ones(3), "marked": torch.nn.Buffer(torch.ones(3))},
    "tied": tied,
    "by number": lambda: {int(key): tensor for key, tensor in plain_tensors().items()},
    "by fraction": lambda: {float(key): tensor for key, tensor in plain_tensors().items()},
    "by truth": lambda: {True: torch.ones(1), **{int(key) + 2: tensor for key, tensor in plain_tensors().items()}},
    "not ASCII": lambda: {**plain_tensors(), "ä": torch.ones(1)},
    "not Unicode": lambda: {**plain_tensors(), "\ud800": torch.ones(1)},
    "with a name that the first has": lambda: {**plain_tensors(), "taken": torch.ones(1)},
    "with an odd dtype": lambda: {**plain_tensors(), "wide": torch.ones(1, dtype=torch.complex128)},
    "with a subclass": lambda: {**plain_tensors(), "two": two()},
    "with a number": lambda: {**plain_tensors(), "epoch": 5},
    "with an array": lambda: {**plain_tensors(), "counts": numpy.arange(3)},
    "with a list": lambda: {**plain_tensors(), "more": [torch.ones(2)]},
    "sparse": lambda: {**plain_tensors(), "s": torch.eye(3).to_sparse()},
    "meta": lambda: {**plain_tensors(), "m": torch.ones(3, device="meta")},
    "nested": lambda: {**plain_tensors(), "n": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])},
    "not there yet": lambda: {**plain_tensors(), "lazy": torch.nn.LazyLinear(3).weight},
}


class OneByOne(Collector):
    def _dict(self, node: dict[Any, Any], path: str) -> bytes | None:
        return None


@pytest.mark.parametrize("kind", list(LONG))
def test_long_dict_of_tensors_is_collected_as_if_one_by_one(kind: str) -> None:
    def outcome(collector: Collector, state: dict[str, Any]) -> Any:
        collector.owner = lambda tensor: SHARED if isinstance(tensor, torch.nn.Parameter) else LEADER
        try:
            values = encoding.encode(state, "state", collector.keep)
        except EncodingError as error:
            return str(error)
        tensors = [(tensor.dtype, tensor.shape, tensor.data_ptr()) for tensor in collector.found.tensors]
        return values, collector.found.names, tensors, collector.found.owners

    long = LONG[kind]()
    shared = next(iter(long.values()))
    states: list[dict[str, Any]] = [
        {"model": long},
        {"model": long, "again": long},
        {"model": long, "one": shared},
        {"one": shared, "model": long},
        {"model": long, "model.7": torch.ones(2)},
        {"model.taken": torch.ones(2), "model": long},
    ]
    for state in states:
        assert outcome(Collector(), state) == outcome(OneByOne(), state)


def test_codec_for_tensors_is_asked_in_a_long_dict_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_codecs", {})
    encoding.register_codec(torch.nn.Parameter, lambda tensor: tensor.tolist(), tuple, "parameter")
    found, values = collected(plain_tensors())
    assert found.tensors == []
    assert decode(memoryview(values))["7"] == (7.0, 7.0)


def test_value_of_a_codec_that_holds_a_long_dict_of_tensors_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model:
        pass

    monkeypatch.setattr(encoding, "_codecs", {})
    encoding.register_codec(Model, lambda model: plain_tensors(), lambda value: value["7"].tolist(), "model")
    assert there_and_back([Model()]) == [[7.0, 7.0]]


# -- tensors that are made of others ----------------------------------------------------------------------------------


def two(seed: int = 0) -> Any:
    return TwoTensor(noise((4, 3), torch.int32, seed), noise((4, 3), torch.int32, seed + 1))


@pytest.mark.parametrize("world", [1, 3])
def test_tensor_made_of_two_is_restored_into_one_that_exists(world: int) -> None:
    tensor, target = two(1), two(7)
    source, values, plans = staged({"w": tensor}, world, lambda tensor: SHARED)
    assert plans[0].names == ["state.w.a", "state.w.b"]
    ref = values["w"]
    assert ref.plain
    assert ref.differs("w", target, source) == []
    source.copy_into(ref.name, target)
    assert torch.equal(target.a, tensor.a)
    assert torch.equal(target.b, tensor.b)


def test_tensor_made_of_tensors_made_of_others_is_restored_in_place() -> None:
    tensor, target = TwoTensor(two(1), two(3)), TwoTensor(two(5), two(7))
    source, values, plans = staged({"w": tensor, "w.a.a": torch.ones(1)})
    assert plans[0].names[:4] == ["state.w.a.a", "state.w.a.b", "state.w.b.a", "state.w.b.b"]
    source.copy_into(values["w"].name, target)
    assert torch.equal(target.b.a, tensor.b.a)
    assert source.fresh(values["w.a.a"]).tolist() == [1]


def test_names_that_the_parts_of_a_tensor_would_have_may_be_taken() -> None:
    tensor, target = two(1), two(7)
    source, values, _ = staged({"w.a": torch.ones(1), "w": tensor, "again": tensor})
    source.copy_into(values["w"].name, target)
    assert torch.equal(target.a, tensor.a)
    assert values["again"].name == values["w"].name
    assert source.fresh(values["w.a"]).tolist() == [1]


def test_parameter_made_of_two_is_shared_like_any_parameter() -> None:
    def owner(tensor: torch.Tensor) -> int:
        return SHARED if isinstance(tensor, torch.nn.Parameter) else OWN

    parameters = [torch.nn.Parameter(torch.randn(2, dtype=torch.complex128)), torch.nn.Parameter(torch.ones(2))]
    found, _ = collected([*parameters, torch.nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))], owner)
    assert found.owners == [SHARED] * 4


def test_other_class_or_shape_is_said_before_anything_is_copied() -> None:
    source, values, _ = staged({"two": two(), "one": torch.ones(2)})
    said = [
        *values["two"].differs("m.two", torch.ones(2), source),
        *values["one"].differs("m.one", two(), source),
        *values["two"].differs("m.two", TwoTensor(torch.ones(2), torch.ones(2)), source),
        *values["one"].differs("m.one", torch.ones(2, dtype=torch.float64), source),
        *values["one"].differs("m.one", torch.ones(3), source),
    ]
    assert len(said) == 6
    assert "m.two is a torch.Tensor, in the checkpoint" in said[0]
    assert said[1].endswith("TwoTensor, in the checkpoint a plain tensor")
    assert said[2].startswith("m.two.a is [2] torch.float32, in the checkpoint [4, 3] torch.int32")
    assert values["one"].differs("m.one", torch.nn.Parameter(torch.ones(2)), source) == []


def test_tensor_made_of_two_is_not_made_out_of_nothing() -> None:
    source, values, _ = staged({"w": two()})
    with pytest.raises(CheckpointError, match=r"state\.w: a .*TwoTensor can only be restored into .*register_codec"):
        source.fresh(values)


def test_codec_makes_a_tensor_of_two_out_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_codecs", {})
    encoding.register_codec(TwoTensor, lambda tensor: [tensor.a, tensor.b], lambda value: TwoTensor(*value))
    tensor = two()
    found = there_and_back({"w": tensor, "nested": [(tensor,)]}, 2, lambda tensor: SHARED)
    for again in (found["w"], found["nested"][0][0]):
        assert type(again) is TwoTensor
        assert torch.equal(again.a, tensor.a)
        assert torch.equal(again.b, tensor.b)


def test_codec_is_given_arrays_and_tensors_and_not_what_stands_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Normalizer:
        def __init__(self, mean: Any, scale: torch.Tensor) -> None:
            self.mean, self.scale = mean, scale

    monkeypatch.setattr(encoding, "_codecs", {})
    encoding.register_codec(
        Normalizer, lambda one: {"mean": one.mean, "scale": one.scale}, lambda value: Normalizer(**value)
    )
    found = there_and_back({"n": Normalizer(numpy.arange(3.0), torch.ones(2))})["n"]
    assert found.mean.tolist() == [0, 1, 2]
    assert found.scale.tolist() == [1, 1]


def test_subclass_that_only_adds_a_name_is_kept_as_its_numbers() -> None:
    class Named(torch.Tensor):  # type: ignore[misc]
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch._foreach_copy_:
                raise AssertionError("it was asked while it was copied")
            return super().__torch_function__(func, types, args, kwargs or {})

    found = there_and_back({"n": torch.arange(6.0).reshape(3, 2).as_subclass(Named)}, 2, lambda tensor: SHARED)["n"]
    assert type(found) is torch.Tensor
    assert found.tolist() == [[0, 1], [2, 3], [4, 5]]


# -- what can't be kept -----------------------------------------------------------------------------------------------


class Wrapper(torch.Tensor):  # type: ignore[misc]
    """One without memory, and without a word on what it is made of."""

    @staticmethod
    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (3,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


class WithContext(TwoTensor):  # type: ignore[misc]
    def __tensor_flatten__(self) -> Any:
        return ["a", "b"], {"scale": object()}


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "of layout torch.sparse_coo"),
    "sparse rows": (lambda: torch.eye(3).to_sparse_csr(), "of layout torch.sparse_csr"),
    "meta": (lambda: torch.ones(3, device="meta"), "on the meta device"),
    "meta parameter": (lambda: torch.nn.Linear(2, 2, device="meta").weight, "on the meta device"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested"),
    "not there yet": (lambda: torch.nn.LazyLinear(3).weight, "has no shape yet"),
    "buffer not there yet": (lambda: torch.nn.LazyBatchNorm1d().running_mean, "has no shape yet"),
    "fake": (fake, "has no memory of its own"),
    "wrapper": (Wrapper, "has no memory of its own"),
    "quantized by channel": (
        lambda: torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8),
        "per_channel.*only per tensor",
    ),
    "dtype of two bytes": (lambda: torch.ones(2, dtype=torch.int16).view(torch.bits16), "torch.bits16"),
    "odd dtype inside another": (
        lambda: TwoTensor(noise((2,), torch.complex128), noise((2,), torch.complex128)),
        "complex128",
    ),
    "context that can't be kept": (lambda: WithContext(torch.ones(2), torch.ones(2)), "builtins.object"),
    "masked array": (lambda: numpy.ma.array([1, 2], mask=[True, False]), "MaskedArray"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_tensor_that_can_not_be_kept_is_refused_with_its_place(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(EncodingError, match=rf"^model\.layers\.0[^ ]*: .*{words}.*nothing was saved"):
        encoding.encode({"layers": [make()]}, "model", Collector().keep)


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_distributed_tensor_is_kept_like_one_that_is_not() -> None:
    from torch.distributed.tensor import Shard as Sharded
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    whole = torch.arange(8.0).reshape(4, 2)
    tensor = distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Sharded(0)])
    assert torch.equal(there_and_back({"w": tensor})["w"], whole)


@pytest.mark.usefixtures("process_group")
def test_distributed_tensor_that_is_a_part_of_a_sum_is_refused_with_its_place() -> None:
    from torch.distributed.tensor import DTensor, Partial, init_device_mesh

    tensor = DTensor.from_local(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Partial()])
    with pytest.raises(CheckpointError, match=r"^state\.w: a DTensor with placements .*Partial.*Redistribute it first"):
        collected({"w": tensor})


# -- plans ------------------------------------------------------------------------------------------------------------


def mixed() -> dict[str, torch.Tensor]:
    return {
        "shared.large": noise((10, 7), torch.float32, 1),
        "shared.odd": noise((5,), torch.int8, 2),
        "shared.scalar": noise((), torch.float64, 3),
        "shared.empty": noise((0, 4), torch.float32, 4),
        "own.state": noise((3, 3), torch.int64, 5),
        "leader.mean": noise((4,), torch.float16, 6),
    }


def by_name(state: dict[str, torch.Tensor]) -> Owner:
    owners = {id(tensor): {"s": SHARED, "o": OWN, "l": LEADER}[name[0]] for name, tensor in state.items()}
    return lambda tensor: owners[id(tensor)]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_rank_stages_its_part_of_what_is_shared_and_all_of_its_own(world: int) -> None:
    state = mixed()
    _, _, plans = staged(state, world, by_name(state))
    rows: dict[str, list[int]] = {}
    for rank, made in enumerate(plans):
        names = {piece.name for piece in made.pieces}
        assert "state.own.state" in names
        assert ("state.leader.mean" in names) == (rank == 0)
        assert made.data_bytes == sum(piece.nbytes for piece in made.pieces)
        for piece in made.pieces:
            rows.setdefault(piece.name, []).extend(
                range(*((piece.offsets[0], piece.offsets[0] + piece.shape[0]) if piece.shape else (0, 1)))
            )
    assert sorted(rows["state.shared.large"]) == list(range(10))
    assert sorted(rows["state.shared.odd"]) == list(range(5))
    assert rows["state.shared.scalar"] == [0]
    assert rows["state.shared.empty"] == []
    shared = [sum(piece.nbytes for piece in made.pieces if ".shared." in piece.name) for made in plans]
    assert max(shared) - min(shared) <= 2 * 28


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_rank_gets_everything_back_whoever_staged_it(world: int) -> None:
    state = mixed()
    for rank in range(world):
        source, values, _ = staged(state, world, by_name(state), rank)
        for name, tensor in source.fresh(values).items():
            assert_same(tensor, state[name])


@pytest.mark.parametrize("seed", range(20))
def test_any_state_comes_back_from_any_number_of_ranks(seed: int) -> None:
    source = random.Random(seed)
    dtypes = [*plan.NAMES, torch.complex128]
    state = {}
    for number in range(source.randrange(1, 12)):
        shape = tuple(source.choice([0, 1, 2, 3, 9]) for _ in range(source.randrange(4)))
        state[f"{source.choice('sol')}{number}"] = noise(shape, source.choice(dtypes), seed * 100 + number)
    world = source.randint(1, 5)
    opened, values, _ = staged(state, world, by_name(state), source.randrange(world))
    for name, tensor in opened.fresh(values).items():
        assert_same(tensor, state[name])


def test_plan_fits_the_state_it_was_made_for_and_its_successors() -> None:
    state = mixed()
    made = make_plan(collected(state, by_name(state))[0], 0, 2)
    successor = {name: tensor.clone() for name, tensor in state.items()}
    assert made.fits(collected(successor, by_name(successor))[0])


def without(state: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in state.items() if key != name}


CHANGES: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "name": lambda state: {("own.other" if name == "own.state" else name): tensor for name, tensor in state.items()},
    "dtype": lambda state: {**state, "own.state": state["own.state"].view(torch.float64)},
    "shape": lambda state: {**state, "own.state": state["own.state"].reshape(9)},
    "order": lambda state: dict(reversed(state.items())),
    "one less": lambda state: without(state, "shared.empty"),
    "one more": lambda state: {**state, "own.more": torch.ones(1)},
}


@pytest.mark.parametrize("what", list(CHANGES))
def test_plan_does_not_fit_a_state_with_another(what: str) -> None:
    state = mixed()
    made = make_plan(collected(state, by_name(state))[0], 0, 2)
    changed = CHANGES[what](state)
    assert not made.fits(collected(changed, by_name(changed))[0])


def test_plan_does_not_fit_when_a_tensor_belongs_to_somebody_else_now() -> None:
    state = mixed()
    found = [collected(state, lambda tensor, owner=owner: owner)[0] for owner in (OWN, SHARED, LEADER)]  # type: ignore[misc]
    plans = [make_plan(each, 0, 2) for each in found]
    assert [[made.fits(each) for each in found] for made in plans] == torch.eye(3, dtype=torch.bool).tolist()


def test_plans_of_one_structure_have_one_id_and_those_of_others_another() -> None:
    state = mixed()
    one, again = (make_plan(collected(state, by_name(state))[0], 0, 2) for _ in range(2))
    other_rank = make_plan(collected(state, by_name(state))[0], 1, 2)
    other_state = make_plan(collected(without(state, "own.state"), by_name(state))[0], 0, 2)
    assert one.id == again.id
    assert len({one.id, other_rank.id, other_state.id}) == 3


def test_state_without_tensors_has_a_plan_too() -> None:
    found, _ = collected({"step": 5})
    made = make_plan(found, 0, 1)
    assert (made.pieces, made.data_bytes) == ([], 0)
    copy(made.targets(torch.empty(0, dtype=torch.uint8)), made.sources(found))


def test_making_a_plan_sets_off_one_round_of_the_garbage_collector_at_most() -> None:
    found, _ = collected({str(number): torch.ones(1) for number in range(3_000)})
    rounds: list[str] = []
    gc.callbacks.append(note := lambda phase, info: rounds.append(phase))
    try:
        made = make_plan(found, 0, 1)
        during = rounds.count("start")
        kept = [[number] for number in range(3_000)]
    finally:
        gc.callbacks.remove(note)
    assert during <= 1  # as it is over, for what has come together
    assert rounds.count("start") - during > 1, "otherwise this test could not fail"
    assert len(made.pieces) == len(kept) == 3_000


def test_garbage_is_collected_again_afterwards_whatever_happens() -> None:
    with garbage.left_alone():
        with garbage.left_alone():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), garbage.left_alone():
        raise ZeroDivisionError
    assert gc.isenabled()
    gc.disable()
    try:
        with garbage.left_alone():
            pass
        assert not gc.isenabled()  # somebody else's wish
    finally:
        gc.enable()


# -- forms that were tampered with ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [
        ["unknown"],
        ["bits"],
        ["bits", "load"],
        ["bits", "_inductor"],
        ["bits", "float64"],
        ["bits", 5],
        ["quantized"],
        ["quantized", "quint8", "a", 0],
        ["quantized", "quint8", 0.1, None],
        ["complex128"],
        ["complex32"],
        [5],
        [["bits"]],
    ],
    ids=str,
)
def test_form_that_can_not_be_is_refused(form: list[Any]) -> None:
    for tensor in (torch.ones(3), torch.ones(3, dtype=torch.uint8)):
        with pytest.raises(DecodingError):
            plan.whole_tensor(tensor, form)


def test_what_stands_for_a_tensor_is_itself_only() -> None:
    assert Ref("a") != Ref("a")
    assert len({Ref("", ("codec", "x", [1])), Ref("", ("codec", "x", [1]))}) == 2
