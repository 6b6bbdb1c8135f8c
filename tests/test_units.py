"""Which modules are units: the rules, one model each."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from lightning_zero.units import MERGED_NUMEL, UnknownUnitError, find_units


def names(root, spec=None):
    """Full names of the members of each unit."""
    return [[name for name, _ in members] for members in find_units(root, spec)]


class Block(nn.Module):
    """8 parameters."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.other = nn.Linear(1, 1)


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


def test_the_classes_that_a_hugging_face_model_names_come_first():
    """Also when the model sits in a LightningModule; other containers are then root."""
    assert names(Wrapped()) == [["model.layers.0"], ["model.layers.1"], ["model.layers.2"]]


def test_a_declaration_that_matches_nothing_falls_back_to_containers():
    """`_no_split_modules` may name classes that this model does not use."""

    class Declares(nn.Module):
        _no_split_modules = ("Absent",)

        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(8))

    assert names(Declares()) == [[f"layers.{i}"] for i in range(8)]


@pytest.mark.parametrize("container", [nn.ModuleList, nn.Sequential])
def test_elements_of_containers_that_hold_an_eighth_are_units(container):
    """Eight equal elements hold 1/8 each: each is a unit, in definition order."""
    root = nn.Module()
    layers = [nn.Linear(4, 4) for _ in range(8)]
    root.layers = container(layers) if container is nn.ModuleList else container(*layers)
    assert names(root) == [[f"layers.{i}"] for i in range(8)]


def test_a_large_element_is_descended_into():
    """Two stages of a half each are no units; the four blocks in each are, at 1/8."""
    root = nn.Module()
    root.stages = nn.ModuleList(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))) for _ in range(2))
    assert names(root) == [[f"stages.{i}.{j}"] for i in range(2) for j in range(4)]


def test_seven_equal_elements_are_too_large_to_be_units():
    """1/7 > 1/8: nothing is a unit, everything is root."""
    root = nn.Module()
    root.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(7))
    assert names(root) == []


def test_nested_elements_are_no_units():
    """A list inside a unit belongs to it."""
    root = nn.Module()
    root.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(8))
    assert names(root) == [[f"layers.{i}"] for i in range(8)]


def test_a_parametrization_list_is_no_container():
    """Weight norm keeps two tensors in a ParametrizationList, which is a ModuleList."""
    root = nn.Module()
    root.layers = nn.ModuleList(parametrizations.weight_norm(nn.Linear(8, 8)) for _ in range(3))
    root.big = nn.Linear(60, 60)
    found = [name for members in names(root) for name in members]
    assert found == ["layers.0", "layers.1", "layers.2"]
    alone = nn.Module()
    alone.layer = parametrizations.orthogonal(nn.Linear(8, 8))
    alone.big = nn.Linear(60, 60)
    assert names(alone) == []


def test_small_siblings_merge_in_order_up_to_an_eighth():
    """16 layers of 1/32 (the root has the other half): an eighth holds four of them."""
    root = nn.Module()
    root.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(16))  # 20 elements each, 320 in all
    root.big = nn.Linear(319, 1)  # 320 elements
    assert names(root) == [[f"layers.{i + j}" for j in range(4)] for i in range(0, 16, 4)]


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
