"""``merge_linears_``: weights side by side, in a model that is the same in all else."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compilepass as cp
from compilepass.errors import OpValueError
from compilepass.merge import PackedLinear


class Block(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 8, bias), nn.Linear(8, 4, bias)
        self.v_proj = nn.Linear(8, 4, bias)
        self.mlp = nn.ModuleDict({"gate_proj": nn.Linear(8, 12), "up_proj": nn.Linear(8, 12)})
        self.down_proj = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        attended = torch.cat([self.q_proj(x), self.k_proj(x) * self.v_proj(x)], -1)[..., :8]
        gated = self.mlp["gate_proj"](x).sigmoid() * self.mlp["up_proj"](x)
        return attended + self.down_proj(gated)  # type: ignore[no-any-return]


X = torch.randn(3, 8)


def bytes_of(model: nn.Module) -> int:
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    return sum(s.nbytes() for s in storages.values())


def test_a_model_computes_the_same_in_the_same_memory() -> None:
    model = Block()
    wanted, state, size = model(X), copy.deepcopy(model.state_dict()), bytes_of(model)
    report = cp.merge_linears_(model)
    assert report.groups == (
        ("q_proj", "k_proj", "v_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
    )
    assert report.kept == ()
    assert str(report).startswith("5 linear layers share 2 weights\n")
    assert torch.equal(model(X), wanted)
    assert bytes_of(model) == size
    assert model.q_proj.weight.untyped_storage()._cdata == (
        model.v_proj.weight.untyped_storage()._cdata
    )
    found = model.state_dict()
    assert list(found) == list(state)
    assert all(torch.equal(found[k], state[k]) for k in state)


def test_state_moves_between_models_merged_and_not() -> None:
    first, second, merged = Block(), Block(), Block()
    cp.merge_linears_(merged)
    merged.load_state_dict(first.state_dict())
    assert torch.equal(merged(X), first(X))
    second.load_state_dict(merged.state_dict())
    assert torch.equal(second(X), first(X))
    file = io.BytesIO()
    torch.save(merged.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file))


def test_a_wrong_state_is_refused_as_that_of_a_linear_layer_is() -> None:
    model = Block()
    cp.merge_linears_(model)
    state = model.state_dict()
    del state["k_proj.weight"]
    state["q_proj.packed"] = torch.zeros(1)
    state["v_proj.weight"] = torch.zeros(2, 2)
    with pytest.raises(RuntimeError, match=r"v_proj.weight has the shape \(2, 2\)") as error:
        model.load_state_dict(state)
    assert 'Missing key(s) in state_dict: "k_proj.weight"' in str(error.value)
    assert 'Unexpected key(s) in state_dict: "q_proj.packed"' in str(error.value)


def test_copies_and_casts_keep_layers_together() -> None:
    model = Block()
    cp.merge_linears_(model)
    for other in (copy.deepcopy(model), copy.deepcopy(model).double(), copy.deepcopy(model).half()):
        assert other.q_proj.packed is other.k_proj.packed
        assert other.q_proj.packed is not model.q_proj.packed
        x = X.to(other.down_proj.weight.dtype)
        torch.testing.assert_close(other(x).float(), model(X), rtol=1e-2, atol=1e-2)
    assert len(list(model.parameters())) == 2 + 5 + 2


def test_it_trains_as_before() -> None:
    plain = Block()
    merged = copy.deepcopy(plain)
    cp.merge_linears_(merged)
    for model in (plain, merged):
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        model(X).square().mean().backward()
        optimiser.step()
    torch.testing.assert_close(merged(X), plain(X))


def test_a_second_call_does_nothing() -> None:
    model = Block()
    cp.merge_linears_(model)
    layer = model.q_proj
    assert cp.merge_linears_(model).groups == ()
    assert model.q_proj is layer and isinstance(layer, PackedLinear)


def hooked() -> Any:
    model = Block()
    model.k_proj.register_forward_hook(lambda *_: None)
    return model


def tied() -> Any:
    model = Block()
    model.tied = nn.Linear(8, 8)
    model.tied.weight = model.q_proj.weight
    return model


def of_two_dtypes() -> Any:
    model = Block()
    model.v_proj.half()
    return model


def of_two_widths() -> Any:
    model = Block()
    model.v_proj = nn.Linear(9, 4)
    return model


@pytest.mark.parametrize(
    ("build", "name", "reason"),
    [
        (hooked, "k_proj", "it has hooks, which would be lost"),
        (tied, "q_proj", "its weight is tied.weight too"),
        (of_two_dtypes, "v_proj", "float16"),
        (of_two_widths, "v_proj", "its weight is (9,"),
    ],
)
def test_what_cannot_be_packed_is_left_and_told(build: Any, name: str, reason: str) -> None:
    model = build()
    report = cp.merge_linears_(model)
    (kept,) = report.kept
    assert kept.name == name and reason in kept.reason
    assert report.groups == (("mlp.gate_proj", "mlp.up_proj"),)
    assert type(model.q_proj) is nn.Linear


def test_a_group_of_one_is_an_error() -> None:
    with pytest.raises(OpValueError, match="two layers or more"):
        cp.merge_linears_(Block(), groups=[("q_proj",)])
