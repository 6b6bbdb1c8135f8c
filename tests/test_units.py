"""Which modules are units: the rules, one model each."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from lightning_zero.cut import MERGED_NUMEL
from lightning_zero.units import UnknownUnitError, find_units


def names(root, spec=None):
    """Full names of the members of each unit."""
    return [[name for name, _ in members] for members in find_units(root, spec)]


class Block(nn.Module):
    """8 parameters."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.other = nn.Linear(1, 1)

    def forward(self, x):
        return x


class Hugging(nn.Module):
    """As a Hugging Face model: it names its blocks, and keeps other lists too."""

    _no_split_modules = ("Block", "Absent")

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.adapters = nn.ModuleList(nn.Linear(2, 2) for _ in range(12))


class Wrapped(nn.Module):
    """A LightningModule around it."""

    def __init__(self):
        super().__init__()
        self.model = Hugging()
        self.head = nn.Linear(2, 2)


def test_the_classes_that_a_hugging_face_model_names_are_units():
    """Also when the model sits in a LightningModule. An eighth of 110 parameters is 13: a block has 8, an adapter 6."""
    layers = [["model.layers.0"], ["model.layers.1"], ["model.layers.2"]]
    pairs = [[f"model.adapters.{i}", f"model.adapters.{i + 1}"] for i in range(0, 12, 2)]
    assert names(Wrapped()) == layers + pairs


def test_a_declaration_that_matches_nothing_falls_back_to_containers():
    """`_no_split_modules` may name classes that this model does not use."""

    class Declares(nn.Module):
        _no_split_modules = ("Absent",)

        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(8))

    assert names(Declares()) == [[f"layers.{i}"] for i in range(8)]


@pytest.mark.parametrize("container", [nn.ModuleList, nn.Sequential])
@pytest.mark.parametrize("number", [2, 4, 7, 8])
def test_equal_elements_of_containers_are_units(container, number):
    """Each is one layer, which nothing divides; in definition order."""
    root = nn.Module()
    layers = [nn.Linear(4, 4) for _ in range(number)]
    root.layers = container(layers) if container is nn.ModuleList else container(*layers)
    assert names(root) == [[f"layers.{i}"] for i in range(number)]


def test_equal_attributes_are_units_too():
    """Blocks need no list: 5 of 1/5 each."""

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            for i in range(5):
                setattr(self, f"block{i}", Callable(nn.Linear(4, 4), nn.Linear(4, 4)))

    assert names(Named()) == [[f"block{i}"] for i in range(5)]


class Callable(nn.Module):
    """Holds the modules given, as ``part0``, ``part1``; its forward is its own."""

    def __init__(self, *parts):
        super().__init__()
        for i, part in enumerate(parts):
            setattr(self, f"part{i}", part)

    def forward(self, x):
        return x


def test_a_module_of_blocks_is_descended_into():
    """Two stages of a half each are no units, nor is a tower of a fifth; blocks in them are."""
    root = nn.Module()
    root.stages = nn.ModuleList(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))) for _ in range(2))
    assert names(root) == [[f"stages.{i}.{j}"] for i in range(2) for j in range(4)]
    root = nn.Module()
    root.tower = Callable(nn.ModuleList(Callable(nn.Linear(8, 8)) for _ in range(4)))
    root.layers = nn.ModuleList(Callable(nn.Linear(16, 16)) for _ in range(5))
    pairs = [[f"tower.part0.{i}", f"tower.part0.{i + 1}"] for i in (0, 2)]  # 2 * 72 of 1,648
    assert names(root) == pairs + [[f"layers.{i}"] for i in range(5)]


