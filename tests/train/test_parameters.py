"""A model's tensors as fragments: what travels, what stays bit for bit, and every element exactly once."""

import numpy as np
import pytest
import torch
from torch import nn

from archipel.errors import ModelError
from archipel.protocol.messages import TensorSpec
from archipel.protocol.schedule import SyncOptions
from archipel.train.parameters import Parameters, flatten, synchronised, unflatten

torch.set_num_threads(1)
ONE = SyncOptions(fragments=1, interval_steps=4)


class Odd(nn.Module):
    """Tied weights, a frozen layer, running statistics, a scalar and an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0, 4))


def whole(parameters: Parameters) -> list[np.ndarray]:
    """Read every fragment."""
    found = []
    for index, numel in enumerate(parameters.numels):
        found.append(np.full(numel, np.nan, np.float32))
        parameters.read(index, found[-1])
    return found


def test_tied_storage_travels_once_and_frozen_parameters_not_at_all():
    found = synchronised(Odd(), ONE)
    assert set(found) == {
        "embed.weight", "norm.weight", "norm.bias", "scale", "empty", "norm.running_mean", "norm.running_var"
    }  # fmt: skip
    assert found["norm.running_var"][1] == "buffer" and "norm.num_batches_tracked" not in found
    assert sum(Parameters(Odd(), ONE).numels) == 15 + 3 + 3 + 1 + 0 + 3 + 3


def test_views_of_one_storage_count_once():
    model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    model[1].weight = nn.Parameter(model[0].weight.data)  # another Parameter, the same memory
    assert list(synchronised(model, ONE)) == ["0.weight"]


def test_local_buffers_and_excluded_names_stay_at_home():
    options = SyncOptions(fragments=1, interval_steps=4, buffers="local", exclude=("norm.*", "scale"))
    assert set(synchronised(Odd(), options)) == {"embed.weight", "empty"}


def test_what_does_not_travel_is_untouched_bit_for_bit():
    options = SyncOptions(fragments=3, interval_steps=4, buffers="local", exclude=("norm.*",))
    model = Odd()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = Parameters(model, options)
    for _ in range(20):
        for index, numel in enumerate(parameters.numels):
            parameters.write(index, np.full(numel, 7.0, np.float32))
    after = model.state_dict()
    assert {name for name in after if not torch.equal(after[name], before[name])} == {
        "embed.weight", "head.weight", "scale"
    }  # fmt: skip


def test_nothing_left_to_synchronise_is_an_error():
    model = nn.Linear(2, 2)
    model.requires_grad_(False)
    with pytest.raises(ModelError, match=r"check requires_grad and sync\.exclude"):
        synchronised(model, ONE)


@pytest.mark.parametrize("fragmentation", ["balanced", "subtensor"])
def test_every_element_goes_out_and_comes_in_once(fragmentation):
    options = SyncOptions(fragments=4, interval_steps=4, fragmentation=fragmentation)
    model = Odd()
    parameters = Parameters(model, options)
    copies = whole(parameters)
    assert not any(np.isnan(copy).any() for copy in copies)
    for index, copy in enumerate(copies):
        parameters.write(index, copy + 1)
    fresh = Odd()
    for name, (tensor, _) in synchronised(model, options).items():
        assert torch.equal(tensor, synchronised(fresh, options)[name][0] + 1), name
    assert model.embed.weight is model.head.weight and model.scale.shape == () and model.empty.shape == (0, 4)


def test_write_touches_its_fragment_only():
    model = Odd()
    parameters = Parameters(model, SyncOptions(fragments=2, interval_steps=4))
    before = whole(parameters)
    parameters.write(0, before[0] + 1)
    after = whole(parameters)
    assert (after[0] == before[0] + 1).all() and (after[1] == before[1]).all()


def test_tensor_in_another_memory_order_is_read_and_written_right():
    model = nn.Conv2d(2, 3, 2, bias=False).to(memory_format=torch.channels_last)
    assert not model.weight.is_contiguous()
    parameters = Parameters(model, ONE)
    wanted = np.arange(24, dtype=np.float32)
    parameters.write(0, wanted)
    assert (whole(parameters)[0] == wanted).all()
    assert torch.equal(model.weight.detach(), torch.arange(24.0).view(3, 2, 2, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_less_precise_tensors_are_named_and_round_what_lands(dtype):
    model = nn.Linear(3, 1, bias=True)
    model.weight.data = model.weight.data.to(dtype)
    parameters = Parameters(model, ONE)
    assert parameters.rounded() == [(0, 1, 4, str(dtype).removeprefix("torch."))]
    values = np.array([0.1, 1.0 + 2**-12, 3.0, -0.3], np.float32)
    parameters.write(0, values)
    rounded = torch.from_numpy(values[1:]).to(dtype).float().numpy()
    assert (whole(parameters)[0] == np.concatenate([values[:1], rounded])).all()


def test_share_of_the_local_value_is_kept_for_parameters_but_not_for_buffers():
    model = nn.BatchNorm1d(1)
    parameters = Parameters(model, SyncOptions(fragments=1, interval_steps=4, local_share=0.25))
    start = flatten(
        {n: t.detach().numpy() for n, (t, _) in synchronised(model, ONE).items()}, parameters.fragments[0]
    )
    parameters.write(0, start + 4)
    assert model.weight.item() == 1 + 3 and model.bias.item() == 3
    assert model.running_mean.item() == 4 and model.running_var.item() == 5


def test_schema_says_names_shapes_and_kinds():
    assert Parameters(nn.BatchNorm1d(2, affine=False), ONE).schema == (
        TensorSpec("running_mean", (2,), "buffer"),
        TensorSpec("running_var", (2,), "buffer"),
    )


def test_flatten_and_unflatten_are_inverse():
    parameters = Parameters(Odd(), SyncOptions(fragments=3, interval_steps=4, fragmentation="subtensor"))
    tensors = unflatten(whole(parameters), parameters.fragments, parameters.schema)
    again = [flatten(tensors, fragment) for fragment in parameters.fragments]
    assert all((a == b).all() for a, b in zip(again, whole(parameters), strict=True))


@pytest.mark.gpu
def test_a_model_on_a_gpu_reads_and_writes_as_one_on_the_cpu() -> None:
    here, there = Odd(), Odd().cuda()
    mine, theirs = Parameters(here, ONE), Parameters(there, ONE)
    assert mine.schema == theirs.schema
    copies = [np.empty(mine.numels[0], np.float32) for _ in range(2)]
    mine.read(0, copies[0])
    theirs.read(0, copies[1])
    assert np.array_equal(*copies)
    theirs.write(0, copies[0] + 1)
    theirs.read(0, copies[1])
    assert np.array_equal(copies[0] + 1, copies[1])
