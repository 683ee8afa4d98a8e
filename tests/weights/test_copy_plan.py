import pytest
import torch

from tidemill.errors import WeightSyncError
from tidemill.weights.checksum import checksum
from tidemill.weights.copy_plan import bake

SHAPES = {"q": (6, 4), "k": (2, 4), "v": (2, 4), "embed": (10, 4), "e0": (3, 4), "e1": (3, 4), "turned": (5, 3)}


class FusedModel:
    """Keeps weights as engines do: q, k, v in one, a vocabulary padded to 16, experts in a stack, one transposed."""

    def __init__(self) -> None:
        make = {"qkv": (10, 4), "table": (16, 4), "experts": (2, 3, 4), "turned": (3, 5)}
        self.parameters = {name: torch.full(shape, -7.0) for name, shape in make.items()}
        self.parameters["head"] = self.parameters["table"]
        self.skipped: set[str] = set()

    def load_weights(self, weights) -> None:
        rows = {"q": (0, 6), "k": (6, 2), "v": (8, 2)}
        for name, weight in weights:
            if name in self.skipped:
                continue
            if name in rows:
                self.parameters["qkv"].narrow(0, *rows[name]).copy_(weight)
            elif name == "embed":
                self.parameters["table"][: len(weight)].copy_(weight)
                self.parameters["table"][len(weight) :].fill_(0)
            elif name == "turned":
                self.parameters["turned"].copy_(weight.to("cpu").t())
            else:
                self.parameters["experts"][int(name[1])].copy_(weight.view(-1).view(3, 4))


def weights(dtype=torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape, dtype=torch.float64).to(dtype) for name, shape in SHAPES.items()}


def baked(model: FusedModel, shapes=None):
    return bake(model.parameters, model.load_weights, shapes or SHAPES, torch.float32)


def test_a_plan_puts_every_weight_where_the_models_own_loader_puts_it_and_reads_it_back() -> None:
    torch.manual_seed(0)
    ours, theirs, new = FusedModel(), FusedModel(), weights()
    plan = baked(ours)
    assert all(bool((parameter == -7.0).all()) for parameter in ours.parameters.values()), "baking writes nothing"
    assert plan.names == SHAPES
    plan.fill()
    for name, weight in new.items():
        plan.copy(name, weight, torch.float32)
    theirs.load_weights(new.items())
    for name, parameter in ours.parameters.items():
        assert torch.equal(parameter, theirs.parameters[name]), name
    for name, weight in new.items():
        assert checksum(plan.read(name, torch.float32)) == checksum(weight), name


def test_a_weight_is_rounded_to_the_engines_dtype_even_in_a_parameter_that_holds_more() -> None:
    model, new = FusedModel(), weights()
    model.parameters["qkv"] = model.parameters["qkv"].bfloat16()
    plan = baked(model)
    for name, weight in new.items():
        plan.copy(name, weight, torch.bfloat16)
        assert torch.equal(plan.read(name, torch.bfloat16), weight.bfloat16()), name


def test_a_plan_outlives_the_memory_of_the_parameters() -> None:
    model, new = FusedModel(), weights()
    plan = baked(model)
    for parameter in model.parameters.values():
        parameter.untyped_storage().resize_(0)
    for name, parameter in model.parameters.items():
        if name != "head":
            parameter.untyped_storage().resize_(parameter.numel() * 4)
    plan.fill()
    for name, weight in new.items():
        plan.copy(name, weight, torch.float32)
    assert torch.equal(model.parameters["qkv"][6:8], new["k"])
    assert not model.parameters["head"][10:].any()


def test_a_weight_of_another_shape_is_refused_before_it_is_copied() -> None:
    model = FusedModel()
    with pytest.raises(WeightSyncError, match=r"cannot load q .*\(1,\).*\(6, 4\)"):
        baked(model).copy("q", torch.zeros(1), torch.float32)
    assert bool((model.parameters["qkv"] == -7.0).all())


@pytest.mark.parametrize("name", ["k", "embed", "e1", "turned"])
def test_a_weight_that_the_loader_passes_over_in_silence_is_found(name: str) -> None:
    model = FusedModel()
    model.skipped = {name}
    with pytest.raises(WeightSyncError, match=rf"keeps {name} .*takes 0 elements"):
        baked(model)


@pytest.mark.parametrize(("name", "parameter"), [("v", "qkv"), ("e0", "experts"), ("turned", "turned")])
def test_a_parameter_for_which_no_weight_comes_is_found(name: str, parameter: str) -> None:
    shapes = {key: shape for key, shape in SHAPES.items() if key != name}
    with pytest.raises(
        WeightSyncError, match=rf"into the engine's {parameter}: \d+ of its \d+ elements have no source"
    ):
        baked(FusedModel(), shapes)


def spoiled(change):
    model = FusedModel()
    right = model.load_weights

    def load(items) -> None:
        for name, weight in items:
            if name == "k":
                change(model.parameters["qkv"], weight)
            else:
                right([(name, weight)])

    model.load_weights = load
    return model


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda qkv, weight: qkv[4:6].copy_(weight), "have two sources"),
        (lambda qkv, weight: qkv[6:8].copy_(weight[:1]), "takes 8 elements, and not each of its 8 once"),
        (lambda qkv, weight: qkv[6:8].copy_(weight * 2), "computes what it puts"),
        (lambda qkv, weight: qkv[6:8].add_(1.0), "which is no copy"),
        (lambda qkv, weight: qkv[6:8].copy_(weight + weight.item()), "its own loader fails with"),
    ],
)
def test_what_plain_copies_cannot_do_is_refused_by_name(change, words: str) -> None:
    with pytest.raises(WeightSyncError, match=words) as caught:
        baked(spoiled(change))
    assert "k" in str(caught.value)
