"""Linear maps with chosen algorithms against torch's linear maps, in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.model.components import ModelComponents
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.products import (
    ChosenLinear,
    LinearAlgorithms,
    ProductShape,
    affine,
    chosen_linears,
)

ROWS = 6  # of x (2, 3, 5)
KINDS = ("forward", "of_input", "of_weight")


class Recorder:
    """A product by torch that remembers its calls; algorithms have any name but none."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def __call__(
        self,
        left: Tensor,
        right: Tensor,
        bias: Tensor | None,
        algorithm: str,
        *,
        left_transposed: bool = False,
        right_transposed: bool = False,
    ) -> Tensor:
        assert left.is_contiguous()
        assert right.is_contiguous()
        a, b = left.T if left_transposed else left, right.T if right_transposed else right
        self.calls.append((algorithm, (a.shape[0], b.shape[1], a.shape[1])))
        return a @ b if bias is None else a @ b + bias


def pair(recorder: Recorder, *, bias: bool = True) -> tuple[ChosenLinear, nn.Linear]:
    chosen = ChosenLinear(5, 4, bias, multiply=recorder).double()
    plain = nn.Linear(5, 4, bias).double()
    plain.load_state_dict(chosen.state_dict())
    return chosen, plain


def gradients(linear: nn.Linear, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    out = linear(x)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out))
    return [out.detach(), *(each.grad for each in (x, *linear.parameters()) if each.grad is not None)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kinds", [KINDS, KINDS[:1], KINDS[1:2], KINDS[2:], ()])
def test_outputs_and_gradients_are_those_of_a_linear_map(kinds: tuple[str, ...], bias: bool) -> None:
    recorder = Recorder()
    chosen, plain = pair(recorder, bias=bias)
    chosen.algorithms = LinearAlgorithms(ROWS, **{kind: kind for kind in kinds})
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    for got, expected in zip(gradients(chosen, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    shapes = chosen.product_shapes(ROWS, torch.float64)
    expected_calls = [(kind, (shapes[kind].m, shapes[kind].n, shapes[kind].k)) for kind in kinds]
    assert recorder.calls == expected_calls


def test_other_numbers_of_rows_have_torchs_products() -> None:
    recorder = Recorder()
    chosen, plain = pair(recorder)
    chosen.algorithms = LinearAlgorithms(ROWS, "a", "b", "c")
    for x in (torch.randn(2, 1, 5), torch.randn(5), torch.randn(7, 5)):
        assert torch.equal(chosen(x.double()), plain(x.double()))
    assert recorder.calls == []


def test_without_a_choice_the_bits_are_those_of_a_linear_map() -> None:
    chosen, plain = pair(Recorder())
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    assert all(map(torch.equal, gradients(chosen, x), gradients(plain, x)))


def test_no_product_is_made_for_a_gradient_that_is_not_wanted() -> None:
    recorder = Recorder()
    chosen, _ = pair(recorder)
    chosen.algorithms = LinearAlgorithms(ROWS, "", "of_input", "of_weight")
    chosen(torch.randn(2, 3, 5, dtype=torch.float64)).sum().backward()
    assert [name for name, _ in recorder.calls] == ["of_weight"]


def test_a_bias_may_be_added_without_its_gradient() -> None:
    chosen, plain = pair(Recorder())
    chosen.algorithms = LinearAlgorithms(ROWS, *KINDS)
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    out = affine(chosen, x, chosen.bias.detach())
    torch.testing.assert_close(out, F.linear(x, plain.weight, plain.bias))
    out.sum().backward()
    assert chosen.bias.grad is None
    assert chosen.weight.grad is not None
    assert torch.equal(affine(plain, x, plain.bias), plain(x))


def test_a_graph_computes_the_same_once_for_all_maps_with_equal_algorithms() -> None:
    maps = [pair(Recorder())[0] for _ in range(3)]
    for chosen in maps:
        chosen.multiply = _multiply
        chosen.algorithms = LinearAlgorithms(ROWS, *KINDS)
    compiled_graphs = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()

    def apply(chosen: ChosenLinear, x: Tensor) -> Tensor:
        return chosen(x)

    graph = torch.compile(apply, backend=compiled_graphs, fullgraph=True, dynamic=False)
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    for chosen in maps:
        expected = gradients(chosen, x)
        chosen.zero_grad()
        given = x.detach().requires_grad_()
        out = graph(chosen, given)
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out))
        got = [out.detach(), given.grad, chosen.weight.grad, chosen.bias.grad]
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert compiled_graphs.frame_count == 1


def _multiply(
    left: Tensor,
    right: Tensor,
    bias: Tensor | None,
    algorithm: str,
    *,
    left_transposed: bool = False,
    right_transposed: bool = False,
) -> Tensor:
    a, b = left.T if left_transposed else left, right.T if right_transposed else right
    return a @ b if bias is None else a @ b + bias


def test_a_model_has_four_maps_per_layer_with_twelve_products() -> None:
    config = ModelConfig(num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=8)
    recorder = Recorder()

    def linear(inputs: int, outputs: int, bias: bool) -> ChosenLinear:
        return ChosenLinear(inputs, outputs, bias, multiply=recorder)

    model = GPT(config, 50, parts=ModelComponents(linear=linear))
    found = dict(chosen_linears(model))
    assert len(found) == 8
    shapes = {shape for each in found.values() for shape in each.product_shapes(8, torch.bfloat16).values()}
    assert len({shape.name for shape in shapes}) == len(shapes) == 12
    assert ProductShape(torch.bfloat16, 8, 48, 16, False, True, True).name == "bfloat16_8x48x16_nt_bias"