def test_a_block_is_divided_above_a_quarter_alone():
    """Four blocks of a quarter are units as they are; of three blocks of a third the two halves are."""
    root = nn.Module()
    root.layers = nn.ModuleList(Callable(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(4))
    assert names(root) == [[f"layers.{i}"] for i in range(4)]
    del root.layers[3]
    assert names(root) == [[f"layers.{i}.part{j}"] for i in range(3) for j in range(2)]


def test_what_has_no_forward_is_no_unit():
    """A namespace, a ModuleDict and a ParameterList cannot be called, so no window of theirs would open."""
    root, space = nn.Module(), nn.Module()
    space.layers = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    root.space, root.list = space, nn.ParameterList([torch.zeros(20), torch.zeros(20)])
    assert names(root) == [["space.layers.a"], ["space.layers.b"]]


def test_a_module_that_reads_the_weights_of_its_parts_is_not_divided():
    """MultiheadAttention never calls its `out_proj`, nor a parametrized module what computes its weight. Cells are
    called once for each step in time, with what is beside them."""
    root = nn.Module()
    for i in range(2):
        setattr(root, f"attention{i}", nn.MultiheadAttention(8, 2))
        setattr(root, f"orthogonal{i}", parametrizations.orthogonal(nn.Linear(16, 16)))
        setattr(root, f"recurrent{i}", Callable(nn.LSTMCell(8, 8), nn.Linear(8, 9)))
        setattr(root, f"cell{i}", nn.GRUCell(8, 10))
    assert names(root) == [[f"{kind}{i}"] for i in range(2) for kind in ("attention", "orthogonal", "recurrent")]


def test_a_parametrization_list_is_no_container():
    """Weight norm keeps two tensors in a ParametrizationList, which is a ModuleList."""
    root = nn.Module()
    root.layers = nn.ModuleList(parametrizations.weight_norm(nn.Linear(8, 8)) for _ in range(3))
    root.big = nn.Linear(20, 20)
    assert names(root) == [["layers.0"], ["layers.1"], ["layers.2"], ["big"]]


def test_nested_elements_are_no_units():
    """A list inside a unit belongs to it."""
    root = nn.Module()
    root.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(8))
    assert names(root) == [[f"layers.{i}"] for i in range(8)]


def test_small_layers_stay_in_the_root():
    """Norms between products, which would be two collectives for 16 elements each, and a head that fits into a 32nd."""
    root = nn.Sequential()
    for _ in range(3):
        root.append(nn.Linear(600, 600))  # 360,600
        root.append(nn.LayerNorm(600))  # 1,200
    root.append(nn.Linear(600, 40))  # 24,040 of 1,109,440; below 2 ** 18 a quarter may stay
    assert names(root) == [["0"], ["2"], ["4"]]
    root = nn.Module()
    root.stem, root.head, root.other_head = (nn.Linear(8, 8) for _ in range(3))
    root.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(16))  # an eighth of 19 is two
    assert names(root) == [[f"layers.{i}", f"layers.{i + 1}"] for i in range(0, 16, 2)]


def test_a_layer_above_twice_all_others_stays_in_the_root():
    """An embedding that is freed comes whole again beside the first block: that saves no more than a block, and costs a
    gather of it. With a head as large one of the two is whole at a time, and the last one is gathered once anyway."""
    root = nn.Module()
    root.embed = nn.Embedding(1000, 512)
    root.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(4))  # 2 ** 18 each; 512,000 < 2 ** 19
    layers = [[f"layers.{i}"] for i in range(4)]
    assert names(root) == [["embed"], *layers]
    root.embed = nn.Embedding(1100, 512)  # 563,200 > 2 ** 19
    assert [*sorted(names(root))] == layers
    root.head = nn.Linear(512, 1100, bias=False)
    assert sorted(names(root)) == [["embed"], ["head"], *layers]


def test_what_units_share_is_no_unit():
    """A head that is the embedding is in the root, as `homes` says; a module that two towers call is one of its own."""
    root = nn.Module()
    root.embed = nn.Embedding(9, 8)
    root.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
    root.head = nn.Linear(8, 9, bias=False)
    root.head.weight = root.embed.weight
    assert names(root) == [[f"layers.{i}"] for i in range(8)]
    shared = nn.Linear(8, 8)
    root = nn.Module()
    root.first = Callable(shared, nn.Linear(8, 8))
    root.second = Callable(nn.Linear(8, 8), shared)
    root.rest = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
    assert names(root)[:3] == [["first.part0"], ["first.part1"], ["second.part0"]]


def test_small_siblings_merge_in_order_up_to_an_eighth():
    """16 layers of 1/32 (`big` has the other half): an eighth holds four of them."""
    root = nn.Module()
    root.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(16))  # 20 elements each, 320 in all
    root.big = nn.Linear(319, 1)  # 320 elements
    assert names(root) == [*([f"layers.{i + j}" for j in range(4)] for i in range(0, 16, 4)), ["big"]]


def test_small_blocks_of_a_hugging_face_model_merge_too():
    """An eighth of 17 x 8 parameters is 17: two blocks of 8. What the user names stays as it is."""
    model = nn.Module()
    model._no_split_modules = ["Block"]
    model.layers = nn.ModuleList(Block() for _ in range(17))
    pairs = [[f"layers.{i}", f"layers.{i + 1}"] for i in range(0, 16, 2)]
    assert names(model) == [*pairs, ["layers.16"]]
    assert names(model, ["Block"]) == [[f"layers.{i}"] for i in range(17)]


def test_merging_stops_at_its_size():
    """Below 2 ** 18 elements a collective costs its latency: 64 layers of 2 ** 16 merge by four, not by eight."""
    with torch.device("meta"):
        root = nn.Module()
        root.layers = nn.ModuleList(nn.Linear(2**8, 2**8, bias=False) for _ in range(64))
    assert MERGED_NUMEL == 2**18
    assert [len(members) for members in find_units(root)] == [4] * 16


def test_elements_without_parameters_are_skipped():
    """Activations and dropouts in a Sequential are nobody's unit."""
    root = nn.Sequential()
    for _ in range(8):
        root.append(nn.Linear(4, 4))
        root.append(nn.ReLU())
    assert [name for members in names(root) for name in members] == [str(i) for i in range(0, 16, 2)]


def test_a_module_that_sits_in_two_places_is_one_unit():
    """It is found under its first name."""
    root = nn.Module()
    shared = nn.Linear(4, 4)
    root.layers = nn.ModuleList([shared, *(nn.Linear(4, 4) for _ in range(7)), shared])
    assert [name for members in names(root) for name in members] == [f"layers.{i}" for i in range(8)]


@pytest.mark.parametrize("spec", [[Block], ["Block"], Block, "Block", (Block,), lambda m: isinstance(m, Block)])
def test_a_user_names_classes_or_a_predicate(spec):
    """By type, by name, one or several, or by a function; each match is its own unit, however small."""
    assert names(Wrapped(), spec) == [["model.layers.0"], ["model.layers.1"], ["model.layers.2"]]


def test_a_user_may_name_several_classes_and_the_outermost_match_wins():
    """`inner` is a Linear inside a Block."""
    found = names(Wrapped(), [Block, "Linear"])
    assert found[:3] == [["model.layers.0"], ["model.layers.1"], ["model.layers.2"]]
    assert found[-1] == ["head"]
    assert len(found) == 3 + 12 + 1


def test_a_type_matches_subclasses_and_a_name_does_not():
    """A type is asked with isinstance; a name is the class's own."""

    class Special(Block):
        pass

    root = nn.Module()
    root.a, root.b = Block(), Special()
    assert names(root, [Block]) == [["a"], ["b"]]
    assert names(root, ["Block"]) == [["a"]]


@pytest.mark.parametrize("spec", [["Blok"], [nn.Conv2d], [Block, "Blok"], [3], lambda m: False])
def test_a_class_that_is_not_there_is_refused_with_its_name(spec):
    """Also when another one of the list is there: a typo is never silence."""
    with pytest.raises(UnknownUnitError, match="units") as caught:
        find_units(Wrapped(), spec)
    wanted = "predicate" if callable(spec) else repr(spec[-1])
    assert wanted in str(caught.value)
    assert "Wrapped" in str(caught.value) or "neither" in str(caught.value)
    assert "`units=[" in str(caught.value)


def test_the_root_is_never_a_unit():
    """Naming the root's own class makes units of nothing: there is nothing inside it to free."""
    root = Block()
    with pytest.raises(UnknownUnitError):
        find_units(root, [Block])


def test_looking_for_units_changes_nothing():
    """Values, modes and modules stay as they are."""
    root = Wrapped()
    before = {name: value.clone() for name, value in root.state_dict().items()}
    modules = list(root.modules())
    find_units(root)
    assert list(root.modules()) == modules
    assert all(torch.equal(before[name], value) for name, value in root.state_dict().items())
